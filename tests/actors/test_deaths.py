"""Whoever dies, stands still or is replaced: which rooms fail with it, and which do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdrt.protocol.messages import Landed
from pdrt.protocol.states import OPEN, KVPoll, Reason
from tests.actors.steps import (
    PHASES,
    moving,
    succeeds,
    to_phase,
    until_state,
    until_verdict,
    verdict,
)
from tests.actors.world import World


@pytest.mark.parametrize("tree", ["prefill", "decode0"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_listener_restart_costs_no_room(world: World, tree: str, phase: str) -> None:
    succeeds(world, 0)
    world.send(1, chunks=4, pace_ms=60)
    world.receive(1, pace_ms=60)
    if phase != PHASES[0]:
        until_state(world, "decode0", 1, KVPoll[phase])
    world.trees[tree].kill("listener")
    until_verdict(world, 1, "prefill", "decode0")
    assert verdict(world, "prefill", 1) is verdict(world, "decode0", 1) is KVPoll.Success


@pytest.mark.parametrize("tree", ["prefill", "decode0"])
def test_rooms_that_only_wait_survive_a_worker_restart(world: World, tree: str) -> None:
    succeeds(world, 0)
    world.receive(1, pace_ms=300)
    world.send(1)
    until_state(world, "decode0", 1, KVPoll.WaitingForInput)
    world.trees[tree].kill("worker0")
    until_verdict(world, 1, "prefill", "decode0")
    assert verdict(world, "prefill", 1) is verdict(world, "decode0", 1) is KVPoll.Success


def test_prefills_worker_restart_costs_no_room_whose_bytes_it_did_not_move(world: World) -> None:
    to_phase(world, "WaitingForInput")
    world.trees["prefill"].kill("worker0")
    world.run(200)
    world.engine("prefill").unmute(1)
    until_verdict(world, 1, "prefill", "decode0")
    assert verdict(world, "prefill", 1) is verdict(world, "decode0", 1) is KVPoll.Success


@pytest.mark.parametrize("tree", ["prefill", "decode0"])
def test_a_worker_death_fails_the_rooms_it_moved_and_no_later_one(world: World, tree: str) -> None:
    moving(world)
    world.trees[tree].kill("worker0")
    until_verdict(world, 1, "prefill", "decode0", within_ms=400)
    assert world.job(tree, 1).reason is Reason.WORKER_DIED
    succeeds(world, 2)


@pytest.mark.parametrize("phase", PHASES[1:])
@pytest.mark.parametrize("tree", ["prefill", "decode0"])
def test_an_engine_death_is_told_to_the_other_side(world: World, tree: str, phase: str) -> None:
    to_phase(world, phase)
    other = "decode0" if tree == "prefill" else "prefill"
    world.trees[tree].kill("engine")
    until_verdict(world, 1, other, within_ms=200)
    assert world.job(other, 1).reason is Reason.ENGINE_DIED
    world.until(lambda: "engine" in world.trees[tree].processes)
    succeeds(world, 2)


@pytest.mark.parametrize("name", ["listener", "worker0", "engine"])
@pytest.mark.parametrize("tree", ["prefill", "decode0"])
def test_every_room_ends_though_somebody_is_frozen(world: World, tree: str, name: str) -> None:
    world.trees[tree].shape.hang_s = 1000.0  # and nobody kills it
    moving(world)
    world.both(2)
    world.trees[tree].freeze(name)
    world.run(6000, step_ms=5)
    for each in world.trees.values():
        words = each.table.words[each.table.live_slots()].tolist()
        assert all(word & 0xF not in OPEN for word in words)
    world.trees[tree].thaw(name)
    world.run(1000, step_ms=5)
    succeeds(world, 3)


def test_a_frozen_decode_slows_nobody_else() -> None:
    with World(decodes=2) as world:
        succeeds(world, 0, "decode0")
        succeeds(world, 1, "decode1")
        alone_ms = _ms_of(world, 2)
        moving(world, 3, "decode0")
        for name in ("listener", "worker0", "engine"):
            world.trees["decode0"].freeze(name)
        assert _ms_of(world, 4) <= alone_ms + 10
        world.settle()


def test_a_room_that_stands_still_does_not_keep_its_worker_awake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not even after others have moved: polling it at once takes time from those who work."""
    with World(decodes=2, polls=20) as world:
        succeeds(world, 0, "decode0")
        succeeds(world, 1, "decode1")
        world.both(2, "decode0", mute=True)
        until_state(world, "prefill", 2, KVPoll.WaitingForInput)
        world.trees["decode0"].freeze("worker0")
        world.engine("prefill").unmute(2)
        until_state(world, "prefill", 2, KVPoll.Transferring)
        world.run(400, step_ms=1)
        succeeds(world, 3, "decode1")
        worker = world.trees["prefill"].processes["worker0"].actor
        sleeps_ms: list[int] = []
        monkeypatch.setattr(worker, "tick", _noting(worker.tick, sleeps_ms))
        world.run(100, step_ms=1)
        assert verdict(world, "prefill", 2) is None, "it still stands there"
        assert sleeps_ms
        assert 0 not in sleeps_ms
        world.trees["decode0"].thaw("worker0")
        world.settle()


def _noting(tick: Callable[[int], int], sleeps_ms: list[int]) -> Callable[[int], int]:
    def noting(now_ns: int) -> int:
        sleeps_ms.append(tick(now_ns))
        return sleeps_ms[-1]

    return noting


def _ms_of(world: World, room: int) -> int:
    world.both(room, "decode1")
    return until_verdict(world, room, "prefill", "decode1")


def test_another_instance_at_prefills_address_fails_old_rooms_at_once(world: World) -> None:
    to_phase(world, "Transferring")
    world.replace("prefill")
    until_verdict(world, 1, "decode0", within_ms=300)
    assert world.job("decode0", 1).reason is Reason.PEER_RESTARTED
    succeeds(world, 2)


def test_another_instance_at_decodes_address_gets_no_news_of_the_old_one(world: World) -> None:
    moving(world)
    before = world.trees["decode0"].instance
    world.replace("decode0")
    world.receive(7, pages_count=4)  # the same slot and generation as room 1 had
    world.send(7, mute=True)
    until_state(world, "prefill", 7, KVPoll.WaitingForInput)
    listener = world.trees["decode0"].processes["listener"]
    handle = world.job("decode0", 7).handles[0]
    news = Landed(1, 0, handle.slot, handle.generation, 1, 1, before)
    listener.actor.handle(("control", b"ghost"), news, world.clock())
    assert verdict(world, "decode0", 7) is None
    world.run(10)
    assert world.job("decode0", 7).half.poll() is KVPoll.Transferring
    world.engine("prefill").unmute(7)
    until_verdict(world, 7, "prefill", "decode0")
    assert verdict(world, "decode0", 7) is KVPoll.Success
