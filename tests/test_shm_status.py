from __future__ import annotations

import mmap
import os
import resource
import struct
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdrt import shm_status
from pdrt.actors.janitor import Janitor
from pdrt.clock import MILLISECOND_NS
from pdrt.config import Timeouts
from pdrt.errors import AttachFailed, Closed, NoMemory, TableFull
from pdrt.protocol.counters import Counter
from pdrt.protocol.states import (
    ON_EXPIRY,
    OPEN,
    TERMINAL,
    Event,
    KVPoll,
    Reason,
    Role,
    quiet_at,
    step,
)
from pdrt.shm_status import (
    CLAIMED,
    GENERATION_SHIFT,
    HEADER,
    HEADER_BYTES,
    HIGH_WATER,
    INCARNATION_MASK,
    MAGIC,
    NOBODY,
    PATH,
    STATE_MASK,
    Handle,
    Owner,
    StatusTable,
    Word,
    available_bytes,
    create,
    memory_fd,
    pack,
    peer_of,
    transport_of,
    unpack,
)

TIMEOUTS_MS = {KVPoll.Bootstrapping: 100, KVPoll.WaitingForInput: 200, KVPoll.Transferring: 50}
START_MS = 1_000_000
INSTANCE = b"instance-of-test"
US, THEM = Owner(3, 5), Owner(9, 2047)


def ns(ms: int) -> int:
    return ms * MILLISECOND_NS


NOW = ns(START_MS)


@contextmanager
def tables(
    count: int, *, rooms_max: int = 4, role: Role = Role.PREFILL, queue_ms: int = 1 << 40
) -> Iterator[list[StatusTable]]:
    """Several views of one new table, as different processes have them."""
    fd = create(
        role,
        rooms_max=rooms_max,
        instance=INSTANCE,
        timeouts_ms=TIMEOUTS_MS,
        now_ns=NOW,
        queue_ms=queue_ms,
    )
    views = [StatusTable(fd, me) for me in (US, THEM, NOBODY)[:count]]
    os.close(fd)
    try:
        yield views
    finally:
        for view in views:
            view.close()


@pytest.fixture
def table() -> Generator[StatusTable]:
    with tables(1) as [view]:
        yield view


@pytest.fixture
def pair() -> Generator[list[StatusTable]]:
    with tables(2) as views:
        yield views


ROUTES = {
    Role.PREFILL: (Event.PEER_KNOWN, Event.CHUNK_POSTED, Event.LANDED),
    Role.DECODE: (Event.PEER_KNOWN, Event.DESTINATION_SENT, Event.LANDED),
}


def bring(table: StatusTable, handle: Handle, state: KVPoll, *, now_ns: int = NOW) -> None:
    """Move a room that was just opened to `state`; Failed by way of Transferring, so not quiet."""
    route = ROUTES[table.role]
    events = (*route[:2], Event.FAULT) if state is KVPoll.Failed else route[: state - 1]
    for event in events:
        reason = Reason.ABORTED if event is Event.FAULT else Reason.NONE
        assert table.move(handle.slot, handle.generation, event, now_ns=now_ns, reason=reason)


# --- any history, against a model ----------------------------------------------------------------


@dataclass
class Room:
    """What a room should be.  Pure."""

    state: KVPoll
    deadline_ms: int
    quiet: bool = False
    reason: Reason = Reason.NONE
    owner: Owner = NOBODY
    taken: int = 0
    moved: int = 0
    seen: list[tuple[KVPoll, Reason]] = field(default_factory=list)

    def end_if_late(self, now_ms: int) -> None:
        if self.state in OPEN and self.deadline_ms < now_ms:
            self.quiet = quiet_at(self.state, KVPoll.Failed)
            self.state, self.reason = KVPoll.Failed, ON_EXPIRY[self.state]


