"""A process that opens, moves, aborts, sweeps and clears rooms in a status table at full speed, by
the calls that engines, listeners, workers and readers make.

It keeps the laws that its callers keep and nothing else: the owner of a room alone writes its aux
row, lets it succeed, and says that it is quiet.  Old handles are kept and used again.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from pathlib import Path

from pdrt.clock import SECOND_NS, monotonic_ns
from pdrt.errors import TableFull
from pdrt.process_rows import Owner
from pdrt.protocol.states import Event, KVPoll, Reason, Role
from pdrt.shm_status import CLAIMED, GENERATION_SHIFT, OWNER_SHIFT, QUIET_BIT, STATE_MASK
from stress.cascades.history import Writer as History
from stress.cascades.torn.gate import Told, begin
from stress.cascades.torn.table import (
    CODE,
    LATE_AUX,
    MUTANTS,
    Tracked,
    aux_of,
    room_named,
    value_of,
)

REASONS = tuple(Reason)[1:]
OLD_HANDLES = 32
LATE_NS = 3600 * SECOND_NS  # from now, every deadline has passed
STEPS_A_LOOK = 64  # at the gate


class Writer:
    def __init__(self, told: Told, table: Tracked, chance: random.Random, first: int) -> None:
        self._table, self._chance = table, chance
        self._aux = told.aux_rows()
        self._late_aux = told.mutant == LATE_AUX
        self._slots = told.slots
        self._count = first
        self._old: deque[tuple[int, int]] = deque(maxlen=OLD_HANDLES)
        me = table.me
        self._mine = me.row | me.incarnation << 8
        self._go = Event.CHUNK_POSTED if table.role is Role.PREFILL else Event.DESTINATION_SENT
        self.faults: list[str] = []

    def step(self) -> None:
        """Something to some slot."""
        chance, table = self._chance, self._table
        if self._old and chance.random() < 0.1:
            self._use_old(*chance.choice(self._old))
            return
        slot = chance.randrange(self._slots)
        word = table.word(slot)
        generation, state = word >> GENERATION_SHIFT, word & STATE_MASK
        if generation & 1 == 0:
            self._open()
        elif state in (KVPoll.Failed, KVPoll.Success):
            self._end_further(slot, generation, word)
        elif state != CLAIMED:
            self._push(slot, generation, word)

    def _open(self) -> None:
        self._count += 1
        room = room_named(self._table.me.row, self._count)
        try:
            handle = self._table.open(room, 0, now_ns=monotonic_ns())
        except TableFull:
            return
        self._old.append((handle.slot, handle.generation))

    def _push(self, slot: int, generation: int, word: int) -> None:
        table, draw, now_ns = self._table, self._chance.random(), monotonic_ns()
        if draw < 0.05:
            reason = self._chance.choice(REASONS)
            table.move(slot, generation, Event.FAULT, now_ns=now_ns, reason=reason)
        elif draw < 0.08:
            table.poll(slot, generation, now_ns + LATE_NS)
        elif draw < 0.3:
            self._tell(slot, generation, now_ns)
        elif word & STATE_MASK == KVPoll.Bootstrapping:
            table.set_path(slot, generation, CODE, value_of(slot, generation) & 0xFFFFFFFF)
            table.move(slot, generation, Event.PEER_KNOWN, now_ns=now_ns)
        elif word & STATE_MASK == KVPoll.WaitingForInput:
            table.move(slot, generation, self._go, now_ns=now_ns, owner=table.me)
        elif self._owns(word):
            self._land(slot, generation, now_ns)

    def _land(self, slot: int, generation: int, now_ns: int) -> None:
        room = self._table.room(slot)
        if not self._late_aux:
            self._aux.write(slot, aux_of(room))
        self._table.move(slot, generation, Event.LANDED, now_ns=now_ns)
        if self._late_aux:
            self._table.between()
            self._aux.write(slot, aux_of(room))

    def _tell(self, slot: int, generation: int, now_ns: int) -> None:
        """What stands beside the word."""
        table, value = self._table, value_of(slot, generation)
        table.set_moved(slot, generation, value)
        table.set_taken(slot, generation, value)
        table.renew(slot, generation, now_ns, self._chance.randrange(50_000, 70_000))
        table.renew_state(slot, generation, now_ns)
        table.set_detail(slot, "a few words for people")

    def _end_further(self, slot: int, generation: int, word: int) -> None:
        if word & QUIET_BIT:
            self._table.clear(slot, generation)
        elif self._owns(word):
            self._table.set_quiet(slot, generation)

    def _owns(self, word: int) -> bool:
        return word >> OWNER_SHIFT & 0x7FFFF == self._mine

    def _use_old(self, slot: int, generation: int) -> None:
        """All that a late message can do to a room that is over, and to the one after it."""
        table, now_ns = self._table, monotonic_ns()
        if table.word(slot) >> GENERATION_SHIFT == generation:
            return
        value = value_of(slot, generation)
        table.set_moved(slot, generation, value)
        table.set_taken(slot, generation, value)
        table.renew(slot, generation, now_ns, 60_000)
        table.renew_state(slot, generation, now_ns)
        table.set_path(slot, generation, CODE, value & 0xFFFFFFFF)
        event = self._chance.choice(tuple(Event))
        reason = Reason.ABORTED if event is Event.FAULT else Reason.NONE
        changed = table.move(slot, generation, event, now_ns=now_ns, reason=reason)
        changed |= table.set_quiet(slot, generation) or table.clear(slot, generation)
        table.discard(slot, generation)
        changed |= table.poll(slot, generation, now_ns + LATE_NS) is not None
        if changed:
            self.faults.append(f"slot {slot}: a handle of generation {generation} changed a room")


def main() -> None:
    told = Told.read(sys.argv[1])
    history = History(Path(told.out))
    kind = MUTANTS.get(told.mutant, Tracked)
    table = kind(told.table_fd, Owner(told.row, told.incarnation), history)
    gate = begin(told, table)
    writer = Writer(told, table, random.Random(told.seed), told.incarnation << 32)
    while gate.is_open() and not writer.faults:
        for _ in range(STEPS_A_LOOK):
            writer.step()
    history.close()
    told.answer({"faults": writer.faults})
