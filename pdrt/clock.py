"""The clock as an argument.  Nothing below `runtime` reads one by itself.

A clock is a callable that returns nanoseconds of CLOCK_MONOTONIC.  All processes of one host share
that clock, so a deadline written by one can be enforced by any other.
"""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], int]

SECOND_NS = 1_000_000_000
MILLISECOND_NS = 1_000_000

monotonic_ns: Clock = time.monotonic_ns


def to_ns(duration_s: float) -> int:
    """Seconds to nanoseconds."""
    return int(duration_s * SECOND_NS)


class ManualClock:
    """A clock for tests: stands still until told to move."""

    def __init__(self, now_ns: int = SECOND_NS) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns

    def advance_s(self, duration_s: float) -> None:
        self.now_ns += to_ns(duration_s)
