"""A waiter sleeps only while nobody has anything."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import pytest
import zmq

from pdrt.mail.mailbox import FRAMES_A_TURN
from pdrt.mail.waiter import Waiter, has_something
from pdrt.protocol.codec import encode
from pdrt.protocol.counters import Counter
from tests.mail.site import NEWS, WAIT_S, Site, collect, post
from tests.waiting import wait_until

LONG_MS = 60_000


class Sleepless:
    """In place of the waiter's poll: sleeping is an error."""

    def __init__(self, poll: select.poll) -> None:
        self._poll = poll

    def poll(self, timeout_ms: int) -> list[tuple[int, int]]:
        news = self._poll.poll(0)
        assert news or timeout_ms == 0, "it would sleep"
        return news


def has_signal(socket: zmq.Socket[bytes]) -> bool:
    """Is its descriptor readable?"""
    poll = select.poll()
    poll.register(cast("int", socket.get(zmq.FD)), select.POLLIN)
    return bool(poll.poll(0))


@dataclass
class Pair:
    door: zmq.Socket[bytes]
    link: zmq.Socket[bytes]
    waiter: Waiter  # of the door

    def has_signal(self) -> bool:
        return has_signal(self.door)

    def holds(self) -> bool:
        return has_something(self.door)

    def wait(self) -> list[zmq.Socket[bytes]]:
        """News need not be about messages, so it may have to wait more than once."""
        while not (ready := self.waiter.wait(LONG_MS)):
            pass
        return ready

    def settle(self) -> None:
        """The door has said that it is empty, and been forgotten."""
        assert self.waiter.wait(0) == []

    def awake(self) -> None:
        self.waiter._poll = Sleepless(self.waiter._poll)  # type: ignore[assignment]


@pytest.fixture
def pair() -> Iterator[Pair]:
    context = zmq.Context()
    door, link = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    address = f"ipc://@pdrt-test-waiter-{os.getpid()}"
    door.bind(address)
    link.set(zmq.ROUTING_ID, b"link")
    link.connect(address)
    waiter = Waiter()
    waiter.add(door)
    link.send(b"hello")
    pair = Pair(door, link, waiter)
    try:
        assert pair.wait() == [door]
        assert door.recv_multipart() == [b"link", b"hello"]
        waiter.used(door)
        yield pair
    finally:
        context.destroy(linger=0)


def test_what_arrives_wakes_it(pair):
    pair.settle()
    pair.link.send(b"news")
    assert pair.wait() == [pair.door]


def test_what_a_send_swallowed_is_not_slept_over(pair):
    pair.settle()
    pair.link.send(b"news")
    wait_until(pair.has_signal, WAIT_S, "a signal")

    def swallowed() -> bool:
        pair.door.send_multipart([b"link", b"answer"])  # takes in what the signal was for
        return not pair.has_signal()

    wait_until(swallowed, WAIT_S, "a send that takes it in")
    pair.awake()
    pair.waiter.used(pair.door)
    assert pair.wait() == [pair.door]


def test_what_was_left_unread_is_not_slept_over(pair):
    pair.link.send(b"one")
    pair.link.send(b"two")
    assert pair.wait() == [pair.door]
    assert pair.door.recv_multipart()[1] == b"one"
    pair.waiter.used(pair.door)
    wait_until(pair.holds, WAIT_S, "the second")
    pair.awake()
    assert pair.wait() == [pair.door]


def test_a_missed_signal_costs_no_more_than_one_wait(pair):
    pair.settle()
    pair.link.send(b"news")
    wait_until(pair.has_signal, WAIT_S, "a signal")
    wait_until(pair.holds, WAIT_S, "the message")  # swallows the signal, and nobody says so
    assert not pair.has_signal()
    assert pair.waiter.wait(1) == [pair.door]


def test_one_that_was_removed_is_not_waited_for(pair):
    pair.settle()
    pair.waiter.remove(pair.door)
    pair.link.send(b"news")
    wait_until(pair.has_signal, WAIT_S, "a signal")
    assert pair.waiter.wait(0) == []


def test_a_descriptor_wakes_it_and_is_left_to_its_owner(pair):
    pair.settle()
    fd = os.eventfd(1, os.EFD_NONBLOCK)
    pair.waiter.watch(fd)
    pair.awake()
    assert pair.waiter.wait(LONG_MS) == []
    assert os.eventfd_read(fd) == 1
    os.close(fd)


# --- as a mailbox has it ---


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
