"""A few items are computed by plain numbers, many by arrays: both ways agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.transports.base import Grid, TransportError
from pdrt.transports.tables import DIFFER, FEW, Table, check_write, few_runs

REGION_BYTES = 4096

grids = st.builds(
    lambda offset, item, gap, count: Grid(offset, item, item + gap, count),
    st.integers(0, 64),
    st.integers(1, 16),
    st.integers(0, 16),
    st.integers(0, 8),
)
tables = st.lists(grids, max_size=4).map(lambda g: Table(g, REGION_BYTES))


def items_of(table: Table) -> st.SearchStrategy[np.ndarray]:
    """Numbers in and just outside of a table, few and many."""
    lists = st.lists(st.integers(-2, table.count + 1), max_size=2 * FEW)
    return lists.map(lambda numbers: np.array(numbers, np.int32))


def inside(table: Table, items: np.ndarray) -> bool:
    return all(0 <= item < table.count for item in items.tolist())


@given(st.data())
def test_a_span_is_what_the_arrays_say(data):
    table = data.draw(tables)
    numbers = np.arange(table.count, dtype=np.int32)
    if table.count:
        spans = [table.span(item) for item in numbers.tolist()]
        assert [offset for offset, _ in spans] == table.offsets(numbers).tolist()
        assert [size for _, size in spans] == table.sizes(numbers).tolist()


@given(st.data())
def test_items_are_refused_exactly_if_one_is_outside(data):
    table = data.draw(tables)
    items = data.draw(items_of(table))
    if inside(table, items):
        check_write(table, items, table, items)
    else:
        with pytest.raises(TransportError, match="out of bounds"):
            check_write(table, items, table, items)


@given(st.data())
def test_a_write_is_refused_exactly_if_two_items_differ(data):
    local, remote = data.draw(tables), data.draw(tables)
    count = data.draw(st.integers(0, 2 * FEW)) if local.count and remote.count else 0
    pick = [
        data.draw(st.tuples(st.integers(0, t.count - 1)), label="item")[0] if count else 0
        for t in (local, remote)
    ]
    ours = (np.arange(count) + pick[0]) % max(1, local.count)
    theirs = (np.arange(count) + pick[1]) % max(1, remote.count)
    ours, theirs = ours.astype(np.int32), theirs.astype(np.int32)
    same = count == 0 or np.array_equal(local.sizes(ours), remote.sizes(theirs))
    if same:
        check_write(local, ours, remote, theirs)
        runs = few_runs(local, ours, remote, theirs)
        assert [run[0] for run in runs] == (local.offsets(ours).tolist() if count else [])
        assert [run[1] for run in runs] == (remote.offsets(theirs).tolist() if count else [])
    else:
        with pytest.raises(TransportError, match=DIFFER):
            check_write(local, ours, remote, theirs)
