"""The architecture is a law too: who imports whom, where foreign libraries live, how long is long.

The tables say it all; the checker below them walks syntax trees, so nothing is imported to be
checked.  The tests at the end plant each fault in a small fake tree, where it must be found.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

RANK = {  # a part may import only parts of a lower rank; equals never meet
    "errors": 0, "clock": 0,
    "protocol": 1, "config": 1, "failpoints": 1, "loop": 1, "memfd": 1, "process_rows": 1,
    "supervision": 1,
    "memory": 2, "shm_status": 2, "mail": 2, "child": 2, "attach": 2, "logs": 2,
    "transports": 3, "metrics": 3, "children": 3, "http_door": 3,
    "supervisor": 4, "actors": 4, "engine": 4, "health": 4, "board": 4,
    "runtime": 5,
    "serving": 6, "integrations": 6,
    "cli": 7,
    "__init__": 8,  # pdrt itself: public names for users, so nothing inside may import it
}  # fmt: skip

HOME = {  # each foreign library has one home; a folder ends in a slash
    "accelerate": ["pdrt/serving/"],
    "atomicshm": ["pdrt/shm_status.py"],
    "cyclopts": ["pdrt/cli/"],
    "gguf": ["pdrt/serving/"],
    "httpx": ["pdrt/cli/"],
    "jinja2": ["pdrt/serving/"],
    "multiprocessing": ["pdrt/supervisor.py", "pdrt/child.py"],
    "nixl": ["pdrt/transports/nixl.py"],
    "nixl_cu12": ["pdrt/transports/nixl.py"],
    "nixl_cu13": ["pdrt/transports/nixl.py"],
    "os.environ": ["pdrt/config.py"],
    "pickle": ["pdrt/child.py"],  # never on a wire
    "prometheus_client": ["pdrt/metrics.py"],
    "rich": ["pdrt/serving/", "pdrt/cli/"],
    "sglang": ["pdrt/integrations/"],
    "starlette": ["pdrt/serving/", "pdrt/health.py"],
    "tokenizers": ["pdrt/serving/"],
    "torch": ["pdrt/serving/", "pdrt/integrations/"],
    "transformers": ["pdrt/serving/", "pdrt/integrations/"],
    "uvicorn": ["pdrt/serving/", "pdrt/health.py", "pdrt/http_door.py"],
    "vllm": ["pdrt/integrations/"],
    "zmq": ["pdrt/mail/mailbox.py", "pdrt/mail/doorkeeper.py", "pdrt/mail/waiter.py"],
}
EVERYWHERE = {"msgspec", "numpy", "psutil", "structlog"}  # foreign, and welcome in any part

# What a supervisor or a listener would be slow and fragile with, its imports' imports included.
HEAVY = ["torch", "transformers", "nixl", "nixl_cu12", "nixl_cu13", "cyclopts"]
LIGHT_MODULES = [
    "pdrt.actors.boot",
    "pdrt.actors.decode_listener",
    "pdrt.actors.janitor",
    "pdrt.actors.prefill_listener",
    "pdrt.runtime",
    "pdrt.shm_status",
    "pdrt.supervisor",
]

MODULE_LINES_MAX, FUNCTION_LINES_MAX = 400, 60
# "module" or "module:function" -> its own limit.  Each entry says why it is not split.
LONGER: dict[str, int] = {
    # The picture of shared memory, its constants and every access to it belong on one page.
    "pdrt/shm_status.py": 640,
}

SLEEPERS = {"time.sleep", "asyncio.sleep", "anyio.sleep", "trio.sleep", "gevent.sleep"}
MAY_SLEEP = {"tests/waiting.py"}

# A newcomer's five questions have five files; the README leads to each.
FIVE_FILES = [
    "pdrt/protocol/states.py",
    "pdrt/protocol/messages.py",
    "pdrt/shm_status.py",
    "pdrt/runtime.py",
    "pdrt/engine/",
]


@dataclass(frozen=True)
class Module:
    path: str  # relative to the root, with slashes
    text: str
    tree: ast.Module

    @property
    def part(self) -> str:
        return Path(self.path).parts[1].removesuffix(".py")

    def at(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}"


def modules(root: Path, *folders: str) -> Iterator[Module]:
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            name = path.relative_to(root).as_posix()
            yield Module(name, text, ast.parse(text, filename=name))


# --- what a module imports ---


def _dotted(node: ast.AST) -> str:
    """ "a.b.c" of an attribute chain that starts at a name, else ""."""
    if isinstance(node, ast.Attribute):
        start = _dotted(node.value)
        return f"{start}.{node.attr}" if start else ""
    return node.id if isinstance(node, ast.Name) else ""


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = Path(module.path).parts[:-1]
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def imports(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Every imported name, whole; imports inside functions and by a literal string included."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node, f"{_absolute(module, node)}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args:
            called = _dotted(node.func)
            name = node.args[0]
            by_name = called in {"__import__", "import_module", "importlib.import_module"}
            if by_name and isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node, name.value


# --- the checks: each yields one line for each fault ---


def check_layers(root: Path) -> Iterator[str]:
    for module in modules(root, "pdrt"):
        if module.part not in RANK:
            yield f"{module.path}: part {module.part!r} has no rank"
            continue
        for node, name in imports(module):
            package, _, rest = name.partition(".")
            if package != "pdrt":
                continue
            target = rest.split(".")[0]
            if target not in RANK:  # `import pdrt`, or a public name from it
                yield f"{module.at(node)}: imports {name}; name the part it comes from"
            elif target != module.part and RANK[target] >= RANK[module.part]:
                yield (
                    f"{module.at(node)}: {module.part} (rank {RANK[module.part]}) imports "
                    f"{target} (rank {RANK[target]})"
                )


def _at_home(path: str, homes: list[str]) -> bool:
    return any(path == home or (home.endswith("/") and path.startswith(home)) for home in homes)


ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def _foreign(module: Module) -> Iterator[tuple[ast.AST, str]]:
    for node, name in imports(module):
        top = name.split(".")[0]
        if top == "os" and name.removeprefix("os.") in ENVIRONMENT:
            yield node, "os.environ"
        elif top in HOME or (top not in sys.stdlib_module_names and top != "pdrt"):
            yield node, top
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and _dotted(node).startswith("os."):
            if node.attr in ENVIRONMENT:
                yield node, "os.environ"


def check_homes(root: Path) -> Iterator[str]:
    for module in modules(root, "pdrt"):
        for node, library in _foreign(module):
            if library in EVERYWHERE:
                continue
            if library not in HOME:
                yield f"{module.at(node)}: {library} has no home; give it one in HOME"
            elif not _at_home(module.path, HOME[library]):
                homes = " or ".join(HOME[library])
                yield f"{module.at(node)}: {library} belongs in {homes}"


def _sizes(root: Path) -> Iterator[tuple[str, int, int]]:
    """(key of LONGER, lines, limit without an exception) of every module and function."""
    for module in modules(root, "pdrt"):
        yield module.path, len(module.text.splitlines()), MODULE_LINES_MAX
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                yield f"{module.path}:{node.name}", lines, FUNCTION_LINES_MAX


def check_sizes(root: Path) -> Iterator[str]:
    for key, lines, lines_max in _sizes(root):
        if lines > LONGER.get(key, lines_max):
            yield f"{key} has {lines} lines, more than {LONGER.get(key, lines_max)}"


def _catches_all(kind: ast.expr | None) -> bool:
    if kind is None:
        return True
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(_dotted(k).split(".")[-1] in {"Exception", "BaseException"} for k in kinds)


def _does_nothing(body: list[ast.stmt]) -> bool:
    return all(
        isinstance(s, ast.Pass | ast.Continue)
        or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
        for s in body
    )


def check_swallowed(root: Path) -> Iterator[str]:
    """`except Exception: pass` in any of its spellings."""
    for module in modules(root, "pdrt", "tests", "stress"):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ExceptHandler):
                if _catches_all(node.type) and _does_nothing(node.body):
                    yield f"{module.at(node)}: swallows every exception"
            elif isinstance(node, ast.Call) and _dotted(node.func).endswith("suppress"):
                if any(_catches_all(argument) for argument in node.args):
                    yield f"{module.at(node)}: swallows every exception"


def check_sleeps(root: Path) -> Iterator[str]:
    """Tests wait for conditions.  `asyncio.sleep(0)` only yields and is no sleep."""
    for module in modules(root, "tests"):
        if module.path in MAY_SLEEP:
            continue
        for node, name in imports(module):
            if isinstance(node, ast.ImportFrom) and name in SLEEPERS:
                yield f"{module.at(node)}: imports {name}; use tests/waiting.py"
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and _dotted(node.func) in SLEEPERS:
                yields = [ast.unparse(a) for a in node.args] == ["0"]
                if not (yields and _dotted(node.func) != "time.sleep"):
                    yield f"{module.at(node)}: sleeps; use tests/waiting.py"


def check_five_files(root: Path) -> Iterator[str]:
    readme = root / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    for name in FIVE_FILES:
        if not (root / name).exists():
            yield f"{name} is missing"
        if name not in text:
            yield f"README.md does not lead to {name}"


CHECKS = [
    check_layers,
    check_homes,
    check_sizes,
    check_swallowed,
    check_sleeps,
    check_five_files,
]

# --- the laws, on the real tree ---


@pytest.mark.parametrize("check", CHECKS)
def test_the_tree_is_tidy(check):
    faults = list(check(ROOT))
    assert not faults, "\n" + "\n".join(faults)


def test_every_exception_of_the_size_rule_is_needed():
    needed = {key for key, lines, lines_max in _sizes(ROOT) if lines > lines_max}
    assert LONGER.keys() <= needed


@pytest.mark.parametrize("name", LIGHT_MODULES)
def test_a_light_process_imports_nothing_heavy(name):
    source = f"import sys, {name}; print(*[h for h in {HEAVY!r} if h in sys.modules])"
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


# --- the checker, on planted faults ---


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return root


LONG_FUNCTION = "def long():\n" + "    x = 1\n" * FUNCTION_LINES_MAX

PLANTED = [
    (check_layers, "pdrt/mail/mailbox.py", "from pdrt.actors.base import Actor", "rank 4"),
    (check_layers, "pdrt/mail/mailbox.py", "from pdrt import supervisor", "rank 2"),
    (check_layers, "pdrt/mail/mailbox.py", "import pdrt.shm_status", "rank 2"),
    (check_layers, "pdrt/actors/base.py", "from ..runtime import start", "rank 5"),
    (check_layers, "pdrt/actors/base.py", "from .. import engine", "rank 4"),
    (check_layers, "pdrt/actors/base.py", "def f():\n    import pdrt.engine.sender", "rank 4"),
    (check_layers, "pdrt/clock.py", "import importlib\nimportlib.import_module('pdrt.cli')", "7"),
    (check_layers, "pdrt/clock.py", "from pdrt import KVManager", "name the part"),
    (check_layers, "pdrt/clock.py", "import pdrt", "name the part"),
    (check_layers, "pdrt/helpers.py", "", "has no rank"),
    (check_homes, "pdrt/supervisor.py", "import zmq", "belongs in pdrt/mail/mailbox.py"),
    (check_homes, "pdrt/actors/transfer.py", "import nixl_cu12._api", "pdrt/transports/nixl.py"),
    (check_homes, "pdrt/actors/transfer.py", "def f():\n    from torch import nn", "pdrt/serving/"),
    (check_homes, "pdrt/actors/transfer.py", "__import__('torch')", "pdrt/serving/"),
    (check_homes, "pdrt/actors/base.py", "import multiprocessing.shared_memory", "pdrt/child.py"),
    (check_homes, "pdrt/clock.py", "import os\nos.environ['A']", "belongs in pdrt/config.py"),
    (check_homes, "pdrt/clock.py", "import os\nos.getenv('A')", "belongs in pdrt/config.py"),
    (check_homes, "pdrt/clock.py", "from os import environ", "belongs in pdrt/config.py"),
    (check_homes, "pdrt/clock.py", "import trio", "has no home"),
    (check_sizes, "pdrt/clock.py", "\n" * (MODULE_LINES_MAX + 1), "has 401 lines"),
    (check_sizes, "pdrt/clock.py", LONG_FUNCTION, "pdrt/clock.py:long has 61 lines"),
    (check_swallowed, "pdrt/a.py", "try:\n    f()\nexcept Exception:\n    pass", "swallows"),
    (check_swallowed, "tests/a.py", "try:\n    f()\nexcept:\n    ...", "swallows"),
    (check_swallowed, "stress/a.py", "with contextlib.suppress(Exception):\n    f()", "swallows"),
    (
        check_swallowed,
        "pdrt/a.py",
        "for _ in x:\n  try:\n    f()\n  except (OSError, BaseException) as e:\n    continue",
        "swallows",
    ),
    (check_sleeps, "tests/test_a.py", "import time\ntime.sleep(1)", "sleeps"),
    (check_sleeps, "tests/laws/test_a.py", "from time import sleep", "imports time.sleep"),
    (check_sleeps, "tests/test_a.py", "async def f():\n    await asyncio.sleep(0.1)", "sleeps"),
    (check_five_files, "README.md", "see pdrt/runtime.py", "does not lead to pdrt/engine/"),
    (check_five_files, "README.md", "see pdrt/runtime.py", "pdrt/runtime.py is missing"),
]


@pytest.mark.parametrize(("check", "path", "source", "words"), PLANTED)
def test_a_planted_fault_is_found(tmp_path, check, path, source, words):
    faults = list(check(plant(tmp_path, {path: source})))
    assert any(path in fault or path == "README.md" for fault in faults), faults
    assert any(words in fault for fault in faults), faults


def test_honest_code_has_no_fault(tmp_path):
    readme = " ".join(FIVE_FILES)
    files = {name: "" for name in FIVE_FILES if name.endswith(".py")} | {
        "README.md": readme,
        "pdrt/__init__.py": "from pdrt.engine.manager import KVManager",
        "pdrt/engine/manager.py": "from pdrt.engine import sender\nfrom ..memory import aux",
        "pdrt/mail/mailbox.py": "import zmq, msgspec\nfrom pdrt.protocol.codec import decode",
        "pdrt/config.py": "import os\nfrom pdrt.errors import BadConfig\nos.environ.get('A')",
        "pdrt/serving/model.py": "import torch\nfrom pdrt import engine, runtime",
        "pdrt/clock.py": "try:\n    f()\nexcept Exception:\n    log()\n    raise",
        "tests/waiting.py": "import time\ntime.sleep(0.01)",
        "tests/test_a.py": "async def f():\n    await asyncio.sleep(0)",
    }
    plant(tmp_path, files)
    assert [fault for check in CHECKS for fault in check(tmp_path)] == []
