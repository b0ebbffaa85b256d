"""Judges a round of `torn` afterwards, by what its writers wrote down and its readers saw."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stress.cascades import history
from stress.cascades.torn.table import Kind
from stress.cascades.torn.words import (
    CLAIMED,
    FAILED,
    SUCCESS,
    Words,
    is_verdict,
    live,
    no_step,
    states_of,
)

SHOWN_MAX = 5


@dataclass
class Written:
    """Words that were written, and words of which a killed process did not live to say."""

    slots: NDArray[np.intp]
    before: Words
    after: Words
    unsure: list[tuple[int, int, int]] = field(default_factory=list)

    @classmethod
    def read(cls, paths: Iterable[Path]) -> Written:
        parts, unsure = [], []
        for path in paths:
            records = history.read(path)
            did = np.flatnonzero(records["kind"] == Kind.DID)
            parts.append(records[did - 1])
            if len(records) and records["kind"][-1] == Kind.WILL:
                last = records[-1]
                unsure.append((int(last["b"]), int(last["room"]), int(last["c"])))
        every = np.concatenate(parts) if parts else np.zeros(0, history.DTYPE)
        slots, before, after = every["b"].astype(np.intp), every["room"], every["c"]
        return cls(slots, before.copy(), after.copy(), unsure)

    def settle(self, final: Words) -> None:
        """An unsure word was written if another one follows it, or it stands there still."""
        followed = set(zip(self.slots.tolist(), self.before.tolist(), strict=True))
        found = True
        while found:
            found = False
            for slot, before, after in self.unsure:
                stands = (slot, after) in followed or int(final[slot]) == after
                if stands and (slot, before) not in followed:
                    followed.add((slot, before))
                    self.slots = np.append(self.slots, slot)
                    self.before = np.append(self.before, np.uint64(before))
                    self.after = np.append(self.after, np.uint64(after))
                    found = True
        self.unsure = []

    @property
    def rooms(self) -> int:
        """How many were opened."""
        claims = (states_of(self.before) == CLAIMED) & live(self.before) & live(self.after)
        return int(claims.sum())

    def verdicts(self) -> dict[str, int]:
        ended = ~is_verdict(self.before) & is_verdict(self.after)
        words = self.after[ended]
        succeeded = int((states_of(words) == SUCCESS).sum())
        failed = words[states_of(words) == FAILED]
        reasons = (failed >> np.uint64(5) & np.uint64(0xFF)).astype(np.intp)
        counts = {f"failed, reason {r}": int(n) for r, n in enumerate(np.bincount(reasons)) if n}
        return {"succeeded": succeeded} | counts


def keys(slots: NDArray[np.intp], words: Words) -> NDArray[np.void]:
    """Sorted (slot, word) pairs, repeats kept."""
    pairs = np.empty(len(slots), [("slot", np.intp), ("word", np.uint64)])
    pairs["slot"], pairs["word"] = slots, words
    return np.sort(pairs)


def judge(
    written: Written, final: Words, sights: list[tuple[NDArray[np.intp], Words]]
) -> list[str]:
    """What is wrong: a write that no move makes; a word replaced twice, or by a write that did not
    know it; a word that was seen and never written."""
    written.settle(final)
    slots, before, after = written.slots, written.before, written.after
    faults = [
        f"slot {slots[i]}: {before[i]:#018x} was made {after[i]:#018x}"
        for i in np.flatnonzero(no_step(before, after))[:SHOWN_MAX].tolist()
    ]
    # Every word that ever was, but the first, was written once; every one but the last replaced
    # once: so the writes of a slot are one chain, whoever made them.
    every = np.arange(len(final))
    came = keys(np.append(slots, every), np.append(after, np.zeros_like(final)))
    went = keys(np.append(slots, every), np.append(before, final))
    faults += [f"{line} was written" for line in extra(came, went, "but not replaced")]
    faults += [f"{line} was replaced" for line in extra(went, came, "but not written")]
    for name, pairs in (("written", came), ("replaced", went)):
        twice = np.unique(pairs[1:][pairs[1:] == pairs[:-1]])[:SHOWN_MAX]
        faults += [f"slot {s}: word {w:#018x} was {name} twice" for s, w in twice.tolist()]
    for seen in sights:
        unknown = keys(*seen)
        unknown = np.unique(unknown[~np.isin(unknown, came)])[:SHOWN_MAX]
        faults += [f"slot {s}: {w:#018x} was read and never written" for s, w in unknown.tolist()]
    return faults


def extra(some: NDArray[np.void], others: NDArray[np.void], how: str) -> list[str]:
    only = np.setdiff1d(some, others)[:SHOWN_MAX]
    return [f"slot {slot}: word {word:#018x}, {how}," for slot, word in only.tolist()]
