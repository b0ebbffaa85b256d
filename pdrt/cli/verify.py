"""The command `pdrt`: what can be said of a deployment without starting it.

`pdrt verify` prints the state table with every deadline as these flags and variables set it.  It is
made of the tables that the actors run by (`protocol/states.py`, `Timeouts`), so it cannot say
anything else than they do; a state without a deadline, an owner or an end is a hole, and fails it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Annotated, Literal

from cyclopts import Parameter

from pdrt.actors.janitor import IDLE_FENCE_NS
from pdrt.cli.launch import Flags, make_app, run_app, settings_from
from pdrt.clock import SECOND_NS
from pdrt.config import Timeouts
from pdrt.protocol.states import (
    ENFORCERS,
    FENCER,
    FORCED_BY,
    MOVES,
    ON_EXPIRY,
    OPEN,
    RENEWED_BY,
    TIMEOUT_OF,
    Event,
    KVPoll,
    Move,
    Reason,
    Role,
    Writer,
)

NO_FLAGS = Flags()
HOLE = "-"
UNQUIET = "Failed, unquiet"


@dataclass(frozen=True)
class Row:
    """One state of one role.  HOLE is what nobody has said."""

    role: str
    state: str
    deadline: str  # seconds, and the name of the timeout
    owner: str  # who moves it forward
    renewed_by: str
    enforced_by: str
    on_expiry: str  # verdict and reason


TITLES = Row("role", "state", "deadline", "moved on by", "renewed by", "ended by", "on expiry")


def state_rows(
    role: Role,
    timeouts: Timeouts,
    *,
    states: Iterable[KVPoll] = OPEN,
    moves: Mapping[tuple[KVPoll, Event], Move] | None = None,
    timeout_of: Mapping[KVPoll, str] = TIMEOUT_OF,
    on_expiry: Mapping[KVPoll, Reason] = ON_EXPIRY,
) -> list[Row]:
    """The open states of a role, and the state after them that has a deadline too."""
    rows = []
    for state in sorted(states):
        forward = (MOVES[role] if moves is None else moves).items()
        writers = {w for (s, e), (_, w) in forward if s is state and e is not Event.FAULT}
        may_end = any(s is state and e is Event.FAULT for (s, e), _ in forward)
        name, reason = timeout_of.get(state, HOLE), on_expiry.get(state)
        ends = HOLE if reason is None or not may_end else f"Failed, {reason.name}"
        rows.append(
            Row(
                role.name.lower(),
                state.name,
                HOLE if name == HOLE else f"{getattr(timeouts, name):g} s ({name})",
                "/".join(sorted(w.name for w in writers - {Writer.ANYONE})) or HOLE,
                RENEWED_BY[role].get(state, HOLE),
                " ".join(ENFORCERS[role]) or HOLE,
                ends,
            )
        )
    idle = f", {IDLE_FENCE_NS / SECOND_NS:g} s if idle"
    forced = Row(
        role.name.lower(),
        UNQUIET,
        f"{timeouts.quiet_s:g} s (quiet_s){idle if role is Role.DECODE else ''}",
        FENCER[role],
        "nothing",
        FORCED_BY,
        "quiet: a new worker (others: WORKER_FENCED)",
    )
    return [*rows, forced]


def holes(rows: Sequence[Row]) -> list[str]:
    """What a state lacks, a line each.  Law 2: none may be left."""
    found = []
    for row in rows:
        for what, value in (
            ("deadline", row.deadline),
            ("owner", row.owner),
            ("rule of renewal", row.renewed_by),
            ("observer that ends it", row.enforced_by),
            ("end when it expires", row.on_expiry),
        ):
            if value in (HOLE, ""):
                found.append(f"{row.role} {row.state} has no {what}")
    return found


def render(rows: Sequence[Row]) -> str:
    """Columns, as wide as they must be."""
    lines = [astuple(row) for row in (TITLES, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def render_timeouts(role: Role, timeouts: Timeouts) -> str:
    """Every timeout in effect; some follow from others (`hang_s`)."""
    values = [f"{name}={getattr(timeouts, name):g}" for name in Timeouts.__struct_fields__]
    return f"{role.name.lower()}: {' '.join(values)}"


def report(tables: Mapping[Role, tuple[Timeouts, Sequence[Row]]]) -> tuple[str, list[str]]:
    """What `pdrt verify` prints, and what is wrong."""
    rows = [row for _, table in tables.values() for row in table]
    parts = [render(rows), "", "seconds in effect"]
    parts += [render_timeouts(role, timeouts) for role, (timeouts, _) in tables.items()]
    return "\n".join(parts) + "\n", holes(rows)


def verify(flags: Flags, role: str = "both") -> int:
    """Print the tables; 1 if there is a hole in one."""
    tables = {}
    for each in Role:
        if role in ("both", each.name.lower()):
            timeouts = settings_from(each.name.lower(), flags).timeouts
            tables[each] = timeouts, state_rows(each, timeouts)
    text, wrong = report(tables)
    sys.stdout.write(text)
    for line in wrong:
        sys.stderr.write(f"pdrt verify: {line}\n")
    return 1 if wrong else 0


def main() -> None:
    """Entry point of pdrt."""
    app = make_app("pdrt", "What can be said of a deployment without starting it.")

    @app.command(name="verify")
    def run(
        flags: Flags = NO_FLAGS,
        role: Annotated[
            Literal["both", "prefill", "decode"], Parameter(help="Whose table.")
        ] = "both",
    ) -> int:
        """Print every state's deadline, owner and end, as these flags and variables set them.

        Exits with 1 if a state lacks one of them."""
        return verify(flags, role)

    run_app(app)
