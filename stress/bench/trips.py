"""Rooms between two engines that both live in this process, driven step by step.

Times are those in the slots: whoever moves a room writes when it did, on the clock that all
processes of a host share, so looking rarely costs no accuracy.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from pdrt.engine.manager import KVManager
from pdrt.engine.receiver import KVReceiver
from pdrt.engine.room import KVRoom
from pdrt.engine.sender import KVSender
from pdrt.memory.aux import AuxRow
from pdrt.protocol.states import TERMINAL, KVPoll, Role
from pdrt.shm_status import Handle, StatusTable, Word
from stress.bench.trees import Shape, Tree

ROOMS = itertools.count(1)
PAUSE_S = 0.0005  # a lost wake-up costs no more than this
ROOM_S = 30.0


class Phase(IntEnum):
    """How far a room goes before something happens to it; by prefill's slot."""

    OPENED = 0  # Bootstrapping
    WAITING = 1  # the destination is known, nothing was sent
    MOVING = 2  # all but the last chunk were sent
    WHOLE = 3


@dataclass(eq=False)
class Side:
    """One half of a room."""

    manager: KVManager
    room: KVRoom
    aux: int

    @property
    def handle(self) -> Handle:
        return self.room._handles[0]

    def word(self) -> Word:
        """The slot as it is; ends nothing."""
        return word_of(self.manager.table, self.handle)

    def failed_ns(self) -> int:
        """When the room Failed; 0 if it has not."""
        if self.word().state is not KVPoll.Failed:
            return 0
        return self.manager.table.entered_ns(self.handle.slot)[KVPoll.Failed]

    def clear(self) -> bool:
        """Free slot and aux row if the room is over and quiet."""
        if self.room.poll() not in TERMINAL or not self.room.quiet():
            return False
        self.room.clear()
        self.manager.aux.release(self.aux)
        return True


def word_of(table: StatusTable, handle: Handle) -> Word:
    word = table.read(handle.slot, handle.generation)
    assert word is not None, f"{handle} was cleared by somebody else"
    return word


def half(manager: KVManager, room: int, peer: str, shape: Shape) -> Side:
    """This engine's half of a room; the other one is played elsewhere, or by nobody."""
    aux = manager.aux.reserve()
    if manager.role is Role.DECODE:
        receiver = manager.receiver(room, peer)
        receiver.init()
        return Side(manager, receiver, aux)
    sender = manager.sender(room)
    sender.init(shape.pages, aux)
    manager.aux.write(aux, AuxRow(room, 1))
    return Side(manager, sender, aux)


def advance_half(side: Side) -> bool:
    """Towards a room whose destination is known and of which nothing was sent; is it there?"""
    state = side.room.poll()
    if isinstance(side.room, KVSender):
        return state is KVPoll.WaitingForInput
    if isinstance(side.room, KVReceiver) and state is KVPoll.WaitingForInput:
        side.room.send_metadata(np.zeros(1, dtype=np.int32), side.aux)
    return side.word().state is KVPoll.Transferring


@dataclass(eq=False)
class Trip:
    prefill: Side
    decode: Side
    shape: Shape
    first_page: int
    begun_s: float = field(default_factory=time.monotonic)
    told: bool = False
    sent: int = 0  # chunks

    def advance(self, until: Phase) -> None:
        """Do what the engines have to do next, up to a phase."""
        pages = np.arange(self.first_page, self.first_page + self.shape.pages, dtype=np.int32)
        receiver, sender = self.decode.room, self.prefill.room
        assert isinstance(receiver, KVReceiver)
        assert isinstance(sender, KVSender)
        if until >= Phase.WAITING and not self.told:
            if receiver.poll() is KVPoll.WaitingForInput:
                receiver.send_metadata(pages, self.decode.aux)
                self.told = True
        chunks = self.shape.chunks - (until < Phase.WHOLE) if until >= Phase.MOVING else 0
        while self.sent < chunks and sender.poll() is not KVPoll.Failed:
            part = np.array_split(pages, self.shape.chunks)[self.sent]
            self.sent += 1
            sender.send(part, last=self.sent == self.shape.chunks)

    def reached(self, phase: Phase) -> bool:
        if phase is Phase.WHOLE:
            return self.over
        wanted = (KVPoll.Bootstrapping, KVPoll.WaitingForInput, KVPoll.Transferring)[phase]
        return self.prefill.word().state is wanted

    @property
    def over(self) -> bool:
        return self.prefill.room.poll() in TERMINAL and self.decode.room.poll() in TERMINAL

    @property
    def succeeded(self) -> bool:
        return self.over and self.decode.room.poll() is KVPoll.Success

    def sides(self) -> tuple[Side, Side]:
        return self.prefill, self.decode


