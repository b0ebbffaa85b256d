"""A room that failed costs no worker its life if somebody knows that nothing of it can land, though
listeners died in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.actors import past
from pdrt.actors.decode_failing import UNKNOWN
from pdrt.actors.decode_listener import DecodeListener
from pdrt.actors.prefill_listener import PrefillListener
from pdrt.clock import MILLISECOND_NS, SECOND_NS
from pdrt.protocol.messages import Abort, Destination, HelloReply, Landed
from pdrt.protocol.states import Event, KVPoll, Reason
from pdrt.shm_status import StatusTable
from tests.actors.scenes import LINK, TIMEOUTS, DecodeScene
from tests.actors.steps import moving, succeeds, until_state, until_verdict, verdict
from tests.actors.world import LAYOUT, World

AGED_MS = 1000  # a session is held for younger than it says, see prefills


def costs_no_worker(world: World, within_ms: int) -> None:
    """Room 1 ends at decode and its pages are free without a fence."""
    worker = world.trees["decode0"].processes["worker0"]
    until_verdict(world, 1, "decode0", within_ms=2000)
    assert verdict(world, "decode0", 1) is KVPoll.Failed
    world.until(lambda: world.job("decode0", 1).cleared, within_ms)
    assert world.trees["decode0"].processes["worker0"] is worker
    world.settle()


def test_a_room_that_is_given_up_as_the_listener_dies_costs_no_worker(world: World) -> None:
    """Its destination is on its way to the dead one, which was sent it first; the room is over on
    prefill before the next listener looks."""
    succeeds(world, 0)
    world.receive(1, pace_ms=20)
    until_state(world, "decode0", 1, KVPoll.WaitingForInput)
    world.trees["prefill"].kill("listener", again_ms=60)
    until_state(world, "decode0", 1, KVPoll.Transferring)
    world.send(1)
    until_state(world, "prefill", 1, KVPoll.Bootstrapping)
    world.abort("prefill", 1)
    costs_no_worker(world, within_ms=100)


@pytest.mark.parametrize("state", [KVPoll.WaitingForInput, KVPoll.Transferring])
def test_a_room_that_prefill_gave_up_before_costs_no_worker_if_decodes_listener_dies(
    world: World, state: KVPoll
) -> None:
    """The next one does not know to whom its predecessor sent the destination; but who answers
    there was there before the room was."""
    succeeds(world, 0)
    world.run(AGED_MS)
    world.send(1)
    until_state(world, "prefill", 1, KVPoll.Bootstrapping)
    world.abort("prefill", 1)
    until_verdict(world, 1, "prefill")
    world.run(50)
    world.receive(1, pace_ms=4)
    until_state(world, "decode0", 1, state)
    world.trees["decode0"].kill("listener", again_ms=30)
    costs_no_worker(world, within_ms=500)


def test_a_room_that_has_landed_as_both_listeners_die_costs_no_worker_if_it_is_given_up(
    world: World,
) -> None:
    """Its bytes are in place, prefill's worker says so again and again, and nothing else moves."""
    succeeds(world, 0)
    world.both(1)
    until_verdict(world, 1, "prefill")
    assert verdict(world, "decode0", 1) is None
    world.trees["prefill"].kill("listener", again_ms=30)
    world.trees["decode0"].kill("listener", again_ms=60)
    world.abort("decode0", 1)
    costs_no_worker(world, within_ms=1500)


def test_a_room_that_is_given_up_in_the_moment_that_it_lands_is_quiet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decode's listener has seen it open, and finds it Failed when it is to become Success."""
    settle, scene = StatusTable.settle_use, DecodeScene()

    def given_up_first(table: StatusTable, slot: int, generation: int, use: int) -> bool:
        abort = Event.FAULT
        assert scene.engine.move(slot, generation, abort, now_ns=1, reason=Reason.ABORTED)
        return settle(table, slot, generation, use)

    monkeypatch.setattr(StatusTable, "settle_use", given_up_first)
    try:
        scene.send()
        room, slot, generation = scene.handles[0]
        scene.say(("peer", b""), Landed(room, 0, slot, generation, 1, 1, "d", room + 1))
        word = scene.engine.read(slot, generation)
        assert word is not None
        assert (word.state, word.quiet) == (KVPoll.Failed, True)
    finally:
        scene.close()


def test_who_says_that_a_room_has_landed_that_has_no_destination_is_not_heard() -> None:
    scene = DecodeScene()
    try:
        scene.open()
        room, slot, generation = scene.handles[0]
        scene.say(("peer", b""), Landed(room, 0, slot, generation, 1, 1, "d", room + 1))
        assert scene.engine.state(slot, generation) is KVPoll.Bootstrapping
    finally:
        scene.close()


def test_a_room_that_is_given_up_as_decodes_listener_dies_costs_no_worker(world: World) -> None:
    """The next one tells prefill before it knows with whom it speaks, and again when it does."""
    succeeds(world, 0)
    world.run(AGED_MS)
    world.both(1)
    until_state(world, "decode0", 1, KVPoll.Transferring)
    world.trees["decode0"].kill("listener", again_ms=10)
    world.abort("decode0", 1)
    costs_no_worker(world, within_ms=1500)


def test_a_room_that_was_fenced_as_prefills_listener_died_costs_no_worker(world: World) -> None:
    """What the worker says of it nobody hears; so the next listener asks."""
    succeeds(world, 0)
    moving(world)
    world.abort("decode0", 1)
    until_verdict(world, 1, "prefill")
    prefill = world.trees["prefill"]
    prefill.freeze("listener")
    world.run(50)
    prefill.kill("listener", again_ms=30)
    costs_no_worker(world, within_ms=1500)


