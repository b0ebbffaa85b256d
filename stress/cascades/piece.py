"""What a cascade is handed, and what it hands back.

A cascade is a module of this package with

    NAME: str                               as on the command line
    LIMIT_S: float                          after which a piece of it is given up
    def run(piece: Piece) -> Outcome

A piece is a part of a run that can be repeated alone: its seed settles what is done in it, and in
which order (when is the machine's mood).  It runs in a process of its own, where the machine allows
in PID and mount namespaces of its own, and leaves nothing behind.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stress.cascades.history import Writer


class Outcome(msgspec.Struct, kw_only=True):
    """Of one piece; pieces of one cascade are merged by `add`.

    `counts`: what is added up over pieces; `peaks`: of what only the largest counts.  `times_s`:
    samples by name, as "back: listener".  `series`: curves to plot, (seconds since the beginning,
    value).  `zeros`: names in `counts` that must be 0, each with the name in `counts` of how often
    it could have been otherwise, for the bound beside it.  A violation is a sentence.
    """

    cascade: str
    seed: int
    cycles: int = 0
    rooms: int = 0
    took_s: float = 0.0
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    peaks: dict[str, float] = msgspec.field(default_factory=dict)
    zeros: dict[str, str] = msgspec.field(default_factory=dict)
    times_s: dict[str, list[float]] = msgspec.field(default_factory=dict)
    violations: list[str] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)
    series: dict[str, list[tuple[float, float]]] = msgspec.field(default_factory=dict)

    def count(self, name: str, amount: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + amount

    def none(self, name: str, amount: int, of: str) -> None:
        """`amount` of what must never be; `of` names the count of trials."""
        self.count(name, amount)
        self.zeros[name] = of

    def peak(self, name: str, value: float) -> None:
        self.peaks[name] = max(self.peaks.get(name, value), value)

    def time(self, name: str, seconds: float) -> None:
        self.times_s.setdefault(name, []).append(round(seconds, 6))

    def add(self, other: Outcome) -> None:
        """Take in another piece of the same cascade, which began when this one was over."""
        for name, points in other.series.items():
            moved = [(self.took_s + at_s, value) for at_s, value in points]
            self.series.setdefault(name, []).extend(moved)
        self.cycles += other.cycles
        self.rooms += other.rooms
        self.took_s += other.took_s
        self.counts = dict(Counter(self.counts) + Counter(other.counts)) | {
            name: self.counts.get(name, 0) + other.counts.get(name, 0) for name in other.zeros
        }
        for name, value in other.peaks.items():
            self.peak(name, value)
        self.zeros |= other.zeros
        for name, samples in other.times_s.items():
            self.times_s.setdefault(name, []).extend(samples)
        self.violations += other.violations
        self.notes += [note for note in other.notes if note not in self.notes]


@dataclass
class Piece:
    """`cycles` to do, or until `seconds` have passed, whichever is sooner."""

    seed: int
    cycles: int
    seconds: float
    folder: Path  # histories and logs; kept if something is wrong
    quick: bool = False
    begun_s: float = field(default_factory=time.monotonic)

    def history(self, name: str) -> Writer:
        """A new append-only file of this piece, for one process."""
        self.histories.mkdir(exist_ok=True)
        return Writer(self.histories / f"{name}.history")

    @property
    def histories(self) -> Path:
        return self.folder / "histories"

    def random(self, purpose: str) -> random.Random:
        """Of its own for each purpose, so that what one draws changes nothing for another."""
        return random.Random(f"{self.seed} {purpose}")

    def spent_s(self) -> float:
        return time.monotonic() - self.begun_s

    def rounds(self) -> Iterator[int]:
        """The cycles there is time for; at least one."""
        for cycle in range(self.cycles):
            if cycle and self.spent_s() > self.seconds:
                return
            yield cycle


@dataclass(frozen=True)
class Share:
    """What a cascade does in a run: so many pieces, each of so many cycles or so many seconds.  A
    cascade may name its own as QUICK and RELEASE."""

    pieces: int
    cycles: int
    seconds: float


QUICK = Share(pieces=1, cycles=1_000_000, seconds=15.0)
RELEASE = Share(pieces=1, cycles=1_000_000, seconds=600.0)
