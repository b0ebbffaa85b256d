"""What was done to whom, from the driver's and the watcher's history, and what it may explain."""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from stress.cascades import words
from stress.cascades.history import Kind
from stress.cascades.oracle.findings import Findings

MARGIN_S = 0.5  # a role may serve again a little before everybody knows
AFTERMATH_S = 4.5  # of a tree: peers miss it for as long as it may be silent, and then say hello
FENCE_S = 8.0  # a room waits for quiet, then its worker is fenced; others fail with that
BEFORE_S = 0.1
UNASKED_S = 2.0
OUTAGE_S = 1.0  # actors that are away for so long may let deadlines of a few seconds pass
SILENCE_S = 0.5  # a listener that is away for so long may not say in time that a room is quiet
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


WHOLE = (Role.SUPERVISOR, Role.TREE)
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
    gone_s: float = 0.0  # when its row was empty, if that is all we know

    @property
    def away_s(self) -> tuple[float, float]:
        """From when until when it served nobody."""
        return self.gone_s or self.begun_s, self.ended_s

    @property
    def lasted_s(self) -> float:
        left_s, back_s = self.away_s
        return back_s - left_s

    def touches(self, opened_s: float, verdict_s: float) -> bool:
        after_s = AFTERMATH_S if self.role in WHOLE else MARGIN_S
        return self.begun_s <= verdict_s + BEFORE_S and self.ended_s + after_s >= opened_s


class Faults:
    """All faults of a piece, by tree and in order."""

    def __init__(self, faults: Iterable[Fault], killed: Set[int]) -> None:
        """`killed`: pids that we killed."""
        self.killed = killed
        self.all = sorted(faults, key=lambda fault: fault.begun_s)
        self._by_tree: dict[int, list[Fault]] = {}
        for fault in self.all:
            self._by_tree.setdefault(fault.tree, []).append(fault)

    def touching(
        self,
        trees: Iterable[int],
        opened_s: float,
        verdict_s: float,
        *roles: Role,
        ours: bool = False,
    ) -> list[Fault]:
        """`ours`: only what we did ourselves."""
        return [
            fault
            for tree in trees
            for fault in self._by_tree.get(tree, ())
            if fault.role in roles and fault.touches(opened_s, verdict_s) and fault.asked >= ours
        ]

    def outage(
        self,
        trees: Iterable[int],
        opened_s: float,
        verdict_s: float,
        long_s: float = OUTAGE_S,
    ) -> bool:
        """Was an actor away for long, or one after the other while the room was open?  With a warm
        standby each is back in milliseconds."""
        away = self.touching(trees, opened_s, verdict_s, Role.LISTENER, Role.WORKER)
        if any(fault.lasted_s > long_s for fault in away):
            return True
        return covered_s((f.away_s for f in away), opened_s, verdict_s) > long_s

    def silence(self, verdict_s: float) -> bool:
        """Was some listener away for long before then?  It may have been the one to say that a
        room is quiet, and the bound of that is short."""
        return any(
            fault.role is Role.LISTENER
            and fault.lasted_s > SILENCE_S
            and fault.begun_s <= verdict_s <= fault.ended_s + FENCE_S
            for fault in self.all
        )

    def before(
        self, verdict_s: float, within_s: float, *roles: Role, unasked: Iterable[int] = ()
    ) -> bool:
        """By us anywhere, or by a supervisor in one of the trees `unasked`."""
        return any(
            fault.role in roles
            and (fault.asked or fault.tree in unasked)
            and fault.begun_s <= verdict_s
            and fault.ended_s + within_s >= verdict_s
            for fault in self.all
        )

    def is_away(self, tree: int, at_s: float) -> bool:
        """Was the whole tree dead then?"""
        return any(
            fault.role in WHOLE
            and fault.mode is Mode.KILL
            and fault.begun_s <= at_s <= fault.ended_s
            for fault in self._by_tree.get(tree, ())
        )


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
    hit: dict[tuple[int, int], Role] = {}  # tree and pid -> as whom
    paused: set[tuple[int, int]] = set()
    for ns, room, c, b, a, kind in driver.tolist():
        at_s = ns / 1e9
        if kind == Kind.SIGNAL:
            role, mode = Role(c & 0xFFFF), Mode(c >> 16 & 0xFFFF)
            findings.counts["signals"] += 1
            if mode is Mode.PAUSE:  # who only paused may still be replaced for another reason
                paused.add((a, b))
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
    faults += _unasked(watcher, hit, paused, findings)
    return Faults(faults, ours)


def _unasked(
    watcher: NDArray[np.void],
    hit: dict[tuple[int, int], Role],
    paused_pids: Set[tuple[int, int]],
    findings: Findings,
) -> list[Fault]:
    """Actors that were replaced and had no signal from us: hung, or fenced on purpose.  A standby
    may have been promoted just before our signal reached it."""
    found: list[Fault] = []
    living: dict[tuple[int, int], tuple[int, int]] = {}  # by row: incarnation and pid
    away: dict[tuple[int, int], Fault] = {}
    for ns, serves, c, b, a, kind in watcher.tolist():
        if kind != Kind.ROW or b not in ROLE_OF_ROW:
            continue
        tree, role, at_s = a // TABLES_MAX, ROLE_OF_ROW[b], ns / 1e9
        incarnation, pid = c >> 32, c & 0xFFFF_FFFF
        before, last_pid = living.get((a, b), (0, 0))
        if before and incarnation != before and hit.get((tree, last_pid)) not in (role, *WHOLE):
            paused = (tree, last_pid) in paused_pids
            hit[tree, last_pid] = role
            findings.counts[f"restarts that we did not play: {role.words}"] += not paused
            # It was told to end, or stood still, for some time before its row was empty.
            fault = Fault(tree, role, Mode.HANG, at_s - UNASKED_S, asked=paused, gone_s=at_s)
            found.append(fault)
            away[a, b] = fault
        if incarnation:
            living[a, b] = incarnation, pid or (last_pid if incarnation == before else 0)
        if serves and (a, b) in away:
            away.pop((a, b)).ended_s = at_s
    return found


TABLES_MAX = 1000  # numbers of tables of one tree, in the watcher's history
