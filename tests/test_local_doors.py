"""A local door is for the processes of one user, whoever may read its name in /proc/net/unix."""

from __future__ import annotations

import multiprocessing
import os
import secrets

import pytest
import zmq

from pdrt.actors.boot import local_door
from pdrt.mail.mailbox import Mailbox
from pdrt.protocol import codec
from pdrt.protocol.messages import Ended
from tests.waiting import wait_until

NOBODY_UID = 65534


def knock(endpoint: str, uid: int) -> None:
    """Connect as another user, say something, wait a little for a connection that does not come."""
    os.setuid(uid)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    socket.send(codec.encode([Ended(1, 1, failed=True)]))
    context.destroy(linger=500)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize(("uid", "served"), [(0, True), (NOBODY_UID, False)])
def test_a_local_door_serves_its_own_user_only(uid: int, served: bool) -> None:
    endpoint = f"ipc://@pdrt-test-{secrets.token_hex(4)}"
    counted: list[object] = []
    mailbox = Mailbox(b"door", lambda *count: counted.append(count))
    visitor = multiprocessing.get_context("spawn").Process(target=knock, args=(endpoint, uid))
    with local_door(endpoint) as door:
        mailbox.open_door("local", endpoint, os.dup(door.fileno()), from_peer=False)
        visitor.start()
        arrived: list[object] = []

        def over() -> bool:
            arrived.extend(mailbox.receive(10))
            return bool(arrived) or not visitor.is_alive()

        wait_until(over, 20, "a message, or the visitor to give up")
        arrived.extend(mailbox.receive(50))
        assert bool(arrived) is served
        visitor.join(10)
        mailbox.close()
