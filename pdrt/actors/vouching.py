"""A worker of prefill's says that a use of a room id has landed, and decode asks whether that may
be believed, since it sent the destination to several incarnations of the listener.

It may if no other use had that destination, or will: of all bytes that came, or may come, that use
is then the only one.  The present listener knows what it gave away itself.  What its predecessors
gave away their worker knows, unless that is dead, too: so the worker is asked, and gives it to
nobody from then on, should an order of theirs be still on its way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from pdrt.actors.decodes import worker_link
from pdrt.actors.past import Key, Past, Room, Theirs, theirs_of
from pdrt.mail.mailbox import Address, Postman
from pdrt.protocol.messages import Abort, Expect, Landed, Recall, Recalled


class Vouching:
    def __init__(
        self, ranks: int, mailbox: Postman, past: Past, open_rooms: Mapping[Key, Room]
    ) -> None:
        self._ranks = ranks
        self._mailbox = mailbox
        self._past = past
        self._open_rooms = open_rooms
        self._asked: OrderedDict[Theirs, tuple[Address, Expect]] = OrderedDict()
        self._recalled: OrderedDict[Theirs, None] = OrderedDict()

    def ask(self, sender: Address, expect: Expect) -> None:
        theirs = theirs_of(expect)
        past = self._past
        if theirs in past.vanished:
            return  # in a moment we shall know
        if theirs in past.over or theirs in self._recalled or past.taken.had(*theirs):
            self._answer(sender, expect)
        elif expect.rank < self._ranks:
            past.remember(self._asked, theirs, (sender, expect))
            instance, slot, generation = theirs
            self._mailbox.post(worker_link(expect.rank), Recall(slot, generation, instance))

    def recalled(self, recalled: Recalled) -> None:
        theirs = recalled.instance, recalled.slot, recalled.generation
        if recalled.taken:
            self._past.taken.learn(*theirs, recalled.use)
        self._past.remember(self._recalled, theirs, None)
        if (asked := self._asked.pop(theirs, None)) is not None:
            self._answer(*asked)

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