class AnyHistory(RuleBasedStateMachine):
    """Two processes open, move, end, clear and discard, with each other's handles and old ones."""

    SLOTS = 2

    @initialize(
        role=st.sampled_from(Role), generation=st.sampled_from([0, 0xFFFFFC, 0xFFFFFFFC, 2**31])
    )
    def make(self, role: Role, generation: int) -> None:
        self.role = role
        self.context = tables(2, rooms_max=self.SLOTS, role=role)
        self.views = self.context.__enter__()
        self.views[0].words[:] = generation << GENERATION_SHIFT  # so that the counter wraps
        self.now_ms = START_MS
        self.rooms: dict[Handle, Room] = {}
        self.gone: list[Handle] = []

    def teardown(self) -> None:
        if hasattr(self, "context"):
            self.context.__exit__(None, None, None)

    def draw(self, data: st.DataObject) -> tuple[StatusTable, Handle, Room | None]:
        view = self.views[data.draw(st.integers(0, 1), "view")]
        generations = (view.words >> np.uint64(GENERATION_SHIFT)).tolist()
        free = [Handle(0, slot, g) for slot, g in enumerate(generations) if g % 2 == 0]
        others = [*self.gone[-4:], *free] or [Handle(0, 0, 0)]
        live = bool(self.rooms) and data.draw(st.integers(0, 2), "live") > 0
        handles = list(self.rooms) if live else others
        handle = data.draw(st.sampled_from(handles), "handle")
        return view, handle, self.rooms.get(handle)

    def forget(self, handle: Handle) -> None:
        del self.rooms[handle]
        self.gone.append(handle)

    @rule(view=st.integers(0, 1), room=st.integers(0, 2**63 - 1), rank=st.integers(0, 255))
    def open(self, view: int, room: int, rank: int) -> None:
        if len(self.rooms) == self.SLOTS:
            with pytest.raises(TableFull):
                self.views[view].open(room, rank, now_ns=ns(self.now_ms))
            return
        handle = self.views[view].open(room, rank, now_ns=ns(self.now_ms))
        assert handle.generation % 2 == 1
        assert handle not in self.gone
        assert handle.slot not in [live.slot for live in self.rooms]
        deadline_ms = self.now_ms + TIMEOUTS_MS[KVPoll.Bootstrapping]
        self.rooms[handle] = Room(KVPoll.Bootstrapping, deadline_ms)

    @rule(
        data=st.data(),
        event=st.sampled_from(Event),
        reason=st.sampled_from(list(Reason)[1:]),
        owner=st.none() | st.builds(Owner, st.integers(1, 255), st.integers(1, INCARNATION_MASK)),
    )
    def move(self, data: st.DataObject, event: Event, reason: Reason, owner: Owner | None) -> None:
        view, handle, room = self.draw(data)
        if event is not Event.FAULT:
            reason = Reason.NONE
        after = None if room is None else step(self.role, room.state, event)
        if room is not None and room.state is after and owner not in (None, room.owner):
            after = None  # it moves, and is another's
        moved = view.move(
            handle.slot,
            handle.generation,
            event,
            now_ns=ns(self.now_ms),
            reason=reason,
            owner=owner,
        )
        assert moved == (after is not None)
        if room is None or after is None:
            return
        room.quiet = quiet_at(room.state, after)
        room.state, room.reason = after, reason
        room.owner = room.owner if owner is None else owner
        if after in OPEN:
            room.deadline_ms = self.now_ms + TIMEOUTS_MS[after]

    @rule(data=st.data(), length=st.integers(1, 3))
    def go_forward(self, data: st.DataObject, length: int) -> None:
        """The path that a room takes when all goes well."""
        view, handle, room = self.draw(data)
        for event in ROUTES[self.role][:length]:
            after = None if room is None else step(self.role, room.state, event)
            now_ns = ns(self.now_ms)
            moved = view.move(handle.slot, handle.generation, event, now_ns=now_ns)
            assert moved == (after is not None)
            if room is None or after is None:
                continue
            room.state, room.quiet = after, after is KVPoll.Success
            if after in OPEN:
                room.deadline_ms = self.now_ms + TIMEOUTS_MS[after]

    @rule(data=st.data())
    def set_quiet(self, data: st.DataObject) -> None:
        view, handle, room = self.draw(data)
        news = room is not None and room.state in TERMINAL and not room.quiet
        assert view.set_quiet(handle.slot, handle.generation) == news
        if room is not None and news:
            room.quiet = True

    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        view, handle, room = self.draw(data)
        may = room is not None and room.quiet
        assert view.clear(handle.slot, handle.generation) == may
        if may:
            self.forget(handle)

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        view, handle, room = self.draw(data)
        view.discard(handle.slot, handle.generation)
        if room is not None:
            self.forget(handle)

    @rule(data=st.data(), timeout_ms=st.integers(0, 300), by_state=st.booleans())
    def renew(self, data: st.DataObject, timeout_ms: int, by_state: bool) -> None:
        view, handle, room = self.draw(data)
        if not by_state:
            view.renew(handle.slot, handle.generation, ns(self.now_ms), timeout_ms)
            if room is not None:
                room.deadline_ms = self.now_ms + timeout_ms
            return
        view.renew_state(handle.slot, handle.generation, ns(self.now_ms))
        if room is not None and room.state in OPEN:
            room.deadline_ms = self.now_ms + TIMEOUTS_MS[room.state]

    @rule(data=st.data(), value=st.integers(0, 2**40 - 1), field_=st.sampled_from(["t", "m"]))
    def write_beside_the_word(self, data: st.DataObject, value: int, field_: str) -> None:
        view, handle, room = self.draw(data)
        write = view.set_taken if field_ == "t" else view.set_moved
        write(handle.slot, handle.generation, value)
        if room is not None and field_ == "t":
            room.taken = value
        elif room is not None:
            room.moved = value

    @rule(elapsed_ms=st.integers(0, 120))
    def time_passes(self, elapsed_ms: int) -> None:
        self.now_ms += elapsed_ms

    @rule(data=st.data())
    def poll(self, data: st.DataObject) -> None:
        view, handle, room = self.draw(data)
        if room is None:
            with pytest.raises(Closed):
                view.poll(handle.slot, handle.generation, ns(self.now_ms))
            return
        room.end_if_late(self.now_ms)
        assert view.poll(handle.slot, handle.generation, ns(self.now_ms)) is room.state

    @rule(view=st.integers(0, 1))
    def poll_many(self, view: int) -> None:
        stale = [*self.gone[-6:], Handle(0, 0, 0)]
        handles = [*self.rooms, *stale]
        slots = np.array([handle.slot for handle in handles], dtype=np.intp)
        generations = np.array([handle.generation for handle in handles], dtype=np.uint64)
        for room in self.rooms.values():
            room.end_if_late(self.now_ms)
        states = self.views[view].poll_many(slots, generations, ns(self.now_ms))
        expected = [int(room.state) for room in self.rooms.values()]
        assert states.tolist() == expected + [255] * len(stale)

    @invariant()
    def everybody_sees_the_model(self) -> None:
        for view in self.views if hasattr(self, "views") else ():
            for handle, room in self.rooms.items():
                at = handle.slot, handle.generation
                word = Word(room.state, room.quiet, room.reason, room.owner, handle.generation)
                assert view.read(*at) == word
                assert (view.taken(*at), view.moved_bytes(*at)) == (room.taken, room.moved)
            for stale in self.gone:
                assert view.read(stale.slot, stale.generation) is None
            assert sorted(view.live_slots().tolist()) == sorted(h.slot for h in self.rooms)

    @invariant()
    def a_verdict_is_final_and_quiet_stays(self) -> None:
        for handle, room in self.rooms.items() if hasattr(self, "rooms") else ():
            word = self.views[0].read(handle.slot, handle.generation)
            assert word is not None
            if word.state in TERMINAL:
                room.seen.append((word.state, word.reason))
                assert len(set(room.seen)) == 1
            elif room.seen:
                raise AssertionError(f"{room.seen[0]} came back to life")


