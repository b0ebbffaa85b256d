"""What predecessors of prefill's listener gave away their worker knows, unless that is dead, too.
So the worker is asked, and gives it to nobody from then on, should an order of theirs be still on
its way.  It is asked for two reasons:

* A worker says that a use of a room id has landed, and decode asks whether that may be believed,
  since it sent the destination to several incarnations of the listener.  It may if no other use had
  that destination, or will: of all bytes that came, or may come, that use is then the only one.
* A room has failed, and decode was not told that it is quiet, since a predecessor was sent its
  destination first.  It is, if the worker never had it, or is done with it, and was there before
  that predecessor was: then no dead one had it either.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from pdrt.actors.decodes import Decodes, worker_link
from pdrt.actors.past import Key, Past, Room, Theirs, first_of, theirs_of
from pdrt.mail.mailbox import Address, Postman
from pdrt.process_rows import INCARNATION_MASK
from pdrt.protocol.messages import Abort, Destination, Expect, Landed, Recall, Recalled


class Vouching:
    def __init__(
        self,
        session: str,
        ranks: int,
        mailbox: Postman,
        decodes: Decodes,
        past: Past,
        open_rooms: Mapping[Key, Room],
    ) -> None:
        self._session = session
        self._ranks = ranks
        self._mailbox = mailbox
        self._decodes = decodes
        self._past = past
        self._open_rooms = open_rooms
        self._asked: OrderedDict[Theirs, tuple[Address, Expect]] = OrderedDict()
        self._doubted: OrderedDict[Theirs, int] = OrderedDict()  # who was sent it first
        self._recalled: OrderedDict[Theirs, None] = OrderedDict()

    def ask(self, sender: Address, expect: Expect) -> None:
        """May it be believed that `expect.landed` has landed?"""
        theirs = theirs_of(expect)
        past = self._past
        if theirs in past.vanished:
            return  # in a moment we shall know
        over = past.over.get(theirs)
        settled = over is not None and (isinstance(over, Landed) or over.quiet)
        if settled or theirs in self._recalled or past.taken.had(*theirs):
            self._answer(sender, expect)
        else:
            past.remember(self._asked, theirs, (sender, expect))
            self._recall(expect)

    def doubt(self, asked: Destination | Expect | Abort) -> None:
        """Perhaps its room is quiet after all, if it has failed."""
        first, theirs = first_of(asked), theirs_of(asked)
        over = self._past.over.get(theirs)
        if not isinstance(over, Abort) or over.quiet:
            return
        # That we were the first, a new listener of decode's may have learnt after it told us.
        if self._past.never_had(theirs, first):
            self._settle(theirs)
        instance, _, epoch = first.rpartition("#")
        ours = instance == self._session.rpartition("#")[0] and epoch.isdecimal()
        if ours and first != self._session:
            self._past.remember(self._doubted, theirs, int(epoch))
            self._recall(asked)

    def _recall(self, asked: Destination | Expect | Abort) -> None:
        if asked.rank < self._ranks:
            recall = Recall(asked.slot, asked.generation, asked.instance)
            self._mailbox.post(worker_link(asked.rank), recall)

    def recalled(self, recalled: Recalled) -> None:
        theirs = recalled.instance, recalled.slot, recalled.generation
        if recalled.taken:
            self._past.taken.learn(*theirs, recalled.use)
        self._past.remember(self._recalled, theirs, None)
        if (asked := self._asked.pop(theirs, None)) is not None:
            self._answer(*asked)
        first = self._doubted.pop(theirs, None)
        over = recalled.over or not recalled.taken
        if first is not None and over and is_before(recalled.since, first):
            self._settle(theirs)

    def _settle(self, theirs: Theirs) -> None:
        abort, decode = self._past.settle(theirs), self._decodes.get(theirs[0])
        if abort is not None and decode is not None:
            self._mailbox.post(decode.address, abort)

    def _answer(self, sender: Address, expect: Expect) -> None:
        if (answer := self._verdict(expect)) is not None:
            self._mailbox.post(sender, answer)

    def _verdict(self, expect: Expect) -> Landed | Abort | None:
        """None while a room of another use is open that has the destination: how that ends is the
        answer."""
        past, key, theirs = self._past, (expect.room, expect.rank), theirs_of(expect)
        over, room = past.over.get(theirs), self._open_rooms.get(key)
        had, use_of = past.taken.had(*theirs), past.taken.use_of(*theirs)
        if had and use_of != expect.landed:
            if over is None and room is not None and room.use == use_of:
                return None
            return over or past.lost(key, theirs)
        if over is None or (had and not isinstance(over, Landed)):
            past.forget_questions(key, theirs)
            past.taken.spend(*theirs)
            return past.land(key, theirs, expect.landed)
        return over


def is_before(since: int, epoch: int) -> bool:
    """Did a worker that began under the listener `since` begin before the listener `epoch` did?
    Incarnations wrap."""
    later = (epoch - since) & INCARNATION_MASK
    return since == 0 or 0 < later <= INCARNATION_MASK // 2
