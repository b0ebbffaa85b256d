"""What the status table costs: a status change through our API, and reading 10,000 rooms."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from atomicshm import AtomicView

from pdrt import shm_status
from pdrt.clock import monotonic_ns
from pdrt.process_rows import Owner
from pdrt.protocol.states import OPEN, Event, Role
from pdrt.shm_status import StatusTable
from stress.bench.bench import Bench
from stress.bench.figures import Goal, Result, digits, summarise

TITLE = "The status table"
ROOMS_COUNT = 10_000
ROUNDS = 60
OWNER = Owner(8, 1)


def measure(bench: Bench, result: Result) -> None:
    fd = shm_status.create(
        Role.DECODE,
        rooms_max=65536,
        instance=bytes(16),
        timeouts_ms=dict.fromkeys(OPEN, 3_600_000),
        now_ns=monotonic_ns(),
    )
    table = StatusTable(fd, Owner(48, 1))
    os.close(fd)
    try:
        _measure(bench, result, table)
    finally:
        table.close()


def _measure(bench: Bench, result: Result, table: StatusTable) -> None:
    events = (Event.PEER_KNOWN, Event.DESTINATION_SENT, Event.LANDED)
    found: dict[str, list[float]] = {}
    for _ in bench.rounds(ROUNDS, 12.0):
        now_ns = monotonic_ns()
        handles = [table.open(room, 0, now_ns=now_ns) for room in range(ROOMS_COUNT)]
        slots = np.array([h.slot for h in handles], dtype=np.intp)
        generations = np.array([h.generation for h in handles], dtype=np.uint64)
        for event in events:
            with _timed(found, f"move {event.name}"):
                for _, slot, generation in handles:
                    table.move(slot, generation, event, now_ns=now_ns, owner=OWNER)
            if event is Event.LANDED:
                continue
            for _ in range(3):
                with _timed(found, "poll_many", calls=1):
                    table.poll_many(slots, generations, now_ns)
        with _timed(found, "read"):
            for _, slot, generation in handles:
                table.read(slot, generation)
        for _, slot, generation in handles:
            table.clear(slot, generation)
        _primitives(found)
    parts = ", ".join(f"{name} {digits(summarise(found[name]).median, 2)} us" for name in PARTS)
    why = (
        f"one call each: {parts}; a move makes two loads, two CAS and a store; a verdict counts too"
    )
    for event in events:
        name = f"move {event.name}"
        what = f"move() by {event.name}, deadline and statistics included"
        result.add(what, "us", found[name], Goal("median", 1.0), why)
    result.add("the CAS alone", "us", found["CAS"], Goal("median", 1.0))
    result.add("read() of one room", "us", found["read"])
    why = "two words of each slot gathered by index, then compared: passes of numpy"
    goal = Goal("median", 100.0)
    result.add(f"poll_many() of {ROOMS_COUNT:,} rooms", "us", found["poll_many"], goal, why)
    result.notes.append("each sample of a single call is the mean of 10,000 calls in a loop")


PARTS = ("an empty call", "load", "CAS", "store", "fetch-add")


def _primitives(found: dict[str, list[float]]) -> None:
    """What the calls below the table cost."""
    view = AtomicView(bytearray(64))
    calls: dict[str, Callable[[], object]] = {
        "an empty call": lambda: None,
        "load": partial(view.load_u64, 0),
        "CAS": partial(view.cas_u64, 0, 0, 0),
        "store": partial(view.store_u64, 0, 0),
        "fetch-add": partial(view.fetch_add_u64, 8, 1),
    }
    for name, call in calls.items():
        with _timed(found, name):
            for _ in range(ROOMS_COUNT):
                call()
    view.close()


@contextlib.contextmanager
def _timed(found: dict[str, list[float]], name: str, calls: int = ROOMS_COUNT) -> Iterator[None]:
    """Adds the microseconds of one of `calls` calls."""
    begun = time.perf_counter()
    yield
    found.setdefault(name, []).append((time.perf_counter() - begun) / calls * 1e6)
