"""What law 7 is worth: would it have excused the failure of a room that nothing befell?

Faults are many, so some stand beside every room by chance.  Rooms that succeeded on both sides are
asked about as if one half had failed, with each reason in turn; how often that would have been
excused is how often the law cannot see a failure without a cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stress.cascades.oracle.causes import explained, trees_of
from stress.cascades.oracle.faults import Faults
from stress.cascades.oracle.fences import Fences
from stress.cascades.oracle.findings import Findings
from stress.cascades.oracle.halves import Room
from stress.cascades.plan import DECODE, PREFILL
from stress.cascades.words import FAILED, REASONS, SUCCESS

ASKED_MAX = 300  # of one piece
ASKED, EXCUSED = "innocent rooms asked", "innocent, excused as "


def ask_innocents(
    rooms: Mapping[int, Room], faults: Faults, fences: Fences, ended_s: float, findings: Findings
) -> None:
    innocent = [
        (number, room)
        for number, room in rooms.items()
        if len(room.halves) == 2 and all(half.state == SUCCESS for half in room.halves.values())
    ]
    # Rooms come player by player and in order, so that these are spread over the whole piece.
    asked = innocent[:: len(innocent) // ASKED_MAX + 1]
    findings.counts[ASKED] += len(asked)
    for index, (number, room) in enumerate(asked):
        side = (PREFILL, DECODE)[index % 2]
        half, other = room.halves[side], room.other(side)
        trees = trees_of(half, other, number)
        for reason, name in enumerate(REASONS):
            failed = replace(half, state=FAILED, reason=reason)
            found = explained(failed, other, trees, faults, fences, ended_s)
            findings.counts[EXCUSED + name] += found
