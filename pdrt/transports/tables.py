"""Tables of items over a region, and the checks every transport makes before it moves a byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pdrt.transports.base import TransportError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdrt.transports.base import Grid, Indices

Offsets = NDArray[np.int64]
Run = tuple[int, int, int]  # local offset, remote offset, length, in bytes

DIFFER = "a local item and its remote one differ in bytes"
FEW = 16  # up to so many items, plain numbers are faster than arrays


class Table:
    """Items of a sequence of grids, numbered through.  Immutable, checked when it is made."""

    def __init__(self, grids: Sequence[Grid], region_bytes: int) -> None:
        """Raise TransportError if a grid is malformed or leaves a region of `region_bytes`."""
        for grid in grids:
            _check(grid, region_bytes)
        self.grids = tuple(grid for grid in grids if grid.count)
        self.count = sum(grid.count for grid in self.grids)
        kinds = {grid.item_bytes for grid in self.grids}
        self.item_bytes = kinds.pop() if len(kinds) == 1 else None  # None: sizes differ
        columns = [(g.count, g.offset, g.stride_bytes, g.item_bytes) for g in self.grids]
        counts, offsets, strides, sizes = np.array(columns, np.int64).reshape(-1, 4).T
        self._strides: Offsets = strides
        self._sizes: Offsets = sizes
        self._ends: Offsets = np.cumsum(counts)
        # Where item 0 would lie if the grid reached back to it.
        self._origins: Offsets = offsets - (self._ends - counts) * strides

    def check(self, items: Indices) -> None:
        """Raise TransportError unless `items` is a one-dimensional int32 array of our numbers."""
        self.check_kind(items)
        # Seen as unsigned, a negative number is a huge one: one pass finds both errors.
        if len(items) and items.view(np.uint32).max() >= self.count:
            raise TransportError(self._outside())

    @staticmethod
    def check_kind(items: Indices) -> None:
        """Raise TransportError unless `items` is a one-dimensional int32 array."""
        if items.dtype != np.int32 or items.ndim != 1:
            raise TransportError(f"items must be [n] int32, got {items.shape} {items.dtype}")

    def span(self, item: int) -> tuple[int, int]:
        """Byte offset and bytes of one item.  Raise TransportError if it is none of ours."""
        if item >= 0:
            for grid in self.grids:
                if item < grid.count:
                    return grid.offset + item * grid.stride_bytes, grid.item_bytes
                item -= grid.count
        raise TransportError(self._outside())

    def _outside(self) -> str:
        return f"an item is out of bounds: the table has {self.count}"

    def offsets(self, items: Indices) -> Offsets:
        """Byte offset of each item from the start of the region."""
        if len(self.grids) == 1:
            grid = self.grids[0]
            return grid.offset + items.astype(np.int64) * grid.stride_bytes
        grids = np.searchsorted(self._ends, items, side="right")
        return self._origins[grids] + items * self._strides[grids]

    def sizes(self, items: Indices) -> Offsets:
        """Bytes of each item."""
        if self.item_bytes is not None:
            return np.full(len(items), self.item_bytes, np.int64)
        return self._sizes[np.searchsorted(self._ends, items, side="right")]


def check_write(local: Table, local_items: Indices, remote: Table, remote_items: Indices) -> None:
    """Raise TransportError unless each local item may be written to its remote one."""
    if len(local_items) <= FEW:
        few_runs(local, local_items, remote, remote_items)
        return
    local.check(local_items)
    remote.check(remote_items)
    if len(local_items) != len(remote_items):
        raise TransportError(f"{len(local_items)} local items, {len(remote_items)} remote ones")
    if local.item_bytes is not None and local.item_bytes == remote.item_bytes:
        return
    if not np.array_equal(local.sizes(local_items), remote.sizes(remote_items)):
        raise TransportError(DIFFER)


def few_runs(local: Table, local_items: Indices, remote: Table, remote_items: Indices) -> list[Run]:
    """A run for each pair of a few items, checked as by `check_write`."""
    local.check_kind(local_items)
    remote.check_kind(remote_items)
    if len(local_items) != len(remote_items):
        raise TransportError(f"{len(local_items)} local items, {len(remote_items)} remote ones")
    runs = []
    for ours, theirs in zip(local_items.tolist(), remote_items.tolist(), strict=True):
        from_, length = local.span(ours)
        to, length_there = remote.span(theirs)
        if length != length_there:
            raise TransportError(DIFFER)
        runs.append((from_, to, length))
    return runs


def _check(grid: Grid, region_bytes: int) -> None:
    """Raise TransportError if the grid is malformed or does not fit."""
    if grid.offset < 0 or grid.item_bytes < 1 or grid.count < 0:
        raise TransportError(f"{grid} is malformed")
    if grid.stride_bytes < grid.item_bytes:
        raise TransportError(f"{grid}: items overlap")
    end = grid.offset + (grid.count - 1) * grid.stride_bytes + grid.item_bytes
    if grid.count and end > region_bytes:
        raise TransportError(f"{grid} leaves its region of {region_bytes} bytes")
