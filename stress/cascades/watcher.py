"""Looks at every slot of every tree, hundreds of times a second, and writes each change down."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdrt import attach
from pdrt.attach import AttachRequest
from pdrt.errors import AttachFailed
from stress.cascades import lanes
from stress.cascades.history import Kind, Writer
from stress.cascades.lanes import Lanes
from stress.cascades.words import (
    LISTENER,
    LISTENER_STANDBY,
    SUPERVISOR,
    WORKER,
    WORKER_STANDBY,
    View,
)

PAUSE_S = 0.003
ANSWER_S = 5.0
LATE_MS = 20  # a sweep's time past the deadline is normal
TABLES_MAX = 1000  # of one tree
SILENT_NS = 150_000_000  # no pulse for longer is written down
PULSED = (LISTENER, WORKER)
ROWS = (SUPERVISOR, LISTENER, LISTENER_STANDBY, WORKER_STANDBY, WORKER)


class Told(msgspec.Struct, frozen=True):
    attach: tuple[str, ...]  # by tree
    lanes_file: str
    history: str


def view_of(address: str, name: str) -> tuple[View, socket.socket]:
    """Map a tree's table, and hold the connection as long as the view is wanted.  Raises
    AttachFailed."""
    return _mapped(attach.request(address, AttachRequest(kind="engine", name=name)))


def _mapped(answer: tuple[object, list[int], socket.socket]) -> tuple[View, socket.socket]:
    _, fds, connection = answer
    try:
        return View(fds[0]), connection
    finally:
        for fd in fds:
            os.close(fd)


@dataclass
class Watched:
    number: int  # tree * TABLES_MAX + how many tables it had before
    view: View
    connection: socket.socket
    supervisor: int  # pidfd
    words: NDArray[np.uint64]
    rows: list[int]
    pulses: dict[int, tuple[int, int, int]]  # by row: identity, pulse and since when
    looks: int = 0
    last_ns: int = 0
    gap_ns: int = 0

    def is_orphan(self) -> bool:
        return bool(select.select([self.supervisor], [], [], 0)[0])

    def close(self) -> None:
        os.close(self.supervisor)
        self.connection.close()
        self.view.close()


class Watcher:
    def __init__(self, told: Told) -> None:
        self._told = told
        self._writer = Writer(Path(told.history))
        self._watched: dict[int, Watched] = {}
        self._tables = [0] * len(told.attach)
        self._asking: dict[int, attach.Asking] = {}

    def _attach(self, tree: int) -> None:
        """Without waiting: others are to be watched meanwhile."""
        try:
            asking = self._asking.get(tree)
            if asking is None:
                ask = AttachRequest(kind="engine", name="watcher")
                asking = attach.Asking(self._told.attach[tree], ask, timeout_s=ANSWER_S)
                self._asking[tree] = asking
            answer = asking.poll()
            if answer is None:
                return
            del self._asking[tree]
            view, connection = _mapped(answer)
            supervisor = os.pidfd_open(view.pid)
        except (AttachFailed, ProcessLookupError):
            self._asking.pop(tree, None)
            return
        number = tree * TABLES_MAX + self._tables[tree]
        self._tables[tree] += 1
        words = np.zeros(view.slots_count, dtype=np.uint64)
        watched = Watched(number, view, connection, supervisor, words, [0] * len(ROWS), {})
        self._watched[tree] = watched
        self._writer.append(Kind.TABLE, a=number, b=tree, c=view.role)

    def look(self) -> None:
        for tree in range(len(self._told.attach)):
            watched = self._watched.get(tree)
            if watched is None:
                self._attach(tree)
                continue
            over = watched.is_orphan()
            self._look_at(watched)
            if over:
                self._leave(tree)

    def _leave(self, tree: int) -> None:
        watched = self._watched.pop(tree)
        self._writer.append(
            Kind.LOOKS, watched.gap_ns, watched.number, c=watched.looks, ns=monotonic_ns()
        )
        self._writer.append(Kind.UNWATCHED, a=watched.number)
        watched.close()

    def _look_at(self, watched: Watched) -> None:
        writer, number, view = self._writer, watched.number, watched.view
        now_ns = monotonic_ns()
        if watched.looks:
            watched.gap_ns = max(watched.gap_ns, now_ns - watched.last_ns)
        watched.looks += 1
        watched.last_ns = now_ns
        words = view.words.copy()
        for slot in np.flatnonzero(words != watched.words).tolist():
            writer.append(Kind.WORD, 0, number, slot, int(words[slot]), now_ns)
        watched.words = words
        overdue = view.overdue_ms(now_ns)
        for slot in np.flatnonzero(overdue > LATE_MS).tolist():
            generation = int(words[slot]) >> 32
            late_ns = int(overdue[slot]) * 1_000_000
            writer.append(Kind.LATE, late_ns, number, slot, generation, now_ns)
        for row in PULSED:
            self._feel(watched, row, now_ns)
        for index, row in enumerate(ROWS):
            identity = view.identity(row)
            state = identity << 1 | view.serves(row, 0)
            if state != watched.rows[index]:
                watched.rows[index] = state
                writer.append(Kind.ROW, state & 1, number, row, identity, now_ns)

    def _feel(self, watched: Watched, row: int, now_ns: int) -> None:
        last, pulse, since_ns = watched.pulses.get(row, (0, 0, now_ns))
        identity, now = watched.view.identity(row), watched.view.pulse(row)
        if (identity, now) == (last, pulse):
            return
        if last and now_ns - since_ns > SILENT_NS:
            silent_ns = now_ns - since_ns
            self._writer.append(Kind.SILENT, silent_ns, watched.number, row, last, now_ns)
        watched.pulses[row] = identity, now, now_ns

    def close(self) -> None:
        for tree in list(self._watched):
            with contextlib.suppress(OSError):
                self._look_at(self._watched[tree])
            self._leave(tree)
        self._writer.append(Kind.LEFT)
        self._writer.close()


def main(told: Told) -> None:
    watcher, shared = Watcher(told), Lanes(Path(told.lanes_file))
    while shared.get(lanes.PHASE) != lanes.EXIT:
        watcher.look()
        time.sleep(PAUSE_S)
    watcher.close()
