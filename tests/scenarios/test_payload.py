"""Scenario of a flag that is seen before the data it guards: the word of a slot, and what lies
beside it, between processes that share nothing else.

F047.  Light on imports, for every child imports it again.
"""

from __future__ import annotations

import multiprocessing
import os
from contextlib import ExitStack
from multiprocessing.connection import Connection

import pytest

from pdrt.child import Descriptor
from pdrt.process_rows import Owner
from pdrt.protocol.states import OPEN, Event, KVPoll, Reason, Role
from pdrt.shm_status import (
    CLAIMED,
    DEADLINE,
    GENERATION_SHIFT,
    MOVED,
    OPENER,
    ROOM,
    SLOT_BYTES,
    STATE_MASK,
    TAG_MASK,
    TAG_SHIFT,
    Handle,
    StatusTable,
    create,
    pack,
)
from tests.waiting import wait_until

SLOTS = 2
WRITERS, READERS = (1, 2), (3, 4)
OPENED, LOOKS = 8_000, 40_000  # by each
NOW_NS = 10**15
SPAWN = multiprocessing.get_context("spawn")


def _open_hastily(table: StatusTable, room: int, rank: int) -> Handle:
    """The mutant: the word first, then what it guards."""
    slot, generation = table._claim()
    at = table._slots + slot * SLOT_BYTES
    table._store(at, pack(KVPoll.Bootstrapping, False, 0, Owner(0, 0), generation))
    os.sched_yield()  # with fewer cores than processes nobody would look in between
    for offset in (DEADLINE, MOVED):
        table._store(at + offset, (generation & TAG_MASK) << TAG_SHIFT)
    table._store(at + ROOM, room)
    table._store(at + OPENER, table.me.row | 1 << 8 | rank << 40)
    return Handle(room, slot, generation)


def write(memory: Descriptor, row: int, hasty: bool, report: Connection) -> None:
    """Open rooms whose parts all say the same, end them, clear them."""
    table = StatusTable(memory.fd, Owner(row, 1))
    _start_together(table)
    for number in range(OPENED):
        room, rank = number << 8 | row, number % 100
        if hasty:
            handle = _open_hastily(table, room, rank)
        else:
            handle = table.open(room, rank, now_ns=NOW_NS)
        table.set_moved(handle.slot, handle.generation, number)
        table.move(*handle[1:], Event.FAULT, now_ns=NOW_NS, reason=Reason.ABORTED)
        table.clear(*handle[1:])
    report.send(OPENED)
    table.close()


def read(memory: Descriptor, row: int, hasty: bool, report: Connection) -> None:
    """Whenever the word says that a room is there, all beside it must be of that room."""
    table = StatusTable(memory.fd, Owner(row, 1))
    _start_together(table)
    wrong: list[str] = []
    seen = 0
    for look in range(LOOKS):
        at = table._slots + look % SLOTS * SLOT_BYTES
        word = table._load(at)
        room, opener, deadline, moved = (
            table._load(at + offset) for offset in (ROOM, OPENER, DEADLINE, MOVED)
        )
        generation = word >> GENERATION_SHIFT
        if table._load(at) != word or not generation & 1 or word & STATE_MASK == CLAIMED:
            continue
        seen += 1
        tags = {deadline >> TAG_SHIFT, moved >> TAG_SHIFT}
        same = opener & 0xFF == room & 0xFF and opener >> 40 == (room >> 8) % 100
        if not same or tags != {generation & TAG_MASK}:
            wrong.append(f"{word:#x}: room {room:#x} opener {opener:#x} tags {tags}")
    report.send((seen, wrong[:3]))
    table.close()


def _start_together(table: StatusTable) -> None:
    table.beat(NOW_NS)
    wait_until(lambda: all(table.pulse(row) for row in (*WRITERS, *READERS)), 20, "the others")


@pytest.mark.parametrize("hasty", [False, True], ids=["as it is", "word first"])
def test_a_reader_never_sees_a_word_with_another_rooms_payload(hasty: bool) -> None:
    timeouts = dict.fromkeys(OPEN, 1000)
    fd = create(Role.PREFILL, rooms_max=SLOTS, instance=b"", timeouts_ms=timeouts, now_ns=NOW_NS)
    with ExitStack() as stack:
        stack.callback(os.close, fd)
        started = []
        for row in (*WRITERS, *READERS):
            receiving, sending = SPAWN.Pipe(duplex=False)
            stack.callback(receiving.close)
            target = write if row in WRITERS else read
            args = (Descriptor(fd), row, hasty, sending)
            process = SPAWN.Process(target=target, args=args, daemon=True)
            process.start()
            sending.close()
            started.append((process, receiving))
        reports = [receiving.recv() for _, receiving in started]
        for process, _ in started:
            process.join()
            assert process.exitcode == 0
            process.close()
    sights = reports[len(WRITERS) :]
    assert sum(seen for seen, _ in sights) > 1000, "the test does not do what it says"
    found = [line for _, wrong in sights for line in wrong]
    assert bool(found) is hasty, found
