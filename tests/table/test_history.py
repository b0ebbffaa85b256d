"""Any history of rooms, against a model."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdrt.errors import TableFull
from pdrt.process_rows import INCARNATION_MASK, NOBODY, Owner
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
from pdrt.shm_status import GENERATION_SHIFT, Handle, StatusTable, Word
from tests.table.views import ROUTES, START_MS, TIMEOUTS_MS, ns, tables


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
            assert view.poll(handle.slot, handle.generation, ns(self.now_ms)) is None
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
