"""Replays traces of room_word.pml against the real status table, swap by swap.

usage: python -m stress.models.replay [--seeds N] [--steps N] [--record]

The model tells each look at the word and each swap (`EV process operation generation reason me how
word`).  Here the same operations are called on a `StatusTable`, and each is held before its swap
until the trace says that it comes, or that its process died.  After every line the two words must
be the same, and the real operation must be where the model's is: refused, about to swap, done.

Held means: stopped by an exception, and called anew later with all that it had read.  So there are
no threads here, and a trace replays the same way each time.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pdrt.process_rows import NOBODY, Owner
from pdrt.protocol.states import ON_EXPIRY, TIMEOUT_OF, Event, Reason, Role
from pdrt.shm_status import (
    CLAIMED,
    GENERATION_SHIFT,
    OWNER_SHIFT,
    QUIET_BIT,
    REASON_SHIFT,
    STATE_MASK,
    Handle,
    StatusTable,
    create,
)
from stress.models import traces
from stress.models.check import Unusable
from stress.models.traces import TRACES, Diverged

SLOT, ROOM = 0, 7
LATE_NS = 10**15  # beyond any deadline that is set at time 0
ENGINE_ROW, WORKER_ROW, ENGINE_FROM = 1, 2, 5  # the model's owners above 5 are engines
MODEL_CLAIMED = 5
MODEL_REASON = {
    Reason.NONE: 0,
    Reason.ABORTED: 1,
    Reason.ENGINE_DIED: 2,
    **dict.fromkeys(ON_EXPIRY.values(), 3),
}
REASONS = {number: reason for reason, number in reversed(MODEL_REASON.items())}
EVENTS = {
    "peer_known": Event.PEER_KNOWN,
    "posted": Event.CHUNK_POSTED,
    "landed": Event.LANDED,
    "fault": Event.FAULT,
}
LINE = re.compile(r"EV (\d+) (\w+) (\d+) (\d+) (\d+) (\w+) (\d+)$")

WAYS = "refused", "kept", "looking", "swapped", "beaten"

#: What the model is asked for: all that may happen; rooms that go well; deaths; anything at all.
WORLDS: dict[str, tuple[str, ...]] = {
    "late": ("TIMELESS", "CRASHES=3"),
    "calm": ("CALM", "CRASHES=0"),
    "patient": ("CALM", "NO_DEADLINE", "CRASHES=3"),
    "deaths": ("NO_DEADLINE", "CRASHES=3"),
    "driven": ("TIMELESS", "DRIVEN"),
}
#: Worlds and seeds of the tests' traces, chosen so that each operation goes each way in one.
RECORDED = (
    ("late", 3),
    ("calm", 1),
    ("calm", 8),
    ("patient", 1),
    ("deaths", 11),
    ("driven", 19),
    ("driven", 23),
    ("driven", 27),
)
STEPS = 2500


class Told(NamedTuple):
    """One line of a trace; in the model's numbers."""

    process: int
    operation: str
    generation: int
    reason: int
    me: int
    how: str  # looking, refused, kept, swapped, beaten
    word: int  # afterwards


class Held(Exception):
    """The operation would change the word now, and the trace says: not yet."""


@dataclass
class Operation:
    """A call that a process of the model is in."""

    told: Told
    read: list[int] = field(default_factory=list)  # by every access so far, in their order
    ended: bool = False
    result: object = None


