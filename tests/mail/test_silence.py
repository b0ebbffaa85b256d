"""Links whose peer is gone, silent, stuck or reset."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import subprocess
import sys
import time

import pytest
import zmq

from pdrt.clock import MILLISECOND_NS
from pdrt.mail import mailbox as mailbox_module
from pdrt.mail.mailbox import MEND_MS, RECONNECT_MAX_MS, Mailbox
from pdrt.mail.silence import SILENT_MS
from pdrt.protocol.codec import encode
from pdrt.protocol.counters import Counter
from pdrt.protocol.messages import NewsTaken
from tests.mail.site import NEWS, WAIT_S, Site, collect, counted, post
from tests.waiting import wait_until


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
    code = "from tests.mail.test_silence import be_flooded; be_flooded()"
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
