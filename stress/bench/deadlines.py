"""How late after its deadline a room is Failed, by who looks."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import numpy as np

from pdrt.clock import MILLISECOND_NS
from pdrt.config import Timeouts
from pdrt.protocol.states import Reason
from pdrt.shm_status import DEADLINE, VALUE_MASK
from stress.bench.bench import Bench
from stress.bench.figures import Goal, Result
from stress.bench.trees import SMALL, pair
from stress.bench.trips import ROOMS, Phase, Route, Side, half

TITLE = "A deadline passes until the room is Failed"
#: Short deadlines; hang and quiet so long that nothing but the deadline can end a room.
TIMEOUTS = Timeouts(bootstrap_s=0.25, waiting_s=0.25, stall_s=0.25, hang_s=20.0, quiet_s=30.0)
AT_ONCE, BATCHES = 25, 12
APART_S = 0.003  # so that a sweep's rhythm does not favour a batch
LIMIT_S = 10.0


def measure(bench: Bench, result: Result) -> None:
    with pair(bench.folder, timeouts=TIMEOUTS, first_deaths=True) as (prefill, decode):
        route = Route(prefill, decode, SMALL)
        route.first_success()  # the peers' first meeting may take longer than these deadlines
        late = [_polled(bench, route), _unread(bench, route), _frozen(bench, route)]
    names = (
        "(a) a reader polls",
        "(b) nobody reads: the janitor",
        "(c) its worker is SIGSTOPped, nobody reads",
    )
    for name, samples_ms in zip(names, late, strict=True):
        result.add(name, "ms", samples_ms, Goal("p99", 100.0))
    result.notes.append(
        "deadlines are kept in whole milliseconds and have passed once that millisecond is over, "
        "so 1 to 2 ms is the least there can be"
    )


def _late_ms(side: Side) -> float:
    table, slot = side.manager.table, side.handle.slot
    deadline_ms = int(table.rows(np.array([slot]))[0, DEADLINE // 8]) & VALUE_MASK
    return (side.failed_ns() - deadline_ms * MILLISECOND_NS) / MILLISECOND_NS


def _alone(route: Route) -> list[Side]:
    """Prefill's halves of rooms that no decode asks for."""
    sides = []
    for _ in range(AT_ONCE):
        sides.append(half(route.prefill.manager, next(ROOMS), "", SMALL))
        time.sleep(APART_S)
    return sides


def _batches(
    bench: Bench, route: Route, begin: Callable[[], list[Side]], look: Callable[[Side], object]
) -> list[float]:
    late_ms: list[float] = []
    for _ in bench.rounds(BATCHES, 8.0):
        sides = begin()
        end = time.monotonic() + LIMIT_S
        left = list(sides)
        while left:
            for side in left:
                look(side)
            left = [side for side in left if not side.failed_ns()]
            if time.monotonic() > end:
                raise TimeoutError(f"{len(left)} rooms outlived their deadline by {LIMIT_S:g} s")
            time.sleep(0.0005)
        late_ms += [_late_ms(side) for side in sides]
        route.clear_sides(*sides)
    return late_ms


def _polled(bench: Bench, route: Route) -> list[float]:
    return _batches(bench, route, lambda: _alone(route), lambda side: side.room.poll())


def _unread(bench: Bench, route: Route) -> list[float]:
    return _batches(bench, route, lambda: _alone(route), lambda side: side.word())


def _frozen(bench: Bench, route: Route) -> list[float]:
    """Rooms in Transferring on prefill, whose worker is frozen with the first chunk sent."""
    late_ms: list[float] = []
    for _ in bench.rounds(BATCHES, 12.0):
        trips = [route.to(Phase.MOVING) for _ in range(AT_ONCE)]
        route.prefill.kill("worker0", signal.SIGSTOP)
        try:
            sides = [trip.prefill for trip in trips]
            end = time.monotonic() + LIMIT_S
            while not all(side.failed_ns() for side in sides):
                if time.monotonic() > end:
                    raise TimeoutError(f"rooms outlived their deadline by {LIMIT_S:g} s")
                time.sleep(0.0005)
            stalled = [side for side in sides if side.word().reason is Reason.TRANSFER_STALLED]
            late_ms += [_late_ms(side) for side in stalled]
        finally:
            route.prefill.kill("worker0", signal.SIGCONT)
        route.clear(*trips)
    return late_ms