AnyHistory.TestCase.settings = settings(deadline=None, max_examples=100, stateful_step_count=50)
TestAnyHistory = AnyHistory.TestCase


# --- two processes, at every instruction ---------------------------------------------------------


class AtStep:
    """Stands before a table's atomic operations and does something before the n-th."""

    def __init__(self, table: StatusTable, at: int, act: Callable[[], Any]) -> None:
        self.count = 0
        self._at = at
        self._act = act
        self._view = table._view
        table._view = self  # type: ignore[assignment]
        self._take(table, self)

    @staticmethod
    def _take(table: StatusTable, view: Any) -> None:
        table._load, table._cas, table._store = view.load_u64, view.cas_u64, view.store_u64

    def _step(self) -> None:
        self.count += 1
        if self.count == self._at + 1:
            self._act()

    def load_u64(self, offset: int) -> int:
        self._step()
        return int(self._view.load_u64(offset))

    def cas_u64(self, offset: int, expected: int, desired: int) -> int:
        self._step()
        return int(self._view.cas_u64(offset, expected, desired))

    def store_u64(self, offset: int, value: int) -> None:
        self._step()
        self._view.store_u64(offset, value)

    def fetch_add_u64(self, offset: int, amount: int) -> int:
        self._step()
        return int(self._view.fetch_add_u64(offset, amount))

    def remove(self, table: StatusTable) -> None:
        table._view = self._view
        self._take(table, self._view)

    def close(self) -> None:
        self._view.close()


