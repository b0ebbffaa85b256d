from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdrt.errors import IllegalMove, PoolFull
from pdrt.memory.pages import PageAllocator

POOL = 24


class PagesHaveOneOwner(RuleBasedStateMachine):
    """Any history of allocate, hold and free: a page is never in two hands, and none is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(POOL)
        self.used: list[list[int]] = []
        self.held: list[list[int]] = []

    def pages_out(self) -> list[int]:
        return [page for pages in self.used + self.held for page in pages]

    @rule(count=st.integers(0, POOL + 2))
    def allocate(self, count: int) -> None:
        free = POOL - len(self.pages_out())
        if count > free:
            with pytest.raises(PoolFull):
                self.allocator.allocate(count)
            return
        pages = self.allocator.allocate(count)
        assert pages.dtype == np.int32
        assert len(set(pages.tolist())) == count
        assert not set(pages.tolist()) & set(self.pages_out())
        self.used.append(pages.tolist())

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        if self.used:
            pages = self.used.pop(data.draw(st.integers(0, len(self.used) - 1)))
            self.allocator.hold(np.array(pages, dtype=np.int32))
            self.held.append(pages)

    @rule(data=st.data(), from_held=st.booleans())
    def free(self, data: st.DataObject, from_held: bool) -> None:
        owners = self.held if from_held else self.used
        if owners:
            pages = owners.pop(data.draw(st.integers(0, len(owners) - 1)))
            self.allocator.free(np.array(pages, dtype=np.int32))

    @invariant()
    def counts_are_true(self) -> None:
        assert self.allocator.used_count == sum(map(len, self.used))
        assert self.allocator.held_count == sum(map(len, self.held))
        assert self.allocator.free_count == POOL - len(self.pages_out())


TestPagesHaveOneOwner = PagesHaveOneOwner.TestCase


@given(st.sets(st.integers(0, POOL - 1)), st.integers(1, POOL))
def test_pages_are_consecutive_whenever_some_free_stretch_is_long_enough(
    taken: set[int], count: int
) -> None:
    allocator = PageAllocator(POOL)
    everything = allocator.allocate(POOL)
    allocator.free(np.array(sorted(set(everything.tolist()) - taken), dtype=np.int32))
    if count > POOL - len(taken):
        return
    stretch = any(not taken & set(range(at, at + count)) for at in range(POOL - count + 1))
    pages = allocator.allocate(count)
    assert stretch == bool((np.diff(pages) == 1).all() or count == 1)


@pytest.mark.parametrize("pages", [[0, 0], [5], [-1], [POOL]])
def test_pages_that_are_not_ours_cannot_be_freed_or_held(pages: list[int]) -> None:
    allocator = PageAllocator(POOL)
    allocator.allocate(4)
    for act in (allocator.free, allocator.hold):
        with pytest.raises(IllegalMove):
            act(np.array(pages, dtype=np.int32))
    assert (allocator.free_count, allocator.used_count) == (POOL - 4, 4)


def test_held_pages_cannot_be_held_again() -> None:
    allocator = PageAllocator(POOL)
    pages = allocator.allocate(2)
    allocator.hold(pages)
    with pytest.raises(IllegalMove):
        allocator.hold(pages)


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one page"):
        PageAllocator(0)
    with pytest.raises(ValueError, match="cannot allocate"):
        PageAllocator(1).allocate(-1)
