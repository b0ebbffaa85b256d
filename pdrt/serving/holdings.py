"""What rooms still hold after their requests are over, until it is safe to take it back.

A verdict is not permission to reuse memory: the pages and the aux row of a room stay in quarantine
until the room is quiet, and only then is its slot cleared.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

from pdrt.memory.pages import PageAllocator
from pdrt.protocol.states import TERMINAL
from pdrt.serving.rooms import AuxRows, Pages, Room

FINISHED_MAX = 256  # rooms whose timelines are kept for people to look at


@dataclass(frozen=True)
class _Holding:
    room: Room
    pages: Pages
    aux_index: int | None


class Holdings:
    """The quarantine of one engine."""

    def __init__(self, allocator: PageAllocator, aux: AuxRows) -> None:
        self._allocator = allocator
        self._aux = aux
        self._held: list[_Holding] = []
        self.finished: deque[dict[str, Any]] = deque(maxlen=FINISHED_MAX)  # timelines, oldest first

    def __len__(self) -> int:
        return len(self._held)

    def take(self, room: Room, pages: Pages, aux_index: int | None) -> None:
        """Keep what a room holds.  The room has a verdict or was aborted just now."""
        self._allocator.hold(pages)
        holding = _Holding(room, pages, aux_index)
        if not self._let_go(holding):
            self._held.append(holding)

    def sweep(self) -> None:
        """Take back what has become quiet."""
        self._held = [holding for holding in self._held if not self._let_go(holding)]

    def _let_go(self, holding: _Holding) -> bool:
        if holding.room.poll() not in TERMINAL or not holding.room.quiet():
            return False
        self._allocator.free(holding.pages)
        if holding.aux_index is not None:
            self._aux.release(holding.aux_index)
        self.finished.append(msgspec.to_builtins(holding.room.timeline()))
        holding.room.clear()
        return True
