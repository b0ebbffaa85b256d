"""Workers that were restarted to make a room quiet, and the rooms that waited for it.

A failed room is quiet as soon as its peer says that nothing more can land.  If nobody can say so,
its worker is restarted after a while, and the rooms that move in it fail.  So behind such a failure
there is a room that was not quiet for as long as that, and that room has a fault of its own two
trees: one that left nobody to speak for it.  And so it is behind each restart that nobody played.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stress.cascades import words
from stress.cascades.history import Kind
from stress.cascades.oracle.faults import (
    ACTORS,
    BEFORE_S,
    MARGIN_S,
    TABLES_MAX,
    WHOLE,
    Fault,
    Faults,
    Role,
    is_outage,
)
from stress.cascades.oracle.findings import Findings
from stress.cascades.oracle.halves import tree_pairs

LONG_S = 1.5  # not quiet for so long: its worker is restarted after two seconds
IDLE_S = 0.8  # or after one, if it is decode's and seems to move nothing:
MOVES_S = 0.05  # what moves for less may do so between two looks of its supervisor
RESTARTED_S = 0.25  # a room may become quiet so long before its worker, told to end, is gone
SEEN_S = 1.5  # within so long after that the rooms of that worker have failed, and are seen to have
STALE_S = 1.2  # so long a decode may take a listener of prefill's for the one before it
SILENCE_S = 0.5  # a listener that is away for so long may not say in time that a room is quiet
UNTOUCHED, UNCAUSED = "rooms not quiet without a cause", "restarts without a cause"
DECODE_TREES = (2, 3)

Place = tuple[int, int, int]  # tree, slot, generation


@dataclass(frozen=True)
class Unquiet:
    """A failed room, while it was not quiet."""

    tree: int
    trees: tuple[int, ...]  # of its room
    opened_s: float
    begun_s: float
    ended_s: float
    text: str

    def is_explained(self, faults: Faults) -> bool:
        """By the death of who writes, or of all who could say that nobody does."""

        def touching(*roles: Role) -> list[Fault]:
            found = faults.touching(self.trees, self.opened_s, self.ended_s, *roles)
            # The restart that this room led to is no cause of it.
            return [f for f in found if f.asked or f.gone_s < self.ended_s - SEEN_S / 2]

        # A half that dies with its engine leaves the other to its deadline, and of that a listener
        # that came meanwhile cannot say which session of prefill's was sent its destination.
        forgotten = bool(touching(Role.PLAYER) and touching(Role.LISTENER))
        silent = is_outage(touching(*ACTORS), self.opened_s, self.ended_s, SILENCE_S)
        return bool(touching(Role.WORKER, *WHOLE)) or forgotten or silent or self._is_stale(faults)

    def _is_stale(self, faults: Faults) -> bool:
        """Decode names the listener that it knows as the one that was sent the destination first.
        If that had been replaced just before, and the worker in its time, nobody can say what the
        dead worker was given."""
        prefill = min(self.trees)
        deaths = [f for f in faults.of(prefill, Role.LISTENER) if f.begun_s <= self.begun_s]
        if not deaths or self.opened_s > deaths[-1].ended_s + STALE_S:
            return False
        last_s, began_s = deaths[-1].begun_s, -math.inf
        for death, before in zip(reversed(deaths), reversed(deaths[:-1]), strict=False):
            if death.begun_s - before.ended_s > STALE_S:
                began_s = before.ended_s
                break
        workers = faults.of(prefill, Role.WORKER)
        return any(w.begun_s <= last_s and w.ended_s >= began_s for w in workers)


class Fences:
    def __init__(self, rooms: Sequence[Unquiet], moving: NDArray[np.float64]) -> None:
        """`rooms`: that were not quiet for long.  `moving`: of rooms in decodes' trees that moved
        for some time, a row each: tree, from when, until when."""
        self._rooms = rooms
        self._moving = moving

    def behind(self, trees: Sequence[int], verdict_s: float, faults: Faults) -> bool:
        """Was a worker of these trees to be restarted just before?  Or was it, though it had been
        idle when that was decided, with a cause?"""
        waited = any(
            room.tree in trees and room.begun_s + LONG_S <= verdict_s <= room.ended_s + SEEN_S
            for room in self._rooms
        )
        return waited or any(
            fault.tree in trees
            and fault.role is Role.WORKER
            and not (fault.asked or fault.hung)
            and fault.gone_s - BEFORE_S <= verdict_s <= fault.gone_s + SEEN_S
            and self._explain(fault, faults)
            for fault in faults.all
        )

    def _explain(self, restart: Fault, faults: Faults) -> bool:
        """Was there a room of that very tree that waited for it, and not without a cause?"""
        if restart.role is not Role.WORKER:
            return False
        long_s = IDLE_S if self._is_idle(restart.tree, restart.gone_s) else LONG_S
        return any(
            room.tree == restart.tree
            and room.begun_s + long_s <= restart.gone_s <= room.ended_s + RESTARTED_S
            and room.is_explained(faults)
            for room in self._rooms
        )

    def _is_idle(self, tree: int, gone_s: float) -> bool:
        """Did nothing move for long in that decode's worker?"""
        trees, begun_s, ended_s = self._moving.T
        moved = (trees == tree) & (begun_s < gone_s - RESTARTED_S) & (ended_s > gone_s - IDLE_S)
        return tree in DECODE_TREES and not moved.any()

    def judge(self, faults: Faults, findings: Findings) -> None:
        for room in self._rooms:
            if room.ended_s - room.begun_s <= LONG_S:
                continue
            findings.counts["rooms not quiet for long"] += 1
            if not room.is_explained(faults):
                findings.violation(UNTOUCHED, room.text)
        for fault in faults.all:
            if not fault.asked and not fault.hung and not self._explain(fault, faults):
                text = f"{fault.role.words} of tree {fault.tree} at {fault.gone_s:.6f}"
                findings.violation(UNCAUSED, text)


