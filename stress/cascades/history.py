"""The append-only history of one process: what it did and what it saw, when.

A record is 32 bytes and has its place in a mapped file as soon as it is written, so a process that
is killed at any instant loses nothing but the record it was just writing.  Readers take a file as
one numpy array.  The meaning of `a`, `b` and `c` is beside each kind.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from time import monotonic_ns

import numpy as np
from numpy.typing import NDArray

#: ns, room, c, b, a, kind.  The kind comes last: a record without one was never finished.
RECORD = struct.Struct("<QQQIHH")
DTYPE = np.dtype(
    [("ns", "<u8"), ("room", "<u8"), ("c", "<u8"), ("b", "<u4"), ("a", "<u2"), ("kind", "<u2")]
)
STEP_BYTES = 1 << 20  # a file grows by this; what is never written takes no place on the disk

assert DTYPE.itemsize == RECORD.size
assert STEP_BYTES % RECORD.size == STEP_BYTES % mmap.ALLOCATIONGRANULARITY == 0


class Kind(IntEnum):
    """Numbers from 1,000 on are for cascades with words of their own."""

    # an engine on its rooms
    OPENED = 1  # a: player; b: generation; c: slot
    TOLD = 2  # decode: where its pages are.  a: player; b: pages
    SENT = 3  # prefill: a chunk.  a: player; b: index; c: is it the last
    ABORTED = 4  # a: player; b: aim; c: reason
    DECLINED = 5  # a: player
    VERDICT = 6  # first sight.  a: player; b: state; c: reason
    AGAIN = 7  # looked at again, as VERDICT, straight from the table
    QUIET = 8  # a: player
    CLEARED = 9  # a: player
    BYTES = 10  # decode, at Success.  a: player; b: every page one word throughout; c: digest
    TOKEN = 11  # decode, at Success: what the aux row says.  a: player; c: token
    FILLED = (
        12  # pages of a quiet room that is over, filled for their next owner.  a: player; b: pages
    )
    LOOKED = 13  # the same pages again.  a: player; b: pages; c: pages that changed
    GONE = 14  # the room's table lost its tree; nobody's memory any more.  a: player
    REFUSED = 15  # a limit said no.  a: player

    # a player on itself
    ATTACHED = 30  # a: player; b: pid; c: instance's first 8 bytes
    DETACHED = 31  # its tree is gone.  a: player
    LEFT = 32  # it ends by itself; so do watcher and connector.  a: player

    # the watcher on a table
    TABLE = 40  # a table is watched.  a: tree; b: its number; room: queue of bounds; c: role
    WORD = 41  # a: table's number; b: slot; c: the word now
    LATE = 42  # open past its deadline.  a: table's number; b: slot; c: generation; room: ns late
    UNWATCHED = 43  # the last look at a table.  a: table's number
    LOOKS = 44  # a: table's number; c: how often it was looked at; room: longest gap in ns
    ROW = 45  # of a process.  a: table's number; b: row; c: identity; room: ready
    SILENT = 46  # a process showed no pulse, until it did or was gone.  As ROW; room: ns

    # the driver
    SIGNAL = 60  # a: tree or player; b: pid; c: number, mode, role; room: cycle
    DEAD = 61  # b: pid
    CONTINUED = 62  # b: pid
    BACK = 63  # the role serves again.  a: tree or player; b: mode, role; room: ns since
    CYCLE = 64  # a new one begins.  room: cycle
    CENSUS = 65  # at the end.  a: tree or player; b: what (see survey); c: how many
    CROWD = 67  # many clients were killed at once.  b: how many; room: ns until all was over
    END = 66  # from here on nothing is opened

    # a client that only connects
    CONNECTED = 80  # a: tree
    SERVED = 81  # the listener spoke.  a: tree
    TURNED_AWAY = 82  # refused by the kernel.  a: tree; c: errno
    RESET = 83  # accepted, and the listener died before it spoke.  a: tree
    CONNECTING = 84  # begun.  a: tree


class Writer:
    """Append-only.  One process writes a file; another file is for another process.

    It maps the end of the file alone: what a process under test holds must not grow by what is
    written down about it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._begin = 0  # of what is mapped, in the file
        self._map = self._mapped()
        self._at = 0  # in what is mapped

    def append(
        self, kind: int, room: int = 0, a: int = 0, b: int = 0, c: int = 0, ns: int = 0
    ) -> None:
        if self._at == STEP_BYTES:
            self._grow()
        RECORD.pack_into(self._map, self._at, ns or monotonic_ns(), room, c, b, a, kind)
        self._at += RECORD.size

    def _mapped(self) -> mmap.mmap:
        os.ftruncate(self._fd, self._begin + STEP_BYTES)
        return mmap.mmap(self._fd, STEP_BYTES, offset=self._begin)

    def _grow(self) -> None:
        self._map.close()
        self._begin += STEP_BYTES
        self._map = self._mapped()
        self._at = 0

    def close(self) -> None:
        self._map.close()
        os.ftruncate(self._fd, self._begin + self._at)
        os.close(self._fd)


def read(path: Path) -> NDArray[np.void]:
    """Everything that was written whole, in order."""
    data = path.read_bytes()
    records = np.frombuffer(data[: len(data) // RECORD.size * RECORD.size], dtype=DTYPE)
    blank = np.flatnonzero(records["kind"] == 0)
    return records[: blank[0]] if len(blank) else records


def read_all(folder: Path) -> dict[str, NDArray[np.void]]:
    """By the file's name without its ending."""
    return {path.stem: read(path) for path in sorted(folder.glob("*.history"))}


def tell(records: NDArray[np.void]) -> Iterator[str]:
    """One line for each record, for people."""
    names = {int(kind): kind.name for kind in Kind}
    for ns, room, c, b, a, kind in records.tolist():
        yield f"{ns / 1e9:.6f} {names.get(kind, kind)} room={room} a={a} b={b} c={c}"
