"""What another process does between two instructions of a table's operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pdrt.errors import TableFull
from pdrt.process_rows import Owner
from pdrt.protocol.states import Event, Reason
from pdrt.shm_status import Handle, StatusTable
from tests.table.views import LATE_NS, NOW


class AtStep:
    """Stands before a table's atomic operations and does something before the n-th."""

    def __init__(self, table: StatusTable, at: int, act: Callable[[], Any]) -> None:
        self.count = 0
        self._at = at
        self._act = act
        self._view = table._view
        table._view = self
        self._take(table, self)

    @staticmethod
    def _take(table: StatusTable, view: Any) -> None:
        table._load, table._cas, table._store = view.load_u64, view.cas_u64, view.store_u64

    def _step(self) -> None:
        self.count += 1
        if self.count == self._at + 1:
            self._act()

    def load_u64(self, offset: int) -> int:
        self._step()
        return int(self._view.load_u64(offset))

    def cas_u64(self, offset: int, expected: int, desired: int) -> int:
        self._step()
        return int(self._view.cas_u64(offset, expected, desired))

    def store_u64(self, offset: int, value: int) -> None:
        self._step()
        self._view.store_u64(offset, value)

    def fetch_add_u64(self, offset: int, amount: int) -> int:
        self._step()
        return int(self._view.fetch_add_u64(offset, amount))

    def remove(self, table: StatusTable) -> None:
        table._view = self._view
        self._take(table, self._view)

    def close(self) -> None:
        self._view.close()


STEPS_MAX = 50  # more than any operation takes
Action = Callable[[StatusTable, Handle], object]


def mover(event: Event, reason: Reason = Reason.NONE, owner: Owner | None = None) -> Action:
    return lambda table, h: table.move(
        h.slot, h.generation, event, now_ns=LATE_NS, reason=reason, owner=owner
    )


def poll_late(table: StatusTable, h: Handle) -> object:
    return table.poll(h.slot, h.generation, LATE_NS)


def poll_many_late(table: StatusTable, h: Handle) -> object:
    slots, generations = np.array([h.slot]), np.array([h.generation], dtype=np.uint64)
    state = int(table.poll_many(slots, generations, LATE_NS)[0])
    return None if state == 255 else state


def discard(table: StatusTable, h: Handle) -> None:
    table.discard(h.slot, h.generation)


def reopen(table: StatusTable, h: Handle) -> object:
    """Another room takes the slot."""
    table.discard(h.slot, h.generation)
    try:
        return table.open(1, 0, now_ns=NOW).generation - h.generation
    except TableFull:
        return TableFull


def claim(table: StatusTable, h: Handle) -> object:
    """As far as a process came that was killed while it opened another room in the slot."""
    table.discard(h.slot, h.generation)
    try:
        return table._claim()[1] - h.generation
    except TableFull:
        return TableFull


def perform(action: Action, table: StatusTable, handle: Handle, results: list[object]) -> None:
    results.append(action(table, handle))
