from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdrt.errors import AuxFull, CorruptAux
from pdrt.memory.aux import ROW, TOP_MAX, AuxRow, AuxRows
from pdrt.protocol.layout import AUX_ROW_BYTES, Layout, RegionMap

RANKS, ROWS = 2, 4
LAYOUT = Layout(
    model="m", layers=2, kv_heads=1, head_dim=1, dtype="float32", page_size=1, ranks=RANKS
)
MAPS = [RegionMap(layout=LAYOUT, rank=rank, pages_count=3, aux_rows=ROWS) for rank in range(RANKS)]

rooms = st.integers(0, 2**63 - 1)
tokens = st.integers(-(2**31), 2**31 - 1)
logprobs = st.floats(width=32, allow_nan=False)
aux_rows = st.builds(
    AuxRow,
    rooms,
    tokens,
    logprobs,
    st.integers(0, 2**31 - 1),
    st.lists(st.tuples(tokens, logprobs), max_size=TOP_MAX).map(tuple),
    st.integers(0, 2**64 - 1),
)


def new_regions() -> list[memoryview]:
    return [memoryview(bytearray(each.length_bytes)) for each in MAPS]


def row_bytes(regions: list[memoryview], rank: int, index: int) -> memoryview:
    start = MAPS[rank].aux_offset + index * AUX_ROW_BYTES
    return regions[rank][start : start + AUX_ROW_BYTES]


@settings(deadline=None)
@given(aux_rows, st.integers(0, ROWS - 1))
def test_a_row_is_read_as_it_was_written_and_touches_nothing_else(row: AuxRow, index: int) -> None:
    regions = new_regions()
    AuxRows(regions, MAPS).write(index, row)
    for rank, region in enumerate(regions):
        copy = bytearray(region)
        start = MAPS[rank].aux_offset + index * AUX_ROW_BYTES
        copy[start : start + AUX_ROW_BYTES] = bytes(AUX_ROW_BYTES)
        assert not any(copy)
    landed = [memoryview(bytes(region)) for region in regions]  # at the other side
    assert AuxRows(landed, MAPS).read(index, row.room) == row


@settings(deadline=None)
@given(aux_rows, rooms)
def test_a_row_of_another_room_is_corrupt(row: AuxRow, other: int) -> None:
    aux = AuxRows(new_regions(), MAPS)
    aux.write(1, row)
    if other == row.room:
        return
    with pytest.raises(CorruptAux, match=f"rank 0 belongs to room {row.room}"):
        aux.read(1, other)


@pytest.mark.parametrize("rank", range(RANKS))
def test_one_rank_without_its_copy_makes_the_row_corrupt(rank: int) -> None:
    regions = new_regions()
    aux = AuxRows(regions, MAPS)
    aux.write(0, AuxRow(5, 1))
    row_bytes(regions, rank, 0)[:8] = struct.pack("<Q", 6)
    with pytest.raises(CorruptAux, match=f"rank {rank} belongs to room 6"):
        aux.read(0, 5)


@settings(deadline=None)
@given(rooms, st.binary(min_size=AUX_ROW_BYTES, max_size=AUX_ROW_BYTES), st.booleans())
def test_whatever_bytes_land_they_are_a_row_or_corrupt(room: int, data: bytes, ours: bool) -> None:
    regions = new_regions()
    for rank in range(RANKS):
        row_bytes(regions, rank, 2)[:] = data
        if ours:
            row_bytes(regions, rank, 2)[:8] = struct.pack("<Q", room)
    try:
        row = AuxRows(regions, MAPS).read(2, room)
    except CorruptAux as error:
        corrupt = error.room
    else:
        corrupt = room
        assert row.room == room
        assert len(row.top) <= TOP_MAX
    assert corrupt == room


@pytest.mark.parametrize("tops", [-1, TOP_MAX + 1, 2**31 - 1, -(2**31)])
def test_an_impossible_number_of_tops_is_corrupt(tops: int) -> None:
    regions = new_regions()
    aux = AuxRows(regions, MAPS)
    aux.write(0, AuxRow(5, 1))
    row_bytes(regions, 1, 0)[28:32] = struct.pack("<i", tops)
    with pytest.raises(CorruptAux, match="tops"):
        aux.read(0, 5)


@settings(deadline=None)
@given(st.none() | rooms)
def test_a_row_that_nothing_landed_in_is_no_rooms_not_even_room_0(before: int | None) -> None:
    regions = new_regions()
    aux = AuxRows(regions, MAPS)
    if before is not None:
        index = aux.reserve()
        aux.write(index, AuxRow(before, 1))
        aux.release(index)
    index = aux.reserve()
    for room in {0, before or 0}:
        with pytest.raises(CorruptAux):
            aux.read(index, room)


def test_only_the_best_tops_are_kept() -> None:
    aux = AuxRows(new_regions(), MAPS)
    top = tuple((token, -float(token)) for token in range(TOP_MAX + 5))
    aux.write(0, AuxRow(1, 2, -math.inf, 3, top))
    assert aux.read(0, 1) == AuxRow(1, 2, -math.inf, 3, top[:TOP_MAX])


def test_a_row_is_as_drawn() -> None:
    regions = new_regions()
    AuxRows(regions, MAPS).write(1, AuxRow(7, 8, 0.5, 9, ((10, 1.5), (11, 2.5)), 6))
    expected = struct.pack("<QQifii", 7, 6, 8, 0.5, 9, 2)
    expected += struct.pack("<20i", 10, 11, *[0] * 18) + struct.pack("<20f", 1.5, 2.5, *[0] * 18)
    assert ROW.size == len(expected) == 192
    for rank in range(RANKS):
        assert row_bytes(regions, rank, 1)[:192] == expected


class RowsHaveOneOwner(RuleBasedStateMachine):
    """Any history of reserve and release."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = AuxRows(new_regions(), MAPS)
        self.out: list[int] = []

    @rule()
    def reserve(self) -> None:
        if len(self.out) == ROWS:
            with pytest.raises(AuxFull, match="raise --aux-rows"):
                self.aux.reserve()
            return
        index = self.aux.reserve()
        assert index not in self.out
        self.aux.write(index, AuxRow(index + 100, 1))
        self.out.append(index)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.out:
            index = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
            self.aux.release(index)
            with pytest.raises(AssertionError):
                self.aux.release(index)

    @invariant()
    def rows_in_use_are_whole(self) -> None:
        assert self.aux.used_count == len(self.out)
        for index in self.out:
            assert self.aux.read(index, index + 100).first_token == 1


RowsHaveOneOwner.TestCase.settings = settings(deadline=None, max_examples=30)
TestRowsHaveOneOwner = RowsHaveOneOwner.TestCase
