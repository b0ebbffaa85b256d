"""Aux rows: the fixed-size row that travels with the last chunk of a room.

     0      8        16            20        24              28     32       112           192
    +------+--------+-------------+---------+---------------+------+--------+-------------+
    | room | digest | first_token | logprob | prompt_tokens | tops | 20 ids | 20 logprobs |
    +------+--------+-------------+---------+---------------+------+--------+-------------+

Every rank has its own copy, so that a rank's success covers it.  Decode compares the room id: a row
that belongs to another room means that the KV beside it does too.  `digest` is that of the KV
itself (`memory.digest`), 0 if prefill did not compute one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from pdrt.errors import AuxFull, CorruptAux
from pdrt.protocol.layout import AUX_ROW_BYTES, RegionMap

TOP_MAX = 20
ROW = struct.Struct(f"<QQifii{TOP_MAX}i{TOP_MAX}f")
WIPED = b"\xff" * AUX_ROW_BYTES
assert ROW.size <= AUX_ROW_BYTES


@dataclass(frozen=True)
class AuxRow:
    room: int
    first_token: int
    logprob: float = 0.0
    prompt_tokens: int = 0
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first, at most 20
    digest: int = 0  # of the KV; 0: not computed


class AuxRows:
    """The aux rows of one engine, over all its ranks."""

    def __init__(self, regions: Sequence[memoryview], maps: Sequence[RegionMap]) -> None:
        """`regions[r]` is the whole region of rank r, described by `maps[r]`."""
        self._regions = list(zip(regions, (m.aux_offset for m in maps), strict=True))
        self.rows_count = min(m.aux_rows for m in maps)
        self._free = list(range(self.rows_count - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def used_count(self) -> int:
        return len(self._used)

    def reserve(self) -> int:
        """A row nobody uses, wiped so that an old room id cannot pass for a new one: with ones, for
        zero is a legal room, and no room has the highest bit."""
        if not self._free:
            raise AuxFull(f"all {self.rows_count} aux rows are in use; raise --aux-rows")
        index = self._free.pop()
        self._used.add(index)
        for region, offset in self._regions:
            start = offset + index * AUX_ROW_BYTES
            region[start : start + AUX_ROW_BYTES] = WIPED
        return index

    def release(self, index: int) -> None:
        """Give a row back.  The room must be quiet."""
        assert index in self._used, index
        self._used.remove(index)
        self._free.append(index)

    def write(self, index: int, row: AuxRow) -> None:
        top = row.top[:TOP_MAX]
        ids = [token for token, _ in top] + [0] * (TOP_MAX - len(top))
        values = [value for _, value in top] + [0.0] * (TOP_MAX - len(top))
        for region, offset in self._regions:
            ROW.pack_into(
                region,
                offset + index * AUX_ROW_BYTES,
                row.room,
                row.digest,
                row.first_token,
                row.logprob,
                row.prompt_tokens,
                len(top),
                *ids,
                *values,
            )

    def read(self, index: int, room: int) -> AuxRow:
        """The row as it landed.  Raises CorruptAux unless every rank's copy is `room`'s."""
        for rank, (region, offset) in enumerate(self._regions):
            start = offset + index * AUX_ROW_BYTES
            found, digest, token, logprob, prompt_tokens, tops, *rest = ROW.unpack_from(
                region, start
            )
            if found != room:
                raise CorruptAux(room, f"aux row {index} of rank {rank} belongs to room {found}")
            if not 0 <= tops <= TOP_MAX:
                raise CorruptAux(room, f"aux row {index} of rank {rank} has {tops} tops")
        top = tuple(zip(rest[:tops], rest[TOP_MAX : TOP_MAX + tops], strict=True))
        return AuxRow(room, token, logprob, prompt_tokens, top, digest)
