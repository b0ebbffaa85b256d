"""Doors, mailboxes and raw sockets, and what was counted at them."""

from __future__ import annotations

import os
import secrets
import socket
from collections import Counter as Multiset
from collections.abc import Callable
from typing import Any

import zmq

from pdrt.mail.mailbox import Envelope, Mailbox
from pdrt.protocol.codec import Malformed
from pdrt.protocol.counters import Counter
from pdrt.protocol.messages import AnyMessage, NewsTaken
from tests.waiting import wait_until

WAIT_S = 10.0
NEWS = NewsTaken(1, 3)


class Counts:
    """What a mailbox counted."""

    def __init__(self) -> None:
        self.of: Multiset[int] = Multiset()

    def __call__(self, counter: Counter, amount: int, offset: int) -> None:
        self.of[counter + offset] += amount

    def malformed(self) -> dict[Malformed, int]:
        found = {kind: self.of[Counter.MALFORMED + kind] for kind in Malformed}
        return {kind: count for kind, count in found.items() if count}


class Site:
    """Listening sockets, mailboxes and raw sockets of one test."""

    def __init__(self) -> None:
        self.listening: list[socket.socket] = []
        self.mailboxes: list[Mailbox] = []
        self.context = zmq.Context()
        self.raws: list[zmq.Socket[bytes]] = []

    def listen(self, family: str = "tcp") -> tuple[str, socket.socket]:
        if family == "tcp":
            server = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            server.bind(("127.0.0.1", 0))
            endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        else:
            server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            name = f"pdrt-test-{secrets.token_hex(8)}"
            server.bind(f"\0{name}")
            endpoint = f"ipc://@{name}"
        server.listen(128)
        server.setblocking(False)
        self.listening.append(server)
        return endpoint, server

    def mailbox(self, identity: str, **how: Any) -> tuple[Mailbox, Counts]:
        counts = Counts()
        made = Mailbox(identity.encode(), counts, **how)
        self.mailboxes.append(made)
        return made, counts

    def door(
        self, *, from_peer: bool = True, family: str = "tcp"
    ) -> tuple[str, Mailbox, Counts, socket.socket]:
        endpoint, server = self.listen(family)
        owner, counts = self.mailbox("owner")
        owner.open_door("door", endpoint, os.dup(server.fileno()), from_peer=from_peer)
        return endpoint, owner, counts, server

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self.context.socket(kind)
        self.raws.append(made)
        return made

    def raw(self, endpoint: str, identity: bytes = b"raw") -> zmq.Socket[bytes]:
        dealer = self.socket(zmq.DEALER)
        dealer.set(zmq.ROUTING_ID, identity)
        dealer.set(zmq.LINGER, 0)
        dealer.set(zmq.SNDTIMEO, 10_000)
        dealer.set(zmq.RCVTIMEO, 10_000)
        dealer.connect(endpoint)
        return dealer

    def close(self) -> None:
        for each in self.mailboxes:
            each.close()
        for server in self.listening:
            server.close()
        for raw in self.raws:
            raw.close(linger=0)
        self.context.term()


def post(mailbox: Mailbox, to: str | tuple[str, bytes], *messages: AnyMessage) -> None:
    for message in messages:
        mailbox.post(to, message)
    mailbox.flush()


def collect(mailbox: Mailbox, count: int) -> list[Envelope]:
    """Wait for that many envelopes; more is an error."""
    found: list[Envelope] = []

    def enough() -> bool:
        found.extend(mailbox.receive(20))
        return len(found) >= count

    wait_until(enough, WAIT_S, f"{count} envelopes")
    assert len(found) == count
    return found


def counted(mailbox: Mailbox, is_so: Callable[[], object], what: str) -> list[Envelope]:
    """Take in until something was counted; returns what came meanwhile."""
    found: list[Envelope] = []

    def look() -> object:
        found.extend(mailbox.receive(20))
        return is_so()

    wait_until(look, WAIT_S, what)
    return found