STEPS_MAX = 50  # more than any operation takes
LATE_NS = ns(START_MS + 10_000)
Action = Callable[[StatusTable, Handle], object]


def mover(event: Event, reason: Reason = Reason.NONE, owner: Owner | None = None) -> Action:
    return lambda table, h: table.move(
        h.slot, h.generation, event, now_ns=LATE_NS, reason=reason, owner=owner
    )


def poll_late(table: StatusTable, h: Handle) -> object:
    try:
        return table.poll(h.slot, h.generation, LATE_NS)
    except Closed:
        return Closed


def poll_many_late(table: StatusTable, h: Handle) -> object:
    slots, generations = np.array([h.slot]), np.array([h.generation], dtype=np.uint64)
    state = int(table.poll_many(slots, generations, LATE_NS)[0])
    return Closed if state == 255 else state


def discard(table: StatusTable, h: Handle) -> None:
    table.discard(h.slot, h.generation)


def reopen(table: StatusTable, h: Handle) -> object:
    """Another room takes the slot."""
    table.discard(h.slot, h.generation)
    try:
        return table.open(1, 0, now_ns=NOW).generation - h.generation
    except TableFull:
        return TableFull


def claim(table: StatusTable, h: Handle) -> object:
    """As far as a process came that was killed while it opened another room in the slot."""
    table.discard(h.slot, h.generation)
    try:
        return table._claim()[1] - h.generation
    except TableFull:
        return TableFull


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


def perform(action: Action, table: StatusTable, handle: Handle, results: list[object]) -> None:
    results.append(action(table, handle))


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
            janitor = Janitor(
                table=survivor,
                timeouts=Timeouts(),
                mapped=lambda *_: False,
                fence=lambda row, reason: None,
                wake=lambda row: None,
            )
            for _ in range(3):
                janitor.sweep(NOW)
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
            assert read(reader, handle) is Closed
            spy.remove(reader)
            assert int(other.words[handle.slot]) & STATE_MASK == CLAIMED


# --- deadlines -----------------------------------------------------------------------------------


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


# --- capacity ------------------------------------------------------------------------------------


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


# --- the memory ----------------------------------------------------------------------------------


def test_a_zero_page_reads_as_all_free(table: StatusTable) -> None:
    assert len(table.live_slots()) == 0
    assert not table.words.any()
    before = bytes(table.map)
    for slot, generation in product(range(table.rooms_max), (0, 1)):
        table.renew(slot, generation, NOW, 5)
        table.set_moved(slot, generation, 5)
        table.set_taken(slot, generation, 5)
        table.discard(slot, 0)
    for slot in range(table.rooms_max):
        assert table.read(slot, 1) is None
        assert not table.move(slot, 1, Event.FAULT, now_ns=NOW)
        assert not table.set_quiet(slot, 1)
        assert not table.clear(slot, 1)
    assert bytes(table.map) == before
    assert {table.open(room, 0, now_ns=NOW).generation for room in range(4)} == {1}


@pytest.mark.parametrize("slot", [-1, 4, -(2**31), 2**31 - 1])
def test_a_slot_that_is_none_changes_nothing(table: StatusTable, slot: int) -> None:
    before = bytes(table.map)
    assert table.read(slot, 1) is None
    assert not table.move(slot, 1, Event.FAULT, now_ns=NOW)
    assert not table.set_quiet(slot, 1)
    assert bytes(table.map) == before


