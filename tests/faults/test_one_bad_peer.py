"""Law 11: one bad peer slows nobody else.

Rooms of healthy peers are timed while a peer is bad and while it is well, by turns in one run, so
that the two are compared on the same machine in the same minute.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.faults.conftest import OVER_S, QUIET_S, Net
from tests.faults.proxy import (
    Action,
    BlackHole,
    Delay,
    Freeze,
    HalfOpen,
    Refuse,
    Throttle,
    Truncate,
)
from tests.faults.traffic import Phase, Route, Trip, all_over, finish, recover, run, succeed
from tests.faults.trees import Tree, stopped
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("emptied")

ROUNDS, ROOMS = 6, 6
RATIO = 2.0
SLACK_S = 0.02  # about what one turn of the scheduler costs with two busy cores


@dataclass
class Times:
    bad: list[float]
    well: list[float]

    def check(self) -> None:
        bad, well = statistics.median(self.bad), statistics.median(self.well)
        assert bad < RATIO * well + SLACK_S, (bad, well, sorted(self.bad), sorted(self.well))


def by_turns(
    healthy: Route, sick: Route, hurt: Callable[[], None], heal: Callable[[], None]
) -> tuple[Times, list[Trip]]:
    """Time the healthy route by turns.  While the other is hurt, it has rooms to get stuck in: some
    that were moving when it happened, and some that were opened since."""
    times, stuck = Times([], []), list[Trip]()
    for _ in range(ROUNDS):
        times.well += succeed(healthy, ROOMS, others=[sick])
        moving = [sick.open(Phase.MOVING) for _ in range(2)]
        run([sick], lambda: all(t.reached for t in moving), OVER_S, "rooms to move")  # noqa: B023
        hurt()
        for trip in moving:
            trip.want = Phase.WHOLE
        stuck += [*moving, *(sick.open() for _ in range(2))]
        times.bad += succeed(healthy, ROOMS, others=[sick])
        heal()
        finish([sick], OVER_S + QUIET_S, "the rooms of one round to be over and quiet")
    return times, stuck


def bystanders(net: Net, *bad: Tree) -> dict[str, dict[str, int]]:
    """Who must be the same afterwards."""
    return {tree.control: tree.pids() for tree in net.trees if tree not in bad}


@pytest.mark.parametrize("bad", ["decode", "prefill"])
def test_a_stopped_tree_slows_no_other(net: Net, bad: str) -> None:
    tree: Tree = getattr(net, bad)
    healthy = net.from_other if bad == "decode" else net.to_other
    before = bystanders(net, tree)
    with contextlib.ExitStack() as frozen:
        times, _ = by_turns(
            healthy, net.route, lambda: frozen.enter_context(stopped(tree)), frozen.close
        )
    times.check()
    assert bystanders(net, tree) == before
    recover(net.route, 30)


def test_rooms_with_a_decode_that_stays_stopped_end_and_slow_no_other(net: Net) -> None:
    before = bystanders(net, net.decode)
    usual = succeed(net.from_other, 4 * ROOMS)
    moving = [net.route.open(Phase.MOVING) for _ in range(4)]
    run([net.route], lambda: all(t.reached for t in moving), 10, "rooms to move")
    with stopped(net.decode):
        for trip in moving:
            trip.want = Phase.WHOLE
        opened = [net.route.open() for _ in range(4)]
        meanwhile: list[float] = []

        def all_failed() -> bool:
            """On both sides: decode's rooms end although nobody of it runs."""
            meanwhile.extend(succeed(net.from_other, 1, others=[net.route]))
            return all_over([*moving, *opened])

        wait_until(all_failed, OVER_S, "rooms with a stopped decode to be over")
        assert not any(trip.succeeded for trip in opened)
    Times(meanwhile, usual).check()
    assert bystanders(net, net.decode) == before
    finish([net.route], OVER_S + QUIET_S, "the rooms with the stopped decode to be quiet")
    recover(net.route, 30)


SICK: list[Action] = [Throttle(2_000), Refuse()]
SICK_OTHERWISE: list[Action] = [BlackHole(), Delay(80), Freeze(), HalfOpen(), Truncate(700)]


def sick(net: Net, action: Action) -> None:
    before = bystanders(net, net.decode)
    times, _ = by_turns(net.from_other, net.route, lambda: net.do("both", action), net.heal)
    times.check()
    assert bystanders(net, net.decode) == before


@pytest.mark.parametrize("action", SICK, ids=str)
def test_a_bad_path_slows_no_other(net: Net, action: Action) -> None:
    sick(net, action)


@pytest.mark.slow
@pytest.mark.parametrize("action", SICK_OTHERWISE, ids=str)
def test_a_bad_path_of_another_kind_slows_no_other(net: Net, action: Action) -> None:
    sick(net, action)


def test_a_path_that_flaps_slows_no_other(net: Net) -> None:
    """It is never gone for long enough to be given up, and never there for long."""
    before = bystanders(net)
    usual = succeed(net.from_other, 4 * ROOMS)
    meanwhile: list[float] = []
    trips: list[Trip] = []
    for _ in range(20):
        net.do("both", Refuse())
        trips.append(net.route.open())
        meanwhile += succeed(net.from_other, 1, others=[net.route])
        net.heal()
        trips.append(net.route.open())
        meanwhile += succeed(net.from_other, 1, others=[net.route])
    Times(meanwhile, usual).check()
    run([net.route], lambda: all_over(trips), OVER_S, "the rooms of a flapping path to be over")
    finish([net.route], QUIET_S, "the rooms of a flapping path to be quiet")
    assert bystanders(net) == before
