"""A slot that its engine clears while the janitor looks is nobody's unquiet room.

Found by the matrix: such a slot reads as Failed and unquiet, of owner 0; the janitor asked for the
restart of a worker in row 0, which does not exist, and the rest of that sweep was lost.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from pdrt import shm_status
from pdrt.actors.base import Beating
from pdrt.actors.janitor import Janitor
from pdrt.clock import SECOND_NS
from pdrt.config import Timeouts
from pdrt.process_rows import Owner
from pdrt.protocol.states import Event, KVPoll, Reason, Role
from pdrt.shm_status import StatusTable

OPEN_MS = {KVPoll.Bootstrapping: 1000, KVPoll.WaitingForInput: 1000, KVPoll.Transferring: 1000}


class LateTable(StatusTable):
    """What `live_slots` found may be free by the time it is read."""

    def live_slots(self) -> NDArray[np.intp]:
        return np.arange(2, dtype=np.intp)


@pytest.fixture
def table() -> Iterator[LateTable]:
    fd = shm_status.create(
        Role.DECODE, rooms_max=4, instance=bytes(16), timeouts_ms=OPEN_MS, now_ns=1
    )
    made = LateTable(fd, Owner(1, 1))
    yield made
    made.close()
    os.close(fd)


def test_a_cleared_slot_is_not_fenced(table: LateTable) -> None:
    for room in (1, 2):
        handle = table.open(room, 0, now_ns=1)
        table.move(handle.slot, handle.generation, Event.FAULT, now_ns=1, reason=Reason.ABORTED)
        assert table.clear(handle.slot, handle.generation)
    fenced: list[int] = []
    janitor = Janitor(
        table=table,
        timeouts=Timeouts(),
        mapped=lambda peer, rank, epoch: False,
        fence=lambda row, reason: fenced.append(row),
        wake=lambda row: None,
        beating=Beating(lambda: None),
    )
    janitor.sweep(100 * SECOND_NS)
    assert fenced == []
