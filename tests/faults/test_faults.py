"""Every fault of a network, while rooms are in every phase.

Whatever happens to the path: no process dies, every room ends on both sides in its time and says
why, what succeeded has the right bytes, nothing is left, and once the path is back rooms succeed
without anybody restarting anything.
"""

from __future__ import annotations

import pytest

from tests.faults.conftest import OVER_S, QUIET_S, Net
from tests.faults.proxy import (
    Action,
    BlackHole,
    Delay,
    Flip,
    Freeze,
    HalfOpen,
    Refuse,
    Throttle,
    Truncate,
)
from tests.faults.traffic import (
    Phase,
    Trip,
    all_over,
    count_reasons,
    finish,
    recover,
    run,
    succeed,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("emptied")

SEVERING: list[Action] = [BlackHole(), Freeze(), HalfOpen(), Refuse()]
HURTING: list[Action] = [Delay(80), Throttle(20_000), Truncate(700), Flip(300)]


def leave_nothing(net: Net) -> None:
    """After healing: 20 rooms, empty tables, and no process that died by itself."""
    for tree in net.trees:
        wait_until(tree.is_empty, 10, f"{tree.role}'s table to be empty")
        assert not tree.unplanned_restarts(), tree.log()[-3000:]


def everywhere(net: Net, count: int = 2) -> list[Trip]:
    """Rooms in every phase but the last."""
    trips = [net.route.open(phase) for phase in Phase for _ in range(count) if phase < Phase.WHOLE]
    run([net.route], lambda: all(t.reached for t in trips), 10, "rooms to be in every phase")
    assert not any(trip.over for trip in trips)
    return trips


def suffer(net: Net, where: str, action: Action, *, severs: bool) -> None:
    held = everywhere(net)
    going = everywhere(net)
    net.do(where, action)
    for trip in going:
        trip.want = Phase.WHOLE
    going += [net.route.open() for _ in range(3)]
    # A path that is hurt and not gone may keep a room for long, but never without progress.
    run([net.route], lambda: all_over(going), OVER_S, f"rooms to be over under {action}")
    if severs:
        run([net.route], lambda: all_over(held), OVER_S, f"waiting rooms to be over, {action}")
        assert not any(trip.succeeded for trip in held)
    net.heal()
    for trip in held:
        trip.want = Phase.WHOLE
    finish([net.route], OVER_S + QUIET_S, f"every room to be quiet after {action}")
    recover(net.route, 15)
    succeed(net.route, 20)
    leave_nothing(net)
    print(where, action, dict(count_reasons([*held, *going])))  # noqa: T201


@pytest.mark.parametrize("action", [BlackHole(), Refuse()], ids=str)
def test_a_path_that_is_gone(net: Net, action: Action) -> None:
    suffer(net, "both", action, severs=True)


@pytest.mark.slow
@pytest.mark.parametrize("action", [Freeze(), HalfOpen()], ids=str)
def test_a_path_that_is_gone_otherwise(net: Net, action: Action) -> None:
    suffer(net, "both", action, severs=True)


@pytest.mark.slow
@pytest.mark.parametrize("action", SEVERING, ids=str)
@pytest.mark.parametrize("where", ["bootstrap", "control"])
def test_one_of_two_paths_is_gone(net: Net, where: str, action: Action) -> None:
    suffer(net, where, action, severs=where == "bootstrap")


@pytest.mark.slow
@pytest.mark.parametrize("action", HURTING, ids=str)
@pytest.mark.parametrize("where", ["bootstrap", "control", "both"])
def test_a_path_that_is_bad(net: Net, where: str, action: Action) -> None:
    suffer(net, where, action, severs=False)
