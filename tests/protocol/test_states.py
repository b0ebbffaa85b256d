from __future__ import annotations

import inspect
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrt.config import Timeouts
from pdrt.engine.room import FAILURES
from pdrt.protocol.counters import Counter
from pdrt.protocol.states import (
    MOVES,
    ON_EXPIRY,
    OPEN,
    RENEWED_BY,
    TERMINAL,
    TIMEOUT_OF,
    Event,
    KVPoll,
    Reason,
    Role,
    Writer,
    agree,
    quiet_at,
    step,
    told_by_peer,
)

roles = st.sampled_from(Role)
events = st.sampled_from(Event)
ROLE_AND_OPEN_STATE = [(role, state) for role in Role for state in sorted(OPEN)]


@settings(deadline=None)
@given(roles, st.lists(events))
def test_a_verdict_never_changes_and_a_room_never_goes_back(
    role: Role, history: list[Event]
) -> None:
    state = KVPoll.Bootstrapping
    for event in history:
        after = step(role, state, event)
        if state in TERMINAL:
            assert after is None
        elif after is not None:
            assert after is KVPoll.Failed or after >= state
            state = after


@pytest.mark.parametrize("role", Role)
def test_success_is_reached_only_through_every_open_state(role: Role) -> None:
    ahead = {(s, after) for (s, _), (after, _) in MOVES[role].items() if after is not KVPoll.Failed}
    assert {pair for pair in ahead if pair[0] != pair[1]} == {
        (KVPoll.Bootstrapping, KVPoll.WaitingForInput),
        (KVPoll.WaitingForInput, KVPoll.Transferring),
        (KVPoll.Transferring, KVPoll.Success),
    }


@pytest.mark.parametrize(("role", "state"), ROLE_AND_OPEN_STATE)
def test_every_open_state_can_fail_and_anyone_may_say_so(role: Role, state: KVPoll) -> None:
    assert step(role, state, Event.FAULT) is KVPoll.Failed
    assert MOVES[role][state, Event.FAULT] == (KVPoll.Failed, Writer.ANYONE)


@pytest.mark.parametrize(("role", "state"), ROLE_AND_OPEN_STATE)
def test_each_open_state_has_one_mover(role: Role, state: KVPoll) -> None:
    forward = [
        writer for (s, e), (_, writer) in MOVES[role].items() if s is state and e is not Event.FAULT
    ]
    assert len(set(forward)) == 1
    assert Writer.ANYONE not in forward


@pytest.mark.parametrize("role", Role)
def test_no_verdict_has_a_move_out(role: Role) -> None:
    assert {state for state, _ in MOVES[role]} == OPEN
    assert OPEN | TERMINAL == set(KVPoll)
    assert not OPEN & TERMINAL


def test_every_open_state_has_a_deadline_and_a_reason_for_it() -> None:
    """Whoever adds an open state must say how it ends: the module itself does not import else."""
    assert ON_EXPIRY.keys() == TIMEOUT_OF.keys() == OPEN
    assert set(TIMEOUT_OF.values()) <= set(Timeouts.__struct_fields__)
    assert len(set(TIMEOUT_OF.values())) == len(TIMEOUT_OF)
    for role in Role:
        assert RENEWED_BY[role].keys() == OPEN
    assert Reason.NONE not in ON_EXPIRY.values()
    assert len(set(ON_EXPIRY.values())) == len(ON_EXPIRY)


def test_an_open_state_without_a_deadline_does_not_import(tmp_path: Path) -> None:
    source = Path(inspect.getfile(KVPoll)).read_text()
    planted = source.replace("    Success = 4\n", "    Success = 4\n    Draining = 5\n", 1)
    assert planted != source
    (tmp_path / "planted.py").write_text(planted)
    run = subprocess.run(
        [sys.executable, "-c", "import planted"], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode != 0
    assert "AssertionError: an open state without a deadline" in run.stderr


@pytest.mark.parametrize("role", Role)
def test_a_room_that_never_let_a_byte_move_is_quiet_when_it_fails(role: Role) -> None:
    for (state, event), (after, _) in MOVES[role].items():
        if after in OPEN:
            assert not quiet_at(state, after), (state, event)
        elif after is KVPoll.Success:
            assert quiet_at(state, after)
        else:
            assert quiet_at(state, after) == (state is not KVPoll.Transferring)


@settings(deadline=None)
@given(st.lists(st.sampled_from(KVPoll), min_size=1))
def test_ranks_agree_on_the_lowest_state(states: list[KVPoll]) -> None:
    agreed = agree(states)
    assert agreed is min(states)
    assert (agreed is KVPoll.Failed) == (KVPoll.Failed in states)
    assert (agreed is KVPoll.Success) == all(state is KVPoll.Success for state in states)


def test_the_order_of_ranks_is_of_no_matter() -> None:
    for ranks in permutations(KVPoll, 3):
        assert agree(ranks) is agree(reversed(ranks))


@settings(deadline=None)
@given(st.sampled_from(Reason) | st.integers(0, 255))
def test_a_peers_reason_is_told_as_a_fault_and_never_as_a_wish_of_ours(number: int) -> None:
    told = told_by_peer(number)
    ours = {Reason.NONE, Reason.ABORTED, Reason.CLIENT_GONE, Reason.SHUTDOWN}
    assert told not in ours
    if number == Reason.SHUTDOWN:
        assert told is Reason.PEER_REFUSED  # nobody gave the request up
        return
    assert told is (Reason(number) if number in set(Reason) - ours else Reason.PEER_ABORTED)


def test_states_are_numbered_as_engines_number_them() -> None:
    assert {state.name: state.value for state in KVPoll} == {
        "Failed": 0,
        "Bootstrapping": 1,
        "WaitingForInput": 2,
        "Transferring": 3,
        "Success": 4,
    }


def test_reasons_are_on_the_wire_and_never_renumbered() -> None:
    """Append here; a number that was ever released keeps its meaning."""
    assert [reason.name for reason in sorted(Reason)] == [
        "NONE",
        "ABORTED",
        "CLIENT_GONE",
        "PEER_ABORTED",
        "BOOTSTRAP_TIMEOUT",
        "WAITING_TIMEOUT",
        "TRANSFER_STALLED",
        "PEER_LOST",
        "PEER_RESTARTED",
        "PEER_REFUSED",
        "WORKER_DIED",
        "ENGINE_DIED",
        "TRANSPORT_FAILED",
        "BAD_DESTINATION",
        "LAYOUT_MISMATCH",
        "CORRUPT_AUX",
        "RANK_FAILED",
        "WORKER_FENCED",
        "SHUTDOWN",
    ]
    assert [reason.value for reason in sorted(Reason)] == list(range(len(Reason)))
    assert len(Reason.__members__) == len(Reason), "two names for one number"


def test_every_reason_has_a_counter_of_its_own_and_a_meaning_for_engines() -> None:
    assert Counter.VERDICT_FAILED + max(Reason) < Counter.ROOM_NS
    assert FAILURES.keys() == set(Reason)
    words = [text for _, text in FAILURES.values()]
    assert len(set(words)) == len(words), "two reasons that people cannot tell apart"
