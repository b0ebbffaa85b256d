"""A half of a room that will never come is told at once, and ends nothing but that room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdrt.actors import decode_failing
from pdrt.actors.decode_listener import DecodeListener
from pdrt.protocol.counters import Counter
from pdrt.protocol.states import KVPoll, Reason
from tests.actors.engines import Plan
from tests.actors.steps import (
    ABORT_MS,
    moving,
    succeeds,
    to_phase,
    until_state,
    until_verdict,
    verdict,
)
from tests.actors.world import TIMEOUTS, World

BOOTSTRAP_MS = round(TIMEOUTS.bootstrap_s * 1000)


@pytest.fixture(params=[1, 2])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Both ranks of a room have to hear it."""
    with World(ranks=request.param) as made:
        succeeds(made, 0)
        yield made
        made.settle()


def decline(world: World, side: str, room: int) -> None:
    world.engine(side).decline(room, world.trees["prefill"].control if side != "prefill" else "")


# --- an engine refuses a request before its room has a slot ---


@pytest.mark.parametrize("wait_ms", [0, 10, 300])
def test_prefill_declines_and_the_decode_that_comes_later_hears_it(
    world: World, wait_ms: int
) -> None:
    decline(world, "prefill", 1)
    world.run(wait_ms)
    world.receive(1)
    assert until_verdict(world, 1, "decode0", within_ms=ABORT_MS) <= ABORT_MS
    assert world.job("decode0", 1).reason is Reason.PEER_REFUSED


@pytest.mark.parametrize("pace_ms", [0, 10_000], ids=["destination sent", "only asked"])
def test_prefill_declines_and_the_decode_that_waits_hears_it(world: World, pace_ms: int) -> None:
    world.receive(1, pace_ms=pace_ms)
    world.run(900)  # its questions have become rare
    decline(world, "prefill", 1)
    assert until_verdict(world, 1, "decode0", within_ms=ABORT_MS) <= ABORT_MS
    assert world.job("decode0", 1).reason is Reason.PEER_REFUSED
    # Nothing was given to a worker, so no fence is needed before its pages are used again.
    world.until(lambda: world.job("decode0", 1).cleared, ABORT_MS)


@pytest.mark.parametrize("first", ["prefill", "decode0"])
def test_decode_declines_and_prefill_hears_it_whoever_comes_first(world: World, first: str) -> None:
    if first == "prefill":
        world.send(1)
        world.run(300)
        decline(world, "decode0", 1)
    else:
        decline(world, "decode0", 1)
        world.run(300)
        world.send(1)
    assert until_verdict(world, 1, "prefill", within_ms=ABORT_MS) <= ABORT_MS
    assert verdict(world, "prefill", 1) is KVPoll.Failed


def test_a_decode_that_never_spoke_to_prefill_declines_too() -> None:
    with World() as world:
        world.send(1)
        world.run(50)
        decline(world, "decode0", 1)
        assert until_verdict(world, 1, "prefill", within_ms=3 * ABORT_MS) <= 3 * ABORT_MS


@pytest.mark.parametrize("side", ["prefill", "decode0"])
def test_a_lost_refusal_is_said_again(world: World, side: str) -> None:
    world.post.weather.loss = 0.7
    other = "decode0" if side == "prefill" else "prefill"
    (world.receive if side == "prefill" else world.send)(1)
    decline(world, side, 1)
    until_verdict(world, 1, other, within_ms=BOOTSTRAP_MS - 200)
    detail = world.job(other, 1).detail  # of whichever rank heard it first
    assert "the peer refused the room" in detail or "the peer gave the room up" in detail


@pytest.mark.parametrize("side", ["prefill", "decode0"])
def test_every_one_of_many_refusals_is_told(world: World, side: str) -> None:
    rooms = range(1, 9)
    other = "decode0" if side == "prefill" else "prefill"
    for room in rooms:
        (world.receive if side == "prefill" else world.send)(room)
    world.run(100)
    for room in rooms:
        decline(world, side, room)
    for room in rooms:
        until_verdict(world, room, other, within_ms=ABORT_MS)


@pytest.mark.parametrize("phase", ["Bootstrapping", "WaitingForInput", "Transferring"])
def test_declining_an_id_that_is_open_on_prefill_ends_nothing(world: World, phase: str) -> None:
    if phase == "Bootstrapping":
        world.send(1)
        world.run(50)
    else:
        world.both(1, mute=phase == "WaitingForInput", chunks=4, pace_ms=60)
        until_state(world, "prefill", 1, KVPoll[phase])
    decline(world, "prefill", 1)
    world.run(100)
    if phase == "Bootstrapping":
        world.receive(1)
    world.engine("prefill").unmute(1)
    until_verdict(world, 1, "prefill", "decode0")
    assert verdict(world, "prefill", 1) is verdict(world, "decode0", 1) is KVPoll.Success