def engine_dies_unseen(world: World) -> None:
    """Its slots are cleared while the listener stands still, so nobody says how they ended."""
    world.trees["prefill"].freeze("listener")
    world.trees["prefill"].kill("engine", again_ms=100)
    world.run(150)
    world.trees["prefill"].thaw("listener")


@pytest.mark.parametrize("pace_ms", [100, 200, 300])
def test_a_room_of_an_engine_that_died_costs_no_worker_if_its_destination_came_later(
    world: World, pace_ms: int
) -> None:
    succeeds(world, 0)
    world.send(1)
    world.receive(1, pace_ms=pace_ms)
    until_state(world, "prefill", 1, KVPoll.Bootstrapping)
    world.run(70)  # decode has asked after it
    engine_dies_unseen(world)
    costs_no_worker(world, within_ms=500)


@pytest.mark.parametrize("state", [KVPoll.Bootstrapping, KVPoll.Transferring])
def test_a_listener_knows_what_may_have_been_given_to_the_worker_before_it(
    world: World, state: KVPoll
) -> None:
    succeeds(world, 0)
    world.send(1, pages_count=4, chunks=4, pace_ms=400)
    if state is KVPoll.Transferring:
        world.receive(1, pages_count=4)
    until_state(world, "prefill", 1, state)
    prefill = world.trees["prefill"]
    prefill.kill("listener", again_ms=1)
    world.until(lambda: "listener" in prefill.processes)
    world.run(4)
    listener = prefill.processes["listener"].actor
    assert isinstance(listener, PrefillListener)
    (room,) = listener._rooms.values()
    assert room.given is (state is KVPoll.Transferring)
    if state is KVPoll.Bootstrapping:
        world.abort("prefill", 1)


def test_a_room_of_an_engine_that_died_may_not_be_quiet_if_its_worker_died_with_it(
    world: World,
) -> None:
    succeeds(world, 0)
    moving(world)
    world.trees["prefill"].kill("worker0", again_ms=100)
    engine_dies_unseen(world)
    world.run(past.VANISHED_NS // MILLISECOND_NS + 100)
    listener = world.trees["prefill"].processes["listener"].actor
    assert isinstance(listener, PrefillListener)
    (ended,) = [over for over in listener._past.over.values() if isinstance(over, Abort)]
    assert (ended.reason, ended.quiet) == (Reason.PEER_LOST, False)
    until_verdict(world, 1, "decode0")


@pytest.mark.parametrize("older", [True, False])
def test_who_answers_was_sent_it_first_if_it_is_older_than_the_room(
    world: World, older: bool
) -> None:
    """So concludes a listener of decode's that does not know what its predecessor sent."""
    succeeds(world, 0)
    for before in (True, False):
        if before is older:
            world.trees["prefill"].kill("listener", again_ms=1)
            world.run(700)
        if before:
            world.run(AGED_MS)
            moving(world)
    world.trees["decode0"].kill("listener", again_ms=1)
    world.run(300)
    listener = world.trees["decode0"].processes["listener"].actor
    assert isinstance(listener, DecodeListener)
    room = listener._rooms[world.job("decode0", 1).handles[0].slot]
    prefill = listener._prefills.get(room.peer)
    assert prefill is not None
    assert room.first == (prefill.session if older else UNKNOWN)
    assert room.is_sole is older
    until_verdict(world, 1, "decode0")
    world.settle()


@contextmanager
def successor() -> Iterator[DecodeScene]:
    scene = DecodeScene()
    scene.send()
    scene.begin()  # a successor, which has not seen the rooms open
    scene.open()
    scene.say(LINK, scene.introduced())
    for handle in scene.handles:
        destination = Destination(handle.room, 0, *handle[1:], "d", 1, bytes(4), 1)
        scene.say(("local", b""), destination)
    try:
        yield scene
    finally:
        scene.close()


@pytest.fixture(scope="module")
def scene() -> Iterator[DecodeScene]:
    with successor() as scene:
        yield scene


def said(age_ms: int, epoch: int = 1) -> HelloReply:
    return HelloReply(1, 1, "p", epoch, LAYOUT.digest, age_ms=age_ms)


@given(st.floats(0, 1e6), st.floats(-1e-3, 1e-3), st.floats(0, 1))
def test_no_session_is_held_for_older_than_it_is(
    scene: DecodeScene, age_s: float, gain: float, stood_part: float
) -> None:
    """Whatever its clock gains on ours, and however long our host stood still unnoticed."""
    scene.say(LINK, said(int(age_s * (1 + gain) * 1000)))
    prefill = scene.actor._prefills.get("p:1")
    assert prefill is not None
    passed_s = age_s - stood_part * TIMEOUTS.peer_s
    assert prefill.began_ns >= scene.now_ns - passed_s * SECOND_NS
    assert prefill.began_ns <= scene.now_ns - (age_s * 0.997 - 1 - TIMEOUTS.peer_s) * SECOND_NS


def test_who_sent_it_to_another_session_knows_that() -> None:
    """Though an older one answers then."""
    with successor() as scene:
        room = scene.actor._rooms[scene.handles[0].slot]
        assert (room.first, room.session) == (UNKNOWN, "p#1")
        scene.say(LINK, said(10**9, epoch=2))
        assert (room.first, room.is_sole) == ("p#2", False)
