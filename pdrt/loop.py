"""The loop of one thread: descriptors, timers, signals, and wake-ups from other threads.

A callback must not block.  One that raises does not end the loop: it is counted and logged.  It is
not asyncio, so that what runs in the supervisor can be read in one sitting.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from types import FrameType

from pdrt.clock import SECOND_NS, Clock, monotonic_ns, to_ns
from pdrt.errors import BadConfig

logger = logging.getLogger("pdrt.supervisor")

# A longer gap between two rounds means that this process was stopped, and then those it watches
# probably were too: only this much of it counts against them.
GAP_MAX_S = 0.1
REST_S = 0.1  # a descriptor whose callback raised is not served again sooner


@dataclass
class _Timer:
    period_ns: int
    callback: Callable[[], object]
    due_ns: int


def _ignore(_signum: int, _frame: FrameType | None) -> None:
    """Python writes to the wake-up pipe only for signals that have a handler."""


class Loop:
    """`open`, then `turn` again and again, then `close`; all in the main thread.

    `wake` may be called from any thread.
    """

    def __init__(self, clock: Clock = monotonic_ns) -> None:
        self._clock = clock
        self.clock_ns = clock()
        self.now_ns = self.clock_ns  # the loop's own time: see GAP_MAX_S
        self.callback_errors_count = 0
        self._waker_fd: int | None = None
        self._timers: list[_Timer] = []
        self._services: dict[int, Callable[[], object]] = {}
        self._rests_ns: dict[int, int] = {}  # descriptor -> when it is served again

    def open(self, signums: Iterable[int], on_signal: Callable[[int], None]) -> None:
        """Raises BadConfig if no descriptor is left."""
        self._on_signal = on_signal
        try:
            self._selector = selectors.DefaultSelector()
            self._wake_fd, waker_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise BadConfig(f"no descriptor is left: {error.strerror}; raise ulimit -n") from error
        self._waker_fd = waker_fd
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._on_wake)
        self._handlers = {signum: signal.signal(signum, _ignore) for signum in signums}
        self._old_wakeup_fd = signal.set_wakeup_fd(waker_fd, warn_on_full_buffer=False)

    def close(self) -> None:
        signal.set_wakeup_fd(self._old_wakeup_fd)
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        self._selector.close()
        waker_fd, self._waker_fd = self._waker_fd, None
        for fd in (self._wake_fd, waker_fd):
            if fd is not None:
                os.close(fd)

    def watch(self, fileno: int, callback: Callable[[], object]) -> None:
        """Unguarded, for the owner of the loop itself."""
        self._selector.register(fileno, selectors.EVENT_READ, callback)

    def unwatch(self, fileno: int) -> None:
        self._selector.unregister(fileno)

    def add_service(self, fileno: int, callback: Callable[[], object]) -> None:
        """Call back while `fileno` is readable."""
        self._selector.register(fileno, selectors.EVENT_READ, partial(self._serve, fileno))
        self._services[fileno] = callback

    def remove_service(self, fileno: int) -> None:
        """Call before closing the descriptor."""
        del self._services[fileno]
        if self._rests_ns.pop(fileno, None) is None:
            self._selector.unregister(fileno)

    def add_timer(self, period_s: float, callback: Callable[[], object]) -> None:
        """Call back about every period_s; a missed beat is not made up for."""
        period_ns = to_ns(period_s)
        self._timers.append(_Timer(period_ns, callback, self.now_ns + period_ns))

    def wake(self) -> None:
        """End the wait of the current turn."""
        if self._waker_fd is not None:
            with contextlib.suppress(BlockingIOError):  # full: a wake-up is on its way already
                os.write(self._waker_fd, b"\0")

    def turn(self, wait_s: float) -> None:
        """Wait for something to do, wait_s at most, and do it."""
        due_ns = [timer.due_ns for timer in self._timers] + list(self._rests_ns.values())
        for at_ns in due_ns:
            wait_s = min(wait_s, (at_ns - self.now_ns) / SECOND_NS)
        events = self._selector.select(max(0.0, wait_s))
        clock_ns = self._clock()  # before the callbacks: they start new deadlines
        self.now_ns += min(clock_ns - self.clock_ns, to_ns(GAP_MAX_S))
        self.clock_ns = clock_ns
        for key, _ in events:
            key.data()
        self._end_rests()
        for timer in self._timers:
            if self.now_ns >= timer.due_ns:
                timer.due_ns = self.now_ns + timer.period_ns
                self.guard(timer.callback)

    def guard(self, callback: Callable[[], object]) -> bool:
        """Whether the callback returned."""
        try:
            callback()
        except Exception:  # the loop outlives whatever is hooked into it
            self.callback_errors_count += 1
            count = self.callback_errors_count
            if count & (count - 1) == 0:  # 1, 2, 4, 8, ...: a bounded log for an endless fault
                logger.exception("callback failed count=%d", count)
            return False
        return True

    def _on_wake(self) -> None:
        for signum in os.read(self._wake_fd, 4096):
            if signum != 0:
                self._on_signal(signum)

    def _serve(self, fileno: int) -> None:
        callback = self._services.get(fileno)  # gone if removed earlier in this turn
        if callback is None or self.guard(callback) or fileno not in self._services:
            return
        self._selector.unregister(fileno)  # it is still readable, and would be called at once
        self._rests_ns[fileno] = self.now_ns + to_ns(REST_S)

    def _end_rests(self) -> None:
        for fileno in [f for f, until_ns in self._rests_ns.items() if self.now_ns >= until_ns]:
            del self._rests_ns[fileno]
            callback = self._services.pop(fileno)
            try:
                self.add_service(fileno, callback)
            except OSError:
                logger.exception("service lost: its descriptor is closed fileno=%d", fileno)
