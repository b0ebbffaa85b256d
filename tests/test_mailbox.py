from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter as Multiset
from collections.abc import Callable, Generator
from typing import Any

import pytest
import zmq

from pdrt.clock import MILLISECOND_NS, monotonic_ns
from pdrt.errors import NoDescriptors, ProtocolError
from pdrt.mail import mailbox as mailbox_module
from pdrt.mail.mailbox import (
    FRAMES_A_TURN,
    HELD_MAX,
    LAZY_NS,
    MEND_MS,
    MESSAGES_A_TURN,
    RECONNECT_MAX_MS,
    Envelope,
    Mailbox,
)
from pdrt.mail.silence import SILENT_MS
from pdrt.mail.waiter import has_something
from pdrt.protocol.codec import FRAME_BYTES_MAX, MAGIC, Malformed, encode, seal
from pdrt.protocol.counters import Counter
from pdrt.protocol.messages import (
    AnyMessage,
    DestinationTaken,
    Heartbeat,
    NewsTaken,
    PeerGone,
    Resync,
)
from tests.test_waiter import Sleepless, has_signal
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


@pytest.fixture
def site() -> Generator[Site]:
    made = Site()
    yield made
    made.close()


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


@pytest.mark.parametrize("family", ["tcp", "ipc"])
def test_what_is_posted_in_one_turn_arrives_in_order_in_one_frame(site: Site, family: str) -> None:
    endpoint, owner, counts, _ = site.door(family=family)
    sender, sent = site.mailbox("sender")
    sender.link("to", endpoint)
    messages = [NewsTaken(slot, 1) for slot in range(100)]
    post(sender, "to", *messages)
    sender.flush()  # nothing more to say: no frame
    assert collect(owner, 100) == [(("door", b"sender"), message) for message in messages]
    assert (counts.of[Counter.FRAMES_IN], counts.of[Counter.MESSAGES_IN]) == (1, 100)
    assert (sent.of[Counter.FRAMES_OUT], sent.of[Counter.MESSAGES_OUT]) == (1, 100)


def test_what_is_said_together_goes_in_one_frame(site: Site) -> None:
    endpoint, owner, counts, _ = site.door(from_peer=False, family="unix")
    sender, _ = site.mailbox("sender")
    sender.link("to", endpoint)
    with sender.together():
        post(sender, "to", NewsTaken(1, 1))
        post(sender, "to", NewsTaken(2, 3))
    post(sender, "to", NEWS)
    messages = [message for _, message in collect(owner, 3)]
    assert messages == [NewsTaken(1, 1), NewsTaken(2, 3), NEWS]
    assert counts.of[Counter.FRAMES_IN] == 2


def test_what_is_said_together_goes_though_somebody_raised(site: Site) -> None:
    endpoint, owner, _, _ = site.door(from_peer=False, family="unix")
    sender, _ = site.mailbox("sender")
    sender.link("to", endpoint)
    with contextlib.suppress(KeyError), sender.together():
        post(sender, "to", NEWS)
        raise KeyError
    assert [message for _, message in collect(owner, 1)] == [NEWS]


