"""When a room entered a state is written down after it did, and by whoever made it: a note that may
be missing, or may land in the next room of the slot.  Nothing may be decided by it."""

from __future__ import annotations

import pytest

from pdrt.clock import SECOND_NS
from pdrt.protocol.counters import Counter
from pdrt.protocol.states import KVPoll, Reason
from pdrt.shm_status import ENTERED, StatusTable
from tests.actors import schedule
from tests.actors.steps import moving, succeeds, until_state, until_verdict
from tests.actors.world import TIMEOUTS, World

QUIET_MS = int(TIMEOUTS.quiet_s * 1000)
STUCK = 10_000  # polls of a write
PACE_MS = 400  # of the chunks of a room that is `moving`


def unwritten(
    table: StatusTable, at: int, state: int, after: int, reason: Reason, now_ns: int
) -> None:
    """Whoever moves a room is interrupted before it writes down when."""


def of_long_ago(
    table: StatusTable, at: int, state: int, after: int, reason: Reason, now_ns: int
) -> None:
    """Somebody who was frozen for long writes over what we wrote."""
    for each in KVPoll:
        if each is not KVPoll.Bootstrapping:
            table._store(at + ENTERED + 8 * each, max(1, now_ns - 9 * SECOND_NS))


@pytest.fixture(params=[unwritten, of_long_ago])
def untrue(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatusTable, "_entered", request.param)


def stuck(world: World, room: int) -> None:
    """A room whose last write does not land while we look, nor does a fence behind it."""
    moving(world, room)
    world.fabric.polls = STUCK
    world.run(PACE_MS + 100)


def forced(world: World) -> int:
    return sum(
        int(tree.table.counters[:, Counter.QUIET_FORCED].sum()) for tree in world.trees.values()
    )


@pytest.mark.usefixtures("untrue")
@pytest.mark.parametrize("side", ["prefill", "decode0"])
def test_a_room_whose_times_are_untrue_is_quiet_when_its_bytes_are(side: str) -> None:
    with World(polls=40) as world:
        moving(world)
        world.abort(side, 1)
        until_verdict(world, 1, "prefill", "decode0")
        world.settle()
        succeeds(world, 2)


@pytest.mark.usefixtures("untrue")
def test_a_room_that_never_moved_is_quiet_at_once_whatever_its_times_say(world: World) -> None:
    world.both(1, mute=True)
    until_state(world, "prefill", 1, KVPoll.WaitingForInput)
    world.abort("prefill", 1)
    until_verdict(world, 1, "prefill", "decode0")
    world.until(lambda: not world.engine("decode0").jobs, within_ms=QUIET_MS // 2)
    assert forced(world) == 0


@pytest.mark.usefixtures("untrue")
@pytest.mark.parametrize("side", ["prefill", "decode0"])
def test_no_worker_is_restarted_before_the_quiet_bound_for_a_time_that_is_untrue(side: str) -> None:
    with World() as world:
        stuck(world, 1)
        world.abort(side, 1)
        until_verdict(world, 1, side)
        world.run(QUIET_MS // 2)
        assert forced(world) == 0


@pytest.mark.usefixtures("untrue")
@pytest.mark.parametrize("side", ["prefill", "decode0"])
def test_a_worker_is_restarted_at_the_quiet_bound_of_each_room_though_no_time_is_true(
    side: str,
) -> None:
    """Each room of a slot has a bound of its own."""
    with World() as world:
        slots = []
        for room in (1, 2):
            before = forced(world)
            stuck(world, room)
            slots.append(world.job(side, room).handles[0].slot)
            world.abort(side, room)
            until_verdict(world, room, side)
            world.run(QUIET_MS // 2)
            assert forced(world) == before
            world.until(lambda: forced(world) > before)  # noqa: B023
            world.fabric.polls = 1  # for the new worker's paths
            world.until(lambda: not world.engine(side).jobs)
            world.run(2 * QUIET_MS)
        assert slots[0] == slots[1]


@pytest.mark.usefixtures("untrue")
@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))]
)
def test_the_laws_hold_whatever_breaks_though_no_time_is_true(seed: int) -> None:
    setting = schedule.setting(seed)
    assert schedule.failure(setting, schedule.schedule(setting)) is None
