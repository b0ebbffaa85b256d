"""Healthy rooms beside a frozen decode, and under a flood of malformed frames."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import zmq

from pdrt.protocol.codec import Malformed
from pdrt.protocol.counters import Counter
from stress.bench.bench import Bench
from stress.bench.figures import Goal, Result, summarise
from stress.bench.players import Players, Run
from stress.bench.trees import ROOT, SMALL, Cpu, Tree, started, tie_to_parent
from stress.bench.trips import Phase, Route

TITLE = "Latency of healthy rooms beside trouble, against the same rooms without it"
GOAL = Goal("median", 1.2)
ROOMS, OPEN = 500, (1, 16)
HELD = 16  # rooms of the frozen decode, half of them moving
FRAMES_A_S = 10_000
PERIOD_S = 0.005
FLOOD_MAX_S = 120.0  # it ends by itself, whatever became of who started it


def measure(bench: Bench, result: Result) -> None:
    roles = {"prefill": "prefill", "decode": "decode", "frozen": "decode"}
    trees = [Tree(bench.folder, role, SMALL, name=name) for name, role in roles.items()]
    with started(trees):
        prefill, healthy, frozen = trees
        route = Route(prefill, frozen, SMALL)
        route.whole()
        with Players.ours(bench.folder, "healthy", prefill, healthy, SMALL) as players:
            players.run(50, 1)
            for open_max in OPEN:
                _compare(bench, result, players, open_max, "frozen decode", _Frozen(route))
            for open_max in OPEN:
                flood = _Flood(prefill, healthy)
                _compare(bench, result, players, open_max, "malformed frames", flood)
                result.notes.append(flood.said())


def _compare(
    bench: Bench, result: Result, players: Players, open_max: int, trouble: str, cause: _Cause
) -> None:
    """Without, with, without, with ..., so that the machine's moods hit both."""
    ratios: dict[str, list[float]] = {"median": [], "p99": []}
    pooled: dict[str, list[float]] = {"without": [], "with": []}
    why = ""
    for _ in range(bench.repeats):
        runs: dict[str, Run] = {}
        for name in pooled:
            with cause.lasts() if name == "with" else contextlib.nullcontext():
                before = Cpu.of(*cause.watched)
                rooms = bench.count(ROOMS * (1 if open_max == 1 else 4))
                runs[name] = players.run(rooms, open_max)
                why = Cpu.of(*cause.watched).per_room(before, rooms)
            pooled[name] += runs[name].decode_ms
        for statistic, found in ratios.items():
            with_, without = (
                getattr(summarise(runs[name].decode_ms), statistic) for name in ("with", "without")
            )
            found.append(with_ / without)
    what = f"{trouble}, {open_max} open"
    for name, samples in pooled.items():
        result.add(f"{what}: {name}", "ms", samples)
    result.add(f"{what}: ratio of medians", "x", ratios["median"], GOAL, why)
    result.add(f"{what}: ratio of p99", "x", ratios["p99"], None)


class _Cause:
    """Trouble that can be begun and ended."""

    watched: tuple[Tree, ...]

    def lasts(self) -> contextlib.AbstractContextManager[None]:
        raise NotImplementedError


class _Frozen(_Cause):
    def __init__(self, route: Route) -> None:
        self._route = route
        self.watched = (route.prefill,)

    @contextlib.contextmanager
    def lasts(self) -> Iterator[None]:
        """Its whole tree is stopped while rooms to it wait and move."""
        route = self._route
        trips = [route.to(Phase.WAITING) for _ in range(HELD)]
        route.decode.signal(signal.SIGSTOP)
        try:
            for trip in trips[::2]:
                trip.advance(Phase.MOVING)
            route.pause()
            yield
        finally:
            route.decode.signal(signal.SIGCONT)
        for trip in trips:
            for side in trip.sides():
                side.room.abort()
        route.clear(*trips)


class _Flood(_Cause):
    def __init__(self, *trees: Tree) -> None:
        self.watched = trees
        self._frames = 0
        self._seconds = 0.0

    @contextlib.contextmanager
    def lasts(self) -> Iterator[None]:
        ports = [str(tree.control_port) for tree in self.watched]
        before, begun = self._counted(), time.monotonic()
        program = "from stress.bench.neighbours import main; main()"
        flood = subprocess.Popen([sys.executable, "-c", program, *ports], cwd=ROOT)
        try:
            while self._counted() == before:  # it is still starting
                time.sleep(0.01)
            before, begun = self._counted(), time.monotonic()
            yield
        finally:
            flood.kill()
            flood.wait()
            self._seconds += time.monotonic() - begun
            self._frames += self._counted() - before

    def _counted(self) -> int:
        kinds = slice(Counter.MALFORMED, Counter.MALFORMED + len(Malformed))
        return sum(int(tree.table.counters[:, kinds].sum()) for tree in self.watched)

    def said(self) -> str:
        rate = self._frames / self._seconds
        return f"malformed frames counted: {self._frames:,}, {rate:,.0f} a second on both ports"


def main() -> None:
    """Malformed frames of every kind in turn, to each port its share of 10,000 a second."""
    tie_to_parent()
    context = zmq.Context()
    doors = []
    for port in sys.argv[1:]:
        door = context.socket(zmq.DEALER)
        door.connect(f"tcp://127.0.0.1:{port}")
        doors.append(door)
    rng = np.random.default_rng(0)
    frames = [b"", b"GET / HTTP/1.1", b"\xd7", b"\xd7" + rng.bytes(40), rng.bytes(200)]
    count = round(FRAMES_A_S * PERIOD_S)
    due, sent = time.monotonic(), 0
    end = due + FLOOD_MAX_S
    while due < end:
        for _ in range(count):
            sent += 1
            with contextlib.suppress(zmq.Again):
                doors[sent % len(doors)].send(frames[sent % len(frames)], zmq.DONTWAIT)
        due += PERIOD_S
        time.sleep(max(0.0, due - time.monotonic()))
