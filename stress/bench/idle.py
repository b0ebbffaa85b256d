"""What trees cost that do nothing."""

from __future__ import annotations

import time

from stress.bench.bench import Bench
from stress.bench.figures import Goal, Result
from stress.bench.trees import SMALL, Cpu, Tree, started
from stress.bench.trips import Route

TITLE = "Processor time of idle trees, all processes and threads, in percent of one core"
GOAL = Goal("max", 2.0)
WATCHED_S, SETTLE_S = 12.0, 2.0


def measure(bench: Bench, result: Result) -> None:
    names = {"alone": "prefill", "prefill": "prefill", "decode": "decode"}
    trees = [Tree(bench.folder, role, SMALL, name=name) for name, role in names.items()]
    with started(trees):
        route = Route(trees[1], trees[2], SMALL)
        route.whole()  # from here on they are peers
        end = time.monotonic() + SETTLE_S
        while time.monotonic() < end:
            route.pause()
        begun, before = time.monotonic(), [Cpu.of(tree) for tree in trees]
        time.sleep(max(2.0, bench.seconds(WATCHED_S)))
        watched_s = time.monotonic() - begun
        used = [Cpu.of(tree).since(cpu) for tree, cpu in zip(trees, before, strict=True)]
        counts = [len(tree.processes()) for tree in trees]
    for tree, seconds, count in zip(trees, used, counts, strict=True):
        peer = "no peer" if tree.name == "alone" else "one peer"
        parts = sorted(seconds.items(), key=lambda item: -item[1])
        why = ", ".join(f"{name} {100 * s / watched_s:.2f} %" for name, s in parts)
        whole = 100 * sum(seconds.values()) / watched_s
        what = f"{tree.settings.role}, {peer}, {count} processes"
        result.add(what, "%", [whole], GOAL, why)
        if whole <= GOAL.bound:  # else it is told as the reason
            result.notes.append(f"{what}: {why}")
    result.notes.append(f"one window of {watched_s:.1f} s; the kernel counts in steps of 10 ms")
