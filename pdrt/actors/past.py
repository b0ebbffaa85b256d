"""What prefill's listener remembers: rooms that are over here, and what decodes asked for before
the room was opened here.

All of it is bounded, and lost with the listener.  Losing it may cost a room its time, and never
makes an answer wrong.  Decodes' own handles are the keys where there is one: a router may use a
room id again, and late news of its first use must not touch the second.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from pdrt import failpoints
from pdrt.actors.base import Beating
from pdrt.actors.taken import Taken
from pdrt.clock import SECOND_NS
from pdrt.protocol.messages import Abort, AbortTaken, Destination, Expect, Landed
from pdrt.protocol.peers import instance_digest
from pdrt.protocol.states import Reason, told_by_peer
from pdrt.shm_status import Handle

MEMORY_MAX = 65536  # of each kind
EARLY_BYTES_MAX = 256 << 20  # of page numbers in destinations that wait for our half
VANISHED_NS = SECOND_NS  # how long the end of a cleared room may be under way to us
MISSED_MAX, MISSED_OF_SLOT = 8192, 16  # rooms whose end may be under way, in all and of a slot
EARLY_NS = 5 * SECOND_NS  # a decode asks after its destination once a second

Key = tuple[int, int]  # room, rank
Theirs = tuple[str, int, int]  # decode's handle: instance, slot, generation
NOBODY: Theirs = ("", -1, 0)

K = TypeVar("K")
V = TypeVar("V")


def theirs_of(message: Destination | Expect | Abort | AbortTaken) -> Theirs:
    return message.instance, message.slot, message.generation


def first_of(message: Destination | Expect | Abort) -> str:
    """The session that was sent the destination first."""
    return message.first if isinstance(message, Destination) else message.session


class GivenUp(NamedTuple):
    """A decode's end of a room that is still to be opened here."""

    until_ns: int
    theirs: Theirs
    reason: Reason
    quiet: bool  # it was told so


@dataclass(slots=True)
class Room:
    """What is known of one rank of a room of our table."""

    handle: Handle
    rank: int
    use: int = 0  # of the room id, see Landed
    seen_ns: int = 0  # when we took note of it
    decode: int = 0  # digest of the instance that it was given to, as its slot says
    theirs: Theirs = NOBODY  # of the decode that waits for it
    claimed: bool = False  # a decode has asked for it
    destination: Destination | None = None
    matched: bool = False  # by us: so the worker has no other destination for it
    given: bool = False  # its destination to our worker, perhaps by a predecessor
    failed: bool = False
    fenced: bool = False  # nothing can land at decode any more
    doubted: bool = False  # of ours, that is: others were sent its destination, see `doubts`
    reason: Reason = Reason.NONE
    told_quiet: bool = False
    by_shm: bool = False  # then our worker's death ends its writes, too
    vanished_ns: int = 0  # since when its slot is cleared and its end not known
    deliver_ns: int = 0  # when the worker hears of the destination again
    unclaimed_until_ns: int = 0  # how long a decode may ask for it that never has
    abort_due_ns: int = 0  # 0: no abort waits for its acknowledgement
    abort_until_ns: int = 0

    @property
    def key(self) -> Key:
        return self.handle.room, self.rank

    def is_for(self, instance: str) -> bool:
        """Can it be that decode's?  Another may have the same id, and a predecessor of ours may
        have given the room to one of them."""
        return not self.decode or self.decode == instance_digest(instance)

    @property
    def is_quiet(self) -> bool:
        """May decode be told that nothing can land?"""
        return self.fenced and (self.destination is not None or not self.doubted)


