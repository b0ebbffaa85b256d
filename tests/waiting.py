"""Waiting for a condition in tests.  The only place in tests that sleeps (test_tidy sees to it)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.005


def wait_until(predicate: Callable[[], T], deadline_s: float, what: str) -> T:
    """Call `predicate` until its answer is true and return that answer.

    `what` completes the sentence "waited for ..." of the failure.
    """
    give_up = time.monotonic() + deadline_s
    while True:
        # The order matters: a predicate is asked once more after the deadline, so that a process
        # that was not scheduled for a while does not fail for that.
        late = time.monotonic() >= give_up
        answer = predicate()
        if answer:
            return answer
        if late:
            raise AssertionError(f"waited {deadline_s:g} s for {what}; last answer: {answer!r}")
        time.sleep(POLL_S)
