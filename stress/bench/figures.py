"""What a measurement gives: samples, their summary, and the goal they are held against.

p99 is by nearest rank, so of fewer than 100 samples it is the largest.  Spread is the distance
between the quartiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec


def rank(ordered: Sequence[float], part: float) -> float:
    """The smallest sample that at least `part` of all samples do not exceed."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


class Summary(msgspec.Struct, frozen=True):
    n: int
    median: float
    p99: float
    max: float
    spread: float


def summarise(samples: Sequence[float]) -> Summary:
    ordered = sorted(samples)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else sum(ordered[middle - 1 : middle + 1]) / 2
    spread = rank(ordered, 0.75) - rank(ordered, 0.25)
    return Summary(len(ordered), median, rank(ordered, 0.99), ordered[-1], spread)


class Goal(msgspec.Struct, frozen=True):
    """`statistic` (a field of Summary) is at most, or at least, `bound`."""

    statistic: str
    bound: float
    at_least: bool = False

    def met(self, summary: Summary) -> bool:
        value = float(getattr(summary, self.statistic))
        return value >= self.bound if self.at_least else value <= self.bound

    def text(self, unit: str) -> str:
        sign = ">=" if self.at_least else "<="
        return f"{self.statistic} {sign} {self.bound:g} {unit}".rstrip()


class Figure(msgspec.Struct):
    """One row of a table."""

    name: str
    unit: str
    samples: list[float]
    goal: Goal | None = None
    why: str = ""  # where the time went; shown where the goal is missed

    @property
    def summary(self) -> Summary:
        return summarise(self.samples)

    @property
    def met(self) -> bool | None:
        """None: there is no goal, or nothing was measured."""
        if self.goal is None or not self.samples:
            return None
        return self.goal.met(self.summary)

    def cells(self) -> list[str]:
        """As a row of COLUMNS."""
        goal = self.goal.text(self.unit) if self.goal else ""
        verdict = {True: "met", False: "MISSED", None: ""}[self.met]
        if not self.samples:
            return [self.name, "0", "-", "-", "-", "-", self.unit, goal, "not measured"]
        s = self.summary
        numbers = [digits(v) for v in (s.median, s.p99, s.max, s.spread)]
        return [self.name, str(s.n), *numbers, self.unit, goal, verdict]

    def record(self) -> dict[str, Any]:
        """For a file."""
        summary = msgspec.to_builtins(self.summary) if self.samples else None
        goal = self.goal.text(self.unit) if self.goal else None
        return {
            "name": self.name,
            "unit": self.unit,
            "summary": summary,
            "goal": goal,
            "met": self.met,
            "why": self.why,
            "samples": [float(digits(s, 6)) for s in self.samples],
        }


COLUMNS = ["figure", "n", "median", "p99", "max", "spread", "unit", "goal", "verdict"]


def digits(value: float, significant: int = 3) -> str:
    """The number with so many significant digits, never in exponents."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    places = max(0, significant - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}"


class Result(msgspec.Struct):
    """One measurement: its table, remarks, and how it went."""

    name: str
    title: str
    figures: list[Figure] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)
    took_s: float = 0.0
    error: str = ""

    def add(
        self,
        name: str,
        unit: str,
        samples: Sequence[float],
        goal: Goal | None = None,
        why: str = "",
    ) -> None:
        self.figures.append(Figure(name, unit, list(samples), goal, why))

    def record(self) -> dict[str, Any]:
        """For a file."""
        return {
            "name": self.name,
            "title": self.title,
            "took_s": self.took_s,
            "error": self.error,
            "notes": self.notes,
            "figures": [figure.record() for figure in self.figures],
        }

    @property
    def missed(self) -> dict[str, list[str]]:
        """Names of the figures that miss their goal, by why."""
        found: dict[str, list[str]] = {}
        for figure in self.figures:
            if figure.met is False:
                found.setdefault(figure.why or "no profile was taken", []).append(figure.name)
        return found
