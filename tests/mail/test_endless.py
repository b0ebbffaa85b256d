"""A message that never ends is cut off, and one that ends is not, however much waits before it.

F127.
"""

from __future__ import annotations

import select
import socket

import psutil
import pytest
import zmq

from pdrt.mail import doorkeeper
from pdrt.mail import mailbox as mailbox_module
from pdrt.protocol.codec import Malformed, encode, seal
from stress.fuzz.wire import Connection, frame
from tests.mail.site import NEWS, Counts, Site, collect, counted
from tests.waiting import wait_until

LIMIT_BYTES, PART_BYTES = 4 << 20, 256 << 10
PART = frame(bytes(PART_BYTES), more=True)


@pytest.fixture(autouse=True)
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorkeeper, "UNFINISHED_BYTES_MAX", LIMIT_BYTES)


def test_the_frames_of_a_message_that_never_ends_do_not_pile_up(site: Site) -> None:
    endpoint, owner, counts, server = site.door()
    usual = psutil.Process().memory_info().rss
    honest = site.raw(endpoint)
    endless = Connection(server.getsockname())
    endless.shake()
    endless.send(frame(encode([NEWS])))  # it begins as an honest one does
    assert [message for _, message in collect(owner, 1)] == [NEWS]
    sizes: list[int] = []

    def say_more() -> bool:
        """Until it is hung up on."""
        try:
            endless.send(PART)
        except OSError:
            return True
        owner.receive(0)
        sizes.append(psutil.Process().memory_info().rss - usual)
        assert sizes[-1] < 64 * LIMIT_BYTES, "frames pile up"
        return False

    wait_until(say_more, 20, "the end of the connection")
    assert len(sizes) * len(PART) > LIMIT_BYTES  # their heads count, too
    assert counts.malformed() == {Malformed.PARTS: 1}
    honest.send(encode([NEWS]))
    assert collect(owner, 1) == [(("door", b"raw"), NEWS)]
    endless.break_off()


def test_one_that_ends_is_counted_as_before(site: Site) -> None:
    _, owner, counts, server = site.door()
    long = Connection(server.getsockname())
    long.shake()
    for _ in range(LIMIT_BYTES // PART_BYTES - 2):
        long.send(PART)
        owner.receive(0)
    long.send(frame(b"end") + frame(encode([NEWS])))
    assert [message for _, message in collect(owner, 1)] == [NEWS]
    assert counts.malformed() == {Malformed.PARTS: 1}
    long.break_off()


def test_whole_frames_that_wait_for_their_turn_are_no_message_without_an_end(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is behind has not heard for long from somebody who says much."""
    monkeypatch.setattr(mailbox_module, "FRAMES_A_TURN", 1)
    endpoint, owner, counts, server = site.door()
    crowd = [site.raw(endpoint, bytes([65 + number])) for number in range(8)]
    large = Connection(server.getsockname())
    large.shake()
    whole = frame(seal(bytes(1 << 20)))  # not messages, and not without an end
    for each in crowd:
        each.send(encode([NEWS]))
    assert len(counted(owner, lambda: counts.of[0] >= len(crowd), "the crowd")) == len(crowd)
    sent = 4 * LIMIT_BYTES >> 20
    for _ in range(sent):
        for each in crowd:
            each.send(encode([NEWS]))
        large.send(whole)
        owner.receive(0)

    def all_of_it() -> bool:
        owner.receive(0)
        return sum(counts.malformed().values()) == sent

    wait_until(all_of_it, 20, "all that was said")
    assert Malformed.PARTS not in counts.malformed()
    large.send(frame(encode([NEWS])))  # it is still connected
    counted(owner, lambda: counts.of[0] == (sent + 1) * (len(crowd) + 1), "the last word")
    large.break_off()


def test_a_descriptor_that_is_no_connection_has_received_nothing() -> None:
    assert doorkeeper.received_bytes(0) == 0
    assert doorkeeper.received_bytes(1 << 20) == 0


def test_nobody_is_cut_off_before_all_that_is_whole_was_taken_in(site: Site) -> None:
    """The monitor's events and the bytes of one connection, by hand."""
    monitor = site.socket(zmq.PAIR)
    monitor.bind("inproc://monitor")
    drained, counts = [False], Counts()
    keeper = doorkeeper.Doorkeeper(
        site.socket(zmq.PAIR), "inproc://monitor", counts, lambda: drained[0]
    )
    _, server = site.listen()
    with socket.create_connection(server.getsockname(), timeout=10) as speaker:
        wait_until(lambda: select.select([server], [], [], 0)[0], 10, "the connection")
        ours, _ = server.accept()
        with ours:
            event = doorkeeper.Doorkeeper.EVENT.pack(zmq.EVENT_ACCEPTED, ours.fileno())
            monitor.send_multipart([event, b"somewhere"])
            keeper.attend()
            for _ in range(LIMIT_BYTES // PART_BYTES + 1):
                speaker.sendall(bytes(PART_BYTES))
                assert len(ours.recv(PART_BYTES, socket.MSG_WAITALL)) == PART_BYTES
                keeper.attend()
            assert counts.malformed() == {}
            speaker.sendall(b"more")
            assert ours.recv(4) == b"more"
            drained[0] = True
            keeper.attend()
            assert counts.malformed() == {Malformed.PARTS: 1}
            assert speaker.recv(1) == b""
