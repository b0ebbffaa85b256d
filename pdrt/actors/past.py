"""What prefill's listener remembers: rooms that are over here, and what decodes asked for before
the room was opened here.

All of it is bounded, and lost with the listener.  Losing it may cost a room its time, and never
makes an answer wrong.  Decodes' own handles are the keys where there is one: a router may use a
room id again, and late news of its first use must not touch the second.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

from pdrt.clock import SECOND_NS
from pdrt.protocol.messages import Abort, AbortTaken, Destination, Expect, Landed
from pdrt.protocol.states import Reason
from pdrt.shm_status import Handle

MEMORY_MAX = 65536  # of each kind
EARLY_NS = 5 * SECOND_NS  # a decode asks after its destination once a second

Key = tuple[int, int]  # room, rank
Theirs = tuple[str, int, int]  # decode's handle: instance, slot, generation
NOBODY: Theirs = ("", -1, 0)

K = TypeVar("K")
V = TypeVar("V")


def theirs_of(message: Destination | Expect | Abort | AbortTaken) -> Theirs:
    return message.instance, message.slot, message.generation


@dataclass(slots=True)
class Room:
    """What is known of one rank of a room of our table."""

    handle: Handle
    rank: int
    theirs: Theirs = NOBODY  # of the decode that waits for it
    destination: Destination | None = None
    matched: bool = False  # by us: so the worker has no other destination for it
    failed: bool = False
    fenced: bool = False  # nothing can land at decode any more
    reason: Reason = Reason.NONE
    told_quiet: bool = False
    by_shm: bool = False  # then our worker's death ends its writes, too
    vanished_ns: int = 0  # since when its slot is cleared and its end not known
    abort_due_ns: int = 0  # 0: no abort waits for its acknowledgement
    abort_until_ns: int = 0

    @property
    def key(self) -> Key:
        return self.handle.room, self.rank


class Past:
    def __init__(self, give_up_ns: int) -> None:
        """A decode's abort of a room that we do not have yet counts for `give_up_ns`."""
        self._give_up_ns = give_up_ns
        self.over: OrderedDict[Theirs, Landed | Abort] = OrderedDict()
        self.unclaimed: OrderedDict[Key, Room] = OrderedDict()  # failed before a decode asked
        self.early: OrderedDict[Key, Destination] = OrderedDict()  # came before our half
        self._early_until_ns: dict[Key, int] = {}
        self.asked: OrderedDict[Key, Expect] = OrderedDict()  # likewise
        self._given_up: OrderedDict[Key, tuple[int, Theirs]] = OrderedDict()  # until when, who

    @property
    def full(self) -> bool:
        """No place for another early destination: those are never dropped in silence."""
        return len(self.early) >= MEMORY_MAX

    def keep_early(self, key: Key, destination: Destination, now_ns: int) -> None:
        """Until our half is opened, or nobody asks after it any more."""
        self.early[key] = destination
        self._early_until_ns[key] = now_ns + EARLY_NS

    def drop_unasked(self, now_ns: int) -> None:
        for key, until_ns in list(self._early_until_ns.items()):
            if key not in self.early or now_ns >= until_ns:
                self.early.pop(key, None)
                del self._early_until_ns[key]

    @staticmethod
    def remember(memory: OrderedDict[K, V], key: K, value: V) -> None:
        memory[key] = value
        if len(memory) > MEMORY_MAX:
            memory.popitem(last=False)

    def fail(self, room: Room) -> None:
        """What a decode hears of a failed room from now on."""
        instance, slot, generation = room.theirs
        abort = Abort(*room.key, slot, generation, instance, room.reason, room.fenced)
        self.remember(self.over, room.theirs, abort)

    def succeed(self, room: Room, moved_bytes: int) -> None:
        _, slot, generation = room.theirs
        landed = Landed(*room.key, slot, generation, moved_bytes, 0)
        self.remember(self.over, room.theirs, landed)

    def give_up(self, key: Key, abort: Abort, now_ns: int, *, opened: bool) -> None:
        """A decode gave up a room of which nothing was ever posted.  Unless the id is `opened` by
        another, our half is still to come, and will be of no use."""
        theirs = theirs_of(abort)
        reason = Reason.PEER_ABORTED
        over = Abort(*key, abort.slot, abort.generation, abort.instance, reason, quiet=True)
        self.remember(self.over, theirs, over)
        if not opened:
            self._given_up.pop(key, None)
            self.remember(self._given_up, key, (now_ns + self._give_up_ns, theirs))

    def take_given_up(self, key: Key, now_ns: int) -> Theirs | None:
        """Who gave up the room that has just been opened here."""
        until_ns, theirs = self._given_up.pop(key, (0, NOBODY))
        return theirs if now_ns < until_ns else None

    def forget_questions(self, key: Key, theirs: Theirs) -> None:
        for memory in (self.early, self.asked):
            message = memory.get(key)
            if message is not None and theirs_of(message) == theirs:
                del memory[key]

    def forget_decode(self, instance: str) -> None:
        for memory in (self.early, self.asked):
            for key in [k for k, m in memory.items() if m.instance == instance]:
                del memory[key]