class Past:
    def __init__(
        self, session: str, give_up_ns: int, *, forgot: Callable[[], object] = lambda: None
    ) -> None:
        """`forgot` is called for everything that is forgotten for want of a place.

        The end of a room that the other side does not have yet counts for `give_up_ns`,
        whichever side it ended on: after that, its id means another room."""
        self._session = session
        self._give_up_ns = give_up_ns
        self._forgot = forgot
        self.vanished = Vanished()
        self.taken = Taken(forgot)  # what was given to a room of ours, and so perhaps to a worker
        self.over: OrderedDict[Theirs, Landed | Abort] = OrderedDict()
        self.unclaimed: OrderedDict[Key, Room] = OrderedDict()  # failed before a decode asked
        self.early: OrderedDict[Key, Destination] = OrderedDict()  # came before our half
        self._early_until_ns: dict[Key, int] = {}
        self._early_bytes = 0  # at most so many, since `drop_unasked` counted them last
        self.asked: OrderedDict[Key, Expect] = OrderedDict()  # likewise
        self._given_up: OrderedDict[Key, GivenUp] = OrderedDict()

    @property
    def _full(self) -> bool:
        """No place for another early destination: those are never dropped in silence."""
        return len(self.early) >= MEMORY_MAX or self._early_bytes >= EARLY_BYTES_MAX

    def keep_early(self, key: Key, destination: Destination, now_ns: int) -> None:
        """Until our half is opened, or nobody asks after it any more."""
        if key not in self.early:
            self._early_bytes += len(destination.pages)
        self.early[key] = destination
        self._early_until_ns[key] = now_ns + EARLY_NS

    def refuses(self, room: Room | None, destination: Destination) -> bool:
        """Does another decode, or another room of this one, have that id, or is there no place for
        it?  What we keep has its place: refused when it is sent again, it would still be given to
        our half."""
        if room is not None:
            taken = room.destination is not None and room.theirs != theirs_of(destination)
            return taken or not room.is_for(destination.instance)
        early = self.early.get((destination.room, destination.rank))
        return self._full if early is None else early.instance != destination.instance

    def drop_unasked(self, now_ns: int, beating: Beating) -> None:
        for key, until_ns in beating(list(self._early_until_ns.items())):
            if key not in self.early or now_ns >= until_ns:
                self.early.pop(key, None)
                del self._early_until_ns[key]
        self._early_bytes = sum(len(early.pages) for early in beating(self.early.values()))

    def remember(self, memory: OrderedDict[K, V], key: K, value: V) -> None:
        memory[key] = value
        if len(memory) > MEMORY_MAX:
            memory.popitem(last=False)
            self._forgot()

    def abort_of(self, key: Key, theirs: Theirs, reason: Reason, *, quiet: bool) -> Abort:
        instance, slot, generation = theirs
        return Abort(*key, slot, generation, instance, reason, quiet, self._session)

    def taken_of(self, key: Key, theirs: Theirs) -> AbortTaken:
        """What a decode hears of its abort."""
        failpoints.hit("prefill.abort.before_answer")
        instance, slot, generation = theirs
        over = self.over.get(theirs)
        quiet = over.quiet if isinstance(over, Abort) else over is not None
        return AbortTaken(*key, slot, generation, instance, quiet, self._session)

    def lost(self, key: Key, theirs: Theirs) -> Abort:
        """What a decode hears of a room whose end nobody knows any more."""
        return self.abort_of(key, theirs, Reason.PEER_LOST, quiet=False)

    def lose(self, room: Room) -> None:
        """Nobody has said how it ended.  Of one that no worker knows nothing was posted."""
        if room.theirs != NOBODY:
            room.reason = Reason.PEER_LOST
            room.fenced |= not room.given
            self.fail(room)

    def _end(self, key: Key, theirs: Theirs, reason: Reason, *, quiet: bool) -> Abort:
        """What a decode hears of a failed room from now on.  If that is that nothing of it can
        land, then no room of ours may get its destination any more: a copy of that may come late,
        when we have forgotten all this."""
        if quiet:
            self.taken.spend(*theirs)
        abort = self.abort_of(key, theirs, reason, quiet=quiet)
        self.remember(self.over, theirs, abort)
        return abort

    def refuse(self, destination: Destination, reason: Reason) -> Abort:
        """A destination that no room of ours has.  One may have had it, and be forgotten."""
        key, theirs = (destination.room, destination.rank), theirs_of(destination)
        return self._end(key, theirs, reason, quiet=self.never_had(theirs, destination.first))

    def fail(self, room: Room) -> None:
        self._end(room.key, room.theirs, room.reason, quiet=room.is_quiet)

    def succeed(self, room: Room, moved_bytes: int) -> None:
        self.land(room.key, room.theirs, room.use, moved_bytes)

    def land(self, key: Key, theirs: Theirs, use: int, moved_bytes: int = 0) -> Landed:
        """What a decode hears from now on of a room that has landed."""
        instance, slot, generation = theirs
        landed = Landed(*key, slot, generation, moved_bytes, 0, instance, use, self._session)
        self.remember(self.over, theirs, landed)
        return landed

    def give_up(self, key: Key, abort: Abort, now_ns: int, *, opened: bool) -> None:
        """A decode gave up a room of which we know nothing.  Unless the id is `opened` by another,
        our half is still to come, and will be of no use.

        Nothing of it can land, we say, only if we were the first to be sent its destination, and
        never gave it to a room: how that one ended, we may have forgotten.  Of a destination that a
        predecessor of ours had first, we cannot know.  Then decode's own fence at the quiet bound
        settles it."""
        theirs = theirs_of(abort)
        quiet = self.never_had(theirs, abort.session)
        self._end(key, theirs, Reason.PEER_ABORTED, quiet=quiet)
        if not opened:
            self._given_up.pop(key, None)
            until_ns = now_ns + self._give_up_ns
            end = GivenUp(until_ns, theirs, told_by_peer(abort.reason), quiet)
            self.remember(self._given_up, key, end)

    def never_had(self, theirs: Theirs, first: str) -> bool:
        """Was no room of ours ever given that destination?  `first`: who was sent it first."""
        return first == self._session and not self.taken.had(*theirs)

    def doubts(self, asked: Destination | Expect | Abort, room: Room) -> bool:
        """Was its destination sent to a predecessor of ours first, which may have given it to
        another room?  Then nothing that becomes of this one says that no byte can land there;
        unless its slot says that it was given to that decode."""
        if room.decode and room.is_for(asked.instance):
            return False
        if isinstance(asked, Expect) and not asked.session:
            return False  # it has not been sent yet
        return first_of(asked) != self._session

    def settle(self, theirs: Theirs) -> Abort | None:
        """Nothing of a failed room can land, it turns out.  What its decode is to hear of that, if
        it has not."""
        over = self.over.get(theirs)
        if not isinstance(over, Abort) or over.quiet:
            return None
        return self._end((over.room, over.rank), theirs, Reason(over.reason), quiet=True)

    def take_given_up(self, key: Key, now_ns: int) -> GivenUp | None:
        """Who gave up the room that has just been opened here, and why."""
        end = self._given_up.pop(key, None)
        return end if end is not None and now_ns < end.until_ns else None

    def keep_unclaimed(self, room: Room, now_ns: int) -> None:
        """A room that failed before a decode asked for it; one will."""
        room.unclaimed_until_ns = now_ns + self._give_up_ns
        self.unclaimed.pop(room.key, None)
        self.remember(self.unclaimed, room.key, room)

    def take_unclaimed(self, asked: Destination | Expect | Abort, now_ns: int) -> Room | None:
        """Now one does."""
        key = asked.room, asked.rank
        room = self.unclaimed.get(key)
        if room is None or not room.is_for(asked.instance):
            return None
        del self.unclaimed[key]
        return room if now_ns < room.unclaimed_until_ns else None

    def forget_questions(self, key: Key, theirs: Theirs) -> None:
        for memory in (self.early, self.asked):
            message = memory.get(key)
            if message is not None and theirs_of(message) == theirs:
                del memory[key]

    def take_questions(self, key: Key) -> tuple[Expect | None, Destination | None]:
        """What a decode asked for before our half was there."""
        return self.asked.pop(key, None), self.early.pop(key, None)

    def forget_decodes(self, instances: Container[str], beating: Beating) -> None:
        for memory in (self.early, self.asked):
            theirs = [k for k in beating(memory) if memory[k].instance in instances]
            for key in beating(theirs):
                del memory[key]


