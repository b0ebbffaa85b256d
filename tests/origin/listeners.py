"""Prefill's listener behind real sockets, run by its own loop in the test's thread."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import zmq

from pdrt.actors import base
from pdrt.actors.base import Beating
from pdrt.actors.boot import LISTENER_ROW
from pdrt.actors.prefill_listener import PrefillListener
from pdrt.clock import SECOND_NS, monotonic_ns
from pdrt.config import Timeouts
from pdrt.mail.mailbox import Mailbox
from pdrt.process_rows import Owner
from pdrt.protocol import codec
from pdrt.protocol.counters import Counter
from pdrt.protocol.messages import AnyMessage
from pdrt.protocol.states import OPEN, Role
from pdrt.shm_status import StatusTable, create
from tests.actors.world import LAYOUT

GUARD_S = 10.0


@dataclass
class LoneListener:
    """And a peer that talks to it: a raw socket, which may say anything."""

    table: StatusTable
    mailbox: Mailbox
    actor: PrefillListener
    peer: zmq.Socket[bytes]
    answers: list[AnyMessage] = field(default_factory=list)

    def run_until(self, done: Callable[[], bool]) -> None:
        """Turn until `done`."""
        give_up_ns = monotonic_ns() + int(GUARD_S * SECOND_NS)

        def stopping() -> bool:
            while self.peer.poll(0):
                self.answers += codec.decode(self.peer.recv())
            assert monotonic_ns() < give_up_ns, "it does not answer"
            return done()

        args = self.actor, self.mailbox, self.table, monotonic_ns
        base.run(*args, stopping=stopping, wake=lambda: None)

    def count(self, counter: Counter, kinds: int = 1) -> int:
        return int(self.table.counters[LISTENER_ROW, counter : counter + kinds].sum())


@contextlib.contextmanager
def lone_listener() -> Iterator[LoneListener]:
    fd = create(
        Role.PREFILL,
        rooms_max=64,
        instance=b"p".ljust(16, b"\0"),
        timeouts_ms=dict.fromkeys(OPEN, 60_000),
        now_ns=monotonic_ns(),
    )
    table = StatusTable(fd, Owner(LISTENER_ROW, 1))
    table.incarnate(LISTENER_ROW, 1, os.getpid(), "listener")
    mailbox = Mailbox(b"listener", table.count)
    context = zmq.Context()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        mailbox.open_door("control", endpoint, os.dup(server.fileno()), from_peer=True)
        actor = PrefillListener(
            instance="p",
            boot_id="host",
            layout=LAYOUT,
            table=table,
            mailbox=mailbox,
            timeouts=Timeouts(),
            wake=lambda row: None,
            nobody_listens=lambda peer, now_ns: False,
            beating=Beating(lambda: table.beat(monotonic_ns())),
        )
        peer = context.socket(zmq.DEALER)
        peer.connect(endpoint)
        yield LoneListener(table, mailbox, actor, peer)
        peer.close(linger=0)
        context.term()
        mailbox.close()
    table.close()
    os.close(fd)
