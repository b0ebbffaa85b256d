"""One law a test: rooms between a prefill and its decodes, in a world that breaks on purpose."""

from __future__ import annotations

import pytest

from pdrt.protocol.states import KVPoll, Reason
from tests.actors.steps import (
    ABORT_MS,
    moving,
    succeeds,
    until_verdict,
    verdict,
)
from tests.actors.world import LAYOUT, World

# --- success ---


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("polls", [0, 1, 20])
@pytest.mark.parametrize("late_ms", [-300, 0, 300])
def test_every_byte_is_in_place_whoever_comes_first(ranks: int, polls: int, late_ms: int) -> None:
    with World(ranks=ranks, polls=polls) as world:
        for room in range(10):
            if late_ms >= 0:
                world.receive(room)
                world.run(late_ms)
                world.send(room, chunks=1 + room % 4)
            else:
                world.send(room, chunks=1 + room % 4, eager=True)
                world.run(-late_ms)
                world.receive(room)
        world.until(lambda: len(world.ledger.landed) == 10)
        world.settle()


def test_an_abort_after_success_changes_nothing(world: World) -> None:
    world.both(1)
    world.until(lambda: 1 in world.ledger.landed)
    for name in ("prefill", "decode0"):
        world.job(name, 1).half.abort()
    world.run(200)
    until_verdict(world, 1, "prefill", "decode0")
    assert verdict(world, "prefill", 1) is verdict(world, "decode0", 1) is KVPoll.Success


def test_a_room_id_may_be_used_again_at_once(world: World) -> None:
    for _ in range(5):
        succeeds(world, 1)
        moving(world, 2)
        world.abort("decode0", 2)
        until_verdict(world, 2, "prefill", "decode0")
        world.until(lambda: 2 not in world.engine("prefill").jobs)
    assert len(world.ledger.landed) == 5


def test_a_late_destination_of_an_ended_room_is_not_matched_with_a_new_one(world: World) -> None:
    world.post.weather.repeat = 1.0
    succeeds(world, 1)
    world.send(1)  # nobody on decode waits for this one
    world.run(500)
    assert verdict(world, "prefill", 1) is not KVPoll.Success
    assert world.engine("prefill").job(1).half.poll() is KVPoll.Bootstrapping


# --- quiet ---


def test_pages_of_an_aborted_room_are_held_until_the_last_byte_has_landed() -> None:
    with World(polls=200) as world:
        moving(world)
        world.abort("decode0", 1)
        world.run(20)
        assert not world.job("decode0", 1).half.quiet()
        world.settle()
        assert world.job("decode0", 1).cleared


def test_a_listener_that_was_restarted_does_not_call_a_moving_room_quiet() -> None:
    with World(polls=300) as world:
        moving(world)
        world.trees["prefill"].kill("listener", again_ms=0)
        world.abort("decode0", 1)
        world.run(60)
        assert not world.job("decode0", 1).half.quiet()
        world.settle()


def test_a_dead_prefill_worker_is_no_fence_unless_its_death_ends_its_writes(world: World) -> None:
    moving(world)
    shm = world.trees["prefill"].transports()[0].name == "shm"
    world.trees["prefill"].kill("worker0")
    until_verdict(world, 1, "prefill", "decode0", within_ms=400)
    world.until(lambda: world.job("decode0", 1).cleared, within_ms=3000)
    assert world.trees["decode0"].forced == ([] if shm else ["worker0"])


@pytest.mark.parametrize("age_ms", [0, 200])
def test_over_shm_the_death_of_a_prefill_makes_its_rooms_quiet_and_costs_no_other_room(
    world: World, age_ms: int
) -> None:
    """By nixl its writes may still be on the wire: there decode's worker is restarted."""
    moving(world)
    world.run(age_ms)
    world.replace("prefill")
    until_verdict(world, 1, "decode0")
    assert world.job("decode0", 1).reason is Reason.PEER_RESTARTED
    world.run(300)
    assert not world.job("decode0", 1).cleared, "no supervisor's children live for so long"
    world.until(lambda: world.job("decode0", 1).cleared, within_ms=1200)
    over_shm = next(iter(world.trees["decode0"].transports())).name == "shm"
    assert world.trees["decode0"].forced == ([] if over_shm else ["worker0"])
    succeeds(world, 2)


# --- refusals ---


def test_a_layout_mismatch_names_the_field_on_both_sides() -> None:
    fields = {name: getattr(LAYOUT, name) for name in LAYOUT.__struct_fields__}
    other = LAYOUT.__class__(**{**fields, "page_size": 2})
    with World(decode_layout=other) as world:
        world.both(1)
        until_verdict(world, 1, "prefill", "decode0", within_ms=ABORT_MS)
        decode = world.job("decode0", 1)
        assert decode.reason is Reason.LAYOUT_MISMATCH
        assert "page_size 2/1" in decode.detail
        assert world.job("prefill", 1).reason is Reason.LAYOUT_MISMATCH
        world.settle()


def test_pages_outside_the_pool_fail_that_room_and_no_other(world: World) -> None:
    world.send(1)
    world.receive(1, bad=True)
    world.both(2)
    until_verdict(world, 1, "prefill", "decode0")
    until_verdict(world, 2, "prefill", "decode0")
    assert world.job("decode0", 1).reason is Reason.BAD_DESTINATION
    assert world.job("prefill", 1).reason is Reason.BAD_DESTINATION
    assert verdict(world, "decode0", 2) is KVPoll.Success


def test_a_failed_write_fails_its_room_and_no_later_one(world: World) -> None:
    succeeds(world, 0)
    world.fabric.fail_next(world.trees["decode0"].processes["worker0"].agent)
    world.both(1)
    until_verdict(world, 1, "prefill", "decode0", within_ms=400)
    assert world.job("prefill", 1).reason is Reason.TRANSPORT_FAILED
    succeeds(world, 2)


def test_a_second_decode_with_the_same_room_is_refused() -> None:
    with World(decodes=2) as world:
        succeeds(world, 0, "decode0")
        succeeds(world, 1, "decode1")
        moving(world, 2, "decode0")
        world.receive(2, "decode1")
        until_verdict(world, 2, "decode1", within_ms=ABORT_MS)
        assert world.job("decode1", 2).reason is Reason.PEER_REFUSED
        until_verdict(world, 2, "prefill", "decode0")
        assert verdict(world, "decode0", 2) is KVPoll.Success
        world.settle()


def test_a_healed_link_carries_new_rooms(world: World) -> None:
    moving(world)
    world.post.cuts.add(frozenset(("prefill", "decode0")))
    until_verdict(world, 1, "prefill", "decode0", within_ms=2000)
    world.post.mend("prefill", "decode0")
    world.run(500)
    succeeds(world, 2)