class WatchedTable(StatusTable):
    """The real table, whose accesses are logged, and held when they would change the slot's
    word."""

    def __init__(self, fd: int, me: Owner = NOBODY) -> None:
        super().__init__(fd, me)
        self.really_load: Callable[[int], int] = self._load
        self.really_swap: Callable[[int, int, int], int] = self._cas
        self.really_store: Callable[[int, int], None] = self._store
        for name in ("load", "cas", "store"):
            setattr(self, f"_{name}", getattr(self, f"_watch_{name}"))
        self._log: list[int] = []
        self._at = self._swaps_left = 0
        self.swapped: bool | None = None  # how the last swap went

    def resume(self, operation: Operation, call: Callable[[], object], *, swaps: int) -> None:
        """Call it anew with all that it had read before; it may change the word so often."""
        self._log, self._at, self._swaps_left, self.swapped = operation.read, 0, swaps, None
        self._free = [SLOT]
        try:
            operation.result = call()
        except Held:
            return
        operation.ended = True

    def model_word(self) -> int:
        return model_word(self.really_load(self._slots))

    def swap(self, at: int, old: int, new: int) -> int:
        """What a mutant does in another way."""
        return self.really_swap(at, old, new)

    def _access(self, at: int, access: Callable[[], int], *, changes: bool) -> int:
        self._at += 1
        if self._at <= len(self._log):
            return self._log[self._at - 1]
        if changes and at == self._slots:
            if not self._swaps_left:
                raise Held
            self._swaps_left -= 1
        self._log.append(access())
        return self._log[-1]

    def _watch_load(self, at: int) -> int:
        return self._access(at, lambda: self.really_load(at), changes=False)

    def _watch_cas(self, at: int, old: int, new: int) -> int:
        fresh = self._at >= len(self._log)
        seen = self._access(at, lambda: self.swap(at, old, new), changes=True)
        if fresh and at == self._slots:
            self.swapped = seen == old
        return seen

    def _watch_store(self, at: int, value: int) -> None:
        def store() -> int:
            self.really_store(at, value)
            if at == self._slots:
                self.swapped = True
            return 0

        self._access(at, store, changes=True)


def model_word(word: int) -> int:
    """A word of the table, as the model writes it.  What it has no number for is -1: no word."""
    state, reason = word & STATE_MASK, word >> REASON_SHIFT & 0xFF
    owner = Owner(word >> OWNER_SHIFT & 0xFF, word >> OWNER_SHIFT + 8 & 0x7FF)
    number = MODEL_REASON.get(Reason(reason), -1)
    owners = {0: 0, ENGINE_ROW: ENGINE_FROM + owner.incarnation, WORKER_ROW: owner.incarnation}
    if number < 0 or owner.row not in owners:
        return -1
    return (
        (MODEL_CLAIMED if state == CLAIMED else state)
        | (8 if word & QUIET_BIT else 0)
        | number << 4
        | owners[owner.row] << 6
        | (word >> GENERATION_SHIFT) << 9
    )


def call_of(table: StatusTable, told: Told) -> Callable[[], object]:
    """The real operation that a line tells of."""
    operation, generation = told.operation, told.generation
    if operation == "claim":
        return lambda: table.open(ROOM, 0, now_ns=0)
    if operation == "expire":
        return lambda: table.poll(SLOT, generation, LATE_NS)
    if operation == "set_quiet":
        return lambda: table.set_quiet(SLOT, generation)
    if operation == "clear":
        return lambda: table.clear(SLOT, generation)
    if operation == "discard":
        return lambda: table.discard(SLOT, generation)
    event = EVENTS[operation]
    reason = REASONS[told.reason] if event is Event.FAULT else Reason.NONE
    owner = Owner(WORKER_ROW, told.me) if event is Event.CHUNK_POSTED else None
    return lambda: table.move(SLOT, generation, event, now_ns=0, reason=reason, owner=owner)


def parse(text: str) -> list[Told]:
    """The told lines of what spin printed.  Raises Unusable."""
    found = []
    for match in traces.understood(LINE, text):
        process, operation, generation, reason, me, how, word = match.groups()
        numbers = int(generation), int(reason), int(me)
        found.append(Told(int(process), operation, *numbers, how, int(word)))
    return found


def replay(
    trace: Iterable[Told], table_type: type[WatchedTable] = WatchedTable
) -> Counter[tuple[str, str]]:
    """Have a real table do what a trace tells.  Returns how often each operation went which way.
    Raises Diverged."""
    counts: Counter[tuple[str, str]] = Counter()
    timeouts_ms = dict.fromkeys(TIMEOUT_OF, 1000)
    fd = create(Role.PREFILL, rooms_max=1, instance=bytes(16), timeouts_ms=timeouts_ms, now_ns=0)
    table = table_type(fd)
    under_way: dict[int, Operation] = {}
    try:
        for number, told in enumerate(trace, 1):
            counts[told.operation, told.how] += 1
            try:
                _advance(table, told, under_way)
                if (word := table.model_word()) != told.word:
                    raise Diverged(f"the table's word is {word:#x}, the model's {told.word:#x}")
            except Diverged as error:
                raise Diverged(f"line {number}, {told}: {error}") from None
    finally:
        table.close()
        os.close(fd)
    return counts


