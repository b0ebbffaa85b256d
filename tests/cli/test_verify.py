"""`pdrt verify`: every state has a deadline, an owner and an end, or it says which one has not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pdrt.cli.verify import HOLE, UNQUIET, holes, render_timeouts, report, state_rows
from pdrt.config import Settings, Timeouts, environment_with
from pdrt.protocol.states import MOVES, ON_EXPIRY, OPEN, TIMEOUT_OF, Event, KVPoll, Role, Writer

TIMEOUTS = Timeouts(bootstrap_s=1, waiting_s=2, stall_s=3, quiet_s=4)
SIDES = [(role, state) for role in Role for state in sorted(OPEN)]


def verify(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from pdrt.cli.verify import main; main()", "verify", *flags]
    env = environment_with(variables)
    return subprocess.run(command, capture_output=True, text=True, timeout=30, env=env)


@pytest.mark.parametrize("role", Role)
def test_the_table_of_today_has_no_hole(role: Role) -> None:
    rows = state_rows(role, TIMEOUTS)
    assert [row.state for row in rows] == [*(state.name for state in sorted(OPEN)), UNQUIET]
    assert holes(rows) == []
    deadlines = [row.deadline.partition(" s ")[0] for row in rows]
    assert deadlines == ["1", "2", "3", "4"]


@pytest.mark.parametrize(("role", "state"), SIDES)
def test_a_state_without_a_deadline_is_a_hole(role: Role, state: KVPoll) -> None:
    timeout_of = {s: name for s, name in TIMEOUT_OF.items() if s is not state}
    rows = state_rows(role, TIMEOUTS, timeout_of=timeout_of)
    assert holes(rows) == [f"{role.name.lower()} {state.name} has no deadline"]


@pytest.mark.parametrize(("role", "state"), SIDES)
def test_a_state_that_nobody_moves_on_is_a_hole(role: Role, state: KVPoll) -> None:
    anybody = {
        (s, e): (after, Writer.ANYONE if s is state else writer)
        for (s, e), (after, writer) in MOVES[role].items()
    }
    nobody = {key: move for key, move in MOVES[role].items() if key[0] is not state}
    nobody[state, Event.FAULT] = MOVES[role][state, Event.FAULT]
    for moves in (anybody, nobody):
        rows = state_rows(role, TIMEOUTS, moves=moves)
        assert holes(rows) == [f"{role.name.lower()} {state.name} has no owner"]


@pytest.mark.parametrize(("role", "state"), SIDES)
def test_a_state_that_does_not_end_is_a_hole(role: Role, state: KVPoll) -> None:
    silent = {s: reason for s, reason in ON_EXPIRY.items() if s is not state}
    stuck = {key: move for key, move in MOVES[role].items() if key != (state, Event.FAULT)}
    for rows in (
        state_rows(role, TIMEOUTS, on_expiry=silent),
        state_rows(role, TIMEOUTS, moves=stuck),
    ):
        assert holes(rows) == [f"{role.name.lower()} {state.name} has no end when it expires"]


def test_a_state_that_is_new_and_has_nothing_is_named_with_all_that_it_lacks() -> None:
    """As if Success had become an open state and nothing else had been written."""
    rows = state_rows(Role.DECODE, TIMEOUTS, states=OPEN | {KVPoll.Success})
    text, wrong = report({Role.DECODE: (TIMEOUTS, rows)})
    assert wrong == [
        f"decode Success has no {what}"
        for what in ("deadline", "owner", "rule of renewal", "end when it expires")
    ]
    assert f" {HOLE} " in text


def test_the_command_prints_both_roles_with_the_values_in_effect() -> None:
    done = verify("--quiet-timeout", "3", PDRT_WAITING_TIMEOUT="7")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for role in Role:
        mine = [line.split() for line in lines if line.startswith(f"{role.name.lower()} ")]
        assert len(mine) == len(OPEN) + 1
        assert ["prefill", "decode"][role - 1] == mine[0][0]
        assert [words[2] for words in mine[:3]] == ["60", "7", "30"]
        assert mine[3][3] == "3"
    in_effect = Settings(role="decode", timeouts=Timeouts(quiet_s=3, waiting_s=7)).timeouts
    assert lines[-1] == render_timeouts(Role.DECODE, in_effect)
    one = verify("--role", "decode")
    assert not any(line.startswith("prefill") for line in one.stdout.splitlines())


def test_the_command_fails_and_says_which_state_has_a_hole() -> None:
    """Another table in another process: the code path of the command, with one entry gone."""
    source = """
from pdrt.protocol import states
del states.TIMEOUT_OF[states.KVPoll.Transferring]
from pdrt.cli.verify import main
main()
"""
    command = [sys.executable, "-c", source, "verify"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "pdrt verify: prefill Transferring has no deadline",
        "pdrt verify: decode Transferring has no deadline",
    ]


def test_a_bad_value_is_named_as_the_roles_would_name_it() -> None:
    done = verify("--waiting-timeout", "0")
    assert done.returncode == 2
    assert "bad_config: --waiting-timeout" in done.stderr
