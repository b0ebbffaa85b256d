"""What a listener took note of, and what it has yet to hear of: slots are used again at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.actors import past
from pdrt.actors.decode_listener import DecodeListener
from pdrt.actors.past import Seen
from pdrt.actors.prefill_listener import PrefillListener
from pdrt.engine.room import AGAIN_MAX, AGAIN_NS
from pdrt.engine.sender import KVSender
from pdrt.mail.mailbox import Address
from pdrt.protocol import codec
from pdrt.protocol.messages import AnyMessage, Destination, Ended, Fenced, Landed, Opened
from pdrt.protocol.states import Event, KVPoll, Reason
from pdrt.shm_status import Handle, Word
from tests.actors.post import Frame
from tests.actors.steps import succeeds, to_phase, until_state, until_verdict, verdict
from tests.actors.world import World

LISTENER = "listener"


@given(st.lists(st.integers(0, past.MISSED_OF_SLOT), min_size=1, unique=True), st.data())
def test_the_end_of_each_room_is_news_once_in_whatever_order_they_are_heard_of(
    rooms: list[int], data: st.DataObject
) -> None:
    seen = Seen()
    seen.note(3, 1)
    for generation in (3 + 2 * room for room in rooms):
        if data.draw(st.booleans()):
            seen.note(3, generation)
        else:
            assert seen.is_news(3, generation)
        assert not seen.is_news(3, generation), "it is known by now"


def test_a_room_of_which_nobody_said_how_it_ended_is_still_to_be_heard_of() -> None:
    seen = Seen()
    seen.note(1, 5)
    seen.miss(1, 5)
    assert seen.is_news(1, 5)
    assert not seen.is_news(1, 5)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("first", ["p#1", "p#0", ""])
def test_what_may_have_been_given_to_a_room_is_not_called_quiet_because_it_is_refused_now(
    given: bool, first: str
) -> None:
    """How that room ended may be forgotten, and its bytes be under way; so may what a listener
    before us gave away."""
    memory = past.Past("p#1", 0)
    asked = Destination(7, 0, 3, 5, "d", 1, b"", 0, "p#1", first)
    if given:
        assert memory.taken.take(asked, Handle(7, 1, 9))
    refused = memory.refuse(asked, Reason.PEER_REFUSED)
    assert refused.quiet is (not given and first == "p#1")
    assert memory.taken.take(asked, Handle(7, 2, 9)) is (not given and not refused.quiet)


def test_what_was_missed_longest_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past, "MISSED_MAX", 2)
    seen = Seen()
    seen.note(1, 1)
    seen.note(1, 9)  # 3, 5 and 7 passed unseen
    assert [seen.is_news(1, generation) for generation in (3, 5, 7)] == [False, True, True]


@pytest.mark.parametrize("side", ["prefill", "decode0"])
def test_an_abort_is_told_though_the_slot_is_cleared_while_the_listener_reads_it(
    world: World, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_phase(world, "Bootstrapping")
    tree = world.trees[side]
    tree.freeze("engine")  # it has said how the room ended, and says nothing more
    listener = tree.processes["listener"].actor
    assert isinstance(listener, PrefillListener | DecodeListener)
    job, table = world.job(side, 1), listener._table
    read, handle = table.read, job.handles[0]

    def read_and_clear(slot: int, generation: int) -> Word | None:
        word = read(slot, generation)
        if (slot, generation) == handle[1:]:
            table.clear(slot, generation)
        return word

    table.move(*handle[1:], Event.FAULT, now_ns=world.clock(), reason=Reason.ABORTED)
    ended = Ended(*handle[1:], True, Reason.ABORTED, True, room=1, peer=job.plan.peer)
    monkeypatch.setattr(table, "read", read_and_clear)
    listener.handle(("local", b"engine"), ended, world.clock())
    monkeypatch.undo()
    other = "decode0" if side == "prefill" else "prefill"
    until_verdict(world, 1, other, within_ms=1500 if side == "prefill" else 100)
    assert world.job(other, 1).reason is Reason.PEER_ABORTED
    tree.kill("engine")  # its room was cleared behind its back


class Recorder:
    """A mailbox that keeps what is posted."""

    def __init__(self) -> None:
        self.posted: list[AnyMessage] = []

    def post(self, to: Address, message: AnyMessage, *, lazy: bool = False) -> None:
        self.posted.append(message)

    def link(self, name: str, endpoint: str, *, from_peer: bool = False) -> None:
        """Nobody is at the other end."""

    def unlink(self, name: str) -> None:
        """There is no link."""


def test_a_new_listener_hears_again_what_failed_lately_and_no_more(world: World) -> None:
    mailbox, now_ns = Recorder(), world.clock()
    desk = replace(world.engine("prefill").desk, mailbox=mailbox)
    desk.failed.append((now_ns - AGAIN_NS, Ended(0, 1, True, Reason.ABORTED)))
    desk.say_again(now_ns)
    assert mailbox.posted == []
    ends = [Ended(n, 1, True, Reason.ABORTED, room=n) for n in range(AGAIN_MAX + 1)]
    desk.failed.extend((now_ns, ended) for ended in ends)
    desk.say_again(now_ns)
    assert mailbox.posted == ends[1:]
    desk.failed.clear()


def test_an_abort_is_told_though_its_slot_is_in_use_again_before_the_listener_looks(
    world: World,
) -> None:
    succeeds(world, 0)
    engine, tree = world.engine("prefill"), world.trees["prefill"]
    listener, post = tree.processes["listener"].actor, engine.box
    assert isinstance(listener, PrefillListener)
    handle = engine._open_handles(1)[0]
    post.post(LISTENER, Opened(1, 0, *handle[1:]))
    sender = KVSender(1, [handle], engine.desk)
    sender.abort()  # what says so is under way
    sender.clear()
    later = engine._open_handles(2)[0]
    assert later[1:] == (handle.slot, handle.generation + 2)
    listener._scan(world.clock())
    world.run(20)
    world.receive(1)
    until_verdict(world, 1, "decode0", within_ms=500)
    assert world.job("decode0", 1).reason is Reason.PEER_ABORTED
    other = KVSender(2, [later], engine.desk)
    other.abort()
    other.clear()


def test_what_landed_is_no_lost_peer_because_the_worker_is_slow_to_say_so(world: World) -> None:
    """What it says to decode's listener is lost with that, and its own listener hears it late."""
    succeeds(world, 0)
    kept: list[Frame] = []
    arrive = world.post._arrive

    def hold(frame: Frame) -> None:
        from_peer = frame.endpoint.startswith("tcp://")
        messages = codec.decode(frame.data, from_peer=from_peer)
        if any(isinstance(message, Ended) for message in messages):
            kept.append(frame)
        elif not any(isinstance(message, Landed) and not message.session for message in messages):
            arrive(frame)

    world.post._arrive = hold  # type: ignore[method-assign]
    world.both(1, pages_count=4, chunks=4, pace_ms=10)
    until_state(world, "prefill", 1, KVPoll.Transferring)
    world.trees["prefill"].freeze("listener")
    until_verdict(world, 1, "prefill")
    world.until(lambda: world.job("prefill", 1).cleared)
    world.trees["prefill"].thaw("listener")
    listener = world.trees["prefill"].processes["listener"].actor
    assert isinstance(listener, PrefillListener)
    world.until(lambda: len(listener._past.vanished) > 0)
    world.trees["decode0"].kill("listener", again_ms=1)
    world.run(400)
    for frame in kept:
        arrive(frame)
    until_verdict(world, 1, "decode0", within_ms=1500)
    assert verdict(world, "decode0", 1) is KVPoll.Success
    world.post._arrive = arrive  # type: ignore[method-assign]
    world.settle()


