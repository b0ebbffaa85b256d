"""Processes run at once: between two instructions of one, another has a turn.

In a world without this a turn is atomic, and whoever has looked at a room may take it for granted
until the end of its turn.  In truth somebody else may end the room by then, clear it, and open the
next one in its slot.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pdrt.shm_status import StatusTable
from tests.actors.tree import Tree


def before_each(table: StatusTable, act: Callable[[], object]) -> None:
    """Have `act` called before each load and each swap of this view of a table, and between a look
    at many slots and what comes of it."""
    load, cas, rows, live_slots = table._load, table._cas, table.rows, table.live_slots

    def late_load(at: int) -> int:
        act()
        return load(at)

    def late_cas(at: int, old: int, new: int) -> int:
        act()
        return cas(at, old, new)

    def old_rows(slots: NDArray[np.intp]) -> NDArray[np.uint64]:
        found = rows(slots)
        act()
        return found

    def old_slots() -> NDArray[np.intp]:
        found = live_slots()
        act()
        return found

    table._load, table._cas = late_load, late_cas  # type: ignore[assignment]
    table.rows, table.live_slots = old_rows, old_slots  # type: ignore[method-assign]


class Preempt:
    """One instruction in `mean`, at random, waits: some other process of the tree that runs has a
    whole turn first."""

    def __init__(self, seed: int, mean: int, now_ns: Callable[[], int]) -> None:
        self.overlaps = 0
        self._random = random.Random(seed)
        self._mean, self._now_ns = mean, now_ns
        self._left = self._draw()
        self._busy = False  # nobody has to wait for two

    def _draw(self) -> int:
        return self._random.randrange(1, 2 * self._mean)

    def attach(self, tree: Tree) -> None:
        """To the views of its table that there are, and to those that there will be."""
        on_view = tree.on_view

        def attach(table: StatusTable) -> None:
            on_view(table)
            before_each(table, partial(self._step, tree, table))

        for table in tree.tables:
            before_each(table, partial(self._step, tree, table))
        tree.on_view = attach

    def _step(self, tree: Tree, table: StatusTable) -> None:
        self._left -= 1
        if self._left > 0 or self._busy:
            return
        self._left = self._draw()
        others = [p for p in tree.running() if p.table is not table and p.box.alive]
        if not others:
            return
        self._busy = True
        try:
            self._random.choice(others).turn(self._now_ns())
            self.overlaps += 1
        finally:
            self._busy = False
