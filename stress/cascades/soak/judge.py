"""Does a curve rise?  By a robust line through the second half of its samples.

A leak is a rise that goes on; warm-up is over by the half, and what saws up and down is no rise.
The line is Theil and Sen's: the median of the slopes between all pairs of points, which a minority
of odd samples cannot turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Points = Sequence[tuple[float, float]]

BINS = 240  # of the second half; more samples are put together by their median
POINTS_MIN = 12
AGREED_MIN = 0.6  # of all pairs that differ, so many must rise


@dataclass(frozen=True)
class Tolerance:
    """What a line may rise from the middle of a run to its end."""

    amount: float
    part: float = 0.0  # of its height, besides
    unit: str = ""

    def of(self, height: float) -> float:
        return self.amount + self.part * abs(height)


@dataclass(frozen=True)
class Line:
    """`rise` over the second half; `agreed`: the part of the pairs of points that rise, of those
    that differ."""

    height: float
    rise: float
    agreed: float
    points: int

    def is_leak(self, tolerance: Tolerance) -> bool:
        return self.rise > tolerance.of(self.height) and self.agreed >= AGREED_MIN


def line_of(points: Points) -> Line | None:
    """Through the second half of the time; None if there are too few points to say anything."""
    if len(points) < POINTS_MIN:
        return None
    times, values = np.array(points, float).T
    half = times >= (times[0] + times[-1]) / 2
    times, values = _binned(times[half], values[half])
    span = times[-1] - times[0]
    if len(times) < POINTS_MIN // 2 or span <= 0:
        return None
    first, second = np.triu_indices(len(times), 1)
    steps = values[second] - values[first]
    slope = float(np.median(steps / (times[second] - times[first])))
    differ = int(np.count_nonzero(steps))
    agreed = float(np.count_nonzero(steps > 0)) / differ if differ else 0.0
    return Line(float(np.median(values)), slope * float(span), agreed, len(times))


def _binned(
    times: NDArray[np.float64], values: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if len(times) <= BINS:
        return times, values
    parts = np.array_split(np.arange(len(times)), BINS)
    return (
        np.array([times[part].mean() for part in parts]),
        np.array([np.median(values[part]) for part in parts]),
    )


def judge(name: str, points: Points, tolerance: Tolerance) -> str:
    """A sentence if the curve rises; "" if it is flat, falls, saws, or is too short to tell."""
    line = line_of(points)
    if line is None or not line.is_leak(tolerance):
        return ""
    hours = (points[-1][0] - points[0][0]) / 2 / 3600
    return (
        f"{name} rises by {line.rise:.6g} {tolerance.unit} in the second half "
        f"({line.rise / hours:.6g} an hour, from about {line.height:.6g}); "
        f"{tolerance.of(line.height):.6g} are tolerated"
    )
