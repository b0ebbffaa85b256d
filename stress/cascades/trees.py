"""Process trees of a piece: started, signalled, buried and started again at the same addresses."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from pdrt.config import Settings, Timeouts, environment_with
from pdrt.errors import AttachFailed
from pdrt.protocol.layout import Layout
from stress.bench.trees import PAGE_TOKENS, ROOT, SHORT_PERIOD_S, Shape, wait
from stress.cascades import plan
from stress.cascades.watcher import view_of
from stress.cascades.words import (
    LISTENER,
    LISTENER_STANDBY,
    WORKER,
    WORKER_STANDBY,
    View,
)

START_S, STOP_S = 60.0, 15.0
PAGES_COUNT, AUX_ROWS, ROOMS_MAX = 2048, 512, 1024
SHAPE = Shape(1, plan.PAGE_WORDS * 8 // 2, pages=2, chunks=1, pages_count=PAGES_COUNT)
#: Short, so that a room that ends by its deadline does so within seconds; and so that a child that
#: is stopped while it starts, which only `ready_s` bounds, does not hold the piece up for a minute.
TIMEOUTS = Timeouts(
    bootstrap_s=3, waiting_s=3, stall_s=3, quiet_s=2, peer_s=3, queue_s=20, ready_s=15
)
ACTORS = {
    "listener": LISTENER,
    "worker": WORKER,
    "listener-standby": LISTENER_STANDBY,
    "worker-standby": WORKER_STANDBY,
}


class Held:
    """A process held by pidfd: a number that is free again is never signalled."""

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError."""
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def dead(self) -> bool:
        """A zombie counts as dead; who has to reap it is another matter."""
        return bool(select.select([self._pidfd], [], [], 0)[0])

    def close(self) -> None:
        os.close(self._pidfd)


class Tree:
    def __init__(self, index: int, folder: Path, role: str, name: str, transport: str) -> None:
        self.index, self.role, self.name = index, role, name
        self._transport = transport
        self._log = folder / f"{name}.log"
        self._starts = 0
        self.pid = 0
        self.facts: dict[str, Any] = {}
        self.view: View = None  # type: ignore[assignment]  # from `wait_ready`
        self._connection: socket.socket | None = None
        self.lost = True  # no tree is there now

    @property
    def is_prefill(self) -> bool:
        return self.role == "prefill"

    @property
    def control(self) -> str:
        return str(self.facts["control"])

    @property
    def attach(self) -> str:
        return str(self.facts["attach"])

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
            aux_rows=AUX_ROWS,
            rooms_max=ROOMS_MAX,
            intensity=100_000,  # more deaths a minute than a deployment should bear,
            period_s=SHORT_PERIOD_S,  # and each is to be a first one, without backoff
            log_level="warning",
            timeouts=TIMEOUTS,
        )
        self._starts += 1
        layout: Layout = SHAPE.layout
        arguments = [msgspec.json.encode(part).decode() for part in (settings, layout)]
        environment = {"PYTHONPATH": str(ROOT), "UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp,self"}
        with self._log.open("ab") as output:
            popen = subprocess.Popen(
                [sys.executable, "-c", "from stress.bench.trees import main; main()", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment_with(environment),
                start_new_session=True,
            )
        popen.returncode = 0  # `Rig.reap` does that
        self.pid = popen.pid
        self.lost = True

    def serves(self) -> bool:
        """After `launch`: does the new tree serve?  Its standbys may be on their way yet."""
        if self.lost and not self._take_up():
            return False
        return all(self.view.serves(row, 0) for row in (LISTENER, WORKER))

    def _take_up(self) -> bool:
        facts = self._announced()
        if not facts:
            return False
        self.facts = facts
        self.let_go()
        try:
            self.view, self._connection = view_of(self.attach, "driver")
        except AttachFailed:
            return False
        self.lost = False
        return True

    def _announced(self) -> dict[str, Any]:
        lines = self._log.read_text(errors="replace").split("\n")[:-1]  # the last may be half there
        found = [json.loads(line)["pdrt"] for line in lines if line.startswith('{"pdrt"')]
        if found and found[-1]["pid"] == self.pid:
            facts: dict[str, Any] = found[-1]
            return facts
        return {}

    def is_whole(self) -> bool:
        return self.serves() and all(self.view.serves(row, 0) for row in ACTORS.values())

    def wait_whole(self) -> None:
        wait(self.is_whole, START_S, f"{self.name} to be whole\n{self.tail()}", pause_s=0.02)

    def pids(self) -> dict[str, int]:
        """Of the actors that live now, by role."""
        found = {role: self.view.pid_of(row) for role, row in ACTORS.items()}
        return {role: pid for role, pid in found.items() if pid}

    def tail(self, lines: int = 20) -> str:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def let_go(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self.view.close()

    def stop(self) -> None:
        """Politely.  Whoever does not go is ended with its namespace, and told of before."""
        self.let_go()
        if not self.pid:
            return
        try:
            held = Held(self.pid)
        except ProcessLookupError:
            return
        held.signal(signal.SIGCONT)
        held.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            wait(held.dead, STOP_S, f"{self.name} to stop")
        held.signal(signal.SIGKILL)
        held.close()