def test_nobody_sleeps_over_a_lazy_message(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint, _, _, _ = site.door(from_peer=False, family="unix")
    sender, _ = site.mailbox("sender")
    sender.link("to", endpoint)
    asked: list[int] = []

    def wait(timeout_ms: int) -> list[zmq.Socket[bytes]]:
        asked.append(timeout_ms)
        return []

    monkeypatch.setattr(sender._waiter, "wait", wait)
    sender.receive(5000)
    sender.post("to", NEWS, lazy=True)
    sender.flush()
    sender.receive(5000)
    assert asked == [5000, LAZY_NS // MILLISECOND_NS]


def test_a_lazy_message_waits_for_company_and_goes_before_it(site: Site) -> None:
    endpoint, owner, counts, _ = site.door()
    sender, sent = site.mailbox("sender")
    sender.link("to", endpoint)
    sender.post("to", NewsTaken(1, 1), lazy=True)
    sender.flush(LAZY_NS - 1)
    sender.flush()
    assert sent.of[Counter.FRAMES_OUT] == 0
    post(sender, "to", NewsTaken(2, 1))
    assert [m for _, m in collect(owner, 2)] == [NewsTaken(1, 1), NewsTaken(2, 1)]
    assert counts.of[Counter.FRAMES_IN] == 1


def test_a_lazy_message_goes_alone_when_it_has_waited_long_enough(site: Site) -> None:
    endpoint, owner, _, _ = site.door()
    sender, sent = site.mailbox("sender")
    sender.link("to", endpoint)
    now_ns = 7 * LAZY_NS
    sender.post("to", NEWS)
    sender.flush(now_ns)
    sender.post("to", NewsTaken(8, 8), lazy=True)
    sender.post("nobody", NEWS)
    sender.flush(now_ns + LAZY_NS - 1)  # company of another addressee is none
    assert (sent.of[Counter.FRAMES_OUT], sent.of[Counter.SENDS_REFUSED]) == (1, 1)
    sender.flush(now_ns + LAZY_NS)
    assert [message for _, message in collect(owner, 2)] == [NEWS, NewsTaken(8, 8)]


def test_an_answer_goes_to_whoever_wrote(site: Site) -> None:
    endpoint, owner, _, _ = site.door()
    senders = [site.mailbox(name)[0] for name in ("a", "b")]
    for number, sender in enumerate(senders):
        sender.link("to", endpoint, from_peer=True)
        post(sender, "to", NewsTaken(number, 1))
    for address, message in collect(owner, 2):
        assert isinstance(message, NewsTaken)
        owner.post(address, DestinationTaken(message.slot, 9))
    owner.flush()
    for number, sender in enumerate(senders):
        assert collect(sender, 1) == [("to", DestinationTaken(number, 9))]


def test_a_batch_that_is_too_big_is_cut_and_a_message_that_is_too_big_is_counted(
    site: Site,
) -> None:
    """The latter happens without fault of ours: what a peer sent may not fit when passed on."""
    endpoint, owner, counts, _ = site.door()
    sender, sent = site.mailbox("sender")
    sender.link("to", endpoint)
    big = Heartbeat("p", 1, bytes(FRAME_BYTES_MAX * 3 // 5))
    huge = Heartbeat("p", 1, bytes(FRAME_BYTES_MAX))
    post(sender, "to", big, huge, NEWS, big)
    assert [message for _, message in collect(owner, 3)] == [big, NEWS, big]
    assert counts.of[Counter.FRAMES_IN] == 2
    assert sent.of[Counter.SENDS_REFUSED] == 1


def test_a_turn_takes_a_bounded_number_of_frames_and_messages_from_a_socket(site: Site) -> None:
    endpoint, owner, _, _ = site.door()
    crowded, hasty = site.raw(endpoint, b"crowded"), site.raw(endpoint, b"hasty")
    for _ in range(20):
        crowded.send(encode([NEWS] * 1000))
    turns: list[int] = []

    def took(count: int) -> bool:
        turns.append(len(owner.receive(20)))
        return sum(turns) == count

    wait_until(lambda: took(20_000), WAIT_S, "all")
    assert max(turns) <= MESSAGES_A_TURN + 1000
    for _ in range(3 * FRAMES_A_TURN):
        hasty.send(encode([NEWS]))
    turns.clear()
    wait_until(lambda: took(3 * FRAMES_A_TURN), WAIT_S, "all")
    assert max(turns) <= FRAMES_A_TURN


def test_what_a_turn_leaves_behind_is_not_slept_over(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, owner, _, _ = site.door()
    hasty = site.raw(endpoint, b"hasty")
    for _ in range(2 * FRAMES_A_TURN):
        hasty.send(encode([NEWS]))
    wait_until(lambda: len(owner.receive(20)) == FRAMES_A_TURN, WAIT_S, "a full turn")
    hasty.send(encode([NEWS]))
    wait_until(lambda: has_something(owner._doors["door"]), WAIT_S, "more")
    monkeypatch.setattr(owner._waiter, "_poll", Sleepless(owner._waiter._poll))
    assert owner.receive(60_000)


def test_what_a_failed_send_swallowed_is_not_slept_over(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, owner, counts, _ = site.door()
    caller = site.raw(endpoint)
    caller.send(encode([NEWS]))
    collect(owner, 1)
    owner.receive(0)
    caller.send(encode([NEWS]))
    door = owner._doors["door"]
    wait_until(lambda: has_signal(door), WAIT_S, "a signal")

    def swallowed() -> bool:
        post(owner, ("door", b"nobody"), NEWS)
        return not has_signal(door)

    wait_until(swallowed, WAIT_S, "a send that takes it in")
    assert counts.of[Counter.SENDS_REFUSED] > 0
    monkeypatch.setattr(owner._waiter, "_poll", Sleepless(owner._waiter._poll))
    assert owner.receive(60_000)


# --- queues ---


@pytest.fixture
def short_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox_module, "QUEUE_MAX", 8)


@pytest.mark.usefixtures("short_queues")
def test_a_link_whose_door_nobody_serves_fills_up_and_is_counted(site: Site) -> None:
    endpoint, _ = site.listen()
    sender, sent = site.mailbox("sender")
    sender.link("to", endpoint)
    for _ in range(50):
        post(sender, "to", NEWS, NEWS)
    assert sent.of[Counter.FRAMES_OUT] == 8
    assert sent.of[Counter.MESSAGES_OUT] == 16
    assert sent.of[Counter.SENDS_REFUSED] == 84  # messages, not frames


@pytest.mark.usefixtures("short_queues")
def test_a_frozen_peer_fills_its_own_queue_and_slows_nobody_else(site: Site) -> None:
    endpoint, owner, counts, _ = site.door()
    frozen = site.raw(endpoint, b"frozen")
    frozen.set(zmq.RCVHWM, 8)
    frozen.send(encode([NEWS]))
    lively, _ = site.mailbox("lively")
    lively.link("to", endpoint)
    post(lively, "to", NEWS)
    assert len(collect(owner, 2)) == 2
    chunk = Heartbeat("p", 1, bytes(1 << 16))
    for _ in range(2000):
        post(owner, ("door", b"frozen"), chunk)
    assert counts.of[Counter.SENDS_REFUSED] > 0
    refused = counts.of[Counter.SENDS_REFUSED]
    for _ in range(5):
        post(owner, ("door", b"lively"), NEWS)
        assert collect(lively, 1) == [("to", NEWS)]
    assert counts.of[Counter.SENDS_REFUSED] == refused


def test_what_is_sent_to_a_peer_that_is_gone_is_counted(site: Site) -> None:
    endpoint, owner, counts, _ = site.door()
    peer, _ = site.mailbox("peer")
    peer.link("to", endpoint)
    post(peer, "to", NEWS)
    collect(owner, 1)
    post(owner, ("door", b"peer"), NEWS)
    assert counts.of[Counter.SENDS_REFUSED] == 0
    peer.close()
    site.mailboxes.remove(peer)

    def refused() -> int:
        post(owner, ("door", b"peer"), NEWS)
        owner.receive(5)
        return counts.of[Counter.SENDS_REFUSED]

    wait_until(refused, WAIT_S, "the peer's end to be seen")


def test_what_is_sent_to_nobody_is_counted(site: Site) -> None:
    _, owner, counts, _ = site.door()
    post(owner, ("door", b"nobody"), NEWS, NEWS)
    post(owner, ("no such door", b"nobody"), NEWS)
    post(owner, "no such link", NEWS)
    assert counts.of[Counter.SENDS_REFUSED] == 4
    assert counts.of[Counter.FRAMES_OUT] == 0


# --- malformed ---

MALFORMED: list[tuple[Malformed, list[bytes]]] = [
    (Malformed.PARTS, [encode([NEWS]), b""]),
    (Malformed.PARTS, [b"", encode([NEWS])]),
    (Malformed.EMPTY, [b""]),
    (Malformed.OVERSIZED, [bytes(FRAME_BYTES_MAX + 1)]),
    (Malformed.OVERSIZED, [bytes(2 * FRAME_BYTES_MAX)]),
    (Malformed.FOREIGN, [b"{}"]),
    (Malformed.UNREADABLE, [MAGIC]),
    (Malformed.UNREADABLE, [encode([NEWS])[:-1]]),
    (Malformed.UNKNOWN, [seal(b"\x91\x91\x63")]),
    (Malformed.NOT_FOR_PEERS, [encode([NEWS, PeerGone("x")])]),
]


@pytest.mark.parametrize(("kind", "parts"), MALFORMED, ids=lambda v: getattr(v, "name", ""))
def test_a_malformed_frame_is_counted_by_kind_and_costs_nothing_else(
    site: Site, kind: Malformed, parts: list[bytes]
) -> None:
    endpoint, owner, counts, _ = site.door()
    raw = site.raw(endpoint)
    raw.send_multipart(parts)
    raw.send(encode([NEWS]))
    assert collect(owner, 1) == [(("door", b"raw"), NEWS)]
    assert counts.malformed() == {kind: 1}
    assert counts.of[Counter.FRAMES_IN] == 2
    post(owner, ("door", b"raw"), NEWS)
    assert raw.recv() == encode([NEWS])


def test_a_door_of_our_own_tree_lets_local_messages_in(site: Site) -> None:
    endpoint, owner, counts, _ = site.door(from_peer=False, family="ipc")
    site.raw(endpoint).send(encode([PeerGone("x")]))
    assert collect(owner, 1) == [(("door", b"raw"), PeerGone("x"))]
    assert counts.malformed() == {}


def test_a_link_to_a_peer_takes_no_local_messages(site: Site) -> None:
    endpoint, server = site.listen()
    router = site.socket(zmq.ROUTER)
    router.set(zmq.USE_FD, os.dup(server.fileno()))
    router.bind(endpoint)
    ours, counts = site.mailbox("ours")
    ours.link("to", endpoint, from_peer=True)
    post(ours, "to", NEWS)
    identity, _ = router.recv_multipart()
    router.send_multipart([identity, encode([PeerGone("x")])])
    router.send_multipart([identity, b""])
    router.send_multipart([identity, encode([NEWS])])
    assert collect(ours, 1) == [("to", NEWS)]
    assert counts.malformed() == {Malformed.NOT_FOR_PEERS: 1, Malformed.EMPTY: 1}


def test_a_frame_beyond_twice_the_limit_costs_its_sender_the_connection_and_no_one_else(
    site: Site,
) -> None:
    endpoint, owner, counts, _ = site.door()
    raw, other = site.raw(endpoint), site.raw(endpoint, b"other")
    raw.send(bytes(2 * FRAME_BYTES_MAX + 1))
    other.send(encode([NEWS]))
    assert collect(owner, 1) == [(("door", b"other"), NEWS)]

    def reconnected() -> bool:
        raw.send(encode([NEWS]))
        return (("door", b"raw"), NEWS) in owner.receive(20)

    wait_until(reconnected, WAIT_S, "the sender to be back")
    assert counts.malformed() == {}  # nor did it cost us its memory


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, b"\xff" * 100, b""],
    ids=["http", "zeros", "ones", "nothing"],
)
def test_a_connection_that_does_not_speak_zmq_is_of_no_matter(site: Site, data: bytes) -> None:
    endpoint, owner, counts, server = site.door()
    with socket.create_connection(server.getsockname()) as stranger:
        stranger.sendall(data)
        site.raw(endpoint).send(encode([NEWS]))
        assert collect(owner, 1) == [(("door", b"raw"), NEWS)]
    assert counts.malformed() == {}


# --- doors and links come and go ---


def test_nobody_is_refused_while_the_owner_of_a_door_restarts(site: Site) -> None:
    endpoint, owner, _, server = site.door()
    peer, sent = site.mailbox("peer")
    peer.link("to", endpoint)
    post(peer, "to", NEWS)
    collect(owner, 1)
    owner.close()
    site.mailboxes.remove(owner)

    post(peer, "to", Resync("p", 1))  # may be lost with the old connection; nothing blocks
    with socket.create_connection(server.getsockname()):
        pass  # the descriptor listens still
    newcomer, _ = site.mailbox("newcomer")
    newcomer.link("to", endpoint)
    post(newcomer, "to", NewsTaken(7, 7))

    heir, counts = site.mailbox("owner")
    heir.open_door("door", endpoint, os.dup(server.fileno()), from_peer=True)
    found: set[Envelope] = set()

    def heard() -> bool:
        post(peer, "to", NEWS)
        found.update(heir.receive(20))
        return {(("door", b"peer"), NEWS), (("door", b"newcomer"), NewsTaken(7, 7))} <= found

    wait_until(heard, WAIT_S, "both links at the new owner")
    assert sent.of[Counter.SENDS_REFUSED] == 0
    post(heir, ("door", b"peer"), NEWS)
    assert ("to", NEWS) in collect(peer, 1)
    assert counts.malformed() == {}


def test_a_peer_that_comes_back_under_its_name_gets_the_answers(site: Site) -> None:
    endpoint, owner, _, _ = site.door()
    for life in range(3):
        peer, _ = site.mailbox("peer")
        peer.link("to", endpoint)
        post(peer, "to", NewsTaken(life, 1))
        collect(owner, 1)
        post(owner, ("door", b"peer"), NewsTaken(life, 2))
        assert collect(peer, 1) == [("to", NewsTaken(life, 2))]
        # Not closed: the old connection may be half open when its successor comes.


def test_the_same_link_again_is_no_news_and_another_endpoint_replaces_it(site: Site) -> None:
    endpoint, owner, counts, _ = site.door()
    elsewhere, other, _, _ = site.door()
    sender, _ = site.mailbox("sender")
    sender.link("to", endpoint)
    sender.post("to", NEWS)
    sender.link("to", endpoint)
    sender.flush()
    collect(owner, 1)
    sender.post("to", NEWS)
    sender.link("to", elsewhere)  # what waited for the old one is dropped with it
    post(sender, "to", NewsTaken(8, 8))
    assert collect(other, 1) == [(("door", b"sender"), NewsTaken(8, 8))]
    assert owner.receive(0) == []
    assert counts.of[Counter.FRAMES_IN] == 1


def test_an_unlinked_peer_hears_nothing_more(site: Site) -> None:
    endpoint, owner, counts, _ = site.door()
    sender, sent = site.mailbox("sender")
    sender.link("to", endpoint)
    post(sender, "to", NEWS)
    collect(owner, 1)
    sender.post("to", NEWS)
    sender.unlink("to")
    sender.unlink("to")
    sender.flush()
    post(sender, "to", NEWS)
    assert sent.of[Counter.SENDS_REFUSED] == 1
    sender.link("to", endpoint)
    post(sender, "to", NewsTaken(8, 8))
    assert collect(owner, 1) == [(("door", b"sender"), NewsTaken(8, 8))]
    assert counts.of[Counter.FRAMES_IN] == 2


@pytest.mark.parametrize("endpoint", ["tcp://", "tcp://nonsense", "tcp://a b:1", "x://y", ""])
def test_a_link_to_nonsense_is_refused_and_nothing_of_it_stays(
    site: Site, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    """Peers name endpoints."""
    monkeypatch.setattr(mailbox_module, "SOCKETS_MAX", 64)
    good, owner, _, _ = site.door()
    sender, sent = site.mailbox("sender")

    def refused() -> bool:
        try:
            sender.link("to", endpoint)
        except ProtocolError as error:
            return error.kind == Malformed.VALUE.name
        except NoDescriptors:  # ZMQ gives the old ones back in its own time
            pass
        return False

    for _ in range(100):  # more sockets than a context has
        wait_until(refused, WAIT_S, "a refusal")
    post(sender, "to", NEWS)
    assert sent.of[Counter.SENDS_REFUSED] == 1
    sender.link("to", good)
    post(sender, "to", NEWS)
    collect(owner, 1)


class Names:
    """A name server that knows one name and leaves every other question without an answer."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def __call__(self, host: str) -> str:
        if host == "good.example":
            return "127.0.0.1"
        self.end.wait(60)
        raise socket.gaierror(socket.EAI_AGAIN, "nobody answers")


@pytest.fixture
def names() -> Generator[Names]:
    made = Names()
    yield made
    made.end.set()


def test_a_name_that_nobody_resolves_holds_up_no_other_link(site: Site, names: Names) -> None:
    """ZMQ would ask from the one thread that serves every socket, for a minute."""
    good, owner, _, _ = site.door()
    sender, sent = site.mailbox("sender", resolve=names)
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
    site: Site, names: Names
) -> None:
    good, owner, _, _ = site.door()
    sender, sent = site.mailbox("sender", resolve=names)
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


def retries_ms(mailbox: Mailbox, link: str, until_ms: int) -> list[int]:
    """How long ZMQ waits each time before it dials again, until it waits that long."""
    monitor = mailbox._links[link].get_monitor_socket(zmq.EVENT_CONNECT_RETRIED)
    pauses: list[int] = []

    def longest() -> bool:
        while monitor.poll(20):
            pauses.append(struct.unpack("=HI", monitor.recv_multipart()[0])[1])
        return bool(pauses) and pauses[-1] >= until_ms

    try:
        wait_until(longest, WAIT_S, "pauses to have grown")
    finally:
        mailbox._links[link].disable_monitor()
        monitor.close(linger=0)
    return pauses


def test_a_peer_that_is_gone_is_dialled_ever_more_seldom_and_by_no_two_alike(site: Site) -> None:
    endpoint, server = site.listen()
    server.close()
    site.listening.remove(server)
    seen = []
    for name in ("one", "two"):
        dialler, _ = site.mailbox(name)
        dialler.link("to", endpoint, from_peer=True)
        pauses = retries_ms(dialler, "to", 150)
        assert all(2 * a == b for a, b in itertools.pairwise(pauses))
        assert pauses[-1] <= RECONNECT_MAX_MS[1]
        seen.append(pauses)
        longest = dialler._links["to"].get(zmq.RECONNECT_IVL_MAX)
        assert RECONNECT_MAX_MS[0] <= int(longest) <= RECONNECT_MAX_MS[1]
    assert seen[0] != seen[1]


def test_two_links_of_one_process_to_one_door_are_two(site: Site) -> None:
    """A worker has one to a decode that died and one to its successor at the same address."""
    endpoint, owner, _, _ = site.door()
    sender, _ = site.mailbox("sender")
    for number in range(20):
        sender.link("old", endpoint, from_peer=True)
        sender.link("new", endpoint, from_peer=True)
        post(sender, "old", NewsTaken(number, 1))
        post(sender, "new", NewsTaken(number, 2))
        assert {message for _, message in collect(owner, 2)} == {
            NewsTaken(number, 1),
            NewsTaken(number, 2),
        }
        sender.unlink("old")
        post(sender, "new", NEWS)
        [(address, message)] = collect(owner, 1)
        assert message == NEWS
        post(owner, address, NEWS)
        assert collect(sender, 1) == [("new", NEWS)]
        sender.unlink("new")


def test_zmq_has_no_timer_on_what_peers_can_reset(site: Site) -> None:
    """It aborts the process when it fires on a connection that was reset while its input waited."""
    endpoint, owner, _, _ = site.door()
    sender, _ = site.mailbox("sender")
    sender.link("to", endpoint, from_peer=True)
    for socket_ in (owner._doors["door"], sender._links["to"]):
        assert socket_.get(zmq.HEARTBEAT_IVL) == 0


@pytest.mark.slow
def test_a_peer_that_floods_and_resets_ends_nobodys_process() -> None:
    """In a process of its own: ZMQ would abort it."""
    code = "from tests.test_mailbox import be_flooded; be_flooded()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (0, "alive"), run.stderr


def be_flooded() -> None:
    """Entered by the test above."""

    def command(name: bytes, body: bytes) -> bytes:
        return bytes([4, 1 + len(name) + len(body), len(name)]) + name + body

    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    kind = b"\x0bSocket-Type\x00\x00\x00\x06DEALER"
    frame = encode([NEWS])
    site = Site()
    endpoint, owner, counts, server = site.door()
    with socket.create_connection(server.getsockname()) as peer:
        peer.sendall(greeting)
        wait_until(lambda: len(peer.recv(64, socket.MSG_PEEK)) == 64, WAIT_S, "a greeting")
        peer.sendall(command(b"READY", kind))
        peer.settimeout(0.5)
        with contextlib.suppress(OSError):  # until nothing more is taken: our owner is busy
            peer.sendall((bytes([0, len(frame)]) + frame) * 200_000)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    give_up = time.monotonic() + 1.5  # longer than any timer of ZMQ's that we set
    wait_until(lambda: time.monotonic() > give_up, WAIT_S, "the process not to be aborted")
    wait_until(lambda: owner.receive(5), WAIT_S, "what was taken")
    fine, _ = site.mailbox("fine")
    fine.link("to", endpoint, from_peer=True)
    post(fine, "to", NewsTaken(8, 8))
    counted(owner, lambda: counts.of[Counter.FRAMES_IN] > 1000, "those frames")
    site.close()
    sys.stdout.write("alive")


def test_a_link_that_answers_nothing_is_dialled_anew_and_one_that_answers_is_not(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, _ = site.mailbox("sender")
    now_ns = 1
    monkeypatch.setattr(mailbox_module, "monotonic_ns", lambda: now_ns)
    silent, heir, _, _ = site.door()
    lively, owner, _, _ = site.door()
    local, other, _, _ = site.door()
    for name, endpoint in {"silent": silent, "lively": lively, "local": local}.items():
        sender.link(name, endpoint, from_peer=name != "local")
    before = dict(sender._links)

    def talk() -> None:
        for name in before:
            post(sender, name, NEWS)
        for door in (heir, other):
            collect(door, 1)
        [(address, _)] = collect(owner, 1)
        post(owner, address, NEWS)
        assert collect(sender, 1) == [("lively", NEWS)]

    for _ in range(3):
        talk()
        now_ns += SILENT_MS[0] * MILLISECOND_NS - 1
        sender.receive(0)
        if _ == 0:
            assert sender._links == before
    now_ns += SILENT_MS[1] * MILLISECOND_NS
    sender.receive(0)
    changed = {name for name, socket_ in sender._links.items() if socket_ is not before[name]}
    assert changed == {"silent"}
    talk()


@pytest.mark.usefixtures("short_queues")
def test_a_link_that_takes_nothing_is_not_dialled_anew_at_every_frame(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, _ = site.listen()  # and nobody accepts
    sender, sent = site.mailbox("sender")
    sender.link("to", endpoint, from_peer=True)
    dialled: list[str] = []
    link = sender.link

    def count(name: str, endpoint: str, *, from_peer: bool = False) -> None:
        dialled.append(name)
        link(name, endpoint, from_peer=from_peer)

    monkeypatch.setattr(sender, "link", count)
    now_ns = 1
    monkeypatch.setattr(mailbox_module, "monotonic_ns", lambda: now_ns)
    for _ in range(200):
        post(sender, "to", NEWS)
    assert len(dialled) == 1
    now_ns += MEND_MS[1] * MILLISECOND_NS
    for _ in range(200):
        post(sender, "to", NEWS)
    assert len(dialled) == 2
    assert sent.of[Counter.SENDS_REFUSED] > 300


def test_a_watched_descriptor_wakes_the_mailbox(site: Site) -> None:
    mailbox, _ = site.mailbox("me")
    wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        mailbox.watch(wake_fd)
        assert mailbox.receive(0) == []
        os.eventfd_write(wake_fd, 1)
        assert mailbox.receive(60_000) == []  # would run into the test's own timeout
        assert os.eventfd_read(wake_fd) == 1
    finally:
        os.close(wake_fd)
