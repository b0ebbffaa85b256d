"""Rooms served all the while: those that must succeed with the right bytes, and victims, which may
fail, and must end.

Both engines live in this process, in one thread of it.  Every page has a pattern while it is
nobody's, so a byte that lands late is seen when the page is used again.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter as Multiset
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pdrt.engine.manager import KVManager
from pdrt.errors import CorruptAux, TransferError
from pdrt.protocol.states import KVPoll
from stress.bench.trees import Shape, Tree
from stress.bench.trips import Phase, Route, Trip, half
from stress.fuzz.hostile import VICTIM, rng_of

OPEN, VICTIMS_OPEN = 6, 3
OVER_S = 60.0  # far beyond every deadline of these trees
FREE = 0xDD


@dataclass(eq=False)
class Room:
    trip: Trip
    number: int
    place: int
    goes_on_s: float  # when it is taken further; victims linger
    seen_s: float = 0.0

    @property
    def is_victim(self) -> bool:
        return self.number >= VICTIM


@dataclass
class Seen:
    """What became of the rooms."""

    succeeded: int = 0
    victims: Multiset[str] = field(default_factory=Multiset)  # by how they ended on decode
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


class Rooms:
    def __init__(self, prefill: Tree, decode: Tree, shape: Shape, seed: int) -> None:
        self._route = Route(prefill, decode, shape)
        self._managers = prefill.manager, decode.manager
        self._shape = shape
        self._rng = rng_of(seed, "rooms")
        self._free = list(range(0, shape.pages_count - shape.pages + 1, shape.pages))
        self._open: list[Room] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rooms")
        self.seen = Seen()
        self.busy = threading.Event()  # a first room has succeeded
        self._grid(self._managers[1])[:] = FREE

    def _grid(self, manager: KVManager) -> NDArray[np.uint8]:
        page_bytes = manager.maps[0].page_bytes
        return np.frombuffer(manager.kv(0), np.uint8).reshape(-1, page_bytes)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> Seen:
        """Open no more, see the others end."""
        self._stopping.set()
        self._thread.join()
        return self.seen

    def _run(self) -> None:
        try:
            while self._open or not self._stopping.is_set():
                if not self._stopping.is_set():
                    self._fill()
                for room in list(self._open):
                    self._look(room)
                self._route.pause()
        except Exception:
            self.seen.wrong.append(traceback.format_exc(limit=4))
        finally:
            self.busy.set()

    def _fill(self) -> None:
        victims = sum(room.is_victim for room in self._open)
        for _ in range(VICTIMS_OPEN - victims):
            self._begin(VICTIM + self._rng.getrandbits(61))
        for _ in range(OPEN + VICTIMS_OPEN - len(self._open)):
            self._begin(self._rng.getrandbits(62))

    def _begin(self, number: int) -> None:
        place = self._free.pop(0)  # used longest ago
        pages = slice(place, place + self._shape.pages)
        if (self._grid(self._managers[1])[pages] != FREE).any():
            self.seen.wrong.append(f"bytes landed in free pages {pages}")
        self._grid(self._managers[0])[pages] = self._pattern(number)
        peer = self._route.prefill.control
        sides = [half(manager, number, peer, self._shape) for manager in self._managers]
        trip = Trip(sides[0], sides[1], self._shape, place)
        wait_s = self._rng.choice((0, 0.05, 0.5)) if number >= VICTIM else 0.0
        self._open.append(Room(trip, number, place, time.monotonic() + wait_s))

    def _pattern(self, number: int) -> NDArray[np.uint8]:
        shape = (self._shape.pages, self._shape.page_bytes)
        return np.random.default_rng(number).integers(0, 256, shape, np.uint8)

    def _look(self, room: Room) -> None:
        trip, now_s = room.trip, time.monotonic()
        if now_s >= room.goes_on_s and not trip.over:
            lingers = (Phase.WAITING, Phase.MOVING, Phase.WHOLE)
            trip.advance(self._rng.choice(lingers) if room.is_victim else Phase.WHOLE)
        if now_s - trip.begun_s > OVER_S:
            words = [str(side.word()) for side in trip.sides()]
            raise AssertionError(f"room {room.number} is not over, or not quiet: {words}")
        if not trip.over:
            return
        if not room.seen_s:
            room.seen_s = now_s
            self._judge(room)
        left = [side for side in trip.sides() if not (side.room._cleared or side.clear())]
        if not left:
            pages = slice(room.place, room.place + self._shape.pages)
            self._grid(self._managers[1])[pages] = FREE
            self._free.append(room.place)
            self._open.remove(room)

    def _read(self, room: Room) -> CorruptAux | None:
        """The bytes of a Success.  Of one that was forged, the aux row tells: it comes last."""
        pages = slice(room.place, room.place + self._shape.pages)
        try:
            row = self._managers[1].aux.read(room.trip.decode.aux, room.number)
        except CorruptAux as error:
            return error
        same = np.array_equal(self._grid(self._managers[1])[pages], self._pattern(room.number))
        if not same or row.first_token != 1:
            self.seen.wrong.append(f"room {room.number}: Success, and other bytes")
        return None

    def _judge(self, room: Room) -> None:
        receiver, sender = room.trip.decode.room, room.trip.prefill.room
        error: TransferError | None = receiver.failure()
        if error is None and receiver.poll() is KVPoll.Success:
            error = self._read(room)
        if room.is_victim:
            self.seen.victims["Success" if error is None else error.code] += 1
        elif isinstance(error, CorruptAux):
            self.seen.wrong.append(f"room {room.number}: Success, and {error}")
        elif receiver.poll() is sender.poll() is KVPoll.Success:
            self.seen.succeeded += 1
            self.seen.slowest_s = max(self.seen.slowest_s, room.seen_s - room.trip.begun_s)
            self.busy.set()
        else:
            ends = f"{receiver.failure()!r} on decode, {sender.failure()!r} on prefill"
            self.seen.wrong.append(f"room {room.number} failed: {ends}")
