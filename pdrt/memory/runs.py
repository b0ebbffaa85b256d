"""Merges items that are consecutive on both sides of a copy.  Pure numpy; moves no bytes itself."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.signedinteger[Any]]


def merge_runs(
    local: Integers, remote: Integers, *, step: int | Integers = 1
) -> tuple[Integers, Integers, NDArray[np.int64]]:
    """Return (starts_local, starts_remote, lengths), one entry a run, in the order of the items.

    local, remote: [items] non-negative positions, item i of one belongs to item i of the other.
    step: distance from one item to the next within a run, one for all or [items - 1] of them:
    1 merges indices, the item's bytes merges byte offsets.
    lengths: [runs] items in each run, always positive; their sum is the number of items.
    """
    if len(local) == 0:
        return local, remote, np.zeros(0, np.int64)
    if len(local) == 1:
        return local, remote, np.ones(1, np.int64)
    broken = (local[1:] - local[:-1] != step) | (remote[1:] - remote[:-1] != step)
    starts = np.concatenate(([0], np.flatnonzero(broken) + 1))
    return local[starts], remote[starts], np.diff(starts, append=len(local))
