"""A listener or a worker is killed: until its successor is ready, and until a room succeeds."""

from __future__ import annotations

import signal
import time

from pdrt.clock import monotonic_ns
from stress.bench.bench import Bench
from stress.bench.figures import Goal, Result
from stress.bench.trees import SMALL, Tree, pair
from stress.bench.trips import Route

TITLE = "SIGKILL of an actor until its successor is ready, and until a room succeeds"
KILLS, BUDGET_S = 40, 24.0
LIMIT_S = 30.0
GOALS = {"listener": Goal("p99", 25.0), "worker0": Goal("p99", 100.0)}
ACTORS = ("listener", "worker0")


def measure(bench: Bench, result: Result) -> None:
    with pair(bench.folder, first_deaths=True) as (prefill, decode):
        route = Route(prefill, decode, SMALL)
        route.whole()
        for tree in (prefill, decode):
            for child in ACTORS:
                _kills(bench, result, route, tree, child)


def _kills(bench: Bench, result: Result, route: Route, tree: Tree, child: str) -> None:
    ready_ms: list[float] = []
    room_ms: list[float] = []
    failed = unsettled = 0
    for _ in bench.rounds(KILLS, BUDGET_S):
        unsettled += not tree.settle()
        before = tree.table.incarnation(tree.row(child))
        begun_ns = monotonic_ns()
        tree.kill(child, signal.SIGKILL)
        ready_ms.append((successor_ns(tree, child, before) - begun_ns) / 1e6)
        entered_ns, lost = route.first_success(LIMIT_S)
        room_ms.append((entered_ns - begun_ns) / 1e6)
        failed += lost
    what = f"{tree.name}'s {child.rstrip('0')} killed"
    why = f"{unsettled} of {len(ready_ms)} kills hit a tree that was still busy with the one before"
    result.add(f"{what}: successor ready", "ms", ready_ms, GOALS[child], why)
    result.add(f"{what}: a room opened then has succeeded", "ms", room_ms)
    if failed:
        result.notes.append(f"{what}: {failed} rooms failed before the {len(room_ms)} successes")


def successor_ns(tree: Tree, child: str, before: int) -> int:
    """When another incarnation than `before` is ready; looks five times a millisecond."""
    table, row = tree.table, tree.row(child)
    end_ns = monotonic_ns() + int(LIMIT_S * 1e9)
    while not (table.incarnation(row) not in (0, before) and table.ready(row)):
        if monotonic_ns() > end_ns:
            raise TimeoutError(f"no successor of {tree.name}'s {child} within {LIMIT_S:g} s")
        time.sleep(0.0002)
    return monotonic_ns()