class Route:
    """From one tree's engine to another's, both in this process."""

    def __init__(self, prefill: Tree, decode: Tree, shape: Shape) -> None:
        self.prefill, self.decode = prefill, decode
        self.shape = shape
        self._managers = prefill.manager, decode.manager
        self._page = itertools.cycle(range(0, shape.pages_count - shape.pages + 1, shape.pages))

    def open(self) -> Trip:
        """A room with both halves open."""
        room, peer = next(ROOMS), self.prefill.control
        out, into = (half(manager, room, peer, self.shape) for manager in self._managers)
        trip = Trip(out, into, self.shape, next(self._page))
        self._managers[0].tick()
        return trip

    def to(self, phase: Phase, limit_s: float = ROOM_S) -> Trip:
        """A new room, brought to a phase.  Raises TimeoutError."""
        trip = self.open()

        def there() -> bool:
            trip.advance(phase)
            return trip.reached(phase)

        self.wait(there, limit_s, f"a room to be {phase.name}")
        return trip

    def whole(self, limit_s: float = ROOM_S) -> Trip:
        """A new room that succeeded.  Raises TimeoutError."""
        trip = self.to(Phase.WHOLE, limit_s)
        if not trip.succeeded:
            error = trip.decode.room.failure() or trip.prefill.room.failure()
            raise RuntimeError(f"a room failed: {error}")
        self.clear(trip)
        return trip

    def first_success(self, limit_s: float = ROOM_S) -> tuple[int, int]:
        """Try rooms until one succeeds: when it did, and how many failed before.  A room that is
        told to a process nobody knows to be dead fails with it."""
        failed = 0
        give_up = time.monotonic() + limit_s
        while time.monotonic() < give_up:
            trip = self.to(Phase.WHOLE, limit_s)
            if trip.succeeded:
                table, handle = trip.decode.manager.table, trip.decode.handle
                entered_ns = table.entered_ns(handle.slot)[KVPoll.Success]
                self.clear(trip)
                return entered_ns, failed
            failed += 1
            self.clear(trip)
        raise TimeoutError(f"no room succeeded within {limit_s:g} s")

    def clear(self, *trips: Trip) -> None:
        """Wait until both halves are over and quiet, and free them."""
        self.clear_sides(*(side for trip in trips for side in trip.sides()))

    def clear_sides(self, *sides: Side, limit_s: float = ROOM_S) -> None:
        left = list(sides)

        def empty() -> bool:
            left[:] = [side for side in left if not side.clear()]
            return not left

        self.wait(empty, limit_s, "rooms to be quiet")

    def wait(self, ready: Callable[[], bool], limit_s: float, what: str) -> None:
        """Until `ready`, with both engines ticking."""
        give_up = time.monotonic() + limit_s
        while not ready():
            if time.monotonic() > give_up:
                raise TimeoutError(f"waited {limit_s:g} s for {what}")
            self.pause()

    def pause(self) -> None:
        """A moment, or until a room may have changed."""
        fds = [manager.wake_fd for manager in self._managers]
        for fd in select.select(fds, [], [], PAUSE_S)[0]:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(fd)
        for manager in self._managers:
            manager.tick()
