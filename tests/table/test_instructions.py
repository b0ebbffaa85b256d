"""Two processes at every instruction: at once, late, and killed."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from pdrt.process_rows import NOBODY
from pdrt.protocol.states import TERMINAL, Event, KVPoll, Reason
from pdrt.shm_status import CLAIMED, GENERATION_SHIFT, STATE_MASK, Handle, StatusTable, Word, unpack
from tests.table.steps import (
    STEPS_MAX,
    Action,
    AtStep,
    claim,
    discard,
    mover,
    perform,
    poll_late,
    poll_many_late,
    reopen,
)
from tests.table.views import LATE_NS, NOW, START_MS, THEM, TIMEOUTS_MS, US, bring, sweep, tables

ACTIONS: dict[str, Action] = {
    "peer known": mover(Event.PEER_KNOWN),
    "chunk posted": mover(Event.CHUNK_POSTED, owner=US),
    "chunk posted again": mover(Event.CHUNK_POSTED),
    "landed": mover(Event.LANDED),
    "abort": mover(Event.FAULT, Reason.ABORTED),
    "death": mover(Event.FAULT, Reason.WORKER_DIED),
    "quiet": lambda table, h: table.set_quiet(h.slot, h.generation),
    "clear": lambda table, h: table.clear(h.slot, h.generation),
    "poll": poll_late,
    "poll many": poll_many_late,
    "discard": discard,
    "reopen": reopen,
    "claim": claim,
}
POLLS = {"poll", "poll many"}


def may_say(state: object, word: int, age: int) -> bool:
    """May a reader have said that, with the word as it is now?  A verdict lasts."""
    return age > 0 or state not in TERMINAL or word & STATE_MASK == state


def outcome(table: StatusTable, handle: Handle) -> tuple[int, int]:
    """The word, and its generation relative to the handle's."""
    word = int(table.words[handle.slot])
    age = (word >> GENERATION_SHIFT) - handle.generation
    return word & 0xFFFFFFFF, age


@pytest.mark.parametrize("state", KVPoll)
@pytest.mark.parametrize("first", ACTIONS)
def test_two_processes_at_any_instruction_do_as_if_one_came_after_the_other(
    state: KVPoll, first: str
) -> None:
    """`second` runs as a whole before each atomic operation of `first`, and the word must be as
    after one of the two orders."""
    with tables(2, rooms_max=1) as [ours, theirs]:

        def fresh() -> Handle:
            for slot in theirs.live_slots().tolist():
                theirs.discard(slot, int(theirs.words[slot]) >> GENERATION_SHIFT)
            handle = theirs.open(0, 0, now_ns=NOW)
            bring(theirs, handle, state)
            return handle

        for second in ACTIONS:
            one, other = ACTIONS[first], ACTIONS[second]
            handle = fresh()
            mine, yours = one(ours, handle), other(theirs, handle)
            expected = {(outcome(ours, handle), mine, yours)}
            handle = fresh()
            yours, mine = other(theirs, handle), one(ours, handle)
            expected.add((outcome(ours, handle), mine, yours))
            for at in range(STEPS_MAX):
                handle = fresh()
                did: list[object] = []
                spy = AtStep(ours, at, partial(perform, other, theirs, handle, did))
                mine = one(ours, handle)
                spy.remove(ours)
                if not did:
                    break  # `one` takes fewer steps
                found = outcome(ours, handle), mine, did[0]
                fine = found in expected
                if POLLS & {first, second}:  # what a reader says may be over when it says it
                    says = mine if first in POLLS else did[0]
                    fine = found[0] in {word for word, *_ in expected} and may_say(says, *found[0])
                assert fine, f"{second} before step {at} of {first}: {found}, not {expected}"
            else:
                raise AssertionError(f"{first} takes more than {STEPS_MAX} steps")


BESIDE: dict[str, Action] = {
    "renew": lambda table, h: table.renew(h.slot, h.generation, LATE_NS, 7),
    "renew by state": lambda table, h: table.renew_state(h.slot, h.generation, LATE_NS),
    "set moved": lambda table, h: table.set_moved(h.slot, h.generation, 5),
    "set taken": lambda table, h: table.set_taken(h.slot, h.generation, 5),
    "move": mover(Event.CHUNK_POSTED, owner=US),
    "abort": mover(Event.FAULT, Reason.ABORTED),
}


