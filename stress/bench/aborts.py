"""How long until the other side of a room knows: of an abort, and of an engine's death."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import partial

from pdrt.clock import monotonic_ns
from pdrt.engine.manager import KVManager
from stress.bench.bench import Bench
from stress.bench.figures import Goal, Result
from stress.bench.trees import ROOT, SMALL, Cpu, Tree, pair, tie_to_parent
from stress.bench.trips import ROOMS, Phase, Route, Side, advance_half, half

TITLE = "An abort, or an engine's death, until the other side's room is Failed"
GOAL = Goal("p99", 100.0)
ABORTS, DEATHS = 200, 15
LIMIT_S, VICTIM_MAX_S = 10.0, 60.0
MS = 1e6


def measure(bench: Bench, result: Result) -> None:
    with pair(bench.folder, transport=bench.transports[0]) as (prefill, decode):
        route = Route(prefill, decode, SMALL)
        route.whole()
        for phase in (Phase.WAITING, Phase.MOVING):
            for aborter in (0, 1):
                _aborts(bench, result, route, phase, aborter)
        for tree, other in ((prefill, decode), (decode, prefill)):
            _deaths(bench, result, route, tree, other)


def _aborts(bench: Bench, result: Result, route: Route, phase: Phase, aborter: int) -> None:
    told_ms: list[float] = []
    quiet_ms: list[float] = []
    before = Cpu.of(route.prefill, route.decode)
    for _ in bench.rounds(ABORTS, 10.0):
        trip = route.to(phase)
        first, second = trip.sides()[:: -1 if aborter else 1]
        begun_ns = monotonic_ns()
        first.room.abort()
        told_ms.append((_failed_ns(route, [second]) - begun_ns) / MS)
        route.clear(trip)
        quiet_ms.append((monotonic_ns() - begun_ns) / MS)
    names = ("prefill", "decode")[:: -1 if aborter else 1]
    what = f"{names[0]} aborts, {phase.name.lower()}"
    why = Cpu.of(route.prefill, route.decode).per_room(before, len(told_ms))
    result.add(f"{what}: {names[1]} Failed", "ms", told_ms, GOAL, why)
    result.add(f"{what}: both quiet", "ms", quiet_ms)


def _failed_ns(route: Route, sides: Iterable[Side]) -> int:
    """When the last of these rooms Failed."""
    waiting = list(sides)
    route.wait(lambda: all(side.failed_ns() for side in waiting), LIMIT_S, "the other side to fail")
    return max(side.failed_ns() for side in waiting)


def _deaths(bench: Bench, result: Result, route: Route, tree: Tree, other: Tree) -> None:
    """An engine in a process of its own holds a room with our engine on the other side."""
    samples_ms = []
    role = "prefill" if tree is route.prefill else "decode"
    for _ in bench.rounds(DEATHS, 12.0):
        room = next(ROOMS)
        ask = {"attach": tree.attach, "room": room, "peer": route.prefill.control}
        engine = subprocess.Popen(
            [sys.executable, "-c", "from stress.bench.aborts import play; play()", json.dumps(ask)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        try:
            side = half(other.manager, room, route.prefill.control, SMALL)
            route.wait(partial(advance_half, side), LIMIT_S, "a room to have its destination")
            assert engine.stdout is not None
            assert engine.stdout.readline() == b"there\n"
            begun_ns = monotonic_ns()
            engine.kill()
            samples_ms.append((_failed_ns(route, [side]) - begun_ns) / MS)
        finally:
            engine.kill()
            engine.wait()
            assert engine.stdout is not None
            engine.stdout.close()
        route.clear_sides(side)
    names = ("prefill", "decode")[:: 1 if role == "prefill" else -1]
    result.add(f"{names[0]}'s engine killed: {names[1]} Failed", "ms", samples_ms, GOAL)


def play() -> None:
    """The engine that is killed: opens its half, says "there", and ticks until its end."""
    tie_to_parent()
    ask = json.loads(sys.argv[1])
    manager = KVManager.attach(ask["attach"], name="bench-victim")
    side = half(manager, ask["room"], ask["peer"], SMALL)
    said = False
    end = time.monotonic() + VICTIM_MAX_S
    while time.monotonic() < end:
        if advance_half(side) and not said:
            said = True
            print("there", flush=True)
        manager.tick()
        time.sleep(0.001)