@pytest.mark.parametrize("side", ["prefill", "decode0"])
def test_a_declined_id_may_be_used_again_once_that_was_heard(world: World, side: str) -> None:
    other = "decode0" if side == "prefill" else "prefill"
    for _ in range(3):
        (world.receive if side == "prefill" else world.send)(1)
        decline(world, side, 1)
        until_verdict(world, 1, other, within_ms=2 * ABORT_MS)
        world.until(lambda: 1 not in world.engine(other).jobs)
        succeeds(world, 1)


def test_declined_rooms_that_nobody_acknowledges_are_bounded(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_failing, "FAILING_MAX", 4)
    table = world.trees["decode0"].table
    forgotten = int(table.counters.sum(axis=0)[Counter.FORGOTTEN])
    world.post.cuts.add(frozenset(("prefill", "decode0")))
    for room in range(1, 11):
        decline(world, "decode0", room)
    world.run(10)
    listener = world.trees["decode0"].processes["listener"].actor
    assert isinstance(listener, DecodeListener)
    assert len(listener._failing) == 4
    ranks = world.layout.ranks
    assert table.counters.sum(axis=0)[Counter.FORGOTTEN] == forgotten + 10 * ranks - 4


# --- a tombstone has a bound ---


@pytest.mark.parametrize("side", ["prefill", "decode0"])
@pytest.mark.parametrize("how", ["declined", "aborted"])
def test_after_the_bootstrap_timeout_an_id_means_another_room(
    world: World, side: str, how: str
) -> None:
    if how == "declined":
        decline(world, side, 1)
    else:
        (world.send if side == "prefill" else world.receive)(1)
        world.run(10)
        world.abort(side, 1)
        world.until(lambda: 1 not in world.engine(side).jobs)
    world.run(BOOTSTRAP_MS + 200, step_ms=10)
    later = world.receive if side == "prefill" else world.send
    later(1)
    world.run(300)  # without the bound it would be told by now
    (world.send if side == "prefill" else world.receive)(1)
    until_verdict(world, 1, "prefill", "decode0")
    assert verdict(world, "prefill", 1) is verdict(world, "decode0", 1) is KVPoll.Success


@pytest.mark.parametrize("side", ["prefill", "decode0"])
def test_late_and_repeated_aborts_of_an_id_do_not_touch_its_next_use(
    world: World, side: str
) -> None:
    world.post.weather.repeat = 1.0  # every frame once more, up to 300 ms later
    for _ in range(5):
        moving(world, 1)
        world.abort(side, 1)
        until_verdict(world, 1, "prefill", "decode0")
        world.until(lambda: not any(1 in world.engine(n).jobs for n in ("prefill", "decode0")))
        succeeds(world, 1)


# --- a tree that is gone ---


@pytest.mark.parametrize("phase", ["before the peer", "WaitingForInput", "Transferring"])
def test_rooms_of_a_prefill_tree_that_is_gone_end_before_its_silence_would(phase: str) -> None:
    with World() as world:
        to_phase(world, phase)
        control = world.desert("prefill")
        if phase == "before the peer":
            world.engine("decode0").plan(Plan(1, peer=control))
        within_ms = round(2 * TIMEOUTS.beat_s * 1000) + 50
        assert within_ms < TIMEOUTS.peer_s * 1000 / 2
        until_verdict(world, 1, "decode0", within_ms=within_ms)
        assert world.job("decode0", 1).reason is Reason.PEER_LOST
        # The next does not even wait that long: it is known by now.
        world.engine("decode0").plan(Plan(2, peer=control))
        until_verdict(world, 2, "decode0", within_ms=ABORT_MS)


def test_a_prefill_that_nobody_ever_reached_is_gone_too() -> None:
    with World() as world:
        control = world.desert("prefill")
        world.engine("decode0").plan(Plan(1, peer=control))
        until_verdict(world, 1, "decode0", within_ms=300)
        assert world.job("decode0", 1).reason is Reason.PEER_LOST


def test_a_silent_prefill_that_is_listening_keeps_its_rooms_as_long_as_ever() -> None:
    with World() as world:
        to_phase(world, "WaitingForInput")
        world.trees["prefill"].freeze("listener")
        world.run(round(TIMEOUTS.peer_s * 1000) - 100)
        assert verdict(world, "decode0", 1) is None


@pytest.mark.parametrize("late_ms", [0, 100])
def test_a_tree_that_took_the_address_serves_new_rooms(late_ms: int) -> None:
    with World() as world:
        to_phase(world, "Transferring")
        control = world.trees["prefill"].control
        world.post.deserted.add(control)
        world.replace("prefill")
        world.run(late_ms)
        world.post.deserted.clear()
        until_verdict(world, 1, "decode0")
        succeeds(world, 2)
