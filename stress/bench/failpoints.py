"""What a failpoint costs while nobody has armed it, and what other ways to write it would."""

from __future__ import annotations

import time
from collections.abc import Callable

from pdrt import failpoints
from stress.bench.bench import Bench
from stress.bench.figures import Goal, Result, summarise

TITLE = "A failpoint that is off"
CALLS = 200_000
ROUNDS = 25
#: What one small room comes by in its own processes on both sides, from opening it to clearing it;
#: those of the loops' turns not counted: they serve many rooms at once.
HITS_A_ROOM = 30


class Asked:
    """Stands for the module, with hits written in other ways."""

    armed = False

    @staticmethod
    def by_python(point: str) -> None:
        return None


def nothing() -> None:
    for _ in range(CALLS):
        pass


def a_hit() -> None:
    for _ in range(CALLS):
        failpoints.hit("worker.post.after_move")


def a_python_function() -> None:
    for _ in range(CALLS):
        Asked.by_python("worker.post.after_move")


def a_flag() -> None:
    for _ in range(CALLS):
        if Asked.armed:
            Asked.by_python("worker.post.after_move")


def measure(bench: Bench, result: Result) -> None:
    bare: list[float] = []
    ways: dict[Callable[[], None], tuple[str, Goal | None, list[float]]] = {
        a_hit: ("failpoints.hit(...) while off", Goal("median", 0.1), []),
        a_python_function: ("as an empty function of Python", None, []),
        a_flag: ("as `if armed: hit(...)`, two lines at each point", None, []),
    }
    for _ in bench.rounds(ROUNDS, 20.0):
        bare.append(_timed(nothing))
        for way, (_, _, samples) in ways.items():
            samples.append(max(0.0, _timed(way) - bare[-1]))
    for name, goal, samples in ways.values():
        result.add(name, "us", samples, goal, f"an empty turn of the loop is subtracted, {CALLS:,}")
    one = summarise(ways[a_hit][2]).median
    result.add(f"{HITS_A_ROOM} of them, as of one small room", "us", [one * HITS_A_ROOM])


def _timed(way: Callable[[], None]) -> float:
    """Microseconds of one turn."""
    begun = time.perf_counter()
    way()
    return (time.perf_counter() - begun) / CALLS * 1e6
