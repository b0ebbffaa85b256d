"""Two writers end a room of pdrt's status table at the same moment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from pdrt.actors.boot import LISTENER_ROW
from pdrt.clock import monotonic_ns
from pdrt.process_rows import Owner
from pdrt.protocol.states import OPEN, Event, KVPoll, Role
from pdrt.shm_status import Handle, StatusTable, create
from stress.stock.findings import Found, Trial
from stress.stock.races import Held, meet

AT_ONCE = 4096  # slots of a table
RACE_S = 60.0


@dataclass
class Ends:
    """Of rooms that two writers ended at the same moment."""

    rooms: int = 0
    success: int = 0
    failed: int = 0
    both: int = 0  # writers were told that they won
    changed: int = 0  # verdicts

    def race(self, table: StatusTable, rooms_count: int) -> None:
        handles = [_moving(table, room) for room in range(rooms_count)]
        landed, failed = [False] * rooms_count, [False] * rooms_count

        def write(room: int, event: Event, won: list[bool]) -> None:
            _, slot, generation = handles[room]
            won[room] = table.move(slot, generation, event, now_ns=monotonic_ns())

        self.rooms += meet(
            lambda room: write(room, Event.LANDED, landed),
            lambda room: write(room, Event.FAULT, failed),
            rooms_count,
            RACE_S,
        )
        for room, (_, slot, generation) in enumerate(handles):
            state = table.state(slot, generation)
            self.success += state is KVPoll.Success
            self.failed += state is KVPoll.Failed
            self.both += landed[room] and failed[room]
            self.changed += landed[room] and state is not KVPoll.Success
            self.changed += failed[room] and state is not KVPoll.Failed


def forced(table: StatusTable) -> KVPoll | None:
    """How a room ends whose writer of Success is held between its read of the word and its CAS
    while another writes Failed."""
    _, slot, generation = _moving(table, 0)
    held, load = Held(), table._load

    def slow_load(at: int) -> int:
        value = load(at)
        held.after_reading()
        return value

    def move(event: Event) -> bool:
        return table.move(slot, generation, event, now_ns=monotonic_ns())

    table._load = slow_load  # it has an order, which nobody gives
    try:
        if not held.overtaken(lambda: move(Event.LANDED), lambda: move(Event.FAULT)):
            raise RuntimeError("the word was not read")
    finally:
        table._load = load
    return table.state(slot, generation)


def race(trial: Trial) -> Found:
    count, ends = trial.count(60_000), Ends()
    with small_table() as table:
        end = forced(table)
    assert end is not None
    for first in range(0, count, AT_ONCE):
        with small_table() as table:
            ends.race(table, min(AT_ONCE, count - first))
    return Found(
        f"{ends.changed} of {ends.rooms:,} rooms changed their verdict ({ends.success:,} ended "
        f"Success, {ends.failed:,} Failed: whoever was first); forced (Failed is written between "
        f"the other writer's read and write): it ends {end.name}",
        "Rooms in Transferring in a status table; for each, one thread applies LANDED and another "
        "FAULT at the same moment, with `sys.setswitchinterval(1e-6)`. Who is told that its move "
        "took effect must be who is read afterwards. Forced: one thread is held after it has read "
        "the word, before its compare-and-swap.",
        {
            "rooms": ends.rooms,
            "ended Success": ends.success,
            "ended Failed": ends.failed,
            "changed verdicts": ends.changed,
            "forced: ended": end.name,
            "both writers were told that they won": ends.both,
            "95 % upper bound of the rate of 0 in so many": f"{3 / max(1, ends.rooms):.1e}",
        },
    )


@contextlib.contextmanager
def small_table() -> Iterator[StatusTable]:
    fd = create(
        Role.PREFILL,
        rooms_max=AT_ONCE,
        instance=b"race".ljust(16, b"\0"),
        timeouts_ms=dict.fromkeys(OPEN, 600_000),
        now_ns=monotonic_ns(),
    )
    table = StatusTable(fd, Owner(LISTENER_ROW, 1))
    try:
        yield table
    finally:
        table.close()
        os.close(fd)


def _moving(table: StatusTable, room: int) -> Handle:
    now_ns = monotonic_ns()
    handle = table.open(room, 0, now_ns=now_ns)
    for event in (Event.PEER_KNOWN, Event.CHUNK_POSTED):
        assert table.move(handle.slot, handle.generation, event, now_ns=now_ns)
    return handle
