"""An actor stops turning without dying: until it is killed, and until a room succeeds."""

from __future__ import annotations

import os
import select
import signal

from pdrt.clock import monotonic_ns
from stress.bench.bench import Bench
from stress.bench.crashes import ACTORS, LIMIT_S, successor_ns
from stress.bench.figures import Goal, Result
from stress.bench.trees import SMALL, Tree, pair
from stress.bench.trips import Route

TITLE = "An actor hangs until it is killed, and until a room succeeds"
GOAL = Goal("p99", 250.0)
HANGS, BUDGET_S = 6, 9.0  # of each tree, actor and kind
KINDS = {
    "SIGSTOP": signal.SIGSTOP,
    "endless loop": signal.SIGUSR1,  # see sabotage/
    "GIL held": signal.SIGUSR2,
}


def measure(bench: Bench, result: Result) -> None:
    with pair(bench.folder, first_deaths=True, sabotage=True) as trees:
        route = Route(*trees, SMALL)
        route.whole()
        for child in ACTORS:
            for kind in KINDS:
                killed_ms: list[float] = []
                room_ms: list[float] = []
                for tree in trees[:1] if bench.quick else trees:
                    for _ in bench.rounds(HANGS, BUDGET_S):
                        tree.settle()
                        killed, room = _hang(route, tree, child, kind)
                        killed_ms.append(killed)
                        room_ms.append(room)
                what = f"{child.rstrip('0')}, {kind}"
                why = f"silent for hang_s = {trees[0].settings.timeouts.hang_s:g} s it is killed, "
                why += "but not for the time it was runnable and had no processor"
                result.add(f"{what}: killed", "ms", killed_ms, GOAL, why)
                result.add(f"{what}: a room opened after it has succeeded", "ms", room_ms)


def _hang(route: Route, tree: Tree, child: str, kind: str) -> tuple[float, float]:
    """Milliseconds until the process is dead, and until a room has succeeded."""
    before = tree.table.incarnation(tree.row(child))
    pidfd = os.pidfd_open(tree.pid(child))
    try:
        begun_ns = monotonic_ns()
        signal.pidfd_send_signal(pidfd, KINDS[kind])
        if not select.select([pidfd], [], [], LIMIT_S)[0]:
            raise TimeoutError(f"{tree.name}'s {child} was not killed within {LIMIT_S:g} s")
        killed_ms = (monotonic_ns() - begun_ns) / 1e6
    finally:
        os.close(pidfd)
    successor_ns(tree, child, before)
    entered_ns, _ = route.first_success(LIMIT_S)
    return killed_ms, (entered_ns - begun_ns) / 1e6
