"""The leak check catches what it says it catches: a planted leak fails its test, or its suite."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
GRACE = "GRACE_S = 2.0"

CONFIG = """
[pytest]
pythonpath = .
addopts = --import-mode=importlib -p no:cacheprovider -p no:hypothesispytest
"""

IMPORTS = """
import os, signal, socket, subprocess, sys

SLEEPER = "import signal; signal.pause()"
kept = []
"""

PROCESS = """
def test_leaves_a_process():
    kept.append(subprocess.Popen([sys.executable, "-c", SLEEPER]))
"""

ORPHAN = """
def test_leaves_an_orphan():
    middle = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEPER!r}])"
    subprocess.run([sys.executable, "-c", middle], check=True)
"""

ZOMBIE = """
def test_leaves_a_zombie():
    kept.append(subprocess.Popen([sys.executable, "-c", "pass"]))
    os.waitid(os.P_PID, kept[-1].pid, os.WEXITED | os.WNOWAIT)
"""

MEMFD = """
def test_leaves_a_memfd():
    os.memfd_create("table")
"""

LISTENER = """
def test_leaves_a_listening_socket():
    kept.append(socket.create_server(("127.0.0.1", 0)))
"""

PIPES = """
def test_leaves_many_pipes():
    kept.extend(os.pipe() for _ in range(5))
"""

THREAD = """
import threading

def test_leaves_a_thread():
    threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True).start()
"""

SHARED_MEMORY = """
def test_leaves_shared_memory():
    open(f"/dev/shm/leak-of-{os.getpid()}", "w").close()
"""

ABSTRACT = """
def test_leaves_an_abstract_socket():
    kept.append(socket.socket(socket.AF_UNIX))
    kept[-1].bind(f"\\0pdrt-leak-{os.getpid()}")
"""

TIDY = """
import pytest

@pytest.fixture(scope="module")
def tree():
    # Says "up" once its own child runs; the test then makes it start another.
    spawner = (
        "import itertools, subprocess, sys\\n"
        "command = [sys.executable, '-c', 'import sys; sys.stdin.read()']\\n"
        "children = []\\n"
        "for line in itertools.chain(['first'], sys.stdin):\\n"
        "    children.append(subprocess.Popen(command, stdin=subprocess.PIPE))\\n"
        "    print('up', flush=True)\\n"
        "[(c.stdin.close(), c.wait()) for c in children]\\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", spawner], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "up\\n"
        yield process
        process.stdin.close()
        process.wait()

def test_a_fixture_of_the_module_may_go_on(tree):
    tree.stdin.write("another\\n")
    tree.stdin.flush()
    assert tree.stdout.readline() == "up\\n"

def test_a_child_that_was_waited_for_is_no_leak():
    subprocess.run([sys.executable, "-c", "pass"], check=True)

def test_a_closed_descriptor_is_no_leak():
    os.close(os.memfd_create("table"))
    socket.create_server(("127.0.0.1", 0)).close()
"""


def run_suite(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    tests = folder / "tests"
    tests.mkdir()
    for name in ("conftest.py", "waiting.py"):
        shutil.copy(HERE / name, tests / name)
    # What is planted stays for ever: waiting for it to go only takes time.
    source_of_check = (HERE / "leaks.py").read_text()
    assert GRACE in source_of_check
    (tests / "leaks.py").write_text(source_of_check.replace(GRACE, "GRACE_S = 0.2"))
    (folder / "pytest.ini").write_text(CONFIG)
    (tests / "test_planted.py").write_text(IMPORTS + source)
    command = [sys.executable, "-m", "pytest", "-q"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=45)


PROCESSES = {PROCESS: "signal.pause()", ORPHAN: "signal.pause()", ZOMBIE: "zombie"}
LEFT_OPEN = {
    MEMFD: "/memfd:table",
    LISTENER: "listening socket",
    PIPES: "pipe:",
    THREAD: "thread 'forgotten' (daemon)",
    SHARED_MEMORY: "shared memory: /dev/shm/leak-of-",
    ABSTRACT: "abstract socket: @pdrt-leak-",
}


def test_a_process_left_behind_fails_its_test_and_no_other(tmp_path):
    done = run_suite(tmp_path, "".join(PROCESSES))
    assert done.returncode == 1, done.stdout
    assert "3 passed, 3 errors" in done.stdout
    _, *errors = done.stdout.split("ERROR at teardown of ")
    for (source, words), error in zip(PROCESSES.items(), errors, strict=True):
        assert error.split()[0] in source
        assert "the test left behind" in error
        assert words in error


def test_what_is_left_open_fails_the_session(tmp_path):
    done = run_suite(tmp_path, "".join(LEFT_OPEN))
    for name in os.listdir("/dev/shm"):
        if name.startswith("leak-of-"):
            os.unlink(f"/dev/shm/{name}")
    assert done.returncode == 1, done.stdout
    assert "6 passed" in done.stdout
    assert "LEAKS: the session fails" in done.stdout
    for words in LEFT_OPEN.values():
        assert words in done.stdout


def test_a_suite_that_cleans_up_passes(tmp_path):
    done = run_suite(tmp_path, TIDY)
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout
