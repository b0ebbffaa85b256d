"""A room told while its worker is being replaced is told by the successor's number.

Found by the matrix: told between a worker's burial and its successor's launch, a room was owned by
incarnation 0; the next sweep after the launch took it for a dead worker's and failed it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from pdrt import shm_status
from pdrt.engine.receiver import KVReceiver
from pdrt.engine.room import Desk
from pdrt.mail.mailbox import Address
from pdrt.process_rows import Owner
from pdrt.protocol.messages import AnyMessage, Destination
from pdrt.protocol.states import Event, KVPoll, Role
from pdrt.shm_status import StatusTable

WORKER, ENGINE = 8, 48
OPEN_MS = {KVPoll.Bootstrapping: 1000, KVPoll.WaitingForInput: 1000, KVPoll.Transferring: 1000}


class Post:
    def __init__(self) -> None:
        self.sent: list[AnyMessage] = []

    def post(self, to: Address, message: AnyMessage, *, lazy: bool = False) -> None:
        self.sent.append(message)

    def link(self, name: str, endpoint: str, *, from_peer: bool = False) -> None:
        """Nobody is at the other end."""

    def unlink(self, name: str) -> None:
        """There is no link."""


@pytest.fixture
def table() -> Iterator[StatusTable]:
    fd = shm_status.create(
        Role.DECODE, rooms_max=4, instance=bytes(16), timeouts_ms=OPEN_MS, now_ns=1
    )
    made = StatusTable(fd, Owner(ENGINE, 1))
    yield made
    made.close()
    os.close(fd)


def test_a_room_is_told_once_its_worker_has_a_successor(table: StatusTable) -> None:
    post = Post()
    desk = Desk(
        table,
        post,
        lambda: 2,
        "us",
        lambda: None,
        lambda room: None,
        lambda rank: Owner(WORKER + rank, table.incarnation(WORKER + rank)),
        1_000_000,
    )
    handle = table.open(7, 0, now_ns=1)
    receiver = KVReceiver(7, [handle], desk, "peer:1")
    table.move(handle.slot, handle.generation, Event.PEER_KNOWN, now_ns=1)
    table.bury(WORKER)

    def state() -> KVPoll:
        word = table.read(handle.slot, handle.generation)
        assert word is not None
        return word.state

    receiver.send_metadata(np.arange(2, dtype=np.int32), 0)
    assert receiver.poll() is KVPoll.Transferring, "an engine tells a room once"
    assert state() is KVPoll.WaitingForInput
    assert not receiver.queued, "its deadline must run: the successor may never come"
    receiver.resend(2, restarted=False)
    assert state() is KVPoll.WaitingForInput

    table.incarnate(WORKER, 2, 1, "worker0")
    receiver.resend(2, restarted=False)
    assert state() is KVPoll.Transferring
    told = [message for message in post.sent if isinstance(message, Destination)]
    assert [message.agent_epoch for message in told] == [2]
