"""Doors and links: what is posted arrives, and they come and go."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest
import zmq

from pdrt.clock import MILLISECOND_NS
from pdrt.errors import NoDescriptors, ProtocolError
from pdrt.mail import mailbox as mailbox_module
from pdrt.mail.mailbox import LAZY_NS, Envelope
from pdrt.protocol.codec import Malformed
from pdrt.protocol.counters import Counter
from pdrt.protocol.messages import DestinationTaken, NewsTaken, Resync
from tests.mail.site import NEWS, WAIT_S, Site, collect, post
from tests.waiting import wait_until


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

    def taken(endpoint: str) -> bool:
        try:
            sender.link("to", endpoint)
        except NoDescriptors:  # ZMQ gives the old ones back in its own time
            return False
        return True

    def refused() -> bool:
        try:
            assert not taken(endpoint)
        except ProtocolError as error:
            return error.kind == Malformed.VALUE.name
        return False

    for _ in range(100):  # more sockets than a context has
        wait_until(refused, WAIT_S, "a refusal")
    post(sender, "to", NEWS)
    assert sent.of[Counter.SENDS_REFUSED] == 1
    wait_until(lambda: taken(good), WAIT_S, "a socket to be given back")
    post(sender, "to", NEWS)
    collect(owner, 1)


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
