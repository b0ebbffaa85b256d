"""What every actor is: one process, one thread, one loop; state that nobody else touches.

An actor's logic is sans-IO.  Clock, mailbox, table and transports are handed in, so the same object
runs in a real process here, in a unit test on a fake mailbox, or in a simulator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Protocol, TypeVar

from pdrt import failpoints
from pdrt.clock import MILLISECOND_NS, SECOND_NS, Clock
from pdrt.mail.mailbox import Address, Mailbox
from pdrt.protocol.codec import Malformed
from pdrt.protocol.counters import Counter
from pdrt.protocol.messages import AnyMessage
from pdrt.shm_status import StatusTable

BEAT_NS = 50 * MILLISECOND_NS
# How long the loop sleeps at most, with rooms to look after and without.  With none, each wake-up
# only costs; a beat must not wait for two.
BUSY_MS, IDLE_MS = 20, 50
LOG_LINES_A_SECOND = 10
ITEMS_A_BEAT = 256  # of a long loop; the dearest costs some 10 us
CONTROL_DOOR = "control"  # the one that peers, and strangers, knock at
DEAF_NS = 200 * MILLISECOND_NS  # between two looks, this much counts as silence

log = logging.getLogger("pdrt.actor")

T = TypeVar("T")
# What tells how many it holds.
SIZED: tuple[type[Sized], ...] = (list, dict, type({}.values()), type({}.items()))


class Actor(Protocol):
    def handle(self, sender: Address, message: AnyMessage, now_ns: int) -> None:
        """Take in one message.  Must not block."""

    def tick(self, now_ns: int) -> int:
        """Do what time asks for; return how many milliseconds the loop may sleep."""


def deaf_for(looked_ns: int, now_ns: int) -> int:
    """How much of the time since we looked last is no silence of our peers: if we did not run for
    long, what they said may not have reached us yet."""
    return max(0, now_ns - looked_ns - DEAF_NS) if looked_ns else 0


class Throttle:
    """Lets through a bounded number of log lines a second (law 10)."""

    def __init__(self, lines_a_second: int = LOG_LINES_A_SECOND) -> None:
        self._limit = lines_a_second
        self._second = -1
        self._lines = 0

    def __call__(self, now_ns: int) -> bool:
        second = now_ns // SECOND_NS
        if second != self._second:
            self._second, self._lines = second, 0
        self._lines += 1
        return self._lines <= self._limit


class Beating:
    """Goes through many items in one turn, and shows meanwhile that the process turns.

    What one message or one tick asks for may grow with the rooms there are, and whoever shows no
    pulse for `hang_s` is killed, however much it got done.  Only for collections that are there
    already: a loop that never ends would never look hung."""

    def __init__(self, beat: Callable[[], object], items_a_beat: int = ITEMS_A_BEAT) -> None:
        self._beat = beat
        self._left = self._items_a_beat = items_a_beat

    def __call__(self, items: Iterable[T]) -> Iterator[T]:
        count = len(items) if isinstance(items, SIZED) else self._items_a_beat
        if count >= self._left:
            return self._slowly(items)
        self._left -= count  # as it is most of the time
        return iter(items)

    def _slowly(self, items: Iterable[T]) -> Iterator[T]:
        left = self._left
        try:
            for item in items:
                if not left:
                    left = self._items_a_beat
                    self._beat()
                left -= 1
                yield item
        finally:
            self._left = left  # many short loops are a long one


def run(
    actor: Actor,
    mailbox: Mailbox,
    table: StatusTable,
    clock: Clock,
    *,
    stopping: Callable[[], bool],
    wake: Callable[[], None],
) -> None:
    """The loop: take in what arrived, do what is due, send, wake, beat.  Ends when `stopping()`."""
    sleep_ms = 0
    beaten_ns = 0
    may_log = Throttle()
    while not stopping():
        envelopes = mailbox.receive(sleep_ms)
        now_ns = clock()
        for sender, message in envelopes:
            try:
                actor.handle(sender, message, now_ns)
            except Exception:
                # Law 8: whatever a frame provokes, it must not end the actor nor burn its restart
                # budget.  The codec has checked types and bounds; what is left is counted here.
                table.count(Counter.MALFORMED, 1, Malformed.VALUE)
                if may_log(now_ns):
                    log.exception("message dropped: %.200r", message)
            beaten_ns = _beat(table, beaten_ns, clock())  # a turn may hold many slow ones
        sleep_ms = actor.tick(now_ns)
        beaten_ns = _beat(table, beaten_ns, clock())
        failpoints.hit("actor.turn.before_flush")
        mailbox.flush(now_ns)
        failpoints.hit("actor.turn.before_wake")
        wake()
        beaten_ns = _beat(table, beaten_ns, clock())


def _beat(table: StatusTable, beaten_ns: int, now_ns: int) -> int:
    """Show that we turn, if it is time; returns when we did last."""
    if now_ns - beaten_ns < BEAT_NS:
        return beaten_ns
    table.beat(now_ns)
    return now_ns
