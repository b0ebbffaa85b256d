"""The rows of processes in the status table: who lives there, and how it beats.

      0          8       16      24        32      64     96
    +----------+-------+-------+---------+-------+------+-------+
    | identity | ready | pulse | beat_ns | spare | name | spare |
    +----------+-------+-------+---------+-------+------+-------+

`identity` is the incarnation (11 bits) above the pid (32 bits), or 0: nobody.  Each word has one
writer: the supervisor says who lives in a row, the process itself that it is ready and turns.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

HEADER_BYTES = 4096  # of the table, before the rows
OWNERS_MAX = 64
OWNER_BYTES = 128
ROWS_END = HEADER_BYTES + OWNERS_MAX * OWNER_BYTES
O_IDENTITY, O_READY, O_PULSE, O_BEAT_NS, O_NAME = 0, 8, 16, 24, 64
INCARNATION_MASK = 0x7FF


class Owner(NamedTuple):
    """A process as the table knows it.  Row 0 is nobody."""

    row: int
    incarnation: int


NOBODY = Owner(0, 0)


class Atomics(Protocol):
    """Atomic 64-bit operations at byte offsets of the map."""

    def load_u64(self, offset: int, /) -> int: ...
    def store_u64(self, offset: int, value: int, /) -> None: ...
    def cas_u64(self, offset: int, expected: int, desired: int, /) -> int: ...
    def fetch_add_u64(self, offset: int, amount: int, /) -> int: ...
    def close(self) -> None: ...


class ProcessRows:
    """The part of a StatusTable that is about processes; the table sets the attributes."""

    me: Owner  # who uses this view
    map: mmap.mmap
    _view: Atomics
    _load: Callable[[int], int]
    _store: Callable[[int, int], None]
    _owners: NDArray[np.uint64]  # (OWNERS_MAX, OWNER_BYTES / 8)

    def incarnate(self, row: int, incarnation: int, pid: int, name: str) -> None:
        """Supervisor: a new process takes the row.  It is not ready yet."""
        at = HEADER_BYTES + row * OWNER_BYTES
        self.map[at + O_NAME : at + O_NAME + 32] = name.encode()[:32].ljust(32, b"\0")
        self._store(at + O_IDENTITY, (incarnation & INCARNATION_MASK) << 32 | pid)

    def bury(self, row: int) -> None:
        """Supervisor: the process is gone (its pidfd fired).  Its rooms may be swept."""
        self._store(HEADER_BYTES + row * OWNER_BYTES + O_IDENTITY, 0)

    def beat(self, now_ns: int) -> None:
        """A process: I am turning.  `me` must be set."""
        at = HEADER_BYTES + self.me.row * OWNER_BYTES
        self._store(at + O_BEAT_NS, now_ns)
        self._view.fetch_add_u64(at + O_PULSE, 1)

    def announce_ready(self) -> None:
        self._store(HEADER_BYTES + self.me.row * OWNER_BYTES + O_READY, self.me.incarnation)

    def ready(self, row: int) -> bool:
        """Has the present incarnation of the row announced itself?"""
        at = HEADER_BYTES + row * OWNER_BYTES
        identity = self._load(at + O_IDENTITY)
        return identity != 0 and self._load(at + O_READY) & INCARNATION_MASK == identity >> 32

    def pulse(self, row: int) -> int:
        return self._load(HEADER_BYTES + row * OWNER_BYTES + O_PULSE)

    def beat_ns(self, row: int) -> int:
        return self._load(HEADER_BYTES + row * OWNER_BYTES + O_BEAT_NS)

    def incarnation(self, row: int) -> int:
        """Incarnation (11 bits) that lives in the row now; 0 if none."""
        return self._load(HEADER_BYTES + row * OWNER_BYTES + O_IDENTITY) >> 32

    def incarnations(self) -> NDArray[np.uint64]:
        """Living incarnation of every row, (owners_max,)."""
        return self._owners[:, 0] >> np.uint64(32)
