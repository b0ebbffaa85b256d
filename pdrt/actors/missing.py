"""Decodes that are gone and have not come back, and the rooms that only one of them can want.

A router sends both halves of a request at once and does not tell prefill which decode has the
other.  A living decode that has it says so within a beat; of one whose tree is dead nobody will
ever say anything, and prefill's half would wait for its deadline, with the client behind it.  So
while a decode is missing, a room that no decode asks for in good time is taken to be its.

Good time is not a constant: a router that asks prefill first lets decodes ask late.  It is twice
what the decodes' questions took lately at most, and never less than two beats.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from pdrt.actors.past import NOBODY, Room
from pdrt.clock import SECOND_NS, to_ns

MISSED_NS = 600 * SECOND_NS  # then it is not expected any more, nor are requests for it
MISSING_MAX = 4096
GREETED_NS = 2 * SECOND_NS  # who said hello may be the missing one: it is about to say who it is
FADE = 256  # a long wait counts for about as many questions


def _note(times_ns: OrderedDict[str, int], who: str, now_ns: int) -> None:
    times_ns.pop(who, None)
    times_ns[who] = now_ns
    if len(times_ns) > MISSING_MAX:
        times_ns.popitem(last=False)


def _drop_until(times_ns: OrderedDict[str, int], end_ns: int) -> None:
    while times_ns and next(iter(times_ns.values())) <= end_ns:
        times_ns.popitem(last=False)


class Missing:
    def __init__(self, beat_s: float) -> None:
        self._patience_min_ns = to_ns(2 * beat_s)
        self._longest_ns = 0  # that a living decode took to ask; fades
        self._since_ns: OrderedDict[str, int] = OrderedDict()  # by control address
        self._greeted_ns: OrderedDict[str, int] = OrderedDict()  # by instance

    def lose(self, control: str, now_ns: int) -> None:
        _note(self._since_ns, control, now_ns)

    def greet(self, instance: str, now_ns: int) -> None:
        """Somebody unknown says hello."""
        _note(self._greeted_ns, instance, now_ns)

    def find(self, instance: str, control: str) -> None:
        """It introduced itself."""
        self._greeted_ns.pop(instance, None)
        self._since_ns.pop(control, None)

    def claim(self, room: Room, now_ns: int) -> None:
        """A living decode asks for the room."""
        if not room.claimed:
            room.claimed = True
            took_ns = now_ns - room.seen_ns
            self._longest_ns = max(took_ns, self._longest_ns - self._longest_ns // FADE)

    def rooms(self, rooms: Iterable[Room], now_ns: int) -> list[Room]:
        """Those that nobody living will ask for."""
        _drop_until(self._since_ns, now_ns - MISSED_NS)
        _drop_until(self._greeted_ns, now_ns - GREETED_NS)
        if not self._since_ns or self._greeted_ns:
            return []
        since_ns = now_ns - max(self._patience_min_ns, 2 * self._longest_ns)
        return [r for r in rooms if not r.claimed and r.theirs == NOBODY and r.seen_ns < since_ns]
