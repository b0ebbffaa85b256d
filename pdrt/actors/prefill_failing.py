"""Failed rooms of prefill: the decode has yet to know, or to hear that they are quiet.

    fail -> unclaimed, until a decode asks -> claim -> told, again and again until it says so
                                                    -> told once more when the room is fenced

Says "quiet" only of what cannot land any more: a room of which nothing was posted, one that our
worker has fenced, or one over shm whose writer is gone.  What it says carries our session, since a
decode must not believe a predecessor of ours: we may have given the destination to another room.
"""

from __future__ import annotations

from collections import OrderedDict

from pdrt import failpoints
from pdrt.actors.base import Beating
from pdrt.actors.decodes import Decodes, worker_link
from pdrt.actors.past import NOBODY, Past, Room, Theirs, theirs_of
from pdrt.clock import to_ns
from pdrt.config import Timeouts
from pdrt.mail.mailbox import Address, Postman
from pdrt.protocol.counters import Counter
from pdrt.protocol.messages import AbortTaken, Declined, Destination, Ended, Expect, Fenced
from pdrt.protocol.states import Reason, told_by_peer
from pdrt.shm_status import Handle, StatusTable

FAILING_MAX = 65536  # rooms that are told again and again


class Failing:
    def __init__(
        self,
        table: StatusTable,
        mailbox: Postman,
        timeouts: Timeouts,
        decodes: Decodes,
        past: Past,
        beating: Beating,
    ) -> None:
        self._table = table
        self._mailbox = mailbox
        self._timeouts = timeouts
        self._decodes = decodes
        self._past = past
        self._beating = beating
        self._rooms: OrderedDict[Handle, Room] = OrderedDict()
        self._by_theirs: dict[Theirs, Room] = {}
        self._unfenced: dict[int, Room] = {}  # by slot: whom a Fenced is for, claimed or not

    def __len__(self) -> int:
        return len(self._rooms)

    def fail(self, room: Room, reason: Reason, now_ns: int, *, tell: bool = True) -> None:
        """A room has Failed.  The peer is told unless it was the one who said so."""
        failpoints.hit("prefill.fail.before_tell")
        room.failed, room.reason = True, reason
        handle = room.handle
        room.fenced |= self._is_quiet(room)
        if not room.fenced:
            self._unfenced[handle.slot] = room
            ended = Ended(handle.slot, handle.generation, failed=True, reason=reason)
            self._mailbox.post(worker_link(room.rank), ended)
        if room.theirs == NOBODY:  # no decode has asked for it yet; one will
            self._past.keep_unclaimed(room, now_ns)
        else:
            self.claim(room, now_ns, tell=tell)

    def end_unseen(self, ended: Ended, now_ns: int) -> None:
        """A room was opened and failed, and we never saw it open."""
        handle = Handle(ended.room, ended.slot, ended.generation)
        room = Room(handle, ended.rank, fenced=ended.untouched)
        self._fail_unseen(room, Reason(ended.reason), now_ns)

    def _fail_unseen(self, room: Room, reason: Reason, now_ns: int) -> None:
        """The decode that waits for it, or will, is told."""
        asked, early = self._past.take_questions(room.key)
        if (question := early or asked) is not None:
            room.theirs, room.doubted = theirs_of(question), self._past.doubts(question, room)
            self._past.taken.spend(*room.theirs)  # no later room of that id is given it either
        self.fail(room, reason, now_ns)

    def decline(self, declined: Declined, now_ns: int) -> None:
        """An engine refused a request before it had a slot.  Of that room no destination was ever
        given to a worker, so nothing of it can land."""
        room = Room(Handle(declined.room, -1, declined.generation), declined.rank, fenced=True)
        self._fail_unseen(room, told_by_peer(declined.reason), now_ns)

    def answer(self, sender: Address, asked: Destination | Expect, now_ns: int) -> bool:
        """Answer for a room that is over here.  False if nothing is remembered of it."""
        theirs = theirs_of(asked)
        if theirs in self._past.vanished:
            return True  # in a moment we shall know
        if theirs not in self._past.over:
            room = self._past.take_unclaimed(asked, now_ns)
            if room is None:
                return False
            room.theirs, room.doubted = theirs, self._past.doubts(asked, room)
            self.claim(room, now_ns, tell=True)
        self._mailbox.post(sender, self._past.over[theirs])
        return True

    def claim(self, room: Room, now_ns: int, *, tell: bool) -> None:
        """A failed room and its decode have met."""
        self._past.fail(room)
        room.abort_until_ns = now_ns + to_ns(self._timeouts.quiet_s)
        self._rooms[room.handle] = self._by_theirs[room.theirs] = room
        if len(self._rooms) > FAILING_MAX:  # its decode asks, and is answered all the same
            self._drop(next(iter(self._rooms.values())))
            self._table.count(Counter.FORGOTTEN)
        if tell:
            self._tell(room, now_ns)
        elif room.fenced:
            room.told_quiet = True
            self._drop(room)

    def fenced(self, fenced: Fenced, now_ns: int) -> None:
        room = self._unfenced.get(fenced.slot)
        if room is not None and room.handle.generation == fenced.generation:
            self._become_quiet(room, now_ns)

    def _become_quiet(self, room: Room, now_ns: int) -> None:
        failpoints.hit("prefill.fenced.before_tell")
        room.fenced = True
        self._unfenced.pop(room.handle.slot, None)
        if room.theirs != NOBODY and not room.told_quiet:
            self._tell(room, now_ns)

    def _is_quiet(self, room: Room) -> bool:
        """Can nothing of a failed room land at decode any more?  The table's quiet is about our
        pages; it also follows our worker's death, which is a fence for decode's only with shm."""
        handle = room.handle
        word = self._table.read(handle.slot, handle.generation)
        if word is None:  # cleared, so it was quiet
            return room.by_shm
        return word.untouched or (room.by_shm and word.quiet)

    def _is_unquiet(self, room: Room) -> bool:
        """Is a fence for it still to come?"""
        word = self._table.read(room.handle.slot, room.handle.generation)
        return word is not None and not word.quiet

    def _tell(self, room: Room, now_ns: int) -> None:
        """Tell decode that the room failed; repeated until it says that it knows."""
        self._past.fail(room)
        decode = self._decodes.get(room.theirs[0])
        if decode is None:  # it will ask when it is back; then we should know of the fence
            room.abort_due_ns = 0
            if room.fenced:
                self._drop(room)
            return
        room.told_quiet = room.is_quiet
        room.abort_due_ns = now_ns + to_ns(self._timeouts.resend_s)
        self._table.count(Counter.ABORTS_SENT)
        self._mailbox.post(decode.address, self._past.over[room.theirs])

    def taken(self, taken: AbortTaken) -> None:
        """Decode knows; perhaps, if that was on its way for long, only what we said before the
        fence.  Then it has yet to hear of that."""
        room = self._by_theirs.get(theirs_of(taken))
        if room is not None and (taken.quiet or not room.told_quiet):
            room.abort_due_ns = 0
            if room.told_quiet:
                self._drop(room)

    def repeat(self, now_ns: int) -> None:
        for room in self._beating(list(self._rooms.values())):
            if not room.fenced and self._is_quiet(room):
                self._become_quiet(room, now_ns)
            elif now_ns >= room.abort_until_ns and (room.fenced or not self._is_unquiet(room)):
                self._drop(room)
            elif room.abort_due_ns and now_ns >= room.abort_due_ns:
                self._table.count(Counter.RESENDS)
                self._tell(room, now_ns)

    def _drop(self, room: Room) -> None:
        self._rooms.pop(room.handle, None)
        if self._by_theirs.get(room.theirs) is room:
            del self._by_theirs[room.theirs]
