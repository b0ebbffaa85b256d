"""Rooms from a prefill to a decode, driven to a phase, held there, driven on, and checked."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pdrt.engine.manager import KVManager
from pdrt.engine.receiver import KVReceiver
from pdrt.engine.sender import KVSender
from pdrt.errors import CorruptAux
from pdrt.memory.aux import AuxRow
from pdrt.protocol.states import TERMINAL, KVPoll
from tests.waiting import wait_until

PAGES = 4  # of a room
ROOMS = itertools.count(1)


class Phase(IntEnum):
    """How far a room is driven."""

    OPENED = 0  # both halves are there; the sender is Bootstrapping
    WAITING = 1  # the destination is known
    MOVING = 2  # half of the pages were sent
    WHOLE = 3


class Pages:
    """Free pages of one manager.  Those of a room come back only when it is quiet."""

    def __init__(self, manager: KVManager) -> None:
        self._free = list(range(manager.maps[0].pages_count))

    def take(self) -> NDArray[np.int32]:
        taken, self._free = self._free[:PAGES], self._free[PAGES:]
        return np.array(taken[::-1], dtype=np.int32)

    def give(self, pages: NDArray[np.int32]) -> None:
        self._free += pages.tolist()


@dataclass(eq=False)
class Trip:
    """One room and how it went."""

    room: int
    sender: KVSender
    receiver: KVReceiver
    source: NDArray[np.int32]
    target: NDArray[np.int32]
    out: int  # aux rows
    into: int
    want: Phase
    done: Phase = Phase.OPENED
    told: bool = False
    digest: int = 0
    begun_s: float = field(default_factory=time.monotonic)
    took_s: float = 0.0
    reasons: tuple[str, str] = ("", "")

    @property
    def over(self) -> bool:
        return self.sender.poll() in TERMINAL and self.receiver.poll() in TERMINAL

    @property
    def succeeded(self) -> bool:
        return self.receiver.poll() is KVPoll.Success

    @property
    def reached(self) -> bool:
        """Is it where it is wanted, or over?"""
        if self.over:
            return True
        if self.want is Phase.OPENED:
            return self.receiver.poll() is KVPoll.WaitingForInput
        wanted = KVPoll.WaitingForInput if self.want is Phase.WAITING else KVPoll.Transferring
        return self.want is not Phase.WHOLE and self.sender.poll() is wanted


class Route:
    """From one attached prefill to one attached decode, which dials `peer`."""

    def __init__(
        self,
        prefill: KVManager,
        decode: KVManager,
        peer: str,
        *,
        sources: Pages | None = None,
        targets: Pages | None = None,
    ) -> None:
        """Routes that share a manager share its pages."""
        self.prefill, self.decode, self.peer = prefill, decode, peer
        self.sources, self.targets = sources or Pages(prefill), targets or Pages(decode)
        self.trips: list[Trip] = []

    def open(self, want: Phase = Phase.WHOLE) -> Trip:
        room = next(ROOMS)
        out, into = self.prefill.aux.reserve(), self.decode.aux.reserve()
        source, target = self.sources.take(), self.targets.take()
        kv = np.frombuffer(self.prefill.kv(0), dtype=np.uint8)
        kv = kv.reshape(self.prefill.maps[0].pages_count, -1)
        kv[source] = np.random.default_rng(room).integers(0, 256, kv[source].shape, dtype=np.uint8)
        sender, receiver = self.prefill.sender(room), self.decode.receiver(room, self.peer)
        sender.init(PAGES, out)
        receiver.init()
        self.prefill.aux.write(out, AuxRow(room, 7))
        digest = self.prefill.digest(source)
        trip = Trip(room, sender, receiver, source, target, out, into, want, digest=digest)
        self.trips.append(trip)
        return trip

    def tick(self) -> None:
        self.prefill.tick()
        self.decode.tick()
        for trip in self.trips:
            self._drive(trip)

    def _drive(self, trip: Trip) -> None:
        if trip.over:
            trip.took_s = trip.took_s or time.monotonic() - trip.begun_s
            return
        if trip.want >= Phase.WAITING and not trip.told:
            if trip.receiver.poll() is KVPoll.WaitingForInput:
                trip.receiver.send_metadata(trip.target, trip.into)
                trip.told = True
        if trip.want >= Phase.MOVING and trip.done < Phase.MOVING:
            trip.sender.send(trip.source[: PAGES // 2])
            trip.done = Phase.MOVING
        if trip.want is Phase.WHOLE and trip.done < Phase.WHOLE:
            trip.sender.send(trip.source[PAGES // 2 :], last=True)
            trip.done = Phase.WHOLE

    def settle(self) -> None:
        """Check and clear what is over and quiet."""
        for trip in list(self.trips):
            if trip.over and trip.sender.quiet() and trip.receiver.quiet():
                self._close(trip)

    def _close(self, trip: Trip) -> None:
        trip.reasons = trip.sender.timeline().reason, trip.receiver.timeline().reason
        for side, reason in zip((trip.sender, trip.receiver), trip.reasons, strict=True):
            assert side.poll() is KVPoll.Success or reason != "NONE", (trip.room, trip.reasons)
        if trip.succeeded:
            assert trip.sender.poll() is KVPoll.Success, (trip.room, trip.reasons)
            right = self.decode.digest(trip.target) == trip.digest
            try:
                right &= self.decode.aux.read(trip.into, trip.room).first_token == 7
            except CorruptAux:
                right = False
            assert right, f"room {trip.room}: other bytes"
        trip.sender.clear()
        trip.receiver.clear()
        self.sources.give(trip.source)
        self.targets.give(trip.target)
        self.prefill.aux.release(trip.out)
        self.decode.aux.release(trip.into)
        self.trips.remove(trip)


def run(routes: Iterable[Route], until: Callable[[], bool], deadline_s: float, what: str) -> None:
    """Keep every room moving until something is true."""
    routes = list(routes)

    def turn() -> bool:
        for route in routes:
            route.tick()
        return until()

    wait_until(turn, deadline_s, what)


def all_over(trips: Sequence[Trip]) -> bool:
    return all(trip.over for trip in trips)


def finish(routes: Sequence[Route], deadline_s: float, what: str) -> None:
    """Until every room is over, quiet, checked and cleared."""

    def nothing_left() -> bool:
        for route in routes:
            route.settle()
        return not any(route.trips for route in routes)

    try:
        run(routes, nothing_left, deadline_s, what)
    except AssertionError as error:
        left = [
            f"{t.room} want={t.want.name} {side.poll().name} quiet={side.quiet()}"
            for route in routes
            for t in route.trips
            for side in (t.sender, t.receiver)
        ]
        raise AssertionError(f"{error}: {left}") from error


def succeed(
    route: Route,
    count: int,
    *,
    others: Sequence[Route] = (),
    failed: list[str] | None = None,
) -> list[float]:
    """So many successes, one after the other; how long each took.  No room may fail, unless the
    caller wants to know why they did, on decode's side: `failed`."""
    seconds: list[float] = []
    while len(seconds) < count:
        trip = route.open()
        run((route, *others), partial(all_over, [trip]), 20, f"room {trip.room} to be over")
        if trip.succeeded:
            seconds.append(trip.took_s)
        else:
            why = (trip.room, trip.sender.failure(), trip.receiver.failure())
            assert failed is not None, why
        finish([route], 15, f"room {trip.room} to be quiet")
        if failed is not None and not trip.succeeded:
            failed.append(trip.reasons[1])
    return seconds


def recover(route: Route, deadline_s: float, *, others: Sequence[Route] = ()) -> None:
    """Open rooms, one after the other, until one succeeds: the path is back."""
    trip = route.open()
    next_s = 0.0

    def one_succeeded() -> bool:
        nonlocal trip, next_s
        if trip.over and not trip.succeeded and time.monotonic() > next_s:
            next_s = time.monotonic() + 0.1
            route.settle()
            trip = route.open()
        return trip.succeeded

    run((route, *others), one_succeeded, deadline_s, "a room to succeed after the fault")
    finish([route], 30, "the rooms of the recovery to be quiet")


def count_reasons(trips: Iterable[Trip]) -> Counter[tuple[str, str]]:
    return Counter(trip.reasons for trip in trips)
