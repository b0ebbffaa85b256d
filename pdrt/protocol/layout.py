"""KV layout of an engine: what one page of one rank holds, and whether two engines can exchange it.

A rank owns a contiguous slice of the model's layers.  Its region of memory is

    +--------------------------------------+-----------------+---------+
    | pages_count x page_bytes(rank)       | aux_rows x 256  | scratch |
    +--------------------------------------+-----------------+---------+
    page: [layer of the rank][key, value][token][kv head][head_dim], in row-major order

so a page is one contiguous piece (the fewest descriptors a transfer can have) and page n of every
rank belongs to the same tokens.  The scratch bytes at the end are the target of warm-ups and
fences.
"""

from __future__ import annotations

import hashlib
from functools import cached_property

import msgspec

from pdrt.errors import BadConfig
from pdrt.protocol.codec import UNDECODABLE

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
AUX_ROW_BYTES = 256
SCRATCH_BYTES = 4096


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Everything two engines must agree on.  `pages_count` is not part of it: pools may differ."""

    model: str  # fingerprint of the model's configuration
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    page_size: int  # tokens
    ranks: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise BadConfig(f"dtype {self.dtype!r} is not one of {sorted(DTYPE_BYTES)}")
        for name in ("layers", "kv_heads", "head_dim", "page_size", "ranks"):
            if getattr(self, name) < 1:
                raise BadConfig(f"layout: {name} must be at least 1, got {getattr(self, name)}")
        if self.ranks > self.layers:
            raise BadConfig(
                f"{self.ranks} devices cannot share {self.layers} layers; use fewer --devices"
            )

    def layers_of(self, rank: int) -> range:
        """Layers that `rank` holds.  The first ranks take one more when they do not divide."""
        share, extra = divmod(self.layers, self.ranks)
        first = rank * share + min(rank, extra)
        return range(first, first + share + (1 if rank < extra else 0))

    @property
    def item_bytes(self) -> int:
        """Bytes of one page in one layer, keys or values alone."""
        return self.page_size * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def page_bytes(self, rank: int) -> int:
        """Bytes of one page of `rank`: its layers, keys and values."""
        return len(self.layers_of(rank)) * 2 * self.item_bytes

    def pages_for(self, tokens_count: int) -> int:
        """Pages that hold `tokens_count` tokens."""
        return -(-tokens_count // self.page_size)

    @property
    def digest(self) -> bytes:
        """Sixteen bytes that are equal exactly when every field is."""
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=16).digest()


def layout_of(data: bytes) -> Layout:
    """A layout that came as msgpack.  Raises BadConfig and nothing else, whatever the bytes are."""
    try:
        return msgspec.msgpack.decode(data, type=Layout)
    except UNDECODABLE as error:
        raise BadConfig(f"not a layout: {error}") from None


class RegionMap(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Where things lie in the region of one rank.  All offsets in bytes from its start."""

    layout: Layout
    rank: int
    pages_count: int
    aux_rows: int

    @cached_property
    def page_bytes(self) -> int:
        return self.layout.page_bytes(self.rank)

    @property
    def aux_offset(self) -> int:
        return self.pages_count * self.page_bytes

    @property
    def scratch_offset(self) -> int:
        return self.aux_offset + self.aux_rows * AUX_ROW_BYTES

    @property
    def length_bytes(self) -> int:
        return self.scratch_offset + SCRATCH_BYTES


def first_difference(ours: Layout, theirs: Layout) -> str | None:
    """Name the first field in which two layouts differ, with both values, ours first ("page_size
    16/32"); None if they agree."""
    for name in Layout.__struct_fields__:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            return f"{name} {mine}/{other}"
    return None
