"""The status table under real processes that do everything at once, and under SIGKILL.

Light on imports, for every child imports it again.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections import Counter as Multiset
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection

from pdrt.child import Descriptor
from pdrt.clock import MILLISECOND_NS
from pdrt.errors import TableFull
from pdrt.process_rows import Owner
from pdrt.protocol.counters import Counter
from pdrt.protocol.states import OPEN, TERMINAL, Event, KVPoll, Reason, Role
from pdrt.shm_status import CLAIMED, GENERATION_SHIFT, STATE_MASK, StatusTable, create, unpack
from tests.table.views import sweep
from tests.waiting import wait_until

SLOTS = 3
TIMEOUT_MS = 1000
NOW_NS = 10**15
LATE_NS = NOW_NS + 2 * TIMEOUT_MS * MILLISECOND_NS
TOGETHER = (1, 2, 3, 4, 5)  # rows of three that hammer and two that watch
ROUNDS = 25_000
EVENTS = tuple(Event)
REASONS = tuple(Reason)[1:]
SPAWN = multiprocessing.get_context("spawn")

Room = tuple[int, int]  # slot, generation


@dataclass
class Deeds:
    """What one process did, as far as the table told it that it was the one."""

    opened: list[Room] = field(default_factory=list)
    ended: list[Room] = field(default_factory=list)
    silenced: list[Room] = field(default_factory=list)
    cleared: list[Room] = field(default_factory=list)


def start_together(table: StatusTable, rows: tuple[int, ...]) -> None:
    table.beat(NOW_NS)
    wait_until(lambda: all(table.pulse(row) for row in rows), 20, "the other processes")


def hammer(
    memory: Descriptor, row: int, together: tuple[int, ...], rounds: int, report: Connection
) -> None:
    """Do anything to any slot, a round at a time, then tell."""
    table = StatusTable(memory.fd, Owner(row, 1))
    start_together(table, together)
    chance = random.Random(row)
    deeds = Deeds()
    for _ in range(rounds):
        slot = chance.randrange(SLOTS)
        word = int(table.words[slot])
        generation = word >> GENERATION_SHIFT
        if generation % 2 == 0:
            try:
                handle = table.open(row, 0, now_ns=NOW_NS)
            except TableFull:
                continue
            deeds.opened.append((handle.slot, handle.generation))
        elif word & STATE_MASK in TERMINAL:
            end_further(table, slot, generation, deeds)
        elif word & STATE_MASK != CLAIMED:
            push(table, slot, generation, chance, deeds)
    report.send(deeds)
    table.close()


def push(
    table: StatusTable, slot: int, generation: int, chance: random.Random, deeds: Deeds
) -> None:
    if chance.random() < 0.1:
        before = int(table.counters[table.me.row, Counter.DEADLINES])
        table.poll(slot, generation, LATE_NS)
        if table.counters[table.me.row, Counter.DEADLINES] != before:
            deeds.ended.append((slot, generation))
        return
    event = chance.choice(EVENTS)
    reason = chance.choice(REASONS) if event is Event.FAULT else Reason.NONE
    owner = table.me if event is Event.CHUNK_POSTED else None
    moved = table.move(slot, generation, event, now_ns=NOW_NS, reason=reason, owner=owner)
    if moved and event in (Event.FAULT, Event.LANDED):
        deeds.ended.append((slot, generation))


def end_further(table: StatusTable, slot: int, generation: int, deeds: Deeds) -> None:
    if table.set_quiet(slot, generation):
        deeds.silenced.append((slot, generation))
    elif table.clear(slot, generation):
        deeds.cleared.append((slot, generation))


class Witness:
    """Looks at words and remembers what may not change."""

    def __init__(self) -> None:
        self.verdicts: dict[Room, tuple[KVPoll, Reason, bool]] = {}
        self.newest = [0] * SLOTS
        self.wrong: list[str] = []
        self.looked = 0

    def look(self, slot: int, word: int) -> None:
        self.looked += 1
        generation = word >> GENERATION_SHIFT
        if generation < self.newest[slot]:
            self.wrong.append(f"slot {slot}: generation {generation} after {self.newest[slot]}")
        self.newest[slot] = generation
        if generation % 2 == 0:
            if word & 0xFFFFFFFF:
                self.wrong.append(f"free slot {slot} reads {word:#x}")
            return
        if word & STATE_MASK == CLAIMED:
            if word >> 4 & 0x1FF:
                self.wrong.append(f"claimed slot {slot} reads {word:#x}")
            return
        try:
            self._judge(slot, word)
        except (IndexError, ValueError):
            self.wrong.append(f"slot {slot} reads {word:#x}")

    def _judge(self, slot: int, word: int) -> None:
        state, quiet, reason, _, generation = unpack(word)
        possible = {
            KVPoll.Success: quiet and reason is Reason.NONE,
            KVPoll.Failed: reason is not Reason.NONE,
        }
        if not possible.get(state, not quiet and reason is Reason.NONE):
            self.wrong.append(f"slot {slot} reads {word:#x}")
        before = self.verdicts.get((slot, generation))
        if before is None:
            if state in TERMINAL:
                self.verdicts[slot, generation] = state, reason, quiet
        elif (state, reason) != before[:2] or before[2] > quiet:
            self.wrong.append(f"slot {slot}: {before} became {state.name} {reason.name} {quiet}")
        else:
            self.verdicts[slot, generation] = state, reason, quiet


def watch(
    memory: Descriptor, row: int, together: tuple[int, ...], rounds: int, report: Connection
) -> None:
    """Read one word after another, one by one and many at once."""
    table = StatusTable(memory.fd, Owner(row, 1))
    start_together(table, together)
    witness = Witness()
    for turn in range(rounds):
        if turn % 2:
            for slot, word in enumerate(table.words.tolist()):
                witness.look(slot, word)
        else:
            for slot in range(SLOTS):
                witness.look(slot, table._load(table._slots + slot * 128))
        if witness.wrong:
            break
    report.send((witness.wrong, witness.verdicts, witness.looked))
    table.close()


def make_memory() -> int:
    timeouts = dict.fromkeys(OPEN, TIMEOUT_MS)
    return create(Role.PREFILL, rooms_max=SLOTS, instance=b"", timeouts_ms=timeouts, now_ns=NOW_NS)


def generations_of(table: StatusTable) -> list[int]:
    return [int(word) >> GENERATION_SHIFT for word in table.words]


def test_whatever_processes_do_at_once_each_verdict_has_one_winner_and_never_changes() -> None:
    fd = make_memory()
    with ExitStack() as stack:
        stack.callback(os.close, fd)
        table = StatusTable(fd)
        stack.callback(table.close)
        pipes = [SPAWN.Pipe(duplex=False) for _ in TOGETHER]
        processes = [
            SPAWN.Process(
                target=hammer if row <= 3 else watch,
                args=(Descriptor(fd), row, TOGETHER, ROUNDS, sending),
                daemon=True,
            )
            for row, (_, sending) in zip(TOGETHER, pipes, strict=True)
        ]
        for process in processes:
            process.start()
        for _, sending in pipes:
            sending.close()
        reports = []
        for receiving, _ in pipes:
            reports.append(receiving.recv())
            receiving.close()
        for process in processes:
            process.join()
            assert process.exitcode == 0
            process.close()
        deeds, sights = reports[:3], reports[3:]

        for wrong, _, looked in sights:
            assert wrong == []
            assert looked >= ROUNDS
        for what in ("opened", "ended", "silenced", "cleared"):
            done = Multiset(room for each in deeds for room in getattr(each, what))
            assert set(done.values()) <= {1}, f"{what} by two processes"
            assert len(done) > 100, "the test does not do what it says"
        opened, ended, silenced, cleared = (
            {room for each in deeds for room in getattr(each, what)}
            for what in ("opened", "ended", "silenced", "cleared")
        )
        assert cleared <= ended <= opened
        assert silenced <= ended
        assert {room for _, verdicts, _ in sights for room in verdicts} <= ended
        totals = table.counters.sum(axis=0)
        assert totals[Counter.ROOMS_OPENED] == len(opened)
        verdicts = totals[Counter.VERDICT_SUCCESS : Counter.ROOM_NS].sum()
        assert verdicts == totals[Counter.ROOM_BUCKET : Counter.ROOM_BUCKET + 24].sum()
        assert verdicts == len(ended)
        assert sum(generations_of(table)) == len(opened) + len(cleared)
        assert len(table.live_slots()) == len(opened - cleared)
        for slot, generation in ended - cleared:
            word = table.read(slot, generation)
            assert word is not None
            assert word.state in TERMINAL


def test_processes_killed_while_they_hammer_leave_the_table_usable() -> None:
    fd = make_memory()
    with ExitStack() as stack:
        stack.callback(os.close, fd)
        table = StatusTable(fd, Owner(60, 1))
        stack.callback(table.close)
        witness = Witness()
        rows = [1, 2, 3]
        processes = {}
        for row in rows:
            receiving, sending = SPAWN.Pipe(duplex=False)
            stack.callback(receiving.close)
            process = SPAWN.Process(
                target=hammer, args=(Descriptor(fd), row, (), 10**8, sending), daemon=True
            )
            process.start()
            sending.close()
            processes[row] = process
            table.incarnate(row, 1, process.pid or 0, "hammer")

        def busy(row: int, more: int) -> bool:
            """Has it opened that many rooms more?"""
            for slot, word in enumerate(table.words.tolist()):
                witness.look(slot, word)
            return int(table.counters[row, Counter.ROOMS_OPENED]) >= goals[row] + more

        for number, row in enumerate(rows):
            for survivor in rows[number:]:  # after each death the others still get on
                goals = {r: int(table.counters[r, Counter.ROOMS_OPENED]) for r in rows}
                wait_until(partial(busy, survivor, 50), 20, f"rooms of process {survivor}")
            process = processes[row]
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
            assert process.exitcode == -signal.SIGKILL
            process.close()
            table.bury(row)
        assert witness.wrong == []

        table._cas(table._slots, table._load(table._slots), claimed_by_the_dead(table, 1))
        sweep(table, NOW_NS)
        assert len(table.live_slots()) == 0
        assert {table.open(9, 0, now_ns=NOW_NS).slot for _ in range(SLOTS)} == set(range(SLOTS))


def claimed_by_the_dead(table: StatusTable, row: int) -> int:
    """The word of slot 0 if that process had been killed right after its claim."""
    generation = (int(table.words[0]) >> GENERATION_SHIFT) + 2 | 1
    return CLAIMED | row << 13 | 1 << 21 | generation << GENERATION_SHIFT
