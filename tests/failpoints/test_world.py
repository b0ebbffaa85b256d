"""Every failpoint of an actor, engine or janitor, at every hit, in virtual time.

One play hits them all; each strike plays it again with a death or an exception at one hit, and
every law is checked after every step (tests/actors/laws.py).  The default suite plays a few
strikes, and `bin/test --all tests/failpoints` every one.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from pdrt.failpoints import POINTS, Action, Failpoint
from stress.bench.failpoints import HITS_A_ROOM
from tests.actors.world import World
from tests.failpoints.play import play
from tests.failpoints.strikes import NOT_IN_THE_WORLD, Strikes, struck

HITS_MAX = 60  # of a point; one that is hit more often is struck at so many hits, evenly spread
SAMPLE_EVERY = 5  # of the points, in the default suite
ACTIONS = (Action.KILL, Action.RAISE)
TRANSPORTS = {"nixl-like": False, "shm-like": True}
IN_THE_WORLD = [point for point in POINTS if point not in NOT_IN_THE_WORLD]


@cache
def hits(shm: bool) -> Counter[str]:
    """How often the play comes by each point, if nobody is struck."""
    return play(None, shm=shm).hits


def strikes_at(point: str, shm: bool) -> list[int]:
    count = hits(shm)[point]
    step = max(1, count // HITS_MAX)
    return list(range(1, count + 1, step))


def strike(point: str, action: Action, shm: bool, on_hit: int) -> None:
    failpoint = Failpoint(point=point, action=action, on_hit=on_hit)
    try:
        strikes = play(failpoint, shm=shm)
    except Exception as error:
        error.add_note(f"{failpoint}, shm={shm}")
        raise
    assert strikes.victim, f"{failpoint} was not struck"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_play_hits_every_point_of_the_world(transport):
    """On each transport: a cell that nothing strikes would pass."""
    assert hits(TRANSPORTS[transport]).keys() == set(IN_THE_WORLD)


@pytest.mark.parametrize("point", IN_THE_WORLD[::SAMPLE_EVERY])
def test_the_laws_hold_after_the_first_hit(point):
    strike(point, Action.KILL, False, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("point", IN_THE_WORLD)
def test_the_laws_hold_after_any_hit(point, action, transport):
    shm = TRANSPORTS[transport]
    numbers = strikes_at(point, shm)
    assert numbers, f"nothing comes by {point}"
    for on_hit in numbers:
        strike(point, action, shm, on_hit)


def test_a_small_room_comes_by_as_many_points_as_the_benchmark_says():
    strikes = Strikes()
    with World() as world, struck(world, strikes):
        world.run(200)
        strikes.hits.clear()
        world.both(1, pages_count=1, chunks=1)
        world.run(200)
    turns = {"actor.turn.before_flush", "actor.turn.before_wake"}
    first_meeting = {"prefill.introduce.before_workers", "worker.path.before_report"}
    counted = {p: n for p, n in strikes.hits.items() if p not in turns | first_meeting}
    assert sum(counted.values()) == HITS_A_ROOM, counted
