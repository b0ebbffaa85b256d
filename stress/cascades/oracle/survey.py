"""The driver's census, taken when everything is drained: nothing may be left (law 12)."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from stress.cascades.history import Kind
from stress.cascades.oracle.findings import Findings

SPARE_DESCRIPTORS = 6  # a supervisor may hold so many more at the end than at the beginning


class What(IntEnum):
    """`b` of a CENSUS record."""

    UNFINISHED = 1  # rooms a player could not let go of
    SLOTS = 2  # live slots of a tree, nobody having a room
    NOT_WHOLE = 3  # is the tree without one of its processes
    SURPLUS = 4  # processes of a tree beyond those it should have
    DESCRIPTORS_BEFORE = 5  # of a supervisor, when the piece began
    DESCRIPTORS_AFTER = 6


LEAKS = {
    What.UNFINISHED: "rooms were never let go of",
    What.SLOTS: "slots are live, and nobody has a room",
    What.NOT_WHOLE: "lacks one of its processes",
    What.SURPLUS: "processes too many",
}


def judge_census(driver: NDArray[np.void], findings: Findings) -> None:
    descriptors: dict[int, int] = {}
    for _, _, c, b, a, kind in driver.tolist():
        if kind != Kind.CENSUS:
            continue
        if b in LEAKS:
            findings.counts["leak counts"] += 1
            if c:
                findings.violation("leaks", f"tree {a}: {c}: {LEAKS[What(b)]}")
        elif b == What.DESCRIPTORS_BEFORE:
            descriptors[a] = c
        elif b == What.DESCRIPTORS_AFTER:
            grown = c - descriptors.get(a, c)
            findings.peak("descriptors a supervisor has more than at first", grown)
            if grown > SPARE_DESCRIPTORS:
                findings.violation("leaks", f"tree {a}: its supervisor holds {grown} descriptors")
    findings.counts["pieces"] += 1
