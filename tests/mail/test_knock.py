"""Calls to ports where somebody listens, nobody does, and nobody can tell.  The clock is ours, the
sockets are real."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from pdrt.clock import MILLISECOND_NS
from pdrt.mail.knock import CALLS_MAX, EVERY_NS, GONE_NS, Knocks
from tests.waiting import wait_until


class Caller:
    """Asks about a peer every 20 ms of a clock that waits for each answer."""

    def __init__(self) -> None:
        self.knocks = Knocks()
        self.now_ns = 10**15

    def ask(self, peer: str, for_ns: int, *, answered: bool = True) -> list[bool]:
        said = []
        for _ in range(0, for_ns, 20 * MILLISECOND_NS):
            self.now_ns += 20 * MILLISECOND_NS
            said.append(self.knocks(peer, self.now_ns))
            call = self.knocks._calls.get(peer)
            if answered and call is not None and call.connection is not None:
                wait_until(lambda: self._answered(peer), 5, "an answer on loopback")
        return said

    def _answered(self, peer: str) -> bool:
        self.knocks(peer, self.now_ns)
        return self.knocks._calls[peer].connection is None


@pytest.fixture
def caller() -> Iterator[Caller]:
    before = len(os.listdir("/proc/self/fd"))
    made = Caller()
    yield made
    made.knocks.close()
    assert len(os.listdir("/proc/self/fd")) == before


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_nobody_listens_for_a_while_is_gone(caller: Caller) -> None:
    said = caller.ask(f"127.0.0.1:{free_port()}", 2 * GONE_NS)
    assert not any(said[: GONE_NS // (20 * MILLISECOND_NS)])
    assert said[-1]


def test_a_host_by_name_is_called_too(caller: Caller) -> None:
    peer = f"localhost:{free_port()}"

    def gone() -> bool:
        caller.now_ns += 20 * MILLISECOND_NS
        return caller.knocks(peer, caller.now_ns)

    wait_until(gone, 10, "localhost to be found, and nobody there")


def test_who_listens_is_not_gone_though_it_says_nothing(caller: Caller) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=50) as server:
        peer = f"127.0.0.1:{server.getsockname()[1]}"
        assert not any(caller.ask(peer, 4 * GONE_NS))
        server.setblocking(False)
        calls = 0
        while calls < 100:
            try:
                server.accept()[0].close()
            except BlockingIOError:
                break
            calls += 1
        assert 0 < calls <= 4 * GONE_NS // EVERY_NS + 1


def test_who_listens_again_is_back_at_once(caller: Caller) -> None:
    port = free_port()
    peer = f"127.0.0.1:{port}"
    assert caller.ask(peer, 2 * GONE_NS)[-1]
    with socket.create_server(("127.0.0.1", port)):
        assert not caller.ask(peer, 2 * EVERY_NS)[-1]
    assert not any(caller.ask(peer, GONE_NS // 2)), "it counts from the beginning again"


def test_what_is_long_ago_does_not_count(caller: Caller) -> None:
    peer = f"127.0.0.1:{free_port()}"
    assert caller.ask(peer, 2 * GONE_NS)[-1]
    caller.now_ns += 8 * EVERY_NS
    assert not any(caller.ask(peer, GONE_NS // 2))
    assert caller.ask(peer, 2 * GONE_NS)[-1]


def test_a_black_hole_is_not_known_to_be_gone(caller: Caller) -> None:
    """Its connects neither succeed nor fail."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        place = server.getsockname()[:2]
        full = [socket.socket() for _ in range(4)]
        for connection in full:
            connection.setblocking(False)
            connection.connect_ex(place)
        said = caller.ask(f"127.0.0.1:{place[1]}", 8 * GONE_NS, answered=False)
        for connection in full:
            connection.close()
    assert not any(said)


@pytest.mark.parametrize("peer", ["", ":", "127.0.0.1", "127.0.0.1:", "127.0.0.1:99999", "a b:1"])
def test_nonsense_is_not_known_to_be_gone(caller: Caller, peer: str) -> None:
    assert not any(caller.ask(peer, 2 * GONE_NS, answered=False))


def test_many_peers_are_called_within_a_bound(caller: Caller) -> None:
    port = free_port()
    peers = [f"127.0.{n // 200}.{1 + n % 200}:{port}" for n in range(4 * CALLS_MAX)]
    for _ in range(200):
        caller.now_ns += 20 * MILLISECOND_NS
        for peer in peers:
            caller.knocks(peer, caller.now_ns)
        assert len(caller.knocks._calls) <= CALLS_MAX
    assert any(call.gone for call in caller.knocks._calls.values())
