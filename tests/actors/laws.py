"""The laws that hold after every step of the world, and what may be left when it has settled."""

from __future__ import annotations

import numpy as np

from pdrt.actors.decode_listener import DecodeListener
from pdrt.actors.prefill_listener import PrefillListener
from pdrt.actors.transfer import TransferWorker
from pdrt.clock import MILLISECOND_NS
from pdrt.protocol.states import TERMINAL
from pdrt.shm_status import DEADLINE, STATE_MASK, VALUE_MASK, unpack
from tests.actors.engines import Engine
from tests.actors.tree import Tree

SLACK_MS = 120  # two sweeps of the janitor: law 2 needs no engine to be alive


class Watch:
    """Compares a tree's table with what it was one step ago."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._words = tree.table.words.copy()

    def look(self, now_ns: int) -> None:
        table = self._tree.table
        words = table.words
        for slot in np.flatnonzero(words != self._words).tolist():
            self._compare(slot, int(self._words[slot]), int(words[slot]))
        self._words[:] = words
        if self._tree.observed:
            self._look_at_deadlines(now_ns)
        engine = self._tree.processes.get("engine")
        if engine is not None:
            assert isinstance(engine.actor, Engine)
            engine.actor.check_freed()

    def _compare(self, slot: int, before: int, after: int) -> None:
        old, new = (
            unpack(before & ~0xF | min(before & 0xF, 4)),
            unpack(after & ~0xF | min(after & 0xF, 4)),
        )
        where = f"{self._tree.name} slot {slot}: {old} -> {new}"
        assert new.generation >= old.generation, where
        if old.generation == new.generation and old.generation & 1 and before & STATE_MASK <= 4:
            if old.state in TERMINAL:
                assert (old.state, old.reason) == (new.state, new.reason), f"verdict: {where}"
                assert new.quiet >= old.quiet, f"quiet: {where}"
            else:
                assert new.state in TERMINAL or new.state >= old.state, f"backwards: {where}"

    def _look_at_deadlines(self, now_ns: int) -> None:
        table = self._tree.table
        slots = table.live_slots()
        if not len(slots):
            return
        rows = table.rows(slots)
        states = rows[:, 0] & np.uint64(STATE_MASK)
        due_ms = rows[:, DEADLINE // 8] & np.uint64(VALUE_MASK)
        limit = np.uint64(now_ns // MILLISECOND_NS - SLACK_MS)
        late = (states > 0) & (states < 4) & (due_ms < limit)
        assert not late.any(), f"{self._tree.name}: open past its deadline: slots {slots[late]}"


def leftovers(tree: Tree) -> list[str]:
    """What should be gone once everything is over; one line each."""
    found = []

    def note(name: str, count: int) -> None:
        if count:
            found.append(f"{tree.name}.{name}={count}")

    note("live", len(tree.table.live_slots()))
    note("dead", len(tree.names) - len(tree.processes))
    for process in tree.processes.values():
        actor = process.actor
        match actor:
            case PrefillListener():
                fields = ["_rooms", "_by_id", "_failing", "_vanished"]
                note(f"early {actor._past.early}", len(actor._past.early))
            case DecodeListener():
                fields = ["_rooms", "_failing"]
            case TransferWorker():
                fields = ["_rooms", "_active", "_news"]
                note(f"{process.name}.leaving", actor._paths.leaving_count)
                assert process.transport is not None
                note(f"{process.name} handles", len(list(process.transport._operations.values())))
            case Engine():
                fields = ["jobs", "plans"]
                if actor.pages is None:
                    note("pool", 1)
                else:
                    note("pages", actor.pages.used_count + actor.pages.held_count)
                    note("aux", actor.aux.used_count)
            case _:
                fields = []
        for name in fields:
            note(f"{process.name}.{name}", len(getattr(actor, name)))
    return found
