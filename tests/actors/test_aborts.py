"""Aborts, by either side and at every phase: told, in time, once."""

from __future__ import annotations

import pytest

from pdrt.actors.decode_listener import DecodeListener
from pdrt.protocol.states import KVPoll, Reason
from tests.actors.steps import (
    ABORT_MS,
    PHASES,
    succeeds,
    to_phase,
    until_state,
    until_verdict,
    verdict,
)
from tests.actors.world import World


@pytest.mark.parametrize("phase", PHASES[1:])
@pytest.mark.parametrize("side", ["prefill", "decode0"])
def test_an_abort_reaches_the_other_side_within_100_ms(world: World, side: str, phase: str) -> None:
    to_phase(world, phase)
    other = "decode0" if side == "prefill" else "prefill"
    world.abort(side, 1)
    assert until_verdict(world, 1, other, within_ms=ABORT_MS) <= ABORT_MS
    assert world.job(other, 1).reason is Reason.PEER_ABORTED


@pytest.mark.parametrize("restarted", [False, True])
def test_an_abort_before_prefill_has_answered_the_first_hello_is_told(
    world: World, restarted: bool
) -> None:
    if restarted:
        succeeds(world, 0)
        world.trees["decode0"].kill("listener")
    world.post.cuts.add(frozenset(("prefill", "decode0")))
    world.both(1, mute=True)
    until_state(world, "decode0", 1, KVPoll.Bootstrapping)
    world.run(100)
    world.abort("decode0", 1)
    world.run(20)
    world.post.mend("prefill", "decode0")
    until_verdict(world, 1, "prefill", within_ms=1000)  # it is said again after 0.2 s, and 0.4
    assert world.job("prefill", 1).reason is Reason.PEER_ABORTED


def test_an_abort_is_told_though_the_slot_was_cleared_before_the_listener_looked(
    world: World,
) -> None:
    to_phase(world, "Bootstrapping")
    world.abort("decode0", 1)  # what says so is under way
    world.job("decode0", 1).half.clear()
    listener = world.trees["decode0"].processes["listener"].actor
    assert isinstance(listener, DecodeListener)
    listener._scan(world.clock())
    until_verdict(world, 1, "prefill", within_ms=ABORT_MS)
    assert world.job("prefill", 1).reason is Reason.PEER_ABORTED


@pytest.mark.parametrize("side", ["prefill", "decode0"])
def test_an_abort_before_the_peer_knows_the_room_meets_it(world: World, side: str) -> None:
    succeeds(world, 0)
    first, second = (
        (world.send, world.receive) if side == "prefill" else (world.receive, world.send)
    )
    other = "decode0" if side == "prefill" else "prefill"
    first(1)
    world.run(10)
    world.abort(side, 1)
    world.run(300)
    second(1)
    assert until_verdict(world, 1, other, within_ms=ABORT_MS) <= ABORT_MS
    assert verdict(world, other, 1) is KVPoll.Failed


def test_prefill_that_opens_and_aborts_after_decode_asked_tells_it_at_once(world: World) -> None:
    succeeds(world, 0)
    world.receive(1, pace_ms=10_000)
    world.run(1000)  # its questions have become rare
    world.send(1)
    world.run(30)
    world.abort("prefill", 1)
    assert until_verdict(world, 1, "decode0", within_ms=ABORT_MS) <= ABORT_MS


@pytest.mark.parametrize("phase", PHASES[1:])
def test_both_sides_abort_at_once_and_twice(world: World, phase: str) -> None:
    to_phase(world, phase)
    for _ in range(2):
        world.abort("prefill", 1)
        world.abort("decode0", 1)
    until_verdict(world, 1, "prefill", "decode0", within_ms=ABORT_MS)
    for name in ("prefill", "decode0"):
        assert world.job(name, 1).reason is Reason.ABORTED
    succeeds(world, 1)


@pytest.mark.parametrize("side", ["prefill", "decode0"])
def test_an_abort_whose_listener_dies_reaches_the_other_side_all_the_same(
    world: World, side: str
) -> None:
    to_phase(world, "Transferring")
    other = "decode0" if side == "prefill" else "prefill"
    world.trees[side].kill("listener")
    world.abort(side, 1)
    # Of a room that was cleared before prefill's new listener looked, only decode's deadline tells.
    until_verdict(world, 1, other, within_ms=1000 if side == "decode0" else 2000)
    succeeds(world, 2)
