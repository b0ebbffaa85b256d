"""What worlds went through: rooms and their verdicts, events in every state, faults."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from pdrt.protocol.states import MOVES, TERMINAL, Event, KVPoll, Reason, Role
from pdrt.shm_status import CLAIMED, GENERATION_SHIFT, REASON_SHIFT, STATE_MASK, StatusTable
from tests.actors.laws import Witness

Step = tuple[Role, KVPoll, Event]

#: What moves a room, and all that may be tried: every event of a role, in whatever state it comes.
MOVING: list[Step] = [(role, *step) for role, moves in MOVES.items() for step in moves]
STEPS: list[Step] = [
    (role, state, event)
    for role, moves in MOVES.items()
    for state in KVPoll
    for event in sorted({event for _, event in moves})
]


@dataclass
class Tally(Witness):
    """Sums; two of them add up."""

    seeds: int = 0
    virtual_ms: int = 0
    cpu_s: float = 0.0
    turns: int = 0  # of processes
    frames: int = 0  # that arrived
    rooms: Counter[Role] = field(default_factory=Counter)  # halves that were opened, rank by rank
    verdicts: Counter[tuple[Role, Reason]] = field(default_factory=Counter)  # NONE is Success
    steps: Counter[Step] = field(default_factory=Counter)  # tried, whether they apply or not
    acts: Counter[str] = field(default_factory=Counter)

    def word(self, role: Role, before: int, after: int) -> None:
        state = after & STATE_MASK
        if state == before & STATE_MASK:
            return
        if before & STATE_MASK == CLAIMED:
            self.rooms[role] += 1
        elif state in TERMINAL and before & STATE_MASK not in TERMINAL:
            self.verdicts[role, Reason(after >> REASON_SHIFT & 0xFF)] += 1

    def watch(self, table: StatusTable) -> None:
        move = table.move

        def watched(slot: int, generation: int, event: Event, **how: Any) -> bool:
            # Not by the table's own reads: a world with a witness is the same world.
            word = int(table.words[slot]) if 0 <= slot < table.rooms_max else 0
            if word >> GENERATION_SHIFT == generation and word & STATE_MASK != CLAIMED:
                self.steps[table.role, KVPoll(word & STATE_MASK), event] += 1
            return move(slot, generation, event, **how)

        table.move = watched  # type: ignore[method-assign]

    def __iadd__(self, other: Tally) -> Tally:
        for name in (f.name for f in fields(self)):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    @property
    def reasons(self) -> set[Reason]:
        return {reason for _, reason in self.verdicts}
