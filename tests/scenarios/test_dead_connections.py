"""Connections that the network swallows are given up and tried anew, not left to the kernel.

F059.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import psutil
import pytest

from pdrt.mail import mailbox as mailbox_module
from pdrt.mail.mailbox import Mailbox
from pdrt.protocol.messages import NewsTaken
from tests.waiting import wait_until


def attempts(port: int) -> set[int]:
    """Our ends of connections that nobody has answered."""
    ours = psutil.Process().net_connections("tcp")
    waiting = [c for c in ours if c.status == psutil.CONN_SYN_SENT]
    return {c.laddr.port for c in waiting if c.raddr.port == port}


@pytest.fixture
def swallowing() -> Iterator[socket.socket]:
    """A host that answers no attempt to connect: with a full queue the kernel drops each."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        place = server.getsockname()
        while not attempts(place[1]):
            attempt = stack.enter_context(socket.socket())
            attempt.setblocking(False)
            attempt.connect_ex(place)
        yield server


def test_a_connect_that_nobody_answers_is_abandoned_and_tried_again(
    swallowing: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would repeat it, ever more rarely, for two minutes."""
    monkeypatch.setattr(mailbox_module, "CONNECT_MS", 50)
    port = swallowing.getsockname()[1]
    before = attempts(port)
    seen: set[int] = set()
    link = Mailbox(b"link", lambda counter, amount, offset: None)
    link.link("to", f"tcp://127.0.0.1:{port}", from_peer=True)
    link.post("to", NewsTaken(1, 1))
    link.flush()

    def tried_again() -> bool:
        link.receive(0)
        seen.update(attempts(port) - before)
        return len(seen) > 2

    wait_until(tried_again, 10, "three attempts")
    link.close()
