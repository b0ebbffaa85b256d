"""Slots: their word, what lies beside it, how they are taken, and how verdicts are counted."""

from __future__ import annotations

import struct
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrt.errors import TableFull
from pdrt.process_rows import INCARNATION_MASK, NOBODY, Owner
from pdrt.protocol.counters import Counter
from pdrt.protocol.states import OPEN, Event, KVPoll, Reason, Role
from pdrt.shm_status import (
    CLAIMED,
    GENERATION_SHIFT,
    HIGH_WATER,
    PATH,
    STATE_MASK,
    Handle,
    StatusTable,
    Word,
    pack,
    peer_of,
    transport_of,
    unpack,
)
from tests.table.steps import STEPS_MAX, AtStep
from tests.table.views import NOW, START_MS, THEM, TIMEOUTS_MS, US, bring, ns, tables


def test_the_word_is_as_drawn() -> None:
    assert pack(0xF, False, 0, NOBODY, 0) == 0xF
    assert pack(0, True, 0, NOBODY, 0) == 1 << 4
    assert pack(0, False, 0xFF, NOBODY, 0) == 0xFF << 5
    assert pack(0, False, 0, Owner(0xFF, 0), 0) == 0xFF << 13
    assert pack(0, False, 0, Owner(0, 0x7FF), 0) == 0x7FF << 21
    assert pack(0, False, 0, NOBODY, 0xFFFFFFFF) == 0xFFFFFFFF << 32


@settings(deadline=None)
@given(
    st.builds(
        Word,
        st.sampled_from(KVPoll),
        st.booleans(),
        st.sampled_from(Reason),
        st.builds(Owner, st.integers(0, 255), st.integers(0, INCARNATION_MASK)),
        st.integers(0, 2**32 - 1),
    )
)
def test_a_word_survives_packing(word: Word) -> None:
    packed = pack(*word)
    assert 0 <= packed < 1 << 64
    assert unpack(packed) == word


def test_a_slot_is_as_drawn(table: StatusTable) -> None:
    table.open(1, 0, now_ns=NOW)
    handle = table.open(0x1234, 7, now_ns=NOW, use=0xABCD)
    table.set_path(handle.slot, handle.generation, 2, 2**32 - 1)
    bring(table, handle, KVPoll.Transferring, now_ns=NOW + 5)
    table.set_moved(handle.slot, handle.generation, 1 << 39)
    table.set_taken(handle.slot, handle.generation, 3)
    table.set_detail(handle.slot, "no path")
    raw = struct.Struct("<6Q5QQQ24s").unpack_from(table.map, table._slots + handle.slot * 128)
    word, room, deadline, moved, taken, opener, *entered, path, use, detail = raw
    tag = handle.generation << 40
    assert unpack(word).state is KVPoll.Transferring
    assert room == 0x1234
    assert deadline == tag | (START_MS + TIMEOUTS_MS[KVPoll.Transferring])
    assert (moved, taken) == (tag | 1 << 39, tag | 3)
    assert opener == US.row | US.incarnation << 8 | 7 << 40
    assert entered == [0, NOW, NOW + 5, NOW + 5, 0]
    assert (path, use) == (tag | 2 << 32 | 2**32 - 1, tag | 0xABCD)
    assert detail == b"no path".ljust(24, b"\0")
    row = table.rows(np.array([handle.slot]))[0]
    assert row[:2].tolist() == [word, room]


