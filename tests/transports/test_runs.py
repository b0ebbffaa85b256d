"""Runs cover the items exactly, and each is as long as it can be."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pdrt.memory.runs import merge_runs

numbers = st.integers(0, 2**31 - 1)
# Small numbers meet often; large ones touch the limits of int32.
items = st.lists(st.tuples(st.integers(0, 8) | numbers, st.integers(0, 8) | numbers), max_size=40)


def columns(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    both = np.array(pairs, np.int32).reshape(-1, 2)
    return both[:, 0], both[:, 1]


@given(items)
def test_runs_are_the_items_in_order(pairs):
    local, remote, lengths = merge_runs(*columns(pairs))
    again = [
        (start + i, target + i)
        for start, target, length in zip(
            local.tolist(), remote.tolist(), lengths.tolist(), strict=True
        )
        for i in range(length)
    ]
    assert again == pairs
    assert all(length > 0 for length in lengths.tolist())


@given(items)
def test_no_two_neighbouring_runs_could_be_one(pairs):
    local, remote, lengths = merge_runs(*columns(pairs))
    for i in range(len(lengths) - 1):
        follows_here = int(local[i]) + int(lengths[i]) == int(local[i + 1])
        follows_there = int(remote[i]) + int(lengths[i]) == int(remote[i + 1])
        assert not (follows_here and follows_there)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20))
def test_steps_of_their_own_merge_byte_offsets_of_items_that_differ(sizes):
    offsets = np.cumsum([0, *sizes[:-1]], dtype=np.int64)
    local, remote, lengths = merge_runs(offsets, offsets + 7, step=np.array(sizes[:-1], np.int64))
    assert (local.tolist(), remote.tolist(), lengths.tolist()) == ([0], [7], [len(sizes)])