@pytest.mark.parametrize("write", BESIDE)
def test_a_write_that_comes_late_by_any_instruction_changes_nothing_of_a_newer_room(
    write: str,
) -> None:
    for at in range(STEPS_MAX):
        with tables(2, rooms_max=1) as [ours, theirs]:
            handle = theirs.open(1, 0, now_ns=NOW)
            bring(theirs, handle, KVPoll.Transferring)
            did: list[object] = []
            spy = AtStep(ours, at, partial(perform, reopen, theirs, handle, did))
            BESIDE[write](ours, handle)
            spy.remove(ours)
            if not did:
                return
            [row] = theirs.rows(np.array([0])).tolist()
            tag = handle.generation + 2 << 40
            assert unpack(row[0]) == Word(
                KVPoll.Bootstrapping, False, Reason.NONE, NOBODY, handle.generation + 2
            )
            deadline = tag | START_MS + TIMEOUTS_MS[KVPoll.Bootstrapping]
            assert row[1:5] == [1, deadline, tag, tag], f"before step {at}"
    raise AssertionError(f"{write} takes more than {STEPS_MAX} steps")


class Killed(BaseException):
    pass


def die() -> None:
    raise Killed


def live_a_little(table: StatusTable) -> None:
    """An engine that is its own worker: every operation once, in every state."""

    def post(handle: Handle) -> None:
        at = handle.slot, handle.generation
        table.set_path(handle.slot, handle.generation, 1, 77)
        table.move(*at, Event.PEER_KNOWN, now_ns=NOW)
        table.move(*at, Event.CHUNK_POSTED, now_ns=NOW, owner=table.me)
        table.set_moved(*at, 10)
        table.set_taken(*at, 1)

    succeeding, failing = table.open(1, 0, now_ns=NOW), table.open(2, 0, now_ns=NOW)
    post(succeeding)
    post(failing)
    table.move(succeeding.slot, succeeding.generation, Event.LANDED, now_ns=NOW)
    table.set_detail(failing.slot, "why it failed")
    table.poll(failing.slot, failing.generation, LATE_NS)
    table.set_quiet(failing.slot, failing.generation)
    table.clear(succeeding.slot, succeeding.generation)
    table.clear(failing.slot, failing.generation)
    spare = table.open(3, 0, now_ns=NOW)
    table.discard(spare.slot, spare.generation)
    table.beat(NOW)


def test_a_process_killed_at_any_instruction_leaves_the_table_usable() -> None:
    """Law 3.  After each death the janitor frees what the dead held; the other room lives on."""
    slots = 3
    at = 0
    while True:
        with tables(2, rooms_max=slots) as [victim, survivor]:
            survivor.incarnate(US.row, US.incarnation, 1234, "victim")
            survivor.incarnate(THEM.row, THEM.incarnation, 1235, "survivor")
            other = survivor.open(99, 0, now_ns=NOW)
            spy = AtStep(victim, at, die)
            try:
                live_a_little(victim)
            except Killed:
                pass
            else:
                break
            finally:
                spy.remove(victim)
            survivor.bury(US.row)
            sweep(survivor, NOW)
            assert survivor.live_slots().tolist() == [other.slot], f"killed before step {at}"
            assert survivor.poll(other.slot, other.generation, NOW) is KVPoll.Bootstrapping
            rooms = {survivor.open(room, 0, now_ns=NOW).slot for room in range(slots - 1)}
            assert rooms | {other.slot} == set(range(slots))
            at += 1
    assert at > 80, "the script does less than it says"


def test_a_room_cleared_while_a_reader_enforces_its_deadline_is_closed() -> None:
    for read in (poll_late, poll_many_late):
        with tables(2, rooms_max=1) as [reader, other]:
            handle = other.open(1, 0, now_ns=NOW)
            bring(other, handle, KVPoll.Transferring)
            spy = AtStep(reader, 2, partial(claim, other, handle))  # before its CAS
            assert read(reader, handle) is None
            spy.remove(reader)
            assert int(other.words[handle.slot]) & STATE_MASK == CLAIMED