def test_a_late_writer_cannot_give_a_newer_room_its_path(table: StatusTable) -> None:
    old = table.open(1, 0, now_ns=NOW)
    bring(table, old, KVPoll.Success)
    table.clear(old.slot, old.generation)
    new = table.open(2, 0, now_ns=NOW)
    assert new.slot == old.slot
    table.set_path(new.slot, new.generation, 2, 88)
    table.set_path(old.slot, old.generation, 1, 77)
    path = int(table.rows(np.array([new.slot]))[0][PATH // 8])
    assert (transport_of(path), peer_of(path)) == (2, 88)


def test_a_room_takes_the_use_that_asks_first(table: StatusTable) -> None:
    handle = table.open(1, 0, now_ns=NOW)
    at = handle.slot, handle.generation
    assert table.use(*at) == 0
    assert table.settle_use(*at, 7)
    assert not table.settle_use(*at, 8)
    assert table.settle_use(*at, 7)
    assert table.use(*at) == 7
    bring(table, handle, KVPoll.Success)
    assert table.settle_use(*at, 7), "a rank that comes later"
    table.clear(*at)
    assert not table.settle_use(*at, 7)
    named = table.open(2, 0, now_ns=NOW, use=(1 << 40) - 1)
    assert named.slot == handle.slot
    assert not table.settle_use(*at, 9), "it is another room's by now"
    assert table.use(*at) == 0
    assert table.use(*named[1:]) == (1 << 40) - 1
    assert not table.settle_use(table.rooms_max, 1, 7)


def test_what_lies_beside_the_word_is_read_back_and_gone_with_the_room(table: StatusTable) -> None:
    handle = table.open(1, 0, now_ns=NOW)
    table.set_path(handle.slot, handle.generation, 2, 77)
    table.set_detail(handle.slot, "w\u00e4rmer than " + "x" * 40)
    bring(table, handle, KVPoll.Success)
    assert table.detail(handle.slot) == ("w?rmer than " + "x" * 40)[:24]
    path = table.path(*handle[1:])
    assert (transport_of(path), peer_of(path)) == (2, 77)
    assert table.opener_row(handle.slot) == US.row
    assert table.entered_ns(handle.slot) == (0, NOW, NOW, NOW, NOW)
    table.clear(handle.slot, handle.generation)
    again = table.open(2, 0, now_ns=NOW + 1)
    assert again.slot == handle.slot
    assert table.detail(again.slot) == ""
    assert table.path(*again[1:]) == table.path(*handle[1:]) == 0
    assert table.entered_ns(again.slot) == (0, NOW + 1, 0, 0, 0)


@pytest.mark.parametrize("owner", [US, THEM, Owner(128, 1), NOBODY])
def test_the_worker_that_begins_a_transfer_owns_it(table: StatusTable, owner: Owner) -> None:
    handle = table.open(1, 0, now_ns=NOW)
    at = handle.slot, handle.generation
    bring(table, handle, KVPoll.WaitingForInput)
    for number in range(3):
        now_ns = NOW + 100 + number
        assert table.move(*at, Event.CHUNK_POSTED, now_ns=now_ns, owner=owner)
        assert table.move(*at, Event.CHUNK_POSTED, now_ns=now_ns)
        word = table.read(*at)
        assert word is not None
        assert word.owner == owner
    assert table.entered_ns(handle.slot)[KVPoll.Transferring] == NOW + 100  # the first chunk's


@pytest.mark.parametrize("other", [THEM, US._replace(incarnation=US.incarnation + 1)])
def test_a_room_that_moves_cannot_be_taken_over(table: StatusTable, other: Owner) -> None:
    room = table.open(1, 0, now_ns=NOW)
    at = room.slot, room.generation
    table.move(*at, Event.PEER_KNOWN, now_ns=NOW)
    assert table.move(*at, Event.CHUNK_POSTED, now_ns=NOW, owner=US)
    before = table.read(*at)
    assert not table.move(*at, Event.CHUNK_POSTED, now_ns=NOW, owner=other)
    assert table.read(*at) == before
    assert table.move(*at, Event.CHUNK_POSTED, now_ns=NOW, owner=US)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("state", sorted(OPEN))
def test_a_room_that_fails_is_quiet_unless_its_bytes_may_move(role: Role, state: KVPoll) -> None:
    with tables(1, role=role) as [table]:
        handle = table.open(1, 0, now_ns=NOW)
        at = handle.slot, handle.generation
        bring(table, handle, state)
        assert table.move(*at, Event.FAULT, now_ns=NOW, reason=Reason.PEER_LOST)
        word = table.read(*at)
        assert word is not None
        assert word.quiet == (state is not KVPoll.Transferring)
        assert table.clear(*at) == word.quiet


def test_a_slot_that_is_claimed_is_no_room_yet(table: StatusTable) -> None:
    at = table._claim()
    for event in Event:
        assert not table.move(*at, event, now_ns=NOW)
    assert table.read(*at) is None
    assert not table.set_quiet(*at)
    assert not table.clear(*at)
    assert int(table.words[at[0]]) & STATE_MASK == CLAIMED


@pytest.mark.parametrize("slot", [-1, 4, -(2**31), 2**31 - 1])
def test_a_slot_that_is_none_changes_nothing(table: StatusTable, slot: int) -> None:
    before = bytes(table.map)
    assert table.read(slot, 1) is None
    assert not table.move(slot, 1, Event.FAULT, now_ns=NOW)
    assert not table.set_quiet(slot, 1)
    assert bytes(table.map) == before


@settings(deadline=None, max_examples=20)
@given(st.sets(st.integers(0, 2499)), st.integers(0, 1))
def test_a_full_table_refuses_and_recovers_slot_for_slot(freed: set[int], opener: int) -> None:
    with tables(2, rooms_max=2500) as views:
        handles = [views[i % 2].open(i, 0, now_ns=NOW) for i in range(2500)]
        assert len({handle.slot for handle in handles}) == 2500
        for view in views:
            with pytest.raises(TableFull, match="all 2500 room slots"):
                view.open(1, 0, now_ns=NOW)
        for handle in handles:
            if handle.slot in freed:
                views[0].discard(handle.slot, handle.generation)
        again = {views[opener].open(i, 0, now_ns=NOW).slot for i in range(len(freed))}
        assert again == freed
        with pytest.raises(TableFull):
            views[1 - opener].open(1, 0, now_ns=NOW)
        assert views[0].counters[:, Counter.ROOMS_REFUSED].sum() == 3
        assert len(views[0].live_slots()) == 2500


def test_two_that_open_at_once_are_both_below_the_high_water_mark(pair: list[StatusTable]) -> None:
    """Whichever raises it last, it never falls."""
    ours, theirs = pair
    for at in range(STEPS_MAX):
        for slot in ours.live_slots().tolist():
            ours.discard(slot, int(ours.words[slot]) >> GENERATION_SHIFT)
        ours._store(HIGH_WATER, 0)
        did: list[Handle] = []
        spy = AtStep(ours, at, partial(open_some, theirs, 3, did))
        mine = ours.open(1, 0, now_ns=NOW)
        spy.remove(ours)
        live = sorted(handle.slot for handle in (mine, *did))
        assert ours.live_slots().tolist() == live, f"opened before step {at}"
        if not did:
            return
    raise AssertionError(f"open takes more than {STEPS_MAX} steps")


def open_some(table: StatusTable, count: int, opened: list[Handle]) -> None:
    opened += [table.open(room, 0, now_ns=NOW) for room in range(count)]


def test_who_only_clears_collects_nothing_without_end(pair: list[StatusTable]) -> None:
    opener, sweeper = pair
    for room in range(20):
        handle = opener.open(room, 0, now_ns=NOW)
        bring(opener, handle, KVPoll.Success)
        assert sweeper.clear(handle.slot, handle.generation)
    assert len(sweeper._free) <= sweeper.rooms_max


def test_rooms_of_an_engines_former_lives_are_counted(pair: list[StatusTable]) -> None:
    table, other = pair
    for room in range(2):
        table.open(room, 0, now_ns=NOW)
    other.open(3, 0, now_ns=NOW)
    assert other.slots_opened_by(US.row, but=US.incarnation) == 0
    assert other.slots_opened_by(US.row, but=US.incarnation + 1) == 2
    assert other.slots_opened_by(THEM.row, but=1) == 1
    assert other.slots_opened_by(1, but=1) == 0


@pytest.mark.parametrize("reason", list(Reason)[1:])
def test_a_verdict_is_counted_once_by_whoever_made_it(
    pair: list[StatusTable], reason: Reason
) -> None:
    winner, loser = pair
    handle = winner.open(1, 0, now_ns=NOW)
    at = handle.slot, handle.generation
    assert winner.move(*at, Event.FAULT, now_ns=NOW + ns(1), reason=reason)
    assert not loser.move(*at, Event.FAULT, now_ns=NOW, reason=Reason.ABORTED)
    mine, theirs = winner.counters[US.row], winner.counters[THEM.row]
    assert mine[Counter.VERDICT_FAILED + reason] == 1
    assert mine[Counter.VERDICT_SUCCESS : Counter.ROOM_NS].sum() == 1
    assert mine[Counter.ROOM_NS] == ns(1)
    assert mine[Counter.ROOM_BUCKET : Counter.ROOM_BUCKET + 24].sum() == 1
    assert mine[Counter.TRANSFER_NS] == 0
    assert not theirs.any()


def test_success_counts_the_time_in_transferring(table: StatusTable) -> None:
    handle = table.open(1, 0, now_ns=NOW)
    bring(table, handle, KVPoll.Transferring, now_ns=NOW + ns(3))
    table.move(handle.slot, handle.generation, Event.LANDED, now_ns=NOW + ns(10))
    counts = table.counters[US.row]
    assert counts[Counter.VERDICT_SUCCESS] == 1
    assert counts[Counter.ROOM_NS] == ns(10)
    assert counts[Counter.TRANSFER_NS] == ns(7)
    assert counts[Counter.TRANSFER_BUCKET : Counter.TRANSFER_BUCKET + 24].sum() == 1
