"""The shared page through which engines of a piece learn which rooms there are: a router of a kind.

A lane leads from one prefill to one decode.  Its leader opens the next room and publishes the
number, its follower opens it too; half of the lanes are led by prefill.  Nobody waits for anybody:
all fields are single u64, written by one process each.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from stress.cascades import plan

LANES_MAX, PLAYERS_MAX = 16, 16
PREFILLS, DECODES = 2, 2
RUN, DRAIN, EXIT = 0, 1, 2
# page of u64: [phase, ...], lanes x [granted, next, followed], players x [life, ...]
PHASE, WINDOW, PAUSE_US, ASK = range(4)
LANE, LANE_FIELDS = 8, 8
GRANTED, NEXT, FOLLOWED, CALM_FROM, CALM_END = range(5)
PLAYER, PLAYER_FIELDS = LANE + LANES_MAX * LANE_FIELDS, 8
LIFE, SETTLED, SERVING_NS, BUSY, DONE, HALF, UNQUIET, CLIENTS = range(8)
LENGTH = (PLAYER + PLAYERS_MAX * PLAYER_FIELDS) * 8


class Lanes:
    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(fd, LENGTH)
            self._map = mmap.mmap(fd, LENGTH)
            self._cells = memoryview(self._map).cast("Q")  # whole words, never half of one
        finally:
            os.close(fd)

    def get(self, field: int) -> int:
        return self._cells[field]

    def set(self, field: int, value: int) -> None:
        self._cells[field] = value

    def lane(self, lane: int, field: int) -> int:
        return self.get(LANE + lane * LANE_FIELDS + field)

    def set_lane(self, lane: int, field: int, value: int) -> None:
        self.set(LANE + lane * LANE_FIELDS + field, value)

    def room(self, lane: int, number: int) -> int:
        """The id of a number that is granted."""
        calm = self.lane(lane, CALM_FROM) <= number < self.lane(lane, CALM_END)
        return plan.room_of(lane, number, calm=calm)

    def player(self, player: int, field: int) -> int:
        return self.get(PLAYER + player * PLAYER_FIELDS + field)

    def set_player(self, player: int, field: int, value: int) -> None:
        self.set(PLAYER + player * PLAYER_FIELDS + field, value)

    def close(self) -> None:
        self._cells.release()
        self._map.close()


def lane_number(prefill: int, decode: int, leader: int) -> int:
    """`leader`: 1 if prefill leads, 2 if decode does."""
    return 1 + (prefill * DECODES + decode) * 2 + (leader - 1)
