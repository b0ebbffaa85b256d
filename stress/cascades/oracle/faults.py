"""What was done to whom, from the driver's and the watcher's history, and what it may explain."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from stress.cascades import words
from stress.cascades.history import Kind
from stress.cascades.oracle.findings import Findings

MARGIN_S = 0.5  # a role may serve again a little before everybody knows
AFTERMATH_S = 4.5  # of a tree: peers miss it for as long as it may be silent, and then say hello
BEFORE_S = 0.1
UNASKED_S = 0.5  # it may have stood still, or been told to end, for so long
PAUSED_S = 0.5  # a shorter pause lets no deadline pass
MASK_PID = np.uint64(0xFFFF_FFFF)
SILENT_S = 0.19  # no pulse for 0.2 s is hung
HUNG_S = 0.1  # a shorter one hangs nobody: a supervisor waits for twice as long
OUTAGE_S = 1.0  # actors that are away for so long may let deadlines of a few seconds pass
BACK, NOT_DEAD = "roles not back", "processes not dead"


class Role(IntEnum):
    """Who is signalled.  Numbers are in histories."""

    LISTENER = 1
    WORKER = 2
    LISTENER_STANDBY = 3
    WORKER_STANDBY = 4
    PLAYER = 5
    SUPERVISOR = 6
    TREE = 7

    @property
    def words(self) -> str:
        return self.name.lower().replace("_", "-")


class Mode(IntEnum):
    KILL = 1
    PAUSE = 2  # SIGSTOP, and SIGCONT after a while
    HANG = 3  # SIGSTOP until its supervisor kills it


Process = tuple[int, int]  # tree and pid
WHOLE = (Role.SUPERVISOR, Role.TREE)
ACTORS = (Role.LISTENER, Role.WORKER)
ROLE_OF_ROW = {words.LISTENER: Role.LISTENER, words.WORKER: Role.WORKER}  # standbys change rows


def code(mode: Mode, role: Role) -> int:
    return int(mode) << 16 | int(role)


@dataclass
class Fault:
    tree: int
    role: Role
    mode: Mode
    begun_s: float
    ended_s: float = math.inf
    asked: bool = True  # by us; else by a supervisor
    hung: bool = False  # by itself: a busy machine may do that
    gone_s: float = 0.0  # when its row was empty, if that is all we know

    @property
    def away_s(self) -> tuple[float, float]:
        """From when until when it served nobody."""
        return self.gone_s or self.begun_s, self.ended_s

    @property
    def lasted_s(self) -> float:
        left_s, back_s = self.away_s
        return back_s - left_s

    def counts(self, *, deadly: bool) -> bool:
        """A pause kills nobody, and if it is short it makes nobody late either."""
        return self.mode is not Mode.PAUSE or (not deadly and self.lasted_s >= PAUSED_S)

    def touches(self, opened_s: float, verdict_s: float) -> bool:
        after_s = AFTERMATH_S if self.role in WHOLE else MARGIN_S
        return self.begun_s <= verdict_s + BEFORE_S and self.ended_s + after_s >= opened_s


@dataclass
class Pause:
    """Of one process."""

    begun_s: float
    ended_s: float = math.inf

    def hangs(self, gone_s: float) -> bool:
        """May it have been taken for hung by this, and been killed for that?"""
        is_long = min(gone_s, self.ended_s) - self.begun_s >= HUNG_S
        return is_long and gone_s <= self.ended_s + MARGIN_S


class Faults:
    """All faults of a piece, by tree and in order."""

    def __init__(self, faults: Iterable[Fault], killed: Set[int]) -> None:
        """`killed`: pids that we killed."""
        self.killed = killed
        self.all = sorted(faults, key=lambda fault: fault.begun_s)
        self._by_tree: dict[int, list[Fault]] = {}
        for fault in self.all:
            self._by_tree.setdefault(fault.tree, []).append(fault)
        # By tree, as those: when they began, and when the last up to each was over.
        self._begun = {tree: [f.begun_s for f in those] for tree, those in self._by_tree.items()}
        self._over = {
            tree: list(accumulate((f.ended_s for f in those), max))
            for tree, those in self._by_tree.items()
        }

    def _within(self, tree: int, from_s: float, to_s: float) -> Iterator[Fault]:
        """That began until `to_s` and were not over at `from_s`, the latest first."""
        those, over = self._by_tree.get(tree, []), self._over.get(tree, [])
        at = bisect_right(self._begun.get(tree, []), to_s)
        while at and over[at - 1] >= from_s:
            at -= 1
            if those[at].ended_s >= from_s:
                yield those[at]

    def of(self, tree: int, role: Role) -> Iterator[Fault]:
        """What ended that role there."""
        found = self._by_tree.get(tree, ())
        return (fault for fault in found if fault.role is role and fault.counts(deadly=True))

    def touching(
        self,
        trees: Iterable[int],
        opened_s: float,
        verdict_s: float,
        *roles: Role,
        ours: bool = False,
        deadly: bool = False,
    ) -> list[Fault]:
        """`ours`: only what we did ourselves.  `deadly`: only what ended a process."""
        return [
            fault
            for tree in trees
            for fault in self._within(tree, opened_s - AFTERMATH_S, verdict_s + BEFORE_S)
            if fault.role in roles
            and fault.counts(deadly=deadly)
            and fault.touches(opened_s, verdict_s)
            and fault.asked >= ours
        ]

    def outage(
        self,
        trees: Iterable[int],
        opened_s: float,
        verdict_s: float,
        long_s: float = OUTAGE_S,
    ) -> bool:
        """Was an actor away for long while the room was open?"""
        away = self.touching(trees, opened_s, verdict_s, *ACTORS)
        return is_outage(away, opened_s, verdict_s, long_s)

    def killed_before(
        self, trees: Iterable[int], verdict_s: float, within_s: float, *roles: Role
    ) -> bool:
        return any(
            fault.role in roles and fault.counts(deadly=True)
            for tree in trees
            for fault in self._within(tree, verdict_s - within_s, verdict_s)
        )

    def ended_listener(self, tree: int, begun_s: float, ended_s: float) -> bool:
        """Was its listener to die then, or already dead?"""
        away = self.touching([tree], begun_s, ended_s, Role.LISTENER, *WHOLE, deadly=True)
        return any(fault.ended_s + MARGIN_S >= begun_s for fault in away)

    def is_away(self, tree: int, at_s: float) -> bool:
        """Was the whole tree dead then?"""
        return any(
            fault.role in WHOLE and fault.mode is Mode.KILL
            for fault in self._within(tree, at_s, at_s)
        )


def is_outage(away: Sequence[Fault], from_s: float, to_s: float, long_s: float) -> bool:
    """One for long, or one after the other.  With a warm standby each is back in milliseconds."""
    if any(fault.lasted_s > long_s for fault in away):
        return True
    return covered_s((fault.away_s for fault in away), from_s, to_s) > long_s


def covered_s(spans: Iterable[tuple[float, float]], from_s: float, to_s: float) -> float:
    """How much of a time they cover together."""
    total_s, end_s = 0.0, from_s
    for left_s, back_s in sorted(spans):
        begin_s, end_s = max(left_s, end_s), max(end_s, min(back_s, to_s))
        total_s += max(0.0, end_s - begin_s)
    return total_s


def read_faults(driver: NDArray[np.void], watcher: NDArray[np.void], findings: Findings) -> Faults:
    """Whoever was signalled must be dead or back; restarts that nobody asked for are faults too."""
    faults: list[Fault] = []
    open_by: dict[tuple[int, int], list[Fault]] = {}
    killed: dict[int, str] = {}  # pid -> who
    ours: set[int] = set()
    hit: dict[Process, Role] = {}  # as whom it was killed, or stopped until it is
    pauses: dict[Process, list[Pause]] = {}
    for ns, room, c, b, a, kind in driver.tolist():
        at_s = ns / 1e9
        if kind == Kind.SIGNAL:
            role, mode = Role(c & 0xFFFF), Mode(c >> 16 & 0xFFFF)
            findings.counts["signals"] += 1
            if mode is Mode.PAUSE:  # who only paused may still be replaced for another reason
                pauses.setdefault((a, b), []).append(Pause(at_s))
            else:
                hit[a, b] = role
                ours.add(b)
                killed[b] = f"{role.words} of tree {a} (pid {b}, cycle {room})"
            still = open_by.setdefault((a, int(role)), [])
            if not still or still[-1].begun_s != at_s:  # else one blow at several processes
                still.append(Fault(a, role, mode, at_s))
                faults.append(still[-1])
        elif kind == Kind.CROWD:
            findings.counts["clients killed at one instant"] += b
            findings.time(f"{b} clients killed, until their rooms were over", room / 1e9)
        elif kind == Kind.DEAD:
            killed.pop(b, None)
        elif kind == Kind.CONTINUED:
            for pause in pauses.get((a, b), []):
                pause.ended_s = min(pause.ended_s, at_s)
        elif kind == Kind.BACK:
            role = Role(b & 0xFFFF)
            if still := open_by.get((a, int(role)), []):
                still.pop(0).ended_s = at_s
            if b >> 16 in (Mode.KILL, Mode.HANG):
                mode = Mode(b >> 16)
                how = "killed" if mode is Mode.KILL else "hung"
                findings.time(f"{role.words} {how}", room / 1e9)
    for who in killed.values():
        findings.violation(NOT_DEAD, who)
    for fault in (fault for still in open_by.values() for fault in still):
        findings.violation(BACK, f"{fault.role.words} of tree {fault.tree}")
    faults += _unasked(watcher, hit, pauses, findings)
    return Faults(faults, ours)


def _unasked(
    watcher: NDArray[np.void],
    hit: Mapping[Process, Role],
    pauses: Mapping[Process, Sequence[Pause]],
    findings: Findings,
) -> list[Fault]:
    """Actors that were replaced and had no signal from us in that role.  Who was promoted just
    before our signal reached it, or stood still for long enough to count as hung, was asked for:
    the others were hung of themselves, or fenced."""
    found: list[Fault] = []
    living: dict[tuple[int, int], tuple[int, int]] = {}  # by row: incarnation and pid
    known: set[tuple[int, int, int]] = set()  # by row and incarnation
    away: dict[tuple[int, int], list[Fault]] = {}
    silent: dict[tuple[int, int], tuple[int, float]] = {}  # by row: until when, for how long
    rows = watcher[(watcher["kind"] == Kind.ROW) & np.isin(watcher["b"], list(ROLE_OF_ROW))]
    trees, pids = (rows["a"] // TABLES_MAX).tolist(), (rows["c"] & MASK_PID).tolist()
    seen = set(zip(trees, pids, strict=True))
    unseen = [(tree, role) for (tree, pid), role in hit.items() if (tree, pid) not in seen]
    of_rows = np.isin(watcher["kind"], (Kind.ROW, Kind.SILENT, Kind.UNWATCHED))
    for ns, serves, c, b, a, kind in watcher[of_rows].tolist():
        tree, at_s = a // TABLES_MAX, ns / 1e9
        if kind == Kind.UNWATCHED:  # its tree is dead, and that is a fault of its own
            for row in [row for row in away if row[0] == a]:
                _end(away.pop(row), at_s)
        if kind == Kind.SILENT:
            silent[a, b] = ns, serves / 1e9
        if kind != Kind.ROW or b not in ROLE_OF_ROW:
            continue
        role = ROLE_OF_ROW[b]
        incarnation, pid = c >> 32, c & 0xFFFF_FFFF
        before, last_pid = living.get((a, b), (0, 0))
        last = tree, last_pid
        replaced = before and incarnation != before and (a, b, before) not in known
        if replaced and hit.get(last) not in (role, *WHOLE):
            stood_still = any(pause.hangs(at_s) for pause in pauses.get(last, ()))
            asked = last in hit or stood_still
            if not last_pid and (tree, role) in unseen:  # killed before the watcher saw its pid
                unseen.remove((tree, role))
                asked = True
            known.add((a, b, before))
            until_ns, silent_s = silent.get((a, b), (0, 0.0))
            hung = not asked and until_ns == ns and silent_s >= SILENT_S
            how = "of who stood still by itself" if hung else "that we did not play"
            findings.counts[f"restarts {how}: {role.words}"] += not asked
            # It was told to end, or stood still, for some time before its row was empty.
            fault = Fault(
                tree, role, Mode.HANG, at_s - UNASKED_S, asked=asked, gone_s=at_s, hung=hung
            )
            found.append(fault)
            away.setdefault((a, b), []).append(fault)
        if incarnation:
            living[a, b] = incarnation, pid or (last_pid if incarnation == before else 0)
        if serves:
            _end(away.pop((a, b), []), at_s)
    return found


def _end(faults: Iterable[Fault], at_s: float) -> None:
    for fault in faults:
        fault.ended_s = at_s


TABLES_MAX = 1000  # numbers of tables of one tree, in the watcher's history
