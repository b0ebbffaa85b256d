"""The same through real trees: a large room ends while its bytes move, and its pages are refilled.

Two trees over NIXL on TCP and this process as both engines, which sees decode's pool directly.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pdrt.engine.manager import KVManager
from pdrt.memory.aux import AuxRow
from pdrt.protocol.states import TERMINAL, KVPoll
from tests.crash.tree_process import PAGES_COUNT
from tests.crash.trees import TIMEOUTS, Spawner, Tree, Victims
from tests.transports.late import (
    BEFORE,
    DEADLINE_S,
    PATTERN,
    PENDING_S,
    SENT,
    SETTLED_S,
    Outcome,
)
from tests.waiting import wait_until

PAGES = np.arange(PAGES_COUNT, dtype=np.int32)
QUIET_S = 2 * (TIMEOUTS.quiet_s + DEADLINE_S)
ROOMS = itertools.count(1)


class Ending(StrEnum):
    """What ends the room on decode while its bytes move."""

    ABORT = "decode's engine aborts"
    PEER_ABORT = "prefill's engine aborts"
    PREFILL_KILLED = "prefill's worker is killed"
    PREFILL_STOPPED = "prefill's worker is stopped, decode aborts"
    DECODE_KILLED = "decode's worker is killed"
    DECODE_STOPPED = "decode's worker is stopped, decode aborts, it goes on"


class Rooms:
    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        spawner = Spawner()
        stack.callback(spawner.close)
        self._trees: dict[str, Tree] = {}
        for role in ("prefill", "decode"):
            tree = self._trees[role] = Tree(spawner, folder, role, role, "nixl")
            tree.launch()
            stack.callback(tree.stop)
        for tree in self._trees.values():
            tree.wait_ready()
        self._managers = {
            role: stack.enter_context(
                contextlib.closing(KVManager.attach(tree.attach, name="late"))
            )
            for role, tree in self._trees.items()
        }
        self._aux = {role: manager.aux.reserve() for role, manager in self._managers.items()}

    def _pool(self, role: str) -> NDArray[np.uint8]:
        return np.frombuffer(self._managers[role].kv(0), np.uint8).reshape(PAGES_COUNT, -1)

    def _wait(self, condition: Callable[[], object], deadline_s: float, what: str) -> None:
        def turn() -> object:
            for manager in self._managers.values():
                manager.tick()
            return condition()

        wait_until(turn, deadline_s, what)

    def play(self, ending: Ending, *, wait_quiet: bool) -> Outcome:
        prefill, decode = self._managers.values()
        self._wait(
            lambda: all(tree.is_ready() for tree in self._trees.values()), DEADLINE_S, "both trees"
        )
        room = next(ROOMS)
        source, target = self._pool("prefill"), self._pool("decode")
        source[:], target[:] = SENT, BEFORE
        prefill.aux.write(self._aux["prefill"], AuxRow(room, 7))
        sender, receiver = (
            prefill.sender(room),
            decode.receiver(room, self._trees["prefill"].control),
        )
        sender.init(PAGES_COUNT, self._aux["prefill"])
        receiver.init()
        self._wait(lambda: receiver.poll() is KVPoll.WaitingForInput, DEADLINE_S, "decode's turn")
        receiver.send_metadata(PAGES, self._aux["decode"])
        sender.send(PAGES, last=True)
        self._wait(lambda: target[:, 0].any(), DEADLINE_S, "the first bytes")
        with self._ended(ending) as go_on:
            if ending is Ending.PEER_ABORT:
                sender.abort()
            elif ending not in (Ending.PREFILL_KILLED, Ending.DECODE_KILLED):
                receiver.abort()
            self._wait(lambda: receiver.poll() in TERMINAL, DEADLINE_S, "decode's verdict")
            outstanding = int((target[:, -1] != SENT).sum())
            if ending is Ending.DECODE_STOPPED:
                until_s = time.monotonic() + PENDING_S if wait_quiet else 0
                self._wait(
                    lambda: receiver.quiet() or time.monotonic() >= until_s,
                    DEADLINE_S,
                    "a moment in which nobody can say that it is quiet, unless it is",
                )
                if not receiver.quiet():
                    go_on()
            if wait_quiet:
                self._wait(receiver.quiet, QUIET_S, "decode's pages to be quiet")
            target[:] = PATTERN
            go_on()
            overwritten = self._settle(target)
        self._wait(lambda: sender.poll() in TERMINAL, DEADLINE_S, "prefill's verdict")
        self._wait(lambda: sender.quiet() and receiver.quiet(), QUIET_S, "both to be quiet")
        if not wait_quiet:
            overwritten = self._settle(target)
        sender.clear()
        receiver.clear()
        return Outcome(PAGES_COUNT, outstanding, overwritten)

    @contextlib.contextmanager
    def _ended(self, ending: Ending) -> Iterator[Callable[[], None]]:
        """Signal the victim; what is yielded lets it go on."""
        side = "decode" if ending in (Ending.DECODE_KILLED, Ending.DECODE_STOPPED) else "prefill"
        if ending in (Ending.ABORT, Ending.PEER_ABORT):
            yield lambda: None
            return
        victims = Victims.of(self._trees[side].processes()["worker0"])
        killed = ending in (Ending.PREFILL_KILLED, Ending.DECODE_KILLED)
        victims.signal(signal.SIGKILL if killed else signal.SIGSTOP)
        try:
            yield lambda: victims.signal(signal.SIGCONT)
        finally:
            victims.signal(signal.SIGCONT)
            victims.close()

    def _settle(self, target: NDArray[np.uint8]) -> int:
        """Once nothing lands any more: how many pages have been overwritten."""
        last, since = -1, time.monotonic()

        def settled() -> bool:
            nonlocal last, since
            if (now := int((target != PATTERN).any(axis=1).sum())) != last:
                last, since = now, time.monotonic()
            return time.monotonic() - since >= SETTLED_S

        self._wait(settled, DEADLINE_S, "the last byte to have landed")
        return last


@contextlib.contextmanager
def rooms(folder: Path) -> Iterator[Rooms]:
    with contextlib.ExitStack() as stack:
        yield Rooms(folder, stack)
