"""What every measurement is handed: where, how long, how often."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

QUICK_PART = 0.15  # of the samples, and of the time they may take


@dataclass(frozen=True)
class Bench:
    folder: Path  # for logs; gone afterwards
    part: float = 1.0  # of all samples and budgets
    repeat: int = 3
    transports: tuple[str, ...] = ("nixl", "shm")
    stock_python: Path | None = None  # of the environment with the unmodified components

    def count(self, count: int) -> int:
        return max(1, round(count * self.part))

    def seconds(self, seconds: float) -> float:
        return seconds * self.part

    @property
    def quick(self) -> bool:
        return self.part < 1

    @property
    def repeats(self) -> int:
        return 1 if self.quick else self.repeat

    def rounds(self, count: int, budget_s: float) -> Iterator[int]:
        """At most `count` rounds, and no new one after the budget; at least one."""
        end = time.monotonic() + self.seconds(budget_s)
        for index in range(self.count(count)):
            if index and time.monotonic() > end:
                return
            yield index