def _advance(table: WatchedTable, told: Told, under_way: dict[int, Operation]) -> None:
    if told.operation == "reborn":  # died between two of its steps
        under_way.pop(told.process, None)
        return
    operation = under_way.get(told.process)
    if operation is None:
        if told.how in ("swapped", "beaten"):
            raise Diverged("the table had done with it before")
        operation = under_way[told.process] = Operation(told)
    swaps = told.how in ("swapped", "beaten")
    if swaps or not operation.read:
        # An engine that opens is told of in two operations, and a late room by its first line.
        if operation.told.operation == "claim":
            table.me = Owner(ENGINE_ROW, operation.told.me - ENGINE_FROM)
        if operation.ended:
            raise Diverged("the table refuses it")
        table.resume(operation, call_of(table, operation.told), swaps=int(swaps))
    if swaps and table.swapped is not (told.how == "swapped"):
        raise Diverged(f"the table's swap: {table.swapped}")
    if told.how == "looking" and operation.ended:
        raise Diverged("the table has done with it, and the model would swap")
    if told.how in ("refused", "kept") and not operation.ended:
        raise Diverged("the model would not swap, and the table would")
    if operation.ended and told.how in ("swapped", "refused", "kept"):
        _check_result(operation, told)
        del under_way[told.process]
    elif told.how == "swapped" and told.operation != "claim":
        raise Diverged("the table would swap once more")
    elif told.how == "beaten" and told.operation in ("expire", "clear"):
        if not operation.ended:
            raise Diverged("the table tries again")
        del under_way[told.process]


def _check_result(operation: Operation, told: Told) -> None:
    result, done = operation.result, told.how != "refused"
    if told.operation == "publish":
        done = result == Handle(ROOM, SLOT, told.generation)
        result = True
    if isinstance(result, bool) and result is not done:
        raise Diverged(f"the table answers {operation.result}")


def simulate(world: str, seed: int, steps: int = STEPS, mutant: str = "") -> str:
    """The lines of one random run of the model, or of a mutant of it.  Raises Unusable."""
    defines = (*WORLDS[world], "ROOMS=15", *([mutant] if mutant else []))
    return traces.simulate("room_word.pml", defines, seed, steps, mutant=bool(mutant))


def recorded(world: str, seed: int) -> Path:
    return TRACES / f"{world}_{seed}.txt"


def record() -> None:
    TRACES.mkdir(exist_ok=True)
    for world, seed in RECORDED:
        recorded(world, seed).write_text(simulate(world, seed))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m stress.models.replay", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seeds", type=int, default=100, help="simulations of each world")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each simulation")
    parser.add_argument("--record", action="store_true", help="write the traces of the tests anew")
    asked = parser.parse_args(arguments)
    counts: Counter[tuple[str, str]] = Counter()
    try:
        if asked.record:
            record()
        for world in WORLDS:
            mine: Counter[tuple[str, str]] = Counter()
            for seed in range(1, asked.seeds + 1):
                try:
                    mine += replay(parse(simulate(world, seed, asked.steps)))
                except Diverged as error:
                    raise Diverged(f"world {world}, seed {seed}: {error}") from None
            print(f"{world}: {asked.seeds} simulations, {mine.total():,} lines, all the same")
            counts += mine
    except (Unusable, Diverged) as error:
        print(error, file=sys.stderr)
        return 1
    print("\n| operation | refused | so already | about to swap | swapped | beaten |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name in dict.fromkeys(operation for operation, _ in counts):
        ways = (f"{counts[name, how]:,}" for how in WAYS)
        print(f"| {name} | {' | '.join(ways)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
