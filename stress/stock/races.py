"""Two threads that do two things to the same number at the same moment, again and again.

Imports nothing, so that it runs in any environment.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

SWITCH_S = 1e-6  # the interpreter changes threads as often as it can
LIMIT_S = 10.0


def meet(
    first: Callable[[int], object], second: Callable[[int], object], count: int, limit_s: float
) -> int:
    """Call both with each of `count` numbers, from two threads that start each number together.
    Returns how many numbers were played within the limit."""
    gate = threading.Barrier(2)
    end = time.monotonic() + limit_s
    played = [0, 0]

    def run(mine: int, act: Callable[[int], object]) -> None:
        try:
            for number in range(count):
                gate.wait()
                act(number)
                played[mine] = number + 1
                if mine == 0 and time.monotonic() > end:
                    gate.abort()
        except threading.BrokenBarrierError:
            pass

    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        threads = [
            threading.Thread(target=run, args=(mine, act))
            for mine, act in enumerate((first, second))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    return min(played)


class Held:
    """Makes the thread called `SLOW` wait after each reading until `let_go`."""

    SLOW = "slow"

    def __init__(self) -> None:
        self._reached, self._free = threading.Event(), threading.Event()

    def after_reading(self) -> None:
        if threading.current_thread().name == self.SLOW:
            self._reached.set()
            self._free.wait(LIMIT_S)

    def overtaken(self, slow: Callable[[], object], other: Callable[[], object]) -> bool:
        """`slow` reads, `other` reads and writes, `slow` goes on.  False if `slow` never read."""
        thread = threading.Thread(target=slow, name=self.SLOW)
        thread.start()
        reached = self._reached.wait(LIMIT_S)
        other()
        self._free.set()
        thread.join()
        return reached
