"""The real status table, with a history of every word that is written into it.

Also its mutants: tables whose writes are not what they should be, for the test that readers and
oracle see it.  Each has the name of what it does wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdrt.memory.aux import TOP_MAX, AuxRow, AuxRows
from pdrt.process_rows import NOBODY, Owner
from pdrt.protocol.layout import Layout, RegionMap
from pdrt.protocol.states import Event, KVPoll
from pdrt.shm_status import (
    GENERATION_SHIFT,
    QUIET_BIT,
    ROOM,
    SLOT_BYTES,
    TAG_MASK,
    TAG_SHIFT,
    VALUE_MASK,
    Handle,
    StatusTable,
    pack,
)
from stress.cascades.history import Writer

QUIET_SHIFT = 4
CODE = 1  # of a transport, in every path
LAYOUT = Layout(
    model="torn", layers=1, kv_heads=1, head_dim=1, dtype="float32", page_size=1, ranks=1
)


class Kind(IntEnum):
    """Of a record.  b: slot; room: the word before; c: the word after."""

    WILL = 1000  # about to be tried
    DID = 1001  # the one before it has succeeded


def region_map(rooms_max: int) -> RegionMap:
    """Memory with an aux row for each slot."""
    return RegionMap(layout=LAYOUT, rank=0, pages_count=1, aux_rows=rooms_max)


def mixed(number: int) -> int:
    """64 bits in which each depends on all of `number`."""
    number = (number ^ number >> 31) * 0x7FB5D329728EA185 & 0xFFFF_FFFF_FFFF_FFFF
    number = (number ^ number >> 27) * 0x81DADEF4BC2DD44D & 0xFFFF_FFFF_FFFF_FFFF
    return number ^ number >> 33


def mixed_many(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    numbers = (numbers ^ numbers >> np.uint64(31)) * np.uint64(0x7FB5D329728EA185)
    numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(0x81DADEF4BC2DD44D)
    return numbers ^ numbers >> np.uint64(33)


def value_of(slot: int, generation: int) -> int:
    """What writers put into `moved` and `taken`, and the lower half of it into `path`."""
    return mixed(slot << GENERATION_SHIFT | generation) & VALUE_MASK


def room_named(row: int, count: int) -> int:
    """A room id that no other has: 15 bits say of the others whether they belong together."""
    number = row << 40 | count
    return (mixed(number) & 0x7FFF) << 48 | number


def aux_of(room: int) -> AuxRow:
    """A row that is a function of its room throughout."""
    base = mixed(room)
    top = tuple((base >> i & 0x7FFFFFFF, float(base >> i & 0xFFFF)) for i in range(TOP_MAX))
    return AuxRow(
        room, base & 0x7FFFFFFF, float(base >> 32 & 0xFFFF), base >> 20 & 0xFFFF, top, base
    )


def nothing() -> None:
    """The worst moment of a mutant comes by itself, if others write and read beside it."""


class Tracked(StatusTable):
    """Writes down each word before it tries to write it, and that it did: killed between the two,
    a process leaves one word of which others must tell whether it was written."""

    def __init__(self, fd: int, me: Owner, history: Writer) -> None:
        super().__init__(fd, me)
        self._history = history
        self.between: Callable[[], None] = nothing  # what happens at a mutant's worst moment
        self._true_cas, self._true_store = self._view.cas_u64, self._view.store_u64
        self._cas, self._store = self._cas_tracked, self._store_tracked  # type: ignore[assignment]

    def word(self, slot: int) -> int:
        return self._load(self._slots + slot * SLOT_BYTES)

    def room(self, slot: int) -> int:
        return self._load(self._slots + slot * SLOT_BYTES + ROOM)

    def _slot_of(self, at: int) -> int:
        """Slot whose word is at that offset; -1 if something else is."""
        slot, rest = divmod(at - self._slots, SLOT_BYTES)
        return -1 if rest or slot < 0 else slot

    def _cas_tracked(self, at: int, old: int, new: int) -> int:
        slot = self._slot_of(at)
        if slot < 0:
            return self._true_cas(at, old, new)
        self._history.append(Kind.WILL, old, b=slot, c=new, ns=1)
        seen = self._swap(at, old, new)
        if seen == old:
            self._history.append(Kind.DID, ns=1)
        return seen

    def _swap(self, at: int, old: int, new: int) -> int:
        return self._true_cas(at, old, new)

    def _store_tracked(self, at: int, value: int) -> None:
        slot = self._slot_of(at)
        if slot >= 0:
            self._history.append(Kind.WILL, self._load(at), b=slot, c=value, ns=1)
        self._true_store(at, value)
        if slot >= 0:
            self._history.append(Kind.DID, ns=1)


class Halves(Tracked):
    """Stores a word in two halves, as numpy does with two 32-bit fields."""

    def _swap(self, at: int, old: int, new: int) -> int:
        if (seen := self._load(at)) == old:
            halves = np.frombuffer(self.map, np.uint32, 2, at)
            halves[0] = new & 0xFFFFFFFF
            self.between()
            halves[1] = new >> 32
            del halves
        return seen


class TwoSteps(Tracked):
    """Stores a state, and then why, whose and whether it is quiet."""

    def _swap(self, at: int, old: int, new: int) -> int:
        seen = self._true_cas(at, old, new & ~(0x7FFFFFF << QUIET_SHIFT))
        if seen == old:
            self.between()
            self._true_store(at, new)
        return seen


class Blind(Tracked):
    """Stores without comparing what is there now with what was."""

    def _swap(self, at: int, old: int, new: int) -> int:
        self.between()
        self._true_store(at, new)
        return old


class LateFields(Tracked):
    """Publishes a room before its fields are there."""

    def open(self, room: int, rank: int, *, now_ns: int, use: int = 0) -> Handle:
        handle = super().open(0, rank, now_ns=now_ns, use=use)
        self.between()
        self._true_store(self._slots + handle.slot * SLOT_BYTES + ROOM, room)
        return handle._replace(room=room)


class Untagged(Tracked):
    """Sets the fields of a room without asking whose they are by now."""

    def _tagged(self, at: int, generation: int, value: int) -> None:
        self._true_store(at, (generation & TAG_MASK) << TAG_SHIFT | value & VALUE_MASK)


class HalfFields(Tracked):
    """Sets the fields of a room in two halves."""

    def _tagged(self, at: int, generation: int, value: int) -> None:
        old = self._load(at)
        if old >> TAG_SHIFT == generation & TAG_MASK:
            self._true_cas(at, old, old & ~0xFFFFFFFF | value & 0xFFFFFFFF)
            self.between()
            super()._tagged(at, generation, value)


class LowWater(Tracked):
    """Forgets to raise the mark of the slots that were ever used."""

    def _raise_high_water(self, used: int) -> None:
        super()._raise_high_water(used // 2)


class BackToLife(Tracked):
    """Lets a room whose verdict is not quiet go on."""

    def set_quiet(self, slot: int, generation: int) -> bool:
        at = self._slots + slot * SLOT_BYTES
        word = self._load(at)
        open_again = pack(KVPoll.Bootstrapping, False, 0, NOBODY, generation)
        if word >> GENERATION_SHIFT == generation and not word & QUIET_BIT:
            self._cas(at, word, open_again)
        return False


class OldHandles(Tracked):
    """Ends whatever room is in the slot.  Each of its steps is one that a room may take: only who
    used the old handle can know."""

    def move(self, slot: int, generation: int, event: Event, **how: Any) -> bool:
        if event is Event.FAULT:
            generation = self.word(slot) >> GENERATION_SHIFT
        return super().move(slot, generation, event, **how)


MUTANTS: dict[str, type[Tracked]] = {
    "halves": Halves,
    "two steps": TwoSteps,
    "blind": Blind,
    "late fields": LateFields,
    "untagged": Untagged,
    "half fields": HalfFields,
    "low water": LowWater,
    "back to life": BackToLife,
    "old handles": OldHandles,
}
LATE_AUX = "late aux"  # a writer's: Success first, the aux row afterwards


def aux_rows(region: memoryview, rooms_max: int) -> AuxRows:
    return AuxRows([region], [region_map(rooms_max)])
