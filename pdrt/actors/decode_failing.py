"""Failed rooms of decode: prefill has yet to know, or to say that they are quiet.

    fail -> Abort, again and again until AbortTaken -> and once a second until the room is quiet

What its listener has taken is lost with it, and its half of a room may still be to come.  So a new
one hears again what was told to its predecessor lately.

A prefill is believed that a room is quiet only in its present session: what its listener said
before a restart may have been overtaken by its successor, which was sent the destination again.
And only of rooms that it met itself: another instance at its address may hold the other half of a
request by now, so it is told of the end, and knows nothing of the bytes of its predecessor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np

from pdrt import failpoints
from pdrt.actors.base import Beating
from pdrt.actors.prefills import Prefill, Prefills
from pdrt.clock import MILLISECOND_NS, SECOND_NS, to_ns
from pdrt.config import Timeouts
from pdrt.mail.mailbox import Address, Postman
from pdrt.protocol.counters import Counter
from pdrt.protocol.messages import Abort, AbortTaken, Declined, Destination, Landed
from pdrt.protocol.peers import instance_digest
from pdrt.protocol.states import KVPoll, Reason, told_by_peer
from pdrt.shm_status import (
    GENERATION_SHIFT,
    OPENER,
    PATH,
    QUIET_BIT,
    ROOM,
    STATE_MASK,
    Handle,
    StatusTable,
    peer_of,
)

PAUSE_MAX_NS = 1000 * MILLISECOND_NS
UNANSWERED = (Reason.PEER_LOST, Reason.BOOTSTRAP_TIMEOUT)
FAILING_MAX = 65536  # rooms that are told again and again
UNKNOWN = "?"  # no session has this name
LOOKS_MAX = 4  # of the oldest, for one that need not be
AGAIN_MAX, AGAIN_NS = 1024, 5 * SECOND_NS  # ends that a new listener of prefill's hears again


@dataclass(slots=True)
class Room:
    """What is known of one rank of a room of our table."""

    handle: Handle
    rank: int
    peer: str  # prefill's host:port
    lead: tuple[int, int] = (-1, 0)  # slot and generation of rank 0
    whole: bool = False  # of all who were sent its destination we know
    destination: Destination | None = None
    session: str = ""  # the first that was sent the destination; "" if none was
    shared: bool = False  # others were sent it, too
    landed: Landed | None = None  # what a worker said, until its listener confirms it
    taken: bool = False  # prefill acknowledged the destination
    due_ns: int = 0  # of the next destination or expect
    pause_ns: int = 0
    failed: bool = False
    abort: Abort | None = None
    told: bool = False  # prefill knows that the room failed
    told_ns: int = 0  # since when, by us
    told_session: str = ""  # which of its listeners does
    until_ns: int = 0

    @property
    def first(self) -> str:
        """The session that was sent the destination first; "" if none was yet."""
        return self.session if self.whole else UNKNOWN

    @property
    def is_sole(self) -> bool:
        """Was one listener of prefill's at most ever sent the destination?  It gives that to one
        room, so a Landed is of all bytes that may come."""
        return self.whole and not self.shared


class Failing:
    def __init__(
        self,
        instance: str,
        table: StatusTable,
        mailbox: Postman,
        timeouts: Timeouts,
        prefills: Prefills,
        wake: Callable[[int], None],
        beating: Beating,
    ) -> None:
        self._instance = instance
        self._table = table
        self._mailbox = mailbox
        self._timeouts = timeouts
        self._prefills = prefills
        self._wake = wake
        self._beating = beating
        self._rooms: OrderedDict[Handle, Room] = OrderedDict()
        self._told: OrderedDict[Handle, Room] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rooms)

    def fail(self, room: Room, reason: Reason, now_ns: int, *, tell: bool) -> None:
        """A room has Failed.  The peer is told, unless it was the one who said so."""
        room.failed = True
        handle = room.handle
        if room.whole and not room.session:  # its destination has never left, and will not
            self.become_quiet(handle.slot, handle.generation)
        prefill = self._prefills.get(room.peer)
        room.told = not tell
        # A room that we know from its beginning, and that ends because nobody answers there, has
        # nobody to be told.  Otherwise our hello may just be under way: prefill's half is open.
        unheard = prefill is None or (room.whole and not prefill.instance)
        nobody = prefill is None or (unheard and reason in UNANSWERED)
        if nobody or (room.told and not self._is_unquiet(handle)):
            return
        room.abort = Abort(
            handle.room,
            room.rank,
            handle.slot,
            handle.generation,
            self._instance,
            reason,
            session=room.first,
        )
        room.until_ns = now_ns + to_ns(self._timeouts.quiet_s)
        self._rooms[handle] = room
        if len(self._rooms) > FAILING_MAX:
            self._forget_one()
        if tell:
            self._send(room, now_ns)
        else:
            room.due_ns = now_ns + PAUSE_MAX_NS

    def decline(self, declined: Declined, now_ns: int) -> None:
        """Our engine refused a request before it had a slot: prefill is told, whether its half is
        there already or still to come."""
        if len(self._rooms) >= FAILING_MAX:  # prefill's own deadline will do
            self._table.count(Counter.FORGOTTEN)
            return
        self._prefills.dial(declined.peer, now_ns)
        handle = Handle(declined.room, -1, declined.generation)
        room = Room(handle, declined.rank, declined.peer)
        self.fail(room, told_by_peer(declined.reason), now_ns, tell=True)

    def _forget_one(self) -> None:
        """The oldest, if there is one, of which nothing can land any more: its prefill has its own
        deadline.  Not all are looked at: that many may be unquiet, and another one failing now."""
        oldest = list(islice(self._rooms, LOOKS_MAX))
        quiet = (handle for handle in oldest if not self._is_unquiet(handle))
        del self._rooms[next(quiet, oldest[0])]
        self._table.count(Counter.FORGOTTEN)

    def _send(self, room: Room, now_ns: int) -> None:
        assert room.abort is not None
        failpoints.hit("decode.fail.before_abort")
        again = room.told or now_ns >= room.until_ns  # then only quiet is missing
        room.due_ns = now_ns + (PAUSE_MAX_NS if again else to_ns(self._timeouts.resend_s))
        prefill = self._prefills.get(room.peer)
        if prefill is not None:
            self._table.count(Counter.ABORTS_SENT)
            self._mailbox.post(prefill.link, room.abort)

    def is_orphan(self, handle: Handle, prefill: Prefill) -> bool:
        """Has another instance the address of the room's prefill by now?  Perhaps it was there
        before this listener: so the table remembers whom a room has met."""
        met = peer_of(self._table.path(handle.slot, handle.generation))
        return bool(met and prefill.instance) and met != instance_digest(prefill.instance)

    def taken(self, sender: Address, taken: AbortTaken, now_ns: int) -> None:
        self.hear(sender, taken)
        room = self._rooms.get(Handle(taken.room, taken.slot, taken.generation))
        if room is not None:
            if not room.told:
                prefill = self._prefills.get(room.peer)
                room.told_session = prefill.session if prefill is not None else ""
                room.told_ns = room.told_ns or now_ns
                self._told.pop(room.handle, None)
                self._told[room.handle] = room
                if len(self._told) > AGAIN_MAX:
                    self._told.popitem(last=False)
            room.told = True
            room.due_ns = now_ns + PAUSE_MAX_NS  # and ask again, should the quiet be lost
            self._drop_if_over(room, now_ns)

    def hear(self, sender: Address, said: Abort | AbortTaken) -> None:
        """Prefill may say that a room is quiet."""
        prefill = self._prefills.by_link(sender)
        if not said.quiet or prefill is None or said.session != prefill.session:
            return
        if not self.is_orphan(Handle(said.room, said.slot, said.generation), prefill):
            self.become_quiet(said.slot, said.generation)

    def meet(self, prefill: Prefill, rooms: list[Room], now_ns: int) -> list[Room]:
        """Prefill has told us its session.  Returns those of `rooms` that met another instance."""
        for room in self._beating([*rooms, *self._rooms.values()]):
            if room.peer == prefill.peer and self.inherit(room, prefill) and room.abort is not None:
                # It may have been told before, and could not know that nothing of it can land.
                room.abort = msgspec.structs.replace(room.abort, session=room.first)
                self._send(room, now_ns)
        return [room for room in self._beating(rooms) if self.is_orphan(room.handle, prefill)]

    def inherit(self, room: Room, prefill: Prefill) -> bool:
        """A listener before us may have sent its destination, but to none of prefill's that was
        before the present one, if that is older than the room: we know that now."""
        slot, generation = room.handle[1:]
        if room.whole or not prefill.session or slot < 0:
            return False
        opened_ns = self._table.entered_ns(slot)[KVPoll.Bootstrapping]
        if prefill.began_ns >= opened_ns or self._table.state(slot, generation) is None:
            return False
        room.shared |= room.session not in ("", prefill.session)
        room.whole, room.session = True, prefill.session
        return True

    def find(self, handle: Handle) -> Room | None:
        return self._rooms.get(handle)

    def become_quiet(self, slot: int, generation: int) -> None:
        failpoints.hit("decode.quiet.before_mark")
        if self._table.set_quiet(slot, generation):
            self._wake(self._table.opener_row(slot))

    def _is_unquiet(self, handle: Handle) -> bool:
        word = self._table.read(handle.slot, handle.generation)
        return word is not None and not word.quiet

    def _drop_if_over(self, room: Room, now_ns: int) -> bool:
        """Nothing is left to say to prefill of this room, or to hear."""
        over = not self._is_unquiet(room.handle) and (room.told or now_ns >= room.until_ns)
        if over:
            del self._rooms[room.handle]
        return over

    def adopt(self, prefill: Prefill, now_ns: int, in_use: Container[int]) -> None:
        """Prefill's listener may be new: tell it what its predecessor had taken, but of ids that
        mean another room by now.  Or we are: rooms that failed before us, only this prefill can
        say that they are quiet, and it may not even know that they failed."""
        for room in [r for r in self._told.values() if r.peer == prefill.peer]:
            if room.told_session != prefill.session and room.handle.room not in in_use:
                self._tell_again(room, now_ns)
        slots = self._table.live_slots()
        rows = self._table.rows(slots)
        failed = rows[:, 0] & np.uint64(STATE_MASK | QUIET_BIT) == KVPoll.Failed
        paths = rows[:, PATH // 8] & np.uint64(0xFFFF_FFFF)
        theirs = paths == instance_digest(prefill.instance)
        found = failed & theirs
        cells = (rows[found, at // 8].tolist() for at in (0, ROOM, OPENER))
        each = zip(slots[found].tolist(), *cells, strict=True)
        for slot, cell, room_id, opener in self._beating(each):
            handle = Handle(room_id, slot, cell >> GENERATION_SHIFT)
            word = self._table.read(slot, handle.generation)
            if handle not in self._rooms and word is not None:
                room = Room(handle, opener >> 40, prefill.peer)
                self.inherit(room, prefill)
                self.fail(room, word.reason, now_ns, tell=True)

    def _tell_again(self, room: Room, now_ns: int) -> None:
        del self._told[room.handle]
        if now_ns - room.told_ns < AGAIN_NS:
            room.told, room.until_ns = False, now_ns + to_ns(self._timeouts.quiet_s)
            self._rooms[room.handle] = room
            self._send(room, now_ns)

    def disown(self, sender: Address, slot: int, generation: int) -> None:
        """Prefill waits for a room that failed here, and the abort was lost: say it again."""
        word = self._table.read(slot, generation)
        if word is None or word.state is not KVPoll.Failed:
            return
        row = self._table.rows(np.array([slot]))[0]
        room, rank = int(row[ROOM // 8]), int(row[OPENER // 8]) >> 40
        self._table.count(Counter.ABORTS_SENT)
        self._mailbox.post(sender, Abort(room, rank, slot, generation, self._instance, word.reason))

    def forget(self, peer: str) -> None:
        """Another instance is there now: it knows nothing of these rooms."""
        for rooms in (self._rooms, self._told):
            each = self._beating(rooms.items())
            for handle in self._beating([handle for handle, room in each if room.peer == peer]):
                del rooms[handle]

    def repeat(self, now_ns: int) -> None:
        for room in self._beating(list(self._rooms.values())):
            if not self._drop_if_over(room, now_ns) and now_ns >= room.due_ns:
                self._table.count(Counter.RESENDS)
                self._send(room, now_ns)
