"""Doors, links and connections at their bounds: strangers, too many peers, full queues, and a
process that may open no further descriptor."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from functools import partial

import pytest
import zmq

from pdrt.mail import doorkeeper
from pdrt.mail import mailbox as mailbox_module
from pdrt.mail.mailbox import Mailbox
from pdrt.protocol.codec import encode
from pdrt.protocol.counters import Counter
from pdrt.protocol.messages import NewsTaken
from tests.mail.site import NEWS, Counts, Site, collect, post
from tests.waiting import wait_until

WAIT_S = 10.0
STRANGERS = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "zeros": b"\0" * 64,
    "ones": b"\xff" * 100,
    "its first version": b"\x01\x00",
    "its second version": b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00",
    "half a greeting": b"\xff" + bytes(8) + b"\x7f\x03",
    "a greeting and no more": b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48),
    "nothing": b"",
}


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds for a handshake are too long for a test."""
    monkeypatch.setattr(mailbox_module, "HANDSHAKE_MS", 200)
    monkeypatch.setattr(doorkeeper.Doorkeeper, "DECIDED_NS", 400_000_000)


def is_over(client: socket.socket, door: Mailbox) -> bool:
    """Has the other end hung up?  Its greeting may come first."""
    door.receive(5)
    try:
        while client.recv(4096, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


# --- strangers -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("hasty")
def test_strangers_are_counted_and_keep_no_descriptor(site: Site) -> None:
    endpoint, owner, counts, server = site.door()
    peer = site.raw(endpoint)
    peer.send(encode([NEWS]))
    collect(owner, 1)
    with contextlib.ExitStack() as stack:
        clients = {}
        for name, data in STRANGERS.items():
            client = stack.enter_context(socket.create_connection(server.getsockname()))
            client.sendall(data)
            clients[name] = client
        for name, client in clients.items():
            wait_until(partial(is_over, client, owner), WAIT_S, f"the end of {name}")

    def counted() -> bool:
        owner.receive(5)
        return counts.of[Counter.STRANGERS] == len(STRANGERS)

    wait_until(counted, WAIT_S, "each of them to be counted")
    peer.send(encode([NEWS]))
    assert collect(owner, 1) == [(("door", b"raw"), NEWS)]
    assert counts.of[Counter.STRANGERS] == len(STRANGERS)
    assert counts.malformed() == {}


@pytest.mark.usefixtures("hasty")
def test_peers_are_no_strangers_however_often_they_come(site: Site) -> None:
    endpoint, owner, counts, server = site.door()
    for life in range(10):
        peer = site.raw(endpoint, b"peer%d" % life)
        peer.send(encode([NEWS]))
        collect(owner, 1)
        if life % 2:
            peer.close(linger=0)
    with socket.create_connection(server.getsockname()) as stranger:
        stranger.sendall(b"?" * 64)
        wait_until(lambda: is_over(stranger, owner), WAIT_S, "its end")

    def counted() -> bool:
        owner.receive(5)
        return counts.of[Counter.STRANGERS] > 0

    wait_until(counted, WAIT_S, "the only one")
    assert counts.of[Counter.STRANGERS] == 1


def test_who_may_still_finish_the_handshake_is_not_called_a_stranger(site: Site) -> None:
    """The monitor's events one by one: it does not say whose handshake succeeded."""
    counts = Counts()
    monitor = site.socket(zmq.PAIR)
    monitor.bind("inproc://monitor")
    keeper = doorkeeper.Doorkeeper(
        site.socket(zmq.PAIR),
        "inproc://monitor",
        counts,
        lambda: True,
    )

    def happens(event: int, fd: int) -> int:
        monitor.send_multipart([doorkeeper.Doorkeeper.EVENT.pack(event, fd), b"somewhere"])
        keeper.attend()
        return counts.of[Counter.STRANGERS]

    came, shook, left = (
        zmq.EVENT_ACCEPTED,
        zmq.EVENT_HANDSHAKE_SUCCEEDED,
        zmq.EVENT_DISCONNECTED,
    )
    none = 1 << 20  # a descriptor that nobody has
    assert happens(came, none) == 0
    assert happens(came, none + 1) == 0
    assert happens(shook, 0) == 0  # one of the two
    assert happens(left, none) == 0  # the other, or the same: it may still be coming
    assert happens(left, none + 1) == 1
    assert happens(came, none) == 1
    assert happens(shook, 0) == 1
    assert happens(left, none) == 1
    assert counts.of[Counter.CONNECTIONS_REFUSED] == 0


# --- connections ---------------------------------------------------------------------------------


def test_connections_beyond_the_bound_are_ended_and_counted_until_there_is_a_place(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorkeeper, "CONNECTIONS_MAX", 3)
    monkeypatch.setattr(mailbox_module, "HANDSHAKE_MS", 60_000)  # not that is what ends them
    endpoint, owner, counts, server = site.door()
    peers = []
    for number in range(3):
        peer, _ = site.mailbox(f"peer{number}")
        peer.link("to", endpoint, from_peer=True)
        post(peer, "to", NewsTaken(number, 1))
        collect(owner, 1)
        peers.append(peer)
    assert counts.of[Counter.CONNECTIONS_REFUSED] == 0
    with contextlib.ExitStack() as stack:
        address = server.getsockname()
        crowd = [stack.enter_context(socket.create_connection(address)) for _ in range(20)]
        for client in crowd:
            wait_until(partial(is_over, client, owner), WAIT_S, "it to be sent away")
    assert counts.of[Counter.CONNECTIONS_REFUSED] == 20
    late, _ = site.mailbox("late")
    late.link("to", endpoint, from_peer=True)

    def refused() -> bool:
        owner.receive(5)
        return counts.of[Counter.CONNECTIONS_REFUSED] > 20

    wait_until(refused, WAIT_S, "a peer to be refused like anybody")
    for number, peer in enumerate(peers):  # those inside do not notice
        post(peer, "to", NewsTaken(number, 2))
        [(_, news)] = collect(owner, 1)
        assert news == NewsTaken(number, 2)
    peers[0].unlink("to")

    def inside() -> bool:
        post(late, "to", NewsTaken(9, 9))
        return NewsTaken(9, 9) in [message for _, message in owner.receive(5)]

    wait_until(inside, WAIT_S, "it to find the place that one left")


def test_the_bound_leaves_half_of_the_descriptors_to_everything_else() -> None:
    assert 0 < doorkeeper.connections_max() <= doorkeeper.CONNECTIONS_MAX


# --- queues --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short_queues")
@pytest.mark.parametrize("from_peer", [False, True])
def test_a_full_queue_refuses_counts_and_takes_again_once_it_is_read(
    site: Site, from_peer: bool
) -> None:
    endpoint, server = site.listen()
    sender, sent = site.mailbox("sender")
    sender.link("to", endpoint, from_peer=from_peer)
    for slot in range(50):
        post(sender, "to", NewsTaken(slot, 1))
    assert sent.of[Counter.FRAMES_OUT] + sent.of[Counter.SENDS_REFUSED] == 50
    assert sent.of[Counter.SENDS_REFUSED] > 0
    owner, _ = site.mailbox("owner")
    owner.open_door("door", endpoint, os.dup(server.fileno()), from_peer=from_peer)

    def passes(slot: int) -> bool:
        """Sent again until it arrives, as whatever matters is."""
        post(sender, "to", NewsTaken(slot, 1))
        return NewsTaken(slot, 1) in [message for _, message in owner.receive(20)]

    wait_until(lambda: passes(99), WAIT_S, "the queue to take again")
    refused = sent.of[Counter.SENDS_REFUSED]
    for slot in range(100, 180):
        wait_until(partial(passes, slot), WAIT_S, "each of those that follow")
    # ZMQ notices a place only when it looks for one: at a queue this short, once in eight.
    assert sent.of[Counter.SENDS_REFUSED] - refused <= 20


# --- descriptors ---------------------------------------------------------------------------------


def test_a_process_without_descriptors_refuses_links_loses_none_and_recovers() -> None:
    """In a process of its own: the limit is the process's."""
    code = "from tests.bounds.test_doors import starve; starve()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout.split()) == (0, ["refused", "mended"]), run.stderr


def starve() -> None:
    """Entered by the test above."""
    import resource

    from pdrt.errors import NoDescriptors

    monkey = pytest.MonkeyPatch()
    monkey.setattr(mailbox_module, "QUEUE_MAX", 8)
    monkey.setattr(mailbox_module, "MEND_MS", (0, 0))
    site = Site()
    endpoint, owner, _, _ = site.door()
    stuck, server = site.listen()
    sender, sent = site.mailbox("sender")
    sender.link("to", endpoint, from_peer=True)
    sender.link("stuck", stuck, from_peer=True)
    post(sender, "to", NEWS)
    collect(owner, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.dup(0)
    os.close(first_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, hard))
    for number in range(3):
        with pytest.raises(NoDescriptors, match="no descriptor is left"):
            sender.link(f"more{number}", endpoint, from_peer=True)
    for _ in range(50):  # it fills, and to make it anew needs what there is none of
        post(sender, "stuck", NEWS)
    assert sent.of[Counter.SENDS_REFUSED] > 0
    post(sender, "to", NEWS)
    collect(owner, 1)
    sys.stdout.write("refused\n")
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    sender.link("more0", endpoint, from_peer=True)
    post(sender, "more0", NEWS)
    collect(owner, 1)
    late, _ = site.mailbox("late")
    late.open_door("door", stuck, os.dup(server.fileno()), from_peer=True)

    def heard() -> bool:
        post(sender, "stuck", NewsTaken(5, 5))
        return NewsTaken(5, 5) in [message for _, message in late.receive(20)]

    wait_until(heard, WAIT_S, "the link that could not be made anew")
    sys.stdout.write("mended\n")
    site.close()
