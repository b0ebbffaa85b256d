"""A process that reads a status table in every way there is, and holds what it reads to the laws.

A field stands beside the word and is read at another instant.  So it is judged only between two
reads of the word that show the same room.
"""

from __future__ import annotations

import random
import sys
from collections import Counter

import numpy as np
from atomicshm import AtomicView
from numpy.typing import NDArray

from pdrt.clock import MILLISECOND_NS, monotonic_ns
from pdrt.errors import CorruptAux
from pdrt.process_rows import NOBODY, Owner
from pdrt.shm_status import (
    DEADLINE,
    ENTERED,
    MOVED,
    OPENER,
    PATH,
    ROOM,
    SLOT_BYTES,
    TAKEN,
    StatusTable,
    pack,
)
from stress.cascades.torn.gate import Told, begin
from stress.cascades.torn.table import CODE, aux_of, mixed, mixed_many
from stress.cascades.torn.words import (
    SUCCESS,
    Witness,
    generations_of,
    live,
    published,
    states_of,
)

TAG, VALUE = np.uint64(40), np.uint64((1 << 40) - 1)
DEADLINE_MAX_MS = 130_000  # from now; what writers ask for is below it
FAULTS_MAX = 10
Mask = NDArray[np.bool_]
Words = NDArray[np.uint64]


