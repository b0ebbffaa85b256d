"""Process trees to measure: runtimes without an engine and without a model, one prefill and one
decode or more, with whatever settings a measurement needs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
from msgspec.structs import replace

from pdrt.child import PR_SET_PDEATHSIG, prctl
from pdrt.config import Settings, Timeouts, environment_with
from pdrt.engine.manager import KVManager
from pdrt.process_rows import HEADER_BYTES, O_IDENTITY, OWNER_BYTES
from pdrt.protocol.layout import Layout
from pdrt.runtime import Runtime
from pdrt.shm_status import StatusTable

ROOT = Path(__file__).parent.parent.parent
SABOTAGE = Path(__file__).parent / "sabotage"
START_S, STOP_S = 60.0, 20.0
PAGE_TOKENS = 16
CALM_LOOKS, CALM_LOOK_S, CALM_PART = 3, 0.1, 0.25  # of one core
SHORT_PERIOD_S = 0.05  # each death that a measurement plays is to be a first one, without backoff


class Shape(msgspec.Struct, frozen=True):
    """What one room carries.  An item is one page in one layer, keys or values alone."""

    layers: int
    item_bytes: int
    pages: int  # of a room
    chunks: int
    pages_count: int  # of the pool
    scattered: bool = False  # pages of a room are random ones

    @property
    def page_bytes(self) -> int:
        return self.layers * 2 * self.item_bytes

    @property
    def room_bytes(self) -> int:
        return self.pages * self.page_bytes

    @property
    def layout(self) -> Layout:
        return Layout(
            model="bench",
            layers=self.layers,
            kv_heads=1,
            head_dim=self.item_bytes // (4 * PAGE_TOKENS),
            dtype="float32",
            page_size=PAGE_TOKENS,
            ranks=1,
        )


SMALL = Shape(layers=1, item_bytes=4096, pages=2, chunks=2, pages_count=256)  # 16 KiB
LARGE = Shape(layers=4, item_bytes=65536, pages=16, chunks=2, pages_count=64)  # 8 MiB


def tie_to_parent(number: int = signal.SIGKILL) -> None:
    """A bench that is killed leaves nothing behind, nor anything frozen."""
    prctl(PR_SET_PDEATHSIG, number)


def main() -> None:
    """The process of one tree: settings and layout as JSON in its arguments."""
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    layout = msgspec.json.decode(sys.argv[2], type=Layout)
    tie_to_parent(signal.SIGTERM)
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s pid=%(process)d %(message)s",
    )
    with Runtime(settings, layout, None) as runtime:
        print(json.dumps({"pdrt": runtime.facts()}), flush=True)
        runtime.run()


class Tree:
    """One tree and this process's engine in it."""

    def __init__(
        self,
        folder: Path,
        role: str,
        shape: Shape,
        *,
        name: str = "",
        transport: str = "nixl",
        timeouts: Timeouts | None = None,
        first_deaths: bool = False,
        sabotage: bool = False,
        aux_rows: int = 256,
    ) -> None:
        """`first_deaths`: no restart waits.  `sabotage`: its processes can be made to hang."""
        self.name = name or role
        settings = Settings(
            role=role,
            port=0,
            bootstrap_port=0,
            transport=transport,
            engine="none",
            page_size=PAGE_TOKENS,
            pool_tokens=shape.pages_count * PAGE_TOKENS,
            aux_rows=aux_rows,
            timeouts=timeouts or Timeouts(),
        )
        if first_deaths:
            settings = replace(settings, intensity=100_000, period_s=SHORT_PERIOD_S)
        self.settings = settings
        self._log = folder / f"{self.name}-{time.monotonic_ns()}.log"
        path = [str(ROOT), *([str(SABOTAGE)] if sabotage else [])]
        environment = {"PYTHONPATH": os.pathsep.join(path), "UCX_NET_DEVICES": "lo"}
        arguments = [msgspec.json.encode(part).decode() for part in (settings, shape.layout)]
        with self._log.open("wb") as output:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", "from stress.bench.trees import main; main()", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment_with(environment),
                start_new_session=True,
            )
        self._crew = 0  # most processes seen at once
        self.facts: dict[str, Any] = {}
        self.manager: KVManager = None  # type: ignore[assignment]  # from `wait_ready`

    def wait_ready(self) -> None:
        """Until it serves; then `manager` is attached."""
        wait(self._announced, START_S, f"{self.name} to announce itself")
        wait(self.is_ready, START_S, f"{self.name} to be ready", pause_s=0.02)
        self.manager = KVManager.attach(self.attach, name="bench")

    def _announced(self) -> bool:
        if self.popen.poll() is not None:
            raise RuntimeError(f"{self.name} ended with {self.popen.returncode}:\n{self.tail()}")
        for line in self._log.read_text(errors="replace").splitlines():
            if line.startswith('{"pdrt"'):
                self.facts = json.loads(line)["pdrt"]
                return True
        return False

    def tail(self, lines: int = 20) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    @property
    def attach(self) -> str:
        return str(self.facts["attach"])

    @property
    def control(self) -> str:
        return str(self.facts["control"])

    @property
    def control_port(self) -> int:
        return int(self.control.rpartition(":")[2])

    @property
    def table(self) -> StatusTable:
        return self.manager.table

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.facts['supervisor']}/ready", timeout=2.0) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def row(self, child: str) -> int:
        return self.manager.actor_rows[child]

    def pid(self, child: str) -> int:
        """Of the process that has the child's row; 0 while there is none."""
        at = HEADER_BYTES + self.row(child) * OWNER_BYTES + O_IDENTITY
        return int(struct.unpack_from("<Q", self.table.map, at)[0]) & 0xFFFF_FFFF

    def kill(self, child: str, number: int) -> int:
        """Signal the process in the child's row; returns its pid."""
        pid = self.pid(child)
        assert pid, f"{self.name} has no {child} now"
        os.kill(pid, number)
        return pid

    def processes(self) -> list[psutil.Process]:
        """The supervisor first."""
        supervisor = psutil.Process(self.popen.pid)
        return [supervisor, *supervisor.children(recursive=True)]

    def signal(self, number: int) -> None:
        """To every process of the tree."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def settle(self, limit_s: float = 10.0, *, but: str = "") -> bool:
        """Wait until as many processes as ever do nothing, `but` perhaps one, so that spare ones
        are warm again.  False if that takes too long; what is measured then is a busy tree."""
        before, calm = Cpu.of(self), 0
        end = time.monotonic() + limit_s
        while calm < CALM_LOOKS and time.monotonic() < end:
            time.sleep(CALM_LOOK_S)
            now = Cpu.of(self)
            self._crew = max(self._crew, len(now.seconds))
            used = now.since(before)
            used.pop(f"{self.name} {but}", None)
            busy = sum(used.values()) > CALM_PART * CALM_LOOK_S
            whole = len(now.seconds) == self._crew and self.is_ready()
            calm = 0 if busy or not whole else calm + 1
            before = now
        return calm == CALM_LOOKS

    def stop(self) -> None:
        if self.manager is not None:
            self.manager.close()
        if self.popen.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.signal(signal.SIGCONT)
            self.popen.send_signal(signal.SIGTERM)
            try:
                self.popen.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.popen.kill()
        self.popen.wait(STOP_S)


@dataclass(frozen=True)
class Cpu:
    """Processor time of a tree's processes at one moment."""

    seconds: dict[tuple[str, int], float] = field(default_factory=dict)  # by name and pid

    @classmethod
    def of(cls, *trees: Tree) -> Cpu:
        found = {}
        for tree in trees:
            for index, process in enumerate(tree.processes()):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    last = (process.cmdline() or [""])[-1]
                    child = "supervisor" if index == 0 else last.removeprefix("pdrt:").strip()
                    times = process.cpu_times()
                    found[f"{tree.name} {child}", process.pid] = times.user + times.system
        return cls(found)

    def since(self, before: Cpu) -> dict[str, float]:
        """Seconds used by name, children that died meanwhile left out."""
        used: dict[str, float] = {}
        for key, seconds in self.seconds.items():
            used[key[0]] = used.get(key[0], 0.0) + seconds - before.seconds.get(key, 0.0)
        return used

    def per_room(self, before: Cpu, rooms_count: int) -> str:
        """ "prefill listener 120 us, ...": what one room cost each process."""
        used = sorted(self.since(before).items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {1e6 * s / rooms_count:.0f} us" for name, s in used if s > 0)


@contextlib.contextmanager
def started(trees: Sequence[Tree]) -> Iterator[None]:
    """Waits until all serve; stops all on the way out."""
    try:
        for tree in trees:
            tree.wait_ready()
        yield
    finally:
        for tree in reversed(trees):
            tree.stop()


@contextlib.contextmanager
def pair(folder: Path, shape: Shape = SMALL, **options: Any) -> Iterator[tuple[Tree, Tree]]:
    """A prefill and a decode with the same options."""
    prefill, decode = (Tree(folder, role, shape, **options) for role in ("prefill", "decode"))
    with started([prefill, decode]):
        yield prefill, decode


def wait(ready: Any, limit_s: float, what: str, *, pause_s: float = 0.002) -> None:
    """Call `ready` until it answers true.  Raises TimeoutError."""
    give_up = time.monotonic() + limit_s
    while not ready():
        if time.monotonic() > give_up:
            raise TimeoutError(f"waited {limit_s:g} s for {what}")
        time.sleep(pause_s)