class Seen:
    """Of which rooms of our slots we took note, so that the end of one that we never saw open is
    told from a late word on one whose end we know.

    A slot may be cleared and opened again before we hear of the room that was there: the table then
    shows us the later room first, and the end of the earlier one is still under way to us."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # slot -> latest generation
        self._missed: OrderedDict[tuple[int, int], None] = OrderedDict()  # older ones, not seen

    def note(self, slot: int, generation: int) -> None:
        last = self._last.get(slot, generation - 4)
        if generation <= last:
            self._missed.pop((slot, generation), None)
            return
        self._last[slot] = generation
        for missed in range(max(last + 2, generation - 2 * MISSED_OF_SLOT), generation, 2):
            self.miss(slot, missed)

    def miss(self, slot: int, generation: int) -> None:
        """Of its end we know nothing: who says how it was is to be heard."""
        self._missed[slot, generation] = None
        if len(self._missed) > MISSED_MAX:
            self._missed.popitem(last=False)

    def is_news(self, slot: int, generation: int) -> bool:
        """Did we never take note of that room?  From now on we have."""
        fresh = (slot, generation) in self._missed or generation > self._last.get(slot, -1)
        if fresh:
            self.note(slot, generation)
        return fresh


class Vanished:
    """Rooms whose slot was cleared before we read how they ended: quiet, then, and the message that
    says how is on its way, or lost with the process that sent it."""

    def __init__(self) -> None:
        self._rooms: dict[tuple[int, int], Room] = {}  # by slot and generation
        self._by_theirs: dict[Theirs, Room] = {}

    def __len__(self) -> int:
        return len(self._rooms)

    def __contains__(self, theirs: Theirs) -> bool:
        return theirs in self._by_theirs

    def add(self, room: Room, now_ns: int) -> None:
        room.vanished_ns = now_ns
        self._rooms[room.handle[1:]] = room
        if room.theirs != NOBODY:
            self._by_theirs[room.theirs] = room

    def get(self, slot: int, generation: int) -> Room | None:
        return self._rooms.get((slot, generation))

    def pop(self, slot: int, generation: int) -> Room | None:
        room = self._rooms.pop((slot, generation), None)
        if room is not None and self._by_theirs.get(room.theirs) is room:
            del self._by_theirs[room.theirs]
        return room

    def take_silent(self, now_ns: int) -> Iterator[Room]:
        """Those of which nobody has said how they ended, one by one."""
        due_ns = now_ns - VANISHED_NS
        for room in list(self._rooms.values()):
            if room.vanished_ns > due_ns:
                return  # as all that vanished after it
            self.pop(*room.handle[1:])
            yield room
