"""Which pages of a pool are free, used or held.  Bookkeeping only: it never touches a page's bytes.

    free --allocate--> used --hold--> held
      ^                 |              |
      +------free-------+-----free-----+

A held page belongs to a room that has its verdict but is not quiet: bytes may still land in it, so
it is out of use until somebody who knows that it is quiet frees it.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from pdrt.errors import IllegalMove, PoolFull

Pages = NDArray[np.int32]


class PageState(IntEnum):
    FREE = 0
    USED = 1
    HELD = 2


class PageAllocator:
    """Hands out page numbers of one pool.  One owner, one thread; no locks."""

    def __init__(self, pages_count: int) -> None:
        if pages_count < 1:
            raise ValueError(f"a pool has at least one page, got {pages_count}")
        self.pages_count = pages_count
        self._state = np.zeros(pages_count, dtype=np.uint8)
        self._free_count = pages_count
        self._held_count = 0

    @property
    def free_count(self) -> int:
        return self._free_count

    @property
    def held_count(self) -> int:
        return self._held_count

    @property
    def used_count(self) -> int:
        return self.pages_count - self._free_count - self._held_count

    def allocate(self, count: int) -> Pages:
        """Take `count` pages: consecutive ones if any stretch is long enough, else the lowest.

        Consecutive pages on both sides of a transfer become one write.  Raises PoolFull and takes
        nothing when fewer are free.
        """
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        if count > self._free_count:
            raise PoolFull(f"{count} pages wanted, {self._free_count} of {self.pages_count} free")
        if count == 0:
            return np.empty(0, dtype=np.int32)
        free = np.flatnonzero(self._state == PageState.FREE)
        consecutive = free[count - 1 :] - free[: len(free) - count + 1] == count - 1
        first = int(consecutive.argmax())  # 0, the lowest pages, when no stretch is long enough
        pages = free[first : first + count].astype(np.int32)
        self._state[pages] = PageState.USED
        self._free_count -= count
        return pages

    def hold(self, pages: Pages) -> None:
        """Take used pages out of use until `free`.  Raises IllegalMove unless all are used."""
        self._check(pages, "hold", self._states_of(pages) == PageState.USED)
        self._state[pages] = PageState.HELD
        self._held_count += len(pages)

    def free(self, pages: Pages) -> None:
        """Give used or held pages back.  Raises IllegalMove if one is free or named twice."""
        states = self._states_of(pages)
        self._check(pages, "free", states != PageState.FREE)
        self._state[pages] = PageState.FREE
        self._free_count += len(pages)
        self._held_count -= int(np.count_nonzero(states == PageState.HELD))

    def _states_of(self, pages: Pages) -> NDArray[np.uint8]:
        if len(pages) and (pages.min() < 0 or pages.max() >= self.pages_count):
            raise IllegalMove(f"pages outside the pool of {self.pages_count}: {pages.tolist()}")
        return self._state[pages]

    @staticmethod
    def _check(pages: Pages, verb: str, allowed: NDArray[np.bool_]) -> None:
        if not allowed.all():
            raise IllegalMove(f"cannot {verb} pages {pages[~allowed].tolist()} in their state")
        if len(np.unique(pages)) != len(pages):
            raise IllegalMove(f"cannot {verb} a page twice: {pages.tolist()}")
