from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrt.errors import BadConfig
from pdrt.protocol.layout import (
    AUX_ROW_BYTES,
    DTYPE_BYTES,
    SCRATCH_BYTES,
    Layout,
    RegionMap,
    first_difference,
)

small = st.integers(1, 12)
layouts = st.integers(1, 12).flatmap(
    lambda layers: st.builds(
        Layout,
        model=st.text(max_size=8),
        layers=st.just(layers),
        kv_heads=small,
        head_dim=small,
        dtype=st.sampled_from(sorted(DTYPE_BYTES)),
        page_size=small,
        ranks=st.integers(1, layers),
    )
)
LAYOUT = Layout(model="m", layers=6, kv_heads=2, head_dim=8, dtype="float32", page_size=16, ranks=2)
OTHER = {
    "model": "n",
    "layers": 7,
    "kv_heads": 3,
    "head_dim": 9,
    "dtype": "float16",
    "page_size": 17,
    "ranks": 3,
}
FIELDS = list(OTHER)


def differing(*names: str) -> Layout:
    return msgspec.structs.replace(LAYOUT, **{name: OTHER[name] for name in names})


@settings(deadline=None)
@given(layouts, layouts)
def test_digests_are_equal_exactly_when_every_field_is(one: Layout, other: Layout) -> None:
    assert (one.digest == other.digest) == (one == other)
    assert (first_difference(one, other) is None) == (one == other)
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=Layout)
    assert copy.digest == one.digest
    assert len(one.digest) == 16


@pytest.mark.parametrize("name", FIELDS)
def test_one_field_makes_another_digest(name: str) -> None:
    assert differing(name).digest != LAYOUT.digest


@settings(deadline=None)
@given(st.sets(st.sampled_from(FIELDS), min_size=1))
def test_the_first_field_that_differs_is_named_with_both_values(names: set[str]) -> None:
    first = min(names, key=FIELDS.index)
    ours, theirs = LAYOUT, differing(*names)
    words = f"{first} {getattr(ours, first)}/{getattr(theirs, first)}"
    assert first_difference(ours, theirs) == words


def test_every_field_of_a_layout_is_compared() -> None:
    assert list(Layout.__struct_fields__) == FIELDS


@settings(deadline=None)
@given(layouts)
def test_ranks_share_the_layers_in_order_and_evenly(layout: Layout) -> None:
    shares = [layout.layers_of(rank) for rank in range(layout.ranks)]
    assert [layer for share in shares for layer in share] == list(range(layout.layers))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert min(map(len, shares)) >= 1


@settings(deadline=None)
@given(layouts, st.integers(1, 40), st.integers(1, 40), st.data())
def test_nothing_overlaps_in_a_region(
    layout: Layout, pages_count: int, aux_rows: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, layout.ranks - 1))
    region = RegionMap(layout=layout, rank=rank, pages_count=pages_count, aux_rows=aux_rows)
    pages = [(page * region.page_bytes, region.page_bytes) for page in range(pages_count)]
    rows = [(region.aux_offset + row * AUX_ROW_BYTES, AUX_ROW_BYTES) for row in range(aux_rows)]
    pieces = [*pages, *rows, (region.scratch_offset, SCRATCH_BYTES)]
    for (at, length_bytes), (following, _) in pairwise(pieces):
        assert at + length_bytes == following
    assert sum(pieces[-1]) == region.length_bytes


@settings(deadline=None)
@given(layouts)
def test_pages_of_all_ranks_hold_every_layer_of_a_page_of_tokens(layout: Layout) -> None:
    a_token = 2 * layout.kv_heads * layout.head_dim * DTYPE_BYTES[layout.dtype]
    total = sum(layout.page_bytes(rank) for rank in range(layout.ranks))
    assert total == layout.layers * layout.page_size * a_token


@settings(deadline=None)
@given(layouts, st.integers(0, 1000))
def test_pages_for_tokens_are_enough_and_not_one_too_many(layout: Layout, tokens: int) -> None:
    pages = layout.pages_for(tokens)
    assert (pages - 1) * layout.page_size < tokens <= pages * layout.page_size or pages == 0


@pytest.mark.parametrize("name", ["layers", "kv_heads", "head_dim", "page_size", "ranks"])
def test_a_layout_without_something_is_refused(name: str) -> None:
    with pytest.raises(BadConfig, match=name):
        msgspec.structs.replace(LAYOUT, **{name: 0})


def test_impossible_layouts_are_refused() -> None:
    with pytest.raises(BadConfig, match="int8"):
        msgspec.structs.replace(LAYOUT, dtype="int8")
    with pytest.raises(BadConfig, match="use fewer --devices"):
        msgspec.structs.replace(LAYOUT, ranks=7)
