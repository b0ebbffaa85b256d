"""What a calm world and one that has settled must do, and that it is seen if they do not."""

from __future__ import annotations

import pytest

from pdrt.protocol.states import KVPoll
from tests.actors import calm, schedule
from tests.actors.mutants import mutated, no_abort_is_heard, no_landed_is_heard
from tests.actors.post import Weather
from tests.actors.steps import moving, succeeds, until_verdict
from tests.actors.world import World

CALM = next(seed for seed in range(1000) if schedule.setting(seed).calm)


def test_a_share_of_the_seeds_is_calm_and_nothing_breaks_in_them() -> None:
    settings = [schedule.setting(seed) for seed in range(1000)]
    found = [where for where in settings if where.calm]
    assert 30 < len(found) < 80
    for where in found:
        acts = schedule.schedule(where)
        assert {act.verb for act in acts} <= {"send", "receive", "abort"}
        assert not where.loss
        assert schedule.setting(where.seed) == where


@pytest.mark.parametrize("side", ["prefill", "decode0"])
def test_a_room_that_is_given_up_and_one_that_is_not(world: World, side: str) -> None:
    succeeds(world, 0)
    moving(world, 1)
    world.abort(side, 1)
    world.settle()
    calm.check(world)
    world.serves()
    assert world.job("prefill", 0).verdict is KVPoll.Success


def test_a_room_that_fails_though_nobody_gave_it_up_is_seen(world: World) -> None:
    world.both(1, mute=True)
    world.settle()
    with pytest.raises(AssertionError, match="failed for nothing"):
        calm.check(world)


def test_a_room_of_one_half_is_seen(world: World) -> None:
    world.send(1)
    world.settle()
    with pytest.raises(AssertionError, match="1 halves of room 1"):
        calm.check(world)


def test_an_abort_that_is_not_heard_is_seen(world: World) -> None:
    with mutated(no_abort_is_heard):
        moving(world, 1)
        world.abort("prefill", 1)
        world.settle()
    with pytest.raises(AssertionError, match="unheard: decode0"):
        calm.check(world)


def test_an_abort_that_is_heard_late_is_seen(world: World) -> None:
    moving(world, 1)
    with mutated(no_abort_is_heard):
        world.abort("prefill", 1)
        world.run(calm._bound_ms(Weather()))
    until_verdict(world, 1, "decode0")
    world.settle()
    with pytest.raises(AssertionError, match=r"heard \d+ ms later: decode0"):
        calm.check(world)


def test_a_world_that_serves_nothing_any_more_is_seen(world: World) -> None:
    with mutated(no_landed_is_heard), pytest.raises(AssertionError, match="not served"):
        world.serves()


def test_a_world_serves_by_every_tree_that_lives() -> None:
    with World(decodes=2) as world:
        world.desert("decode0")
        world.settle()
        world.serves()
        assert [job.verdict for job in world.engine("decode1").history] == [KVPoll.Success]
        world.revive("decode0")
        world.replace("prefill")
        world.serves()
        assert [job.verdict for job in world.engine("decode0").history] == [KVPoll.Success]
        assert len(world.ledger.landed) == 3
        world.desert("prefill")
        world.serves()
        assert len(world.ledger.landed) == 3