def read_fences(watcher: NDArray[np.void], players: Mapping[str, NDArray[np.void]]) -> Fences:
    seen = watcher[watcher["kind"] == Kind.WORD]
    slots = seen["a"].astype(np.uint64) << np.uint64(32) | seen["b"]
    order = np.lexsort((seen["ns"], slots))
    seen, slots = seen[order], slots[order]
    begun_ns = seen["ns"].astype(np.int64)
    ended_ns = _last_look_ns(watcher)[seen["a"]]  # the last word of its slot
    followed = np.flatnonzero(slots[1:] == slots[:-1])
    ended_ns[followed] = begun_ns[followed + 1]
    halves: dict[Place, list[tuple[float, float]]] = {}
    long = _is_unquiet(seen["c"]) & (ended_ns - begun_ns > IDLE_S * 1e9)
    for at in np.flatnonzero(long).tolist():
        table, slot, word = int(seen["a"][at]), int(seen["b"][at]), int(seen["c"][at])
        place = table // TABLES_MAX, slot, word >> 32
        span = int(begun_ns[at]) / 1e9, int(ended_ns[at]) / 1e9
        halves.setdefault(place, []).append(span)
    opened = _opened(halves, players)
    rooms = [
        _unquiet(place, *span, opened.get(place, []))
        for place, spans in halves.items()
        for span in spans
    ]
    trees = seen["a"] // TABLES_MAX
    at = (seen["c"] & np.uint64(0xF) == words.TRANSFERRING) & np.isin(trees, DECODE_TREES)
    at &= ended_ns - begun_ns > MOVES_S * 1e9
    moving = np.stack([trees[at], begun_ns[at] / 1e9, ended_ns[at] / 1e9], axis=1)
    return Fences(rooms, moving)


def _last_look_ns(watcher: NDArray[np.void]) -> NDArray[np.int64]:
    """At each table, by its number."""
    found = np.full(1 << 16, watcher["ns"].max(initial=0), dtype=np.int64)
    left = watcher[watcher["kind"] == Kind.UNWATCHED]
    found[left["a"]] = left["ns"]
    return found


def _is_unquiet(word: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Failed, not quiet, and of a room that is there."""
    live = word >> np.uint64(32) & np.uint64(1) == 1
    found: NDArray[np.bool_] = live & (word & np.uint64(0x1F) == words.FAILED)
    return found


def _opened(
    places: Container[Place], players: Mapping[str, NDArray[np.void]]
) -> dict[Place, list[tuple[float, int]]]:
    """When which room was opened there.  Each table of a tree counts its generations anew."""
    found: dict[Place, list[tuple[float, int]]] = {}
    for records in players.values():
        for ns, room, c, b, a, _ in records[records["kind"] == Kind.OPENED].tolist():
            if (a, c, b) in places:
                found.setdefault((a, c, b), []).append((ns / 1e9, room))
    return found


def _unquiet(
    place: Place, begun_s: float, ended_s: float, opened: list[tuple[float, int]]
) -> Unquiet:
    """The last that was opened there before; none if its engine was killed as it did so."""
    tree, slot, generation = place
    before = [each for each in opened if each[0] <= begun_s + MARGIN_S]
    opened_s, room = max(before, default=(begun_s, 0))
    trees = (tree, *tree_pairs(room, tree)) if room else tuple(range(4))
    text = f"room {room:#x} of tree {tree}, slot {slot} of {generation}, for "
    text += f"{ended_s - begun_s:.3f} s from {begun_s:.6f} on"
    return Unquiet(tree, trees, min(opened_s, begun_s), begun_s, ended_s, text)
