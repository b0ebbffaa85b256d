"""A supervisor that fails at any of its failpoints still stops: in time, and leaving nobody.

Found by failpoints: one that failed between a burial and what follows it waited for ever for the
buried child to go; one that failed in the middle of a promotion tended the standby that it no
longer had, and failed again while it stopped.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from pdrt import failpoints
from pdrt.failpoints import POINTS, Action, Failpoint, Injected, Once
from pdrt.supervisor import Phase
from tests.supervisor import kids
from tests.supervisor.kids import MemoryBoard, pid_of, spec, supervised, turn_until
from tests.supervisor.test_standby import SPARE, is_up, spare, start_all, state

OURS = [point for point in POINTS if point.startswith("supervisor.")]


@pytest.fixture
def board() -> Iterator[MemoryBoard]:
    made = MemoryBoard()
    yield made
    made.close()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("point", OURS)
def test_a_supervisor_that_fails_stops_all_the_same(board: MemoryBoard, point: str) -> None:
    hangs = point == "supervisor.kill.sent"
    child = spec(board, 0, kids.steady, hang_s=1.0)
    with supervised(child, spare(board), board=board) as supervisor:
        try:
            start_all(supervisor)
            living = {pid_of(state(supervisor, row)) for row in (0, SPARE)}
            failpoints.arm(Once(Failpoint(point=point, action=Action.RAISE)))
            os.kill(pid_of(state(supervisor, 0)), signal.SIGSTOP if hangs else signal.SIGKILL)
            with pytest.raises(Injected, match=point):
                turn_until(supervisor, is_up(supervisor, SPARE, 2), "it to fail")
        finally:
            failpoints.disarm()
        supervisor.stop("it failed")
        assert {seen.phase for seen in supervisor.children()} == {Phase.DONE}
    assert not [child for child in psutil.Process().children() if child.pid in living]
