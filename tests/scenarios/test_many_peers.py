"""Scenario of a process that talks to more peers than ZMQ has sockets by default.

F029.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator

import psutil
import pytest

from pdrt.mail.mailbox import Mailbox
from pdrt.protocol.counters import Counter
from pdrt.protocol.messages import NewsTaken
from tests.waiting import wait_until

PEERS = 1200  # ZMQ's own bound is 1,023
KEPT = 100


@pytest.fixture(autouse=True)
def enough_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_peers_than_zmq_has_sockets_by_default_and_fewer_again() -> None:
    """Each has its link and its queue; of those that go nothing stays."""
    counted: dict[int, int] = {}

    def count(counter: Counter, amount: int, offset: int) -> None:
        counted[counter] = counted.get(counter, 0) + amount

    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        mailbox, process = Mailbox(b"me", count), psutil.Process()
        before = process.num_fds()
        for number in range(PEERS):
            mailbox.link(f"peer{number}", f"tcp://{host}:{port}", from_peer=True)
            mailbox.post(f"peer{number}", NewsTaken(number, 1))
        mailbox.receive(0)
        mailbox.flush()
        assert counted[Counter.MESSAGES_OUT] == PEERS
        assert Counter.SENDS_REFUSED not in counted
        many = process.num_fds() - before
        assert many >= PEERS
        for number in range(KEPT, PEERS):
            mailbox.unlink(f"peer{number}")
        few = 1.5 * many * KEPT / PEERS
        wait_until(lambda: process.num_fds() - before < few, 10, "descriptors to be given back")
        mailbox.close()
