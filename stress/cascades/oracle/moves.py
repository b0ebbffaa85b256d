"""The watcher's history held against the laws of a slot: what one word may become.

Samples are rare beside the moves, so what is judged is what can follow, not what follows next.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stress.cascades import words
from stress.cascades.history import Kind
from stress.cascades.oracle.findings import Findings
from stress.cascades.words import CLAIMED, FAILED, STATES, SUCCESS, TRANSFERRING, Word

SLACK_NS = 1_000_000_000  # past a deadline, before a room counts as open for good
CHANGED, IMPOSSIBLE, STALE = "changed verdicts", "impossible moves", "stale generations"


def judge_words(records: NDArray[np.void], findings: Findings) -> None:
    last: dict[tuple[int, int], Word] = {}
    seen: set[tuple[int, int, int]] = set()
    late: dict[tuple[int, int, int], int] = {}
    for ns, room, c, b, a, kind in records.tolist():
        if kind == Kind.WORD:
            findings.counts["words"] += 1
            now, key = words.decode(c), (a, b)
            before = last.get(key)
            last[key] = now
            if now.live:
                seen.add((a, b, now.generation))
            if before is None:
                continue
            for fault, text in _faults(before, now):
                findings.violation(fault, f"{ns / 1e9:.6f} table {a} slot {b}: {text}")
        elif kind == Kind.LATE:
            late[a, b, c] = max(late.get((a, b, c), 0), room)
        elif kind == Kind.LOOKS:
            findings.counts["looks"] += c
            findings.peak("longest time between looks, s", room / 1e9)
    findings.counts["slots"] += len(seen)
    for (table, slot, generation), late_ns in late.items():
        findings.peak("open past its deadline, s", late_ns / 1e9)
        if late_ns > SLACK_NS:
            where = f"table {table} slot {slot} generation {generation}"
            findings.violation("open past deadline", f"{where}: {late_ns / 1e9:.3f} s")


def _faults(old: Word, new: Word) -> list[tuple[str, str]]:
    """(kind, text) of what is wrong with one word after the other."""
    text = f"{_name(old)} -> {_name(new)}"
    if new.generation < old.generation:
        return [(STALE, text)]
    if new.live and new.state not in STATES and new.state != CLAIMED:
        return [(IMPOSSIBLE, text)]
    if new.live and new.quiet and new.state not in (FAILED, SUCCESS):
        return [(IMPOSSIBLE, f"quiet without a verdict: {text}")]
    if not new.live or new.generation != old.generation or old.state == CLAIMED:
        return []
    found = []
    if old.state in (FAILED, SUCCESS):
        if (old.state, old.reason) != (new.state, new.reason):
            found.append((CHANGED, text))
        if old.quiet and not new.quiet:
            found.append((IMPOSSIBLE, f"no longer quiet: {text}"))
    elif new.state == CLAIMED or (new.state != FAILED and new.state < old.state):
        found.append((IMPOSSIBLE, f"backwards: {text}"))
    if old.state == TRANSFERRING and new.owner != old.owner:
        found.append((IMPOSSIBLE, f"another owner of a room that moves: {text}"))
    return found


def _name(word: Word) -> str:
    state = STATES.get(word.state, f"state {word.state}")
    quiet = ", quiet" if word.quiet else ""
    return f"{state}{quiet}, reason {word.reason}, owner {word.owner:#x} of {word.generation}"