def test_a_fence_that_is_heard_of_before_the_end_of_its_room_is_not_forgotten(world: World) -> None:
    """The slot is cleared before prefill's listener looks, and the worker is quicker than the
    engine to say so."""
    succeeds(world, 0)
    kept: list[Frame] = []
    arrive = world.post._arrive

    def hold(frame: Frame) -> None:
        messages = codec.decode(frame.data, from_peer=frame.endpoint.startswith("tcp://"))
        late = any(isinstance(message, Ended | Fenced) for message in messages)
        (kept.append if late else arrive)(frame)

    world.both(1, pages_count=4, chunks=4, pace_ms=400)
    until_state(world, "prefill", 1, KVPoll.Transferring)
    world.run(20)
    world.trees["prefill"].freeze("listener")
    world.post._arrive = hold  # type: ignore[method-assign]
    world.abort("prefill", 1)
    world.until(lambda: world.job("prefill", 1).cleared)
    world.trees["prefill"].thaw("listener")
    listener = world.trees["prefill"].processes["listener"].actor
    assert isinstance(listener, PrefillListener)
    world.until(lambda: len(listener._past.vanished) > 0)
    world.post._arrive = arrive  # type: ignore[method-assign]
    for kind in (Fenced, Ended):
        for frame in kept:
            if any(isinstance(message, kind) for message in codec.decode(frame.data)):
                arrive(frame)
        world.run(2)
    world.until(lambda: world.job("decode0", 1).cleared, within_ms=200)
    assert world.trees["decode0"].forced == []
    world.settle()
