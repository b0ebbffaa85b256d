"""Law 7: a room that failed must have been touched by a fault that may fail it.

For each reason the faults that explain it.  A listener's death explains none, rooms that only
waited on it survive; unless it was away so long that their deadline passed.
"""

from __future__ import annotations

from collections.abc import Mapping

from stress.cascades import words
from stress.cascades.oracle.faults import WHOLE, Faults, Role
from stress.cascades.oracle.fences import Fences
from stress.cascades.oracle.findings import Findings
from stress.cascades.oracle.halves import Half, Room, tree_pairs
from stress.cascades.words import FAILED

MOVERS = (Role.WORKER, *WHOLE)
NEVER = (
    words.NONE, words.BAD_DESTINATION, words.LAYOUT_MISMATCH, words.CORRUPT_AUX, words.RANK_FAILED
)  # fmt: skip
SILENT_S, LOST_S = 3.2, 2.4  # a peer is lost that says nothing for 3 s; it beats every 0.5 s
RESTARTED_S = 12.0  # after a tree was killed its peers may find that out as late as this
UNTOUCHED = "untouched rooms failed"


def judge_causes(
    rooms: Mapping[int, Room], faults: Faults, fences: Fences, ended_s: float, findings: Findings
) -> None:
    """`ended_s`: when the piece began to end; engines may leave from then on."""
    for number, room in rooms.items():
        for side, half in room.halves.items():
            if half.state != FAILED:
                continue
            other = room.other(side)
            trees = trees_of(half, other, number)
            if not explained(half, other, trees, faults, fences, ended_s):
                told = "nothing" if other is None else other.verdict
                took_s = half.verdict_s - half.opened_s
                text = f"room {number:#x} of player {half.tree} is {half.verdict} after "
                text += f"{took_s:.3f} s at {half.verdict_s:.6f}; the other half: {told}"
                findings.violation(UNTOUCHED, text)


def trees_of(half: Half, other: Half | None, room: int) -> tuple[int, ...]:
    """Its own first."""
    return half.tree, *((other.tree,) if other is not None else tree_pairs(room, half.tree))


def explained(
    half: Half,
    other: Half | None,
    both: tuple[int, ...],
    faults: Faults,
    fences: Fences,
    ended_s: float,
) -> bool:
    """`both`: the trees of its room, its own first."""
    reason = half.reason
    if reason in NEVER:
        return False
    own, others = both[:1], both[1:]
    begun_s = half.opened_s
    if other is not None and other.opened_s:  # it may have failed before we opened ours
        begun_s = min(begun_s, other.opened_s)
    span = begun_s, half.verdict_s

    def touched(trees: tuple[int, ...], *roles: Role, deadly: bool = False) -> bool:
        return bool(faults.touching(trees, *span, *roles, deadly=deadly))

    other_failed = other is not None and (other.state == FAILED or bool(other.aborts))
    other_silent = touched(others, Role.PLAYER, *WHOLE)
    match reason:
        case words.ABORTED | words.CLIENT_GONE:
            return reason in half.aborts
        case words.PEER_ABORTED:
            return other is not None and bool(other.aborts)
        case words.PEER_REFUSED:
            return (other is not None and other.declined) or half.verdict_s >= ended_s
        case words.BOOTSTRAP_TIMEOUT | words.WAITING_TIMEOUT:
            outage = faults.outage(both, *span)
            return other_silent or outage or touched(own, Role.PLAYER, *WHOLE)
        case words.STALLED:
            stood_still = faults.touching(both, *span, Role.PLAYER, *MOVERS, ours=True)
            return faults.outage(both, *span) or bool(stood_still)
        case words.PEER_LOST:
            # Nobody was there who could beat, and perhaps not before the room was opened, either.
            silent = faults.outage(others, half.verdict_s - SILENT_S, half.verdict_s, LOST_S)
            return other_failed or silent or touched(both, Role.PLAYER, *MOVERS)
        case words.PEER_RESTARTED:
            # Or it is told so by the other half, which had met the tree before this one's, and
            # whose engine may have died before it saw its verdict.
            told = other is not None and (other.reason == reason or not other.verdict_s)
            trees = both if told else others
            return faults.killed_before(trees, half.verdict_s, RESTARTED_S, *WHOLE)
        case words.WORKER_DIED | words.TRANSPORT_FAILED:
            return touched(both, *MOVERS, deadly=True)
        case words.ENGINE_DIED:
            return touched(both, Role.PLAYER, *WHOLE, deadly=True)
        case words.WORKER_FENCED:
            # Who hears of it from the other half may hear it late, its listener being away.
            told_s = half.verdict_s
            if other is not None and other.reason == reason:
                told_s = min(told_s, other.verdict_s)
            return fences.behind(both, told_s, faults)
        case words.SHUTDOWN:
            return half.verdict_s >= ended_s
    return False