def test_the_memory_can_neither_shrink_nor_grow_nor_be_unsealed() -> None:
    fd = create(Role.DECODE, rooms_max=4, instance=b"", timeouts_ms=TIMEOUTS_MS, now_ns=NOW)
    try:
        length_bytes = os.fstat(fd).st_size
        for other in (0, length_bytes - 4096, length_bytes + 4096):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, other)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", length_bytes)
        assert os.fstat(fd).st_size == length_bytes
        assert os.fstat(fd).st_blocks * 512 >= length_bytes, "sized, not reserved"
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_a_table_tells_who_made_it(table: StatusTable) -> None:
    assert table.role is Role.PREFILL
    assert table.supervisor_pid == os.getpid()
    assert table.started_ns == NOW
    assert table.instance == INSTANCE
    assert {s: ms for s, ms in table.timeouts_ms.items() if ms} == TIMEOUTS_MS


def header(**other: int) -> bytes:
    fields = {"magic": MAGIC, "version": 2, "role": 1, "slots": 4, "owners": 64, "counters": 128}
    return HEADER.pack(*(fields | other).values(), 1, 1, b"", *([0] * 5), 0)


OF_FOUR = HEADER_BYTES + 64 * (128 + 128 * 8) + 4 * 128  # bytes of a table of four rooms
FOREIGN = {
    "empty": (b"", 0),
    "short": (b"x", 100),
    "zeros": (b"", OF_FOUR),
    "another magic": (header(magic=MAGIC + 1), OF_FOUR),
    "another version": (header(version=1), OF_FOUR),
    "no role": (header(role=7), OF_FOUR),
    "fewer rows": (header(owners=32), OF_FOUR),
    "fewer counters": (header(counters=64), OF_FOUR),
    "cut off": (header(), HEADER_BYTES),
    "longer": (header(), OF_FOUR + 4096),
    "a room too many": (header(slots=5), OF_FOUR),
    "absurd": (header(slots=0xFFFFFFFF), HEADER_BYTES),
}


def test_a_whole_header_is_taken_for_a_table() -> None:
    """Without which the refusals below would prove nothing."""
    fd = os.memfd_create("like ours", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, OF_FOUR)
        os.pwrite(fd, header(), 0)
        StatusTable(fd).close()
    finally:
        os.close(fd)


@pytest.mark.parametrize("what", FOREIGN)
def test_foreign_memory_is_not_taken_for_a_table(what: str) -> None:
    data, length_bytes = FOREIGN[what]
    fd = os.memfd_create("foreign", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, length_bytes)
        os.pwrite(fd, data, 0)
        with pytest.raises(AttachFailed, match="not a status table"):
            StatusTable(fd)
    finally:
        os.close(fd)


