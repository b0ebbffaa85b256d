"""What a word of the status table may be, and what it may become: the laws that readers hold it to.

They are written down here a second time, from the drawing at the top of `pdrt/shm_status.py`, and
take nothing from it: a mistake in its shifts and masks must not hide here too.  The writers of
`torn` name the owner of a room when its bytes may move and at no other time: that is law here too.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Mask = NDArray[np.bool_]

STATE, QUIET, REASON_AT, OWNER_AT, GENERATION_AT = 0xF, 0x10, 5, 13, 32
FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS, CLAIMED = 0, 1, 2, 3, 4, 15
REASON_LAST = 18
LOW_BITS = 13  # state, quiet and reason
UNOWNED, OWNED = 1, 2  # in LEGAL: the word may be so without an owner, with one

#: One step within a generation, by a compare-and-swap or by the store that publishes a room.
STEPS = {
    (CLAIMED, BOOTSTRAPPING),
    (BOOTSTRAPPING, WAITING),
    (WAITING, TRANSFERRING),
    (TRANSFERRING, SUCCESS),
    (BOOTSTRAPPING, FAILED),
    (WAITING, FAILED),
    (TRANSFERRING, FAILED),
    (FAILED, FAILED),  # becomes quiet
}


def _legal() -> NDArray[np.uint8]:
    """By the low 13 bits of a word of an odd generation: may it have an owner, may it have none?"""
    table = np.zeros(1 << LOW_BITS, np.uint8)
    table[CLAIMED] = OWNED
    table[BOOTSTRAPPING] = table[WAITING] = UNOWNED
    table[TRANSFERRING] = OWNED
    table[SUCCESS | QUIET] = OWNED
    for reason in range(1, REASON_LAST + 1):
        table[FAILED | reason << REASON_AT] = OWNED  # bytes may still move
        table[FAILED | QUIET | reason << REASON_AT] = OWNED | UNOWNED
    return table


def _reach(steps: set[tuple[int, int]]) -> Mask:
    """[before, after]: can some steps, or none, lead from one state to the other?"""
    found = np.eye(16, dtype=bool)
    for before, after in steps:
        found[before, after] = True
    for middle in range(16):
        found |= np.outer(found[:, middle], found[middle])
    return found


LEGAL = _legal()
REACH = _reach(STEPS)
STEP = np.zeros((16, 16), bool)
for _before, _after in STEPS:
    STEP[_before, _after] = True


def states_of(words: Words) -> NDArray[np.intp]:
    return (words & np.uint64(STATE)).astype(np.intp)


def generations_of(words: Words) -> Words:
    return words >> np.uint64(GENERATION_AT)


def owners_of(words: Words) -> Words:
    """Row and incarnation together."""
    return words >> np.uint64(OWNER_AT) & np.uint64(0x7FFFF)


def live(words: Words) -> Mask:
    found: Mask = generations_of(words) & np.uint64(1) == 1
    return found


def published(words: Words) -> Mask:
    found: Mask = live(words) & (states_of(words) != CLAIMED)
    return found


def is_verdict(words: Words) -> Mask:
    states = states_of(words)
    found: Mask = live(words) & ((states == FAILED) | (states == SUCCESS))
    return found


def impossible(words: Words) -> Mask:
    """Words that no sequence of moves writes."""
    low = (words & np.uint64((1 << LOW_BITS) - 1)).astype(np.intp)
    needed = np.where(owners_of(words) != 0, OWNED, UNOWNED)
    odd = (LEGAL[low] & needed) == 0
    found: Mask = np.where(live(words), odd, words & np.uint64(0xFFFFFFFF) != 0)
    return found


def unlike(before: Words, after: Words) -> Mask:
    """Where no moves lead from what was in a slot to what is in it now, however many there were."""
    same = generations_of(before) == generations_of(after)
    lost = ~REACH[states_of(before), states_of(after)]
    lost |= is_verdict(before) & ((before ^ after) & np.uint64(0xFFFFFFEF) != 0)  # all but quiet
    lost |= (before & ~after & np.uint64(QUIET)) != 0
    owned = (owners_of(before) != 0) & (states_of(before) != CLAIMED)
    lost |= owned & (owners_of(before) != owners_of(after))
    return np.where(same, live(before) & lost, generations_of(after) < generations_of(before))


def no_step(before: Words, after: Words) -> Mask:
    """Where one write cannot have made the second word of the first."""
    wrong = impossible(after) | unlike(before, after)
    grown = generations_of(after) - generations_of(before)
    wrong |= (grown == 0) & ~STEP[states_of(before), states_of(after)]
    wrong |= (grown == 0) & is_verdict(before) & (before | np.uint64(QUIET) != after)
    claim = ~live(before) & (states_of(after) == CLAIMED)
    free = (is_verdict(before) & (before & np.uint64(QUIET) != 0)) | (
        live(before) & (states_of(before) == CLAIMED)
    )
    wrong |= (grown == 1) & ~np.where(live(after), claim, free)
    return wrong | (grown > 1)


class Witness:
    """What one reader knows of the slots: the newest word of each."""

    def __init__(self, slots_count: int) -> None:
        self.newest: Words = np.zeros(slots_count, np.uint64)
        self.looked = 0
        self.faults: list[str] = []
        self._seen: list[tuple[NDArray[np.intp], Words]] = []

    def look(self, words: Words) -> None:
        """At one word of every slot, read after those of the look before."""
        self.looked += len(words)
        slots = np.flatnonzero(words != self.newest)
        if not len(slots):
            return
        before, now = self.newest[slots], words[slots]
        odd, lost = impossible(now), unlike(before, now)
        for i in np.flatnonzero(odd | lost).tolist():
            what = "is impossible" if odd[i] else f"cannot follow {before[i]:#018x}"
            self.faults.append(f"slot {slots[i]}: word {now[i]:#018x} {what}")
        self.newest[slots] = now
        self._seen.append((slots, now))

    def sights(self) -> tuple[NDArray[np.intp], Words]:
        """Slots and words that were seen, each change once."""
        if not self._seen:
            return np.zeros(0, np.intp), np.zeros(0, np.uint64)
        return (
            np.concatenate([slots for slots, _ in self._seen]),
            np.concatenate([words for _, words in self._seen]),
        )
