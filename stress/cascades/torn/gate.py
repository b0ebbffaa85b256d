"""What readers and writers of `torn` are told, and how they begin and end together."""

from __future__ import annotations

import json
import mmap
import signal
import time
from typing import Any, Self

import msgspec
from atomicshm import AtomicView

from pdrt.child import PR_SET_PDEATHSIG, prctl
from pdrt.clock import monotonic_ns
from pdrt.memory.aux import AuxRows
from pdrt.shm_status import StatusTable
from stress.cascades.torn.table import aux_rows, region_map

LOOK_S = 0.001
WAITING, OPEN, SHUT = 0, 1, 2


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """To one process, as JSON in its arguments.  `out`: a history, or a file of sights."""

    table_fd: int
    region_fd: int
    slots: int
    seed: str
    row: int
    incarnation: int = 1
    mutant: str = ""
    out: str

    @classmethod
    def read(cls, text: str) -> Self:
        return msgspec.json.decode(text, type=cls)

    def region(self) -> memoryview:
        return memoryview(mmap.mmap(self.region_fd, region_map(self.slots).length_bytes))

    def aux_rows(self) -> AuxRows:
        return aux_rows(self.region(), self.slots)

    @staticmethod
    def answer(what: dict[str, Any]) -> None:
        print(json.dumps(what), flush=True)


class Gate:
    """A cell of the shared memory behind the aux rows: nobody works before it is open."""

    def __init__(self, region: memoryview, slots: int) -> None:
        self._view = AtomicView(region)
        self._at = region_map(slots).scratch_offset

    def is_open(self) -> bool:
        return self._view.load_u64(self._at) == OPEN

    def set(self, state: int) -> None:
        self._view.store_u64(self._at, state)

    def wait(self) -> None:
        while self._view.load_u64(self._at) == WAITING:
            time.sleep(LOOK_S)

    def close(self) -> None:
        self._view.close()


def begin(told: Told, table: StatusTable) -> Gate:
    """Say that this process is there and wait until all are."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    gate = Gate(told.region(), told.slots)
    table.beat(monotonic_ns())
    gate.wait()
    return gate