def test_what_is_no_memory_is_not_taken_for_a_table() -> None:
    reading, writing = os.pipe2(os.O_CLOEXEC)
    own = create(Role.DECODE, rooms_max=4, instance=b"", timeouts_ms=TIMEOUTS_MS, now_ns=NOW)
    read_only = os.open(f"/proc/self/fd/{own}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for fd in (reading, writing, read_only):
            with pytest.raises(AttachFailed):
                StatusTable(fd)
    finally:
        for fd in (reading, writing, own, read_only):
            os.close(fd)


@pytest.mark.parametrize("rooms_max", [2**34, 2**45, 2**60])
def test_more_memory_than_there_is_is_refused_before_anything_is_taken(rooms_max: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NoMemory, match="lower --rooms-max"):
        create(Role.DECODE, rooms_max=rooms_max, instance=b"", timeouts_ms=TIMEOUTS_MS, now_ns=NOW)
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_that_others_use_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken all the same, it would be somebody's life: the kernel kills to find it."""
    monkeypatch.setattr(shm_status, "available_bytes", lambda: 2 << 20)
    with pytest.raises(NoMemory, match="Cannot allocate memory"):
        memory_fd("pool", (2 << 20) + 1)
    os.close(memory_fd("pool", 2 << 20))


def test_what_is_available_is_less_than_there_is() -> None:
    assert 0 < available_bytes() < os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE


def test_memory_that_the_kernel_refuses_is_no_memory() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(NoMemory, match=r"cannot reserve 2 MiB of shared memory for pool: File"):
            memory_fd("pool", 2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_closed_view_may_be_closed_again_and_leaves_no_map() -> None:
    with tables(1) as [view]:
        view.close()
        view.close()
        assert view.map.closed


# --- the word and what lies beside it -------------------------------------------------------------


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
    handle = table.open(0x1234, 7, now_ns=NOW)
    table.set_path(handle.slot, handle.generation, 2, 2**32 - 1)
    bring(table, handle, KVPoll.Transferring, now_ns=NOW + 5)
    table.set_moved(handle.slot, handle.generation, 1 << 39)
    table.set_taken(handle.slot, handle.generation, 3)
    table.set_detail(handle.slot, "no path")
    raw = struct.Struct("<6Q5QQQ24s").unpack_from(table.map, table._slots + handle.slot * 128)
    word, room, deadline, moved, taken, opener, *entered, path, spare, detail = raw
    tag = handle.generation << 40
    assert unpack(word).state is KVPoll.Transferring
    assert room == 0x1234
    assert deadline == tag | (START_MS + TIMEOUTS_MS[KVPoll.Transferring])
    assert (moved, taken) == (tag | 1 << 39, tag | 3)
    assert opener == US.row | US.incarnation << 8 | 7 << 40
    assert entered == [0, NOW, NOW + 5, NOW + 5, 0]
    assert (path, spare) == (tag | 2 << 32 | 2**32 - 1, 0)
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


def test_what_lies_beside_the_word_is_read_back_and_gone_with_the_room(table: StatusTable) -> None:
    handle = table.open(1, 0, now_ns=NOW)
    table.set_path(handle.slot, handle.generation, 2, 77)
    table.set_detail(handle.slot, "w\u00e4rmer than " + "x" * 40)
    bring(table, handle, KVPoll.Success)
    assert table.detail(handle.slot) == ("w?rmer than " + "x" * 40)[:24]
    assert table.transport(handle.slot) == 2
    assert table.opener_row(handle.slot) == US.row
    assert table.entered_ns(handle.slot) == (0, NOW, NOW, NOW, NOW)
    table.clear(handle.slot, handle.generation)
    again = table.open(2, 0, now_ns=NOW + 1)
    assert again.slot == handle.slot
    assert table.detail(again.slot) == ""
    assert table.transport(again.slot) == 0
    assert table.entered_ns(again.slot) == (0, NOW + 1, 0, 0, 0)


def test_rooms_of_an_engines_former_lives_are_counted(pair: list[StatusTable]) -> None:
    table, other = pair
    for room in range(2):
        table.open(room, 0, now_ns=NOW)
    other.open(3, 0, now_ns=NOW)
    assert other.slots_opened_by(US.row, but=US.incarnation) == 0
    assert other.slots_opened_by(US.row, but=US.incarnation + 1) == 2
    assert other.slots_opened_by(THEM.row, but=1) == 1
    assert other.slots_opened_by(1, but=1) == 0


# --- counting ------------------------------------------------------------------------------------


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


# --- processes -----------------------------------------------------------------------------------


def test_a_process_is_ready_in_the_life_that_said_so_and_in_no_other(
    pair: list[StatusTable],
) -> None:
    process, supervisor = pair
    assert not supervisor.ready(US.row)
    supervisor.incarnate(US.row, US.incarnation, 4_000_000, "worker0")
    assert supervisor.incarnation(US.row) == US.incarnation
    assert not supervisor.ready(US.row)
    process.announce_ready()
    assert supervisor.ready(US.row)
    supervisor.bury(US.row)
    assert not supervisor.ready(US.row)
    assert supervisor.incarnation(US.row) == 0
    supervisor.incarnate(US.row, US.incarnation + 1, 4_000_001, "worker0")
    assert not supervisor.ready(US.row)
    expected = [0] * 64
    expected[US.row] = US.incarnation + 1
    assert supervisor.incarnations().tolist() == expected


def test_a_beat_is_a_pulse_and_a_time(pair: list[StatusTable]) -> None:
    process, supervisor = pair
    for beat in range(3):
        assert supervisor.pulse(US.row) == beat
        process.beat(NOW + beat)
        assert supervisor.beat_ns(US.row) == NOW + beat
    assert supervisor.pulse(THEM.row) == 0


def test_mmap_of_the_whole_table_is_page_aligned() -> None:
    assert HEADER_BYTES % mmap.PAGESIZE == 0


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
