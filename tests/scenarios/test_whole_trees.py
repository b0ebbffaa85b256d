"""Scenarios of whole trees of processes: one that gives up, and one that is killed.

F015 F030 F034.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from pdrt import attach
from pdrt.config import environment_with
from pdrt.errors import Escalated, PortInUse
from pdrt.runtime import listen
from tests.faults.trees import LOOPBACK, make_model
from tests.waiting import wait_until

#: `pdrt-prefill`, which gives up at the first death.
MAIN = """
from msgspec.structs import replace
from pdrt.cli import launch
settings_from = launch.settings_from
launch.settings_from = lambda role, flags: replace(settings_from(role, flags), intensity=0)
launch.prefill()
"""
GUARD_S = 20.0
ADDRESS = f"@pdrt-test-{secrets.token_hex(8)}"


@dataclass
class Started:
    popen: subprocess.Popen[str]
    facts: dict[str, str]
    children: list[psutil.Process]

    def pid_of_first(self) -> tuple[str, int]:
        report = httpx.get(f"{self.facts['supervisor']}/health", timeout=5).json()
        first = next(child for child in report["children"] if child["pid"])
        return str(first["name"]), int(first["pid"])


@contextlib.contextmanager
def started(model: Path, *more: str) -> Iterator[Started]:
    flags = ["--engine=none", "--transport=shm", f"--model-path={model}", "--port=0", *more]
    popen = subprocess.Popen(
        [sys.executable, "-c", MAIN, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment_with(LOOPBACK),
    )
    try:
        assert popen.stdout is not None
        assert select.select([popen.stdout], [], [], GUARD_S)[0], "it did not come up"
        line = popen.stdout.readline()
        assert line, popen.communicate(timeout=GUARD_S)[1]
        facts = json.loads(line)["pdrt"]

        def is_ready() -> bool:
            try:
                return httpx.get(f"{facts['supervisor']}/ready", timeout=5).status_code == 200
            except httpx.TransportError:
                return False

        wait_until(is_ready, GUARD_S, "the tree to be ready")
        yield Started(popen, facts, psutil.Process(popen.pid).children(recursive=True))
    finally:
        popen.kill()
        popen.communicate(timeout=GUARD_S)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path)


def test_a_tree_that_has_spent_its_restarts_exits_with_a_code_and_a_cause(model: Path) -> None:
    """So that whatever runs it can start another."""
    with started(model, "--bootstrap-port=0") as tree:
        name, pid = tree.pid_of_first()
        os.kill(pid, signal.SIGKILL)
        _, told = tree.popen.communicate(timeout=GUARD_S)
        assert tree.popen.returncode == Escalated.exit_code == 70
        last = told.splitlines()[-1]
        assert last.startswith("pdrt-prefill: escalated: ")
        assert f"last {name}: ended by SIGKILL" in last
        assert not any(child.is_running() for child in tree.children)


def names_of(tree: Started) -> list[str]:
    """What of a tree can be found under a name: sockets, shared memory, maps of either."""
    unix = Path("/proc/net/unix").read_text().split()
    mine = [word for word in unix if tree.facts["instance"] in word or word == ADDRESS]
    mine += [name for name in os.listdir("/dev/shm") if tree.facts["instance"] in name]
    living = [child for child in tree.children if child.is_running()]
    return mine + [m.path for c in living for m in c.memory_maps() if "/dev/shm/" in m.path]


def test_a_killed_tree_leaves_nothing_under_a_name(model: Path) -> None:
    """SIGKILL skips every clean-up there is.  Memory without a name needs none, children die with
    their supervisor, and its addresses are free for the next tree at once."""
    with started(model, "--bootstrap-port=0", f"--attach={ADDRESS}") as tree:
        control = int(tree.facts["control"].rpartition(":")[2])
        assert len(tree.children) >= 2
        living = names_of(tree)
        assert living
        assert all(name.startswith("@pdrt-") for name in living)
        with pytest.raises(PortInUse):
            attach.bind(ADDRESS)
        tree.popen.kill()
        wait_until(lambda: not any(c.is_running() for c in tree.children), 5, "children to be gone")
        assert names_of(tree) == []
        with listen("127.0.0.1", control, "--bootstrap-port"), attach.bind(ADDRESS):
            pass