class Reader:
    def __init__(self, told: Told, table: StatusTable, chance: random.Random) -> None:
        self._table, self._chance, self._slots = table, chance, told.slots
        self._aux = told.aux_rows()
        self._view = AtomicView(table.map)
        self._first = len(table.map) - told.slots * SLOT_BYTES
        self._all = np.arange(told.slots)
        self._rooms: Words = np.zeros(told.slots, np.uint64)
        self._rooms_of: Words = np.zeros(told.slots, np.uint64)  # generations
        self.witness = Witness(told.slots)
        self.reads: Counter[str] = Counter()
        self.stale_times = 0
        self._ways = (self._words, self._rows, self._live, self._many, self._calls, self._aux_row)

    @property
    def faults(self) -> list[str]:
        return self.witness.faults

    def step(self) -> None:
        """Read in one of the ways."""
        self._chance.choice(self._ways)()

    def close(self) -> None:
        self._view.close()

    def _fault(self, what: str) -> None:
        self.faults.append(what)

    def _load(self, slot: int) -> int:
        return self._view.load_u64(self._first + slot * SLOT_BYTES)

    def _look(self) -> Words:
        """Every word at once, by numpy."""
        words = self._table.words.copy()
        self.witness.look(words)
        return words

    def _words(self) -> None:
        """Every word, each by an atomic load."""
        load, first = self._view.load_u64, self._first
        every = [load(first + slot * SLOT_BYTES) for slot in range(self._slots)]
        self.witness.look(np.array(every, np.uint64))
        self.reads["words one by one"] += self._slots

    def _rows(self) -> None:
        before = self._look()
        rows = self._table.rows(self._all)
        after = self._look()
        now_ms = monotonic_ns() // MILLISECOND_NS
        self.reads["rows"] += self._slots
        same = published(before) & (generations_of(before) == generations_of(after))
        if not same.any():
            return
        slots, rows, words = self._all[same], rows[same], before[same]
        self._judge_rooms(slots, rows, words)
        self._judge_fields(slots, rows, words, now_ms)
        self._judge_times(slots, rows, now_ms)

    def _judge_rooms(self, slots: NDArray[np.intp], rows: Words, words: Words) -> None:
        rooms, openers = rows[:, ROOM // 8], rows[:, OPENER // 8]
        names = rooms & np.uint64((1 << 48) - 1)
        wrong = rooms >> np.uint64(48) != mixed_many(names) & np.uint64(0x7FFF)
        wrong |= names >> np.uint64(40) != openers & np.uint64(0xFF)
        seen_before = self._rooms_of[slots] == generations_of(words)
        wrong |= seen_before & (self._rooms[slots] != rooms)
        self._rooms[slots], self._rooms_of[slots] = rooms, generations_of(words)
        self._report(wrong, slots, rows, "is not the room that was opened")

    def _judge_fields(
        self, slots: NDArray[np.intp], rows: Words, words: Words, now_ms: int
    ) -> None:
        generations = generations_of(words)
        tags = generations & np.uint64(0xFFFFFF)
        values = mixed_many(slots.astype(np.uint64) << np.uint64(32) | generations)
        for name, at in (("moved", MOVED), ("taken", TAKEN), ("path", PATH)):
            field = rows[:, at // 8]
            due = values & VALUE
            if at == PATH:
                due = values & np.uint64(0xFFFFFFFF) | np.uint64(CODE << 32)
            wrong = (field & VALUE != 0) & (field & VALUE != due)
            self._report(wrong | (field >> TAG != tags), slots, rows, f"{name} is another room's")
        deadlines = rows[:, DEADLINE // 8]
        opened_ms = rows[:, ENTERED // 8 + 1] // np.uint64(MILLISECOND_NS)
        wrong = (deadlines & VALUE) > np.uint64(now_ms + DEADLINE_MAX_MS)
        wrong |= (deadlines & VALUE) < opened_ms
        self._report(
            wrong | (deadlines >> TAG != tags), slots, rows, "the deadline is another room's"
        )

    def _judge_times(self, slots: NDArray[np.intp], rows: Words, now_ms: int) -> None:
        """When a room was opened is law.  When it entered other states is only a note: a process
        that is slow to write it down writes it into the next room."""
        times = rows[:, ENTERED // 8 : PATH // 8]
        opened = times[:, 1]
        wrong = (opened == 0) | (opened // np.uint64(MILLISECOND_NS) > now_ms)
        self._report(wrong, slots, rows, "was opened at no time")
        self.stale_times += int(((times != 0) & (times < opened[:, None])).sum())

    def _report(self, wrong: Mask, slots: NDArray[np.intp], rows: Words, what: str) -> None:
        for i in np.flatnonzero(wrong).tolist():
            self._fault(f"slot {slots[i]}: {what}: {[hex(cell) for cell in rows[i].tolist()]}")

    def _live(self) -> None:
        before = self._look()
        found = self._table.live_slots()
        after = self._look()
        self.reads["live slots"] += 1
        there = np.zeros(self._slots, bool)
        there[found] = True
        if len(np.unique(found)) != len(found):
            self._fault(f"live_slots names a slot twice: {found.tolist()}")
        same = generations_of(before) == generations_of(after)
        for slot in np.flatnonzero(same & (there != live(before))).tolist():
            self._fault(f"slot {slot}: live_slots says {there[slot]} of {before[slot]:#018x}")

    def _many(self) -> None:
        """`poll_many`, at a time when nothing is late."""
        before = self._look()
        states = self._table.poll_many(self._all, generations_of(before), 0)
        after = self._look()
        self.reads["states"] += self._slots
        same = (before == after) & (published(before) | ~live(before))
        due = np.where(live(before), states_of(before), 255)
        for slot in np.flatnonzero(same & (states != due)).tolist():
            self._fault(f"slot {slot}: poll_many says {states[slot]} of {before[slot]:#018x}")

    def _calls(self) -> None:
        """One room by the calls of the API."""
        table, slot = self._table, self._chance.randrange(self._slots)
        before = self._load(slot)
        generation = before >> 32
        word, quiet = table.read(slot, generation), table.is_quiet(slot, generation)
        moved, taken = table.moved_bytes(slot, generation), table.taken(slot, generation)
        state = table.state(slot, generation)
        after = self._load(slot)
        self.reads["calls"] += 5
        if before >> 32 != after >> 32 or not generation & 1 or before & 0xF == 15:
            return
        value = mixed(slot << 32 | generation) & int(VALUE)
        if moved not in (0, value) or taken not in (0, value):
            self._fault(f"slot {slot}: moved {moved:#x}, taken {taken:#x} of {before:#018x}")
        if before != after:
            return
        if word is None or pack(*word) != before or state is not word.state:
            self._fault(f"slot {slot}: read says {word}, state {state} of {before:#018x}")
        if quiet != bool(before & 0x10):
            self._fault(f"slot {slot}: is_quiet says {quiet} of {before:#018x}")

    def _aux_row(self) -> None:
        """Of a room that has succeeded and is not cleared."""
        words = self._look()
        succeeded = np.flatnonzero(published(words) & (states_of(words) == SUCCESS)).tolist()
        if not succeeded:
            return
        slot = self._chance.choice(succeeded)
        room = self._view.load_u64(self._first + slot * SLOT_BYTES + ROOM)
        try:
            row = self._aux.read(slot, room)
        except CorruptAux as error:
            row, wrong = None, str(error)
        if self._load(slot) != int(words[slot]):
            return
        self.reads["aux rows"] += 1
        if row != aux_of(room):
            self._fault(f"slot {slot}: aux row of room {room} is {row or wrong}")


def main() -> None:
    told = Told.read(sys.argv[1])
    table = StatusTable(told.table_fd, Owner(told.row, 1) if told.row else NOBODY)
    gate = begin(told, table)
    reader = Reader(told, table, random.Random(told.seed))
    while gate.is_open() and len(reader.faults) < FAULTS_MAX:
        for _ in range(8):
            reader.step()
    slots, words = reader.witness.sights()
    np.savez(told.out, slots=slots, words=words)
    told.answer(
        {
            "faults": reader.faults[:FAULTS_MAX],
            "reads": {"words": reader.witness.looked} | dict(reader.reads),
            "stale_times": reader.stale_times,
        }
    )
