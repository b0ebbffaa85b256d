"""Bytes that land late: a write is given up, its pages get a new owner, what arrives is counted.

A writer and a target, two processes with a NIXL agent each, and this one, which maps the target's
memory and looks at it directly.  One play of the game:

    write all pages -> trouble -> release -> fence, or none -> the pages are refilled with PATTERN
        -> the trouble ends -> how many pages are overwritten?

Without a fence it must be possible to see some; with one, none at all.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdrt.config import UCX_DEFAULTS, environment_with
from pdrt.transports.mapped import Mapped
from tests.transports.late_process import PAGE_BYTES, SCRATCH_BYTES
from tests.transports.wire import Wire
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent.parent
BEFORE, SENT, PATTERN = 0x00, 0xAA, 0x55
DEADLINE_S = 20.0
SETTLED_S = 0.5  # nothing changed for so long: nothing is under way
RESENT_S = 1.5  # the same on a wire that was cut: TCP sends again with growing pauses
PENDING_S = 0.2  # a fence is watched so long for not ending before its time
USER_TIMEOUT_S = UCX_DEFAULTS["UCX_TCP_USER_TIMEOUT"].removesuffix("s")
TRIES = 10
NUMBERS = itertools.count(1)


class Trouble(StrEnum):
    """What happens while the bytes move."""

    NONE = "both are alive"
    TARGET_STOPPED = "target stopped, then continued"
    WRITER_STOPPED = "writer stopped, then continued"
    WRITER_KILLED = "writer killed, target behind"
    CUT = "link black-holed, then healed"
    CUT_LONG = "link black-holed until UCX gave up"


class Fence(StrEnum):
    """What is done before the pages get their new owner."""

    NONE = "none"
    WRITER = "the writer's fence (READ)"
    AGENT = "the target destroys its agent"
    WORKER = "the target is killed"


CUTS = (Trouble.CUT, Trouble.CUT_LONG)
#: Which fences there are: a dead or silent writer has none, a stopped target cannot act.
FENCES: dict[Trouble, tuple[Fence, ...]] = {
    Trouble.NONE: (Fence.NONE, Fence.WRITER, Fence.AGENT, Fence.WORKER),
    Trouble.TARGET_STOPPED: (Fence.NONE, Fence.WRITER, Fence.WORKER),
    Trouble.WRITER_STOPPED: (Fence.NONE, Fence.AGENT, Fence.WORKER),
    Trouble.WRITER_KILLED: (Fence.NONE, Fence.AGENT, Fence.WORKER),
    Trouble.CUT: (Fence.NONE, Fence.WRITER, Fence.AGENT, Fence.WORKER),
    Trouble.CUT_LONG: (Fence.NONE, Fence.AGENT, Fence.WORKER),
}


@dataclass(frozen=True)
class Outcome:
    """In pages.  `outstanding`: not yet landed when the write was given up."""

    pages_count: int
    outstanding: int
    overwritten: int


class Process:
    """Our end of tests/transports/late_process.py."""

    def __init__(self, name: str, pages_count: int, wire: Wire | None, end: str) -> None:
        self._control, theirs = Pipe()
        fd, agent = theirs.fileno(), f"late-{name}-{os.getpid()}-{next(NUMBERS)}#1"
        command = wire.command(end) if wire is not None else []
        command += [sys.executable, "-m", "tests.transports.late_process"]
        environment = {
            **UCX_DEFAULTS,
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": "lo" if wire is None else f"veth-{end}",
            "UCX_LOG_LEVEL": "fatal",
            "PYTHONPATH": str(ROOT),
        }
        self.popen = subprocess.Popen(
            [*command, str(fd), agent, str(pages_count)],
            pass_fds=(fd,),
            env=environment_with(environment),
        )
        theirs.close()

    def begin(self) -> tuple[int, bytes]:
        """(descriptor number of its memory, metadata)."""
        fd, metadata = self._answer()
        return fd, metadata

    def _answer(self) -> Any:
        assert self._control.poll(DEADLINE_S), "no answer"
        return self._control.recv()

    def ask(self, *command: object) -> Any:
        self._control.send(command)
        return self._answer()

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(DEADLINE_S)

    def close(self) -> None:
        self._control.close()
        if self.popen.poll() is None:
            self.signal(signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(DEADLINE_S)
        self.kill()


class Pair:
    """Writer and target, connected.  A play that kills one, or its agent, spoils the pair."""

    def __init__(self, pages_count: int, wire: Wire | None = None) -> None:
        self.pages_count, self.wire = pages_count, wire
        self.spoilt = False
        self.writer = Process("writer", pages_count, wire, "a")
        self.target = Process("target", pages_count, wire, "b")
        _, _ = self.writer.begin()
        fd_there, metadata = self.target.begin()
        fd = os.open(f"/proc/{self.target.popen.pid}/fd/{fd_there}", os.O_RDWR)
        length_bytes = pages_count * PAGE_BYTES + SCRATCH_BYTES
        self._mapped = Mapped(fd, length_bytes)
        os.close(fd)
        self.pages: NDArray[np.uint8] = self._mapped.view[: pages_count * PAGE_BYTES].reshape(
            pages_count, PAGE_BYTES
        )
        self.writer.ask("fill", SENT)
        self.writer.ask("connect", metadata)

    def close(self) -> None:
        self.writer.close()
        self.target.close()
        self.pages = np.zeros((0, 1), np.uint8)
        self._mapped.close()

    # --- looking ---

    def _count(self, other_than: int) -> int:
        return int((self.pages != other_than).any(axis=1).sum())

    def _settle(self, for_s: float) -> int:
        """Wait until nothing lands any more; how many pages have been overwritten."""
        last, since = -1, time.monotonic()

        def settled() -> bool:
            nonlocal last, since
            if (now := self._count(PATTERN)) != last:
                last, since = now, time.monotonic()
            return time.monotonic() - since >= for_s

        wait_until(settled, DEADLINE_S, "the last byte to have landed")
        return last

    # --- playing ---

    def play(self, trouble: Trouble, fence: Fence) -> Outcome:
        assert fence in FENCES[trouble]
        self.pages[:] = BEFORE
        self._begin(trouble)
        outstanding = int((self.pages[:, -1] != SENT).sum())
        if fence is not Fence.NONE:
            self._fence(trouble, fence)
        self.pages[:] = PATTERN
        if fence is not Fence.WRITER:  # else it is over already
            self._end(trouble)
        if fence is Fence.NONE:
            with contextlib.suppress(AssertionError):  # then none comes, and 0 is the answer
                wait_until(lambda: self._count(PATTERN), 2 * RESENT_S, "a late byte")
        overwritten = self._settle(RESENT_S if trouble in CUTS else SETTLED_S)
        self.spoilt |= fence in (Fence.AGENT, Fence.WORKER)
        self.spoilt |= trouble in (Trouble.WRITER_KILLED, Trouble.CUT_LONG)
        return Outcome(self.pages_count, outstanding, overwritten)

    def _begin(self, trouble: Trouble) -> None:
        """Write, meet the trouble, and give up."""
        if trouble is Trouble.TARGET_STOPPED:
            self.target.signal(signal.SIGSTOP)
            self.writer.ask("write")
        else:
            self.writer.ask("write")
            wait_until(lambda: self.pages[:, 0].any(), DEADLINE_S, "the first bytes")
        match trouble:
            case Trouble.WRITER_STOPPED:
                self.writer.signal(signal.SIGSTOP)
            case Trouble.WRITER_KILLED:
                self.target.signal(signal.SIGSTOP)
                self._settle_buffers()
                self.writer.kill()
            case Trouble.CUT | Trouble.CUT_LONG:
                assert self.wire is not None
                self.wire.cut()
        if trouble not in (Trouble.WRITER_STOPPED, Trouble.WRITER_KILLED):
            self.writer.ask("release")
        if trouble is Trouble.CUT_LONG:
            self._await_fence("FAILED")

    def _settle_buffers(self) -> None:
        """Let the writer fill the sockets that nobody reads."""
        until_s = time.monotonic() + PENDING_S
        wait_until(lambda: time.monotonic() >= until_s, DEADLINE_S, "full buffers")

    def _await_fence(self, state: str) -> None:
        self.writer.ask("fence")
        wait_until(lambda: self.writer.ask("poll") != "PENDING", DEADLINE_S, "the fence's end")
        assert self.writer.ask("release") == state

    def _fence(self, trouble: Trouble, fence: Fence) -> None:
        match fence:
            case Fence.WRITER:
                self.writer.ask("fence")
                if trouble is not Trouble.NONE:
                    until_s = time.monotonic() + PENDING_S
                    wait_until(
                        lambda: self.writer.ask("poll") != "PENDING" or time.monotonic() > until_s,
                        DEADLINE_S,
                        "the fence to wait for the trouble's end",
                    )
                    assert self.writer.ask("poll") == "PENDING"
                    self._end(trouble)
                wait_until(lambda: self.writer.ask("poll") == "DONE", DEADLINE_S, "the fence")
                self.writer.ask("release")
            case Fence.AGENT:
                if trouble is Trouble.WRITER_KILLED:
                    self.target.signal(signal.SIGCONT)
                self.target.ask("close")
            case Fence.WORKER:
                self.target.kill()

    def _end(self, trouble: Trouble) -> None:
        match trouble:
            case Trouble.TARGET_STOPPED | Trouble.WRITER_KILLED:
                self.target.signal(signal.SIGCONT)
            case Trouble.WRITER_STOPPED:
                self.writer.signal(signal.SIGCONT)
            case Trouble.CUT | Trouble.CUT_LONG:
                assert self.wire is not None
                self.wire.mend()


class Pairs:
    """A pair for each play; one that is whole is used again."""

    def __init__(self, pages_count: int) -> None:
        self._pages_count = pages_count
        self._pairs: dict[bool, Pair] = {}
        self._wire: Wire | None = None

    def play(self, trouble: Trouble, fence: Fence) -> Outcome:
        wired = trouble in CUTS
        if wired and self._wire is None:
            self._wire = Wire()
        pair = self._pairs.get(wired)
        if pair is None:
            pair = self._pairs[wired] = Pair(self._pages_count, self._wire if wired else None)
        try:
            return pair.play(trouble, fence)
        except BaseException:
            pair.spoilt = True
            raise
        finally:
            if pair.spoilt:
                del self._pairs[wired]
                pair.close()

    def play_under_way(self, trouble: Trouble, fence: Fence) -> Outcome:
        """A play in which something was still to land when the write was given up."""
        for _ in range(TRIES):
            outcome = self.play(trouble, fence)
            if outcome.outstanding:
                return outcome
        raise AssertionError(f"{trouble}: it is always over before it can be given up: {outcome}")

    def close(self) -> None:
        for pair in self._pairs.values():
            pair.close()
        self._pairs.clear()
        if self._wire is not None:
            self._wire.close()


@contextlib.contextmanager
def pairs(pages_count: int) -> Iterator[Pairs]:
    made = Pairs(pages_count)
    try:
        yield made
    finally:
        made.close()
