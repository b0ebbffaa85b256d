"""Names of hosts: a name server that does not answer holds up nobody but who asked."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from pdrt.clock import SECOND_NS, monotonic_ns
from pdrt.mail.mailbox import HELD_MAX, Envelope
from pdrt.mail.names import LOOK_NS, LOOKUPS_MAX, PAUSE_MAX_NS, Addresses, resolve, split
from pdrt.protocol.counters import Counter
from pdrt.protocol.messages import NewsTaken
from tests.mail.site import NEWS, WAIT_S, Site, collect, post
from tests.waiting import wait_until

TURN_NS = SECOND_NS // 20


class Server:
    """A name server.  Names that it does not know are never answered, before the end."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self.asked: list[str] = []
        self.end = threading.Event()

    def __call__(self, host: str) -> str:
        self.asked.append(host)
        if host not in self.known:
            self.end.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "nobody answers")
        if not self.known[host]:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return self.known[host]


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.end.set()


class Asker:
    def __init__(self, server: Server, seed: int = 0) -> None:
        self.addresses = Addresses(random.Random(seed), server)
        self.now_ns = 0

    def take(self, after_ns: int = LOOK_NS) -> list[tuple[str, str, str]]:
        self.now_ns += after_ns
        return self.addresses.take(self.now_ns)

    def wait(self) -> list[tuple[str, str, str]]:
        return wait_until(self.take, 10, "an address")


def quiescent() -> bool:
    return not any(thread.name == "lookup" for thread in threading.enumerate())


def asked(server: Server, number: int) -> bool:
    return len(server.asked) == number and quiescent()


@pytest.mark.parametrize(
    ("endpoint", "parts"),
    [
        ("tcp://prefill-7.example:8998", ("prefill-7.example", 8998)),
        ("tcp://localhost:1", ("localhost", 1)),
        ("tcp://10.0.0.1:8998", None),
        ("tcp://[::1]:8998", None),
        ("tcp://[fe80::1%eth0]:8998", None),
        ("tcp://a b:1", None),
        ("tcp://name:0", None),
        ("tcp://name:65536", None),
        ("tcp://name", None),
        ("tcp://:1", None),
        ("tcp://-f:1", None),
        ("tcp://" + 300 * "a" + ":1", None),
        ("ipc://@name:1", None),
        ("", None),
    ],
)
def test_what_is_to_be_looked_up(endpoint: str, parts: tuple[str, int] | None) -> None:
    assert split(endpoint) == parts


def test_the_hosts_own_names_have_addresses() -> None:
    assert resolve("localhost") in ("127.0.0.1", "::1")


def test_an_address_comes_once_and_ipv6_stands_in_brackets(server: Server) -> None:
    server.known = {"four": "10.0.0.4", "six": "fe80::6"}
    asker = Asker(server)
    assert asker.addresses.want("a", "tcp://four:1")
    assert "a" in asker.addresses
    assert asker.wait() == [("a", "tcp://four:1", "tcp://10.0.0.4:1")]
    assert "a" not in asker.addresses
    assert asker.addresses.want("b", "tcp://six:2")
    assert asker.wait() == [("b", "tcp://six:2", "tcp://[fe80::6]:2")]
    assert asker.take() == []


def test_names_that_are_never_answered_hold_up_no_other(server: Server) -> None:
    server.known = {"good": "10.0.0.1"}
    asker = Asker(server)
    for number in range(LOOKUPS_MAX - 1):
        assert asker.addresses.want(f"bad{number}", f"tcp://bad{number}:1")
    assert asker.addresses.want("good", "tcp://good:1")
    assert asker.wait() == [("good", "tcp://good:1", "tcp://10.0.0.1:1")]


def test_lookups_are_bounded_and_those_beyond_wait_for_their_turn(server: Server) -> None:
    server.known = {"good": "10.0.0.1"}
    asker = Asker(server)
    for number in range(LOOKUPS_MAX):
        asker.addresses.want(f"bad{number}", f"tcp://bad{number}:1")
    asker.addresses.want("good", "tcp://good:1")
    assert asker.take() == []
    assert "good" not in server.asked
    assert sum(thread.name == "lookup" for thread in threading.enumerate()) == LOOKUPS_MAX
    server.end.set()
    assert asker.wait() == [("good", "tcp://good:1", "tcp://10.0.0.1:1")]


