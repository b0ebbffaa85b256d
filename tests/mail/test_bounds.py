"""What a mailbox takes, holds and lets in has bounds, and what is beyond them is counted."""

from __future__ import annotations

import os
import socket

import pytest
import zmq

from pdrt.mail.mailbox import FRAMES_A_TURN, MESSAGES_A_TURN
from pdrt.protocol.codec import FRAME_BYTES_MAX, MAGIC, Malformed, encode, seal
from pdrt.protocol.counters import Counter
from pdrt.protocol.messages import Heartbeat, PeerGone
from tests.mail.site import NEWS, WAIT_S, Site, collect, post
from tests.waiting import wait_until


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
