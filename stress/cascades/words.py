"""A status table as a stranger reads it: its own decoding, written from the drawing in the docs.

Nothing here comes from pdrt: what pdrt believes about its table is what is being examined.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAGIC = b"1ls_trdp"
HEADER_BYTES, OWNER_BYTES, SLOT_BYTES = 4096, 128, 128
HEADER = struct.Struct("<8s6IQ16s")  # magic, version, role, slots, owners, counters, pid, start, id
IDENTITY, READY, PULSE = 0, 8, 16  # in an owner's row
DEADLINE = 2  # u64 of a slot

FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS, CLAIMED = 0, 1, 2, 3, 4, 15
STATES = {0: "Failed", 1: "Bootstrapping", 2: "WaitingForInput", 3: "Transferring", 4: "Success"}
OPEN = (BOOTSTRAPPING, WAITING, TRANSFERRING)
VERDICTS = (FAILED, SUCCESS)

PREFILL, DECODE = 1, 2
SUPERVISOR, LISTENER, LISTENER_STANDBY, WORKER_STANDBY, WORKER = 1, 2, 3, 4, 8  # rows

#: Why a room failed.
REASONS = (
    "none", "aborted", "client gone", "peer aborted", "bootstrap timeout", "waiting timeout",
    "transfer stalled", "peer lost", "peer restarted", "peer refused", "worker died",
    "engine died", "transport failed", "bad destination", "layout mismatch", "corrupt aux",
    "rank failed", "worker fenced", "shutdown",
)  # fmt: skip
(
    NONE, ABORTED, CLIENT_GONE, PEER_ABORTED, BOOTSTRAP_TIMEOUT, WAITING_TIMEOUT, STALLED,
    PEER_LOST, PEER_RESTARTED, PEER_REFUSED, WORKER_DIED, ENGINE_DIED, TRANSPORT_FAILED,
    BAD_DESTINATION, LAYOUT_MISMATCH, CORRUPT_AUX, RANK_FAILED, WORKER_FENCED, SHUTDOWN,
) = range(19)  # fmt: skip


class Word(NamedTuple):
    state: int
    quiet: bool
    reason: int
    owner: int  # row and incarnation together
    generation: int

    @property
    def live(self) -> bool:
        return bool(self.generation & 1)


def decode(word: int) -> Word:
    return Word(word & 0xF, bool(word >> 4 & 1), word >> 5 & 0xFF, word >> 13 & 0x7FFFF, word >> 32)


class View:
    """A mapped table.  The descriptor stays the caller's."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        fields = HEADER.unpack_from(self._map)
        if fields[0] != MAGIC:
            raise ValueError(f"not a status table: {fields[0]!r}")
        _, self.version, self.role, self.slots_count, owners, counters, self.pid, _, self.id = (
            fields
        )
        slots = HEADER_BYTES + owners * (OWNER_BYTES + counters * 8)
        cells = np.frombuffer(self._map, dtype="<u8")
        self.rows: NDArray[np.uint64] = cells[slots // 8 :].reshape(self.slots_count, 16)
        self.words: NDArray[np.uint64] = self.rows[:, 0]
        self.owners: NDArray[np.uint64] = cells[
            HEADER_BYTES // 8 : HEADER_BYTES // 8 + owners * OWNER_BYTES // 8
        ].reshape(owners, OWNER_BYTES // 8)

    def word(self, slot: int) -> Word:
        return decode(int(self.words[slot]))

    def identity(self, row: int) -> int:
        """Incarnation << 32 | pid of the process in a row; 0 if there is none."""
        return int(self.owners[row, IDENTITY])

    def pid_of(self, row: int) -> int:
        return self.identity(row) & 0xFFFF_FFFF

    def serves(self, row: int, before: int) -> bool:
        """Is another process than the one of identity `before` ready in the row?"""
        identity = self.identity(row)
        ready = int(self.owners[row, READY // 8])
        return identity not in (0, before) and identity >> 32 == ready & 0x7FF

    def pulse(self, row: int) -> int:
        """Any change is a sign of life."""
        return int(self.owners[row, PULSE // 8])

    def states(self) -> NDArray[np.uint64]:
        """Of every slot; 255 where no room is."""
        words = self.words.copy()
        return np.where(words >> np.uint64(32) & np.uint64(1), words & np.uint64(0xF), 255)

    def live_count(self) -> int:
        return int(np.count_nonzero(self.words >> np.uint64(32) & np.uint64(1)))

    def overdue_ms(self, now_ns: int) -> NDArray[np.int64]:
        """Of every slot: how long ago the deadline of its open room passed; negative before."""
        rows = self.rows[:, : DEADLINE + 1].copy()
        live = rows[:, 0] >> np.uint64(32) & np.uint64(1)
        state = rows[:, 0] & np.uint64(0xF)
        # the deadline carries the low 24 bits of its room's generation above 40 bits of time
        tag = rows[:, DEADLINE] >> np.uint64(40)
        same = tag == rows[:, 0] >> np.uint64(32) & np.uint64(0xFFFFFF)
        due_ms = (rows[:, DEADLINE] & np.uint64((1 << 40) - 1)).astype(np.int64)
        is_open = (live == 1) & (state >= 1) & (state <= 3) & same
        return np.where(is_open, now_ns // 1_000_000 - due_ms, -1)

    def close(self) -> None:
        del self.rows, self.words, self.owners
        self._map.close()