def test_a_name_without_an_address_is_asked_for_again_ever_more_seldom(server: Server) -> None:
    server.known = {"late": ""}
    asker = Asker(server)
    asker.addresses.want("a", "tcp://late:1")
    pauses = []
    for number in range(1, 9):
        wait_until(partial(asked, server, number), 10, "the question")
        asked_ns = asker.now_ns
        while len(server.asked) == number:
            # An answer takes a moment of real time, in which no virtual time passes.
            asker.take(TURN_NS if quiescent() else 0)
        pauses.append(asker.now_ns - asked_ns)
    assert pauses[0] >= SECOND_NS / 2
    assert all(pause <= PAUSE_MAX_NS + 3 * TURN_NS for pause in pauses)
    assert max(pauses) > 8 * pauses[0]
    server.known = {"late": "10.0.0.9"}
    found = wait_until(partial(asker.take, SECOND_NS), 10, "an address")
    assert found == [("a", "tcp://late:1", "tcp://10.0.0.9:1")]


def test_a_link_that_is_dropped_or_gets_another_endpoint_is_not_connected(server: Server) -> None:
    server.known = {"one": "10.0.0.1", "two": "10.0.0.2"}
    asker = Asker(server)
    asker.addresses.want("a", "tcp://never:1")
    asker.addresses.want("a", "tcp://two:1")
    asker.addresses.want("b", "tcp://never:1")
    assert not asker.addresses.want("b", "tcp://10.0.0.3:1")
    asker.addresses.want("c", "tcp://never:1")
    asker.addresses.drop("c")
    assert asker.wait() == [("a", "tcp://two:1", "tcp://10.0.0.2:1")]
    server.end.set()
    assert not any(link in asker.addresses for link in "abc")


def test_a_name_that_nobody_resolves_holds_up_no_other_link(site: Site, server: Server) -> None:
    """ZMQ would ask from the one thread that serves every socket, for a minute."""
    good, owner, _, _ = site.door()
    sender, sent = site.mailbox("sender", resolve=server)
    sender.link("good", good, from_peer=True)
    for number in range(20):
        sender.link(f"bad{number}", f"tcp://bad{number}.example:1", from_peer=True)
        post(sender, f"bad{number}", NEWS)
    for _ in range(10):
        post(sender, "good", NEWS)
        assert [message for _, message in collect(owner, 1)] == [NEWS]
        sender.receive(0)
    assert sent.of[Counter.SENDS_REFUSED] == 0
    for number in range(20):
        for _ in range(2 * HELD_MAX):
            post(sender, f"bad{number}", NEWS)
        sender.unlink(f"bad{number}")
    assert sent.of[Counter.SENDS_REFUSED] >= 20 * HELD_MAX


def test_what_is_said_before_the_address_is_known_arrives_when_it_is(
    site: Site, server: Server
) -> None:
    server.known = {"good.example": "127.0.0.1"}
    good, owner, _, _ = site.door()
    sender, sent = site.mailbox("sender", resolve=server)
    endpoint = good.replace("127.0.0.1", "good.example")
    sender.link("to", endpoint, from_peer=True)
    for number in range(3):
        sender.post("to", NewsTaken(number, 3))
    found: list[Envelope] = []

    def arrived() -> bool:
        sender.flush(monotonic_ns())
        sender.receive(5)
        found.extend(owner.receive(5))
        return len(found) >= 3

    wait_until(arrived, WAIT_S, "what was said before")
    assert [message for _, message in found] == [NewsTaken(number, 3) for number in range(3)]
    sender.link("to", endpoint, from_peer=True)  # no news
    post(sender, "to", NEWS)
    assert [message for _, message in collect(owner, 1)] == [NEWS]
    assert sent.of[Counter.SENDS_REFUSED] == 0
