"""Process trees that a cell may kill, freeze and start again at the same address."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

from pdrt.config import Settings, Timeouts
from tests.crash.tree_process import PAGE_TOKENS, PAGES_COUNT
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent.parent
START_S = 30.0

#: Short, so that a verdict by deadline costs seconds.
TIMEOUTS = Timeouts(bootstrap_s=4, waiting_s=4, stall_s=4, quiet_s=2, peer_s=3)
ENVIRONMENT = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}


class Spawner:
    """Our end of tests/crash/spawner.py."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "spawner.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def spawn(self, command: Sequence[str], log: Path) -> int:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
        ask = {"command": list(command), "log": str(log), "environment": environment}
        self._popen.stdin.write(json.dumps(ask) + "\n")
        self._popen.stdin.flush()
        return int(self._popen.stdout.readline())

    def close(self) -> None:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.close()
        try:
            self._popen.wait(20)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait(20)
        self._popen.stdout.close()


@dataclass
class Victims:
    """Processes held by pidfd: a number that is free again is never signalled."""

    pidfds: dict[int, int] = field(default_factory=dict)  # pid -> pidfd

    @classmethod
    def of(cls, pids: Sequence[int]) -> Victims:
        return cls({pid: os.pidfd_open(pid) for pid in pids})

    def signal(self, number: int) -> None:
        for pidfd in self.pidfds.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)

    def dead(self) -> bool:
        """A zombie counts as dead; who has to reap it is another matter."""
        poller = select.poll()
        for pidfd in self.pidfds.values():
            poller.register(pidfd, select.POLLIN)
        return len(poller.poll(0)) == len(self.pidfds)

    def close(self) -> None:
        for pidfd in self.pidfds.values():
            os.close(pidfd)
        self.pidfds = {}


class Tree:
    def __init__(self, spawner: Spawner, folder: Path, name: str, role: str, transport: str):
        self.name = name
        self.role = role
        self._spawner = spawner
        self._log = folder / f"{name}.log"
        self._transport = transport
        self._starts = 0
        self.pid = 0
        self.facts: dict[str, Any] = {}

    def launch(self) -> None:
        """Start it; at the address it had before, if it had one."""
        port = int(self.control.rpartition(":")[2]) if self.facts else 0
        settings = Settings(
            role=self.role,
            port=0,
            bootstrap_port=port,
            control_port=port,
            transport=self._transport,
            engine="none",
            page_size=PAGE_TOKENS,
            pool_tokens=PAGES_COUNT * PAGE_TOKENS,
            aux_rows=128,
            rooms_max=512,
            intensity=10_000,  # cells cost more deaths a minute than a deployment should bear,
            period_s=2,  # and each cell's is to be a first one, without backoff
            timeouts=TIMEOUTS,
        )
        self._starts += 1
        command = [sys.executable, "-c", *self._main(msgspec.json.encode(settings).decode())]
        self.pid = self._spawner.spawn(command, self._log)

    def _main(self, settings: str) -> list[str]:
        """Source and arguments of the tree's first process."""
        return ["from tests.crash.tree_process import main; main()", settings]

    def wait_ready(self) -> None:
        self.facts = wait_until(self.announced, START_S, f"{self.name} to announce itself")
        wait_until(self.is_ready, START_S, f"{self.name} to be ready\n{self.tail()}")

    def announced(self) -> dict[str, Any]:
        lines = self._log.read_text(errors="replace").splitlines()
        found = [json.loads(line)["pdrt"] for line in lines if line.startswith('{"pdrt"')]
        if len(found) >= self._starts and found[-1]["pid"] == self.pid:
            facts: dict[str, Any] = found[-1]
            return facts
        assert psutil.pid_exists(self.pid), f"{self.name} ended:\n{self.tail()}"
        return {}

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.facts['supervisor']}/ready", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def rooms(self) -> list[dict[str, Any]]:
        return list(httpx.get(f"{self.facts['supervisor']}/rooms", timeout=5).json())

    def has_no_rooms(self) -> bool:
        return not self.rooms()

    def processes(self) -> dict[str, list[int]]:
        """Living processes below the supervisor, by name."""
        found: dict[str, list[int]] = {}
        for process in psutil.Process(self.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                if process.status() != psutil.STATUS_ZOMBIE:
                    name = process.cmdline()[-1].removeprefix("pdrt:").rstrip()
                    found.setdefault(name, []).append(process.pid)
        return found

    def is_whole(self) -> bool:
        """Has it each of its processes once, and no other, and do the standbys stand by?"""
        if httpx.get(f"{self.facts['supervisor']}/health", timeout=5).json()["degraded"]:
            return False
        names = {name: len(pids) for name, pids in self.processes().items()}
        return names == dict.fromkeys(
            ("listener", "worker0", "listener-standby", "worker-standby"), 1
        )

    def all_pids(self) -> list[int]:
        """The supervisor first."""
        return [self.pid, *(pid for pids in self.processes().values() for pid in pids)]

    @property
    def control(self) -> str:
        return str(self.facts["control"])

    @property
    def attach(self) -> str:
        return str(self.facts["attach"])

    def tail(self, lines: int = 40) -> str:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to whatever is left."""
        try:
            pids = self.all_pids()
        except psutil.NoSuchProcess:
            return
        victims = Victims.of([pid for pid in pids if psutil.pid_exists(pid)])
        try:
            victims.signal(signal.SIGCONT)
            Victims({pid: fd for pid, fd in victims.pidfds.items() if pid == self.pid}).signal(
                signal.SIGTERM
            )
            with contextlib.suppress(AssertionError):
                wait_until(victims.dead, 15, f"{self.name} to stop")
            victims.signal(signal.SIGKILL)
            wait_until(victims.dead, 10, f"{self.name} to be dead")
        finally:
            victims.close()
