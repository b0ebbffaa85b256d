"""The engines' histories, put together: each room's two halves, and what the laws say of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stress.cascades import plan, words
from stress.cascades.history import Kind
from stress.cascades.oracle.findings import Findings
from stress.cascades.plan import DECODE, PREFILL, Mix
from stress.cascades.words import FAILED, REASONS, STATES, SUCCESS

DIED = "players that died by themselves"
ABORT_TOLD = "the other side's abort, until the engine saw Failed"


@dataclass(eq=False)
class Half:
    """One side of a room, as its engine saw it."""

    tree: int
    opened_s: float = 0.0
    verdict_s: float = 0.0
    state: int = -1  # of the verdict; -1: it saw none
    reason: int = 0
    aborts: set[int] = field(default_factory=set)  # reasons of those before the verdict
    aborted_s: float = 0.0
    declined: bool = False
    looked: int = -1  # at its bytes: -1 never, else were they whole
    digest: int = 0
    token: int = -1
    quiet: bool = False
    gone: bool = False

    @property
    def verdict(self) -> str:
        return f"{STATES.get(self.state, 'nothing')} ({REASONS[self.reason]})"


@dataclass(eq=False)
class Room:
    halves: dict[int, Half] = field(default_factory=dict)  # by PREFILL, DECODE

    def other(self, side: int) -> Half | None:
        return self.halves.get(PREFILL if side == DECODE else DECODE)


def tree_pairs(room: int, tree: int) -> tuple[int, ...]:
    """The trees of a room's lane but one: lanes are numbered in pairs, two prefills by two
    decodes."""
    lane = (room >> 48) - 1 >> 1
    return tuple(t for t in (lane // 2, 2 + lane % 2) if t != tree)


def read_rooms(
    histories: Mapping[str, NDArray[np.void]],
    sides: Sequence[int],
    killed: Set[int],
    findings: Findings,
) -> dict[int, Room]:
    """`histories` of players, `sides` by player's number, `killed`: pids.  What one half
    contradicts itself in is judged on the way."""
    rooms: dict[int, Room] = {}
    for name, records in histories.items():
        alive: set[int] = set()  # rooms this process had not let go of
        for record in records.tolist():
            _take(record, rooms, sides, alive, findings)
        if has_left(records):
            for room in alive:
                findings.violation("rooms without a verdict", f"room {room:#x} of {name}")
        elif set(records["b"][records["kind"] == Kind.ATTACHED].tolist()) - killed:
            findings.violation(DIED, name)
    return rooms


def has_left(records: NDArray[np.void]) -> bool:
    """A process that ends as it should says so last."""
    return len(records) > 0 and int(records["kind"][-1]) == Kind.LEFT


def _take(
    record: tuple[int, ...],
    rooms: dict[int, Room],
    sides: Sequence[int],
    alive: set[int],
    findings: Findings,
) -> None:
    ns, number, c, b, a, kind = record
    if kind in (Kind.ATTACHED, Kind.DETACHED, Kind.REFUSED, Kind.LEFT):
        findings.counts[Kind(kind).name.lower()] += 1
        return
    room = rooms.setdefault(number, Room())
    half = room.halves.setdefault(sides[a], Half(a))
    at_s = ns / 1e9
    if kind == Kind.OPENED:
        half.opened_s = at_s
        alive.add(number)
        findings.counts["halves"] += 1
    elif kind == Kind.VERDICT:
        half.state, half.reason, half.verdict_s = b, c, at_s
        alive.discard(number)
        findings.counts["verdicts"] += 1
    elif kind == Kind.AGAIN:
        findings.counts["verdicts read again"] += 1
        if (b, c) != (half.state, half.reason):
            now = f"{STATES.get(b, b)} ({c})"
            text = f"room {number:#x} of player {a}: {half.verdict}, then {now}"
            findings.violation("changed verdicts", text)
    elif kind == Kind.ABORTED:
        aim = plan.AIMS.get(b, "its client died")
        findings.counts[f"aborts: {_side(sides[a])}, {aim}"] += 1
        if half.state < 0:
            half.aborts.add(c)
            half.aborted_s = at_s
    elif kind == Kind.DECLINED:
        half.declined = True
        findings.counts["declined"] += 1
    elif kind == Kind.BYTES:
        half.looked, half.digest = b, c
    elif kind == Kind.TOKEN:
        half.token = c
    elif kind == Kind.QUIET:
        half.quiet = True
    elif kind == Kind.GONE:
        half.gone = True
        alive.discard(number)
    elif kind == Kind.LOOKED:
        if sides[a] == PREFILL:  # transports only read those: no trials
            findings.counts["prefill's pages looked at again"] += b
        else:
            findings.counts["pages looked at again"] += b
            findings.counts["pages of successes looked at again"] += b * (half.state == SUCCESS)
        if c:
            text = f"room {number:#x} of player {a}: {c} of {b} pages changed once it was quiet"
            findings.violation("late bytes", text)


def _side(side: int) -> str:
    return "prefill" if side == PREFILL else "decode"


def judge_rooms(rooms: Mapping[int, Room], salt: int, mix: Mix, findings: Findings) -> None:
    """What both halves together must be."""
    findings.counts["rooms"] += len(rooms)
    for number, room in rooms.items():
        for side, half in room.halves.items():
            if half.state == SUCCESS:
                findings.counts[f"verdicts: {_side(side)}, Success"] += 1
            elif half.state == FAILED:
                findings.counts[f"verdicts: {_side(side)}, {REASONS[half.reason]}"] += 1
                if half.reason == words.NONE:
                    text = f"room {number:#x}, {_side(side)}: Failed without a reason"
                    findings.violation("untouched rooms failed", text)
            other = room.other(side)
            if half.reason == words.PEER_ABORTED and other is not None and other.aborted_s:
                since_s = max(other.aborted_s, half.opened_s)
                findings.time(ABORT_TOLD, max(0.0, half.verdict_s - since_s))
        decode = room.halves.get(DECODE)
        if decode is not None and decode.state == SUCCESS:
            _judge_success(number, decode, room.halves.get(PREFILL), salt, mix, findings)


def _judge_success(
    number: int, decode: Half, prefill: Half | None, salt: int, mix: Mix, findings: Findings
) -> None:
    """Law 5.  Prefill's worker moves prefill's half to Success when every byte has landed, and only
    then tells decode.  So with decode's Success goes prefill's, or a prefill that is gone: never
    its failure.  The other way round decode may have given up, or lost a process, before it heard.
    """
    findings.counts["successes"] += 1
    if prefill is not None and prefill.state == FAILED:
        text = f"room {number:#x}: decode Success, prefill {prefill.verdict}"
        findings.violation("success against failure", text)
    if decode.looked < 0:
        return  # killed before it looked
    count = plan.spec(salt, number, mix).pages_count
    if not decode.looked or decode.digest != plan.digest(salt, number, count):
        text = f"room {number:#x} of {count} pages: not the bytes that were sent"
        findings.violation("wrong bytes", text)
    elif decode.token not in (-1, plan.token(salt, number)):
        findings.violation("wrong bytes", f"room {number:#x}: not the aux row that was sent")
