"""Any reader ends a room whose deadline has passed."""

from __future__ import annotations

import numpy as np
import pytest

from pdrt.clock import MILLISECOND_NS
from pdrt.protocol.counters import Counter
from pdrt.protocol.states import ON_EXPIRY, OPEN, Event, KVPoll, Role
from pdrt.shm_status import StatusTable
from tests.table.views import LATE_NS, NOW, START_MS, THEM, TIMEOUTS_MS, bring, ns, tables


@pytest.mark.parametrize("state", sorted(OPEN))
@pytest.mark.parametrize("role", Role)
def test_any_reader_ends_a_room_once_its_deadline_has_passed_and_not_before(
    role: Role, state: KVPoll
) -> None:
    with tables(2, role=role) as [table, stranger]:
        handle = table.open(1, 0, now_ns=NOW)
        bring(table, handle, state)
        at = handle.slot, handle.generation
        last_ns = ns(START_MS + TIMEOUTS_MS[state])
        assert stranger.poll(*at, last_ns) is state
        assert stranger.poll(*at, last_ns + MILLISECOND_NS) is KVPoll.Failed
        word = table.read(*at)
        assert word is not None
        assert (word.state, word.reason) == (KVPoll.Failed, ON_EXPIRY[state])
        assert word.quiet == (state is not KVPoll.Transferring)
        assert table.counters[THEM.row, Counter.DEADLINES] == 1
        assert stranger.poll(*at, last_ns + MILLISECOND_NS) is KVPoll.Failed
        assert table.counters[THEM.row, Counter.DEADLINES] == 1


def test_progress_moves_the_deadline_of_a_transfer(table: StatusTable) -> None:
    handle = table.open(1, 0, now_ns=NOW)
    at = handle.slot, handle.generation
    bring(table, handle, KVPoll.Transferring)
    for beat in range(1, 20):
        now_ns = ns(START_MS + beat * TIMEOUTS_MS[KVPoll.Transferring])
        assert table.poll(*at, now_ns) is KVPoll.Transferring
        if beat % 2:
            assert table.move(*at, Event.CHUNK_POSTED, now_ns=now_ns)
        else:
            table.renew_state(*at, now_ns)
    assert table.poll(*at, now_ns + ns(TIMEOUTS_MS[KVPoll.Transferring] + 1)) is KVPoll.Failed


def test_a_queue_that_never_moves_holds_no_room_for_good() -> None:
    """Somebody renews it for ever: until bytes move, that counts only for so long."""
    with tables(1, queue_ms=1000) as [table]:
        for state in (KVPoll.Bootstrapping, KVPoll.WaitingForInput):
            handle = table.open(1, 0, now_ns=NOW)
            at = handle.slot, handle.generation
            bring(table, handle, state)
            now_ms = START_MS
            while table.poll(*at, ns(now_ms)) is state:
                table.renew_state(*at, ns(now_ms))
                now_ms += 10
                assert now_ms <= START_MS + 1010
            assert now_ms > START_MS + 1000 - TIMEOUTS_MS[state]
            word = table.read(*at)
            assert word is not None
            assert (word.state, word.reason) == (KVPoll.Failed, ON_EXPIRY[state])


def test_a_verdict_has_no_deadline(table: StatusTable) -> None:
    handle = table.open(1, 0, now_ns=NOW)
    bring(table, handle, KVPoll.Success)
    table.renew_state(handle.slot, handle.generation, NOW)
    assert table.poll(handle.slot, handle.generation, ns(2**39)) is KVPoll.Success


def test_the_deadline_of_an_older_generation_ends_no_newer_room() -> None:
    """As if the newer room had been published and its deadline not yet seen."""
    with tables(1, rooms_max=1) as [table]:
        handle = table.open(1, 0, now_ns=NOW)
        deadline = table.rows(np.array([handle.slot]))[0, 2]
        table.discard(handle.slot, handle.generation)
        newer = table.open(2, 0, now_ns=LATE_NS)
        table._rows[newer.slot, 2] = deadline
        at = newer.slot, newer.generation
        assert table.poll(*at, LATE_NS) is KVPoll.Bootstrapping
        slots, generations = np.array([at[0]]), np.array([at[1]], dtype=np.uint64)
        assert table.poll_many(slots, generations, LATE_NS).tolist() == [KVPoll.Bootstrapping]
