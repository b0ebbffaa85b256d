"""The laws that hold after every change of the world, and what may be left when it has settled."""

from __future__ import annotations

from typing import Protocol

from pdrt.actors.decode_listener import DecodeListener
from pdrt.actors.prefill_listener import PrefillListener
from pdrt.actors.transfer import TransferWorker
from pdrt.clock import MILLISECOND_NS
from pdrt.protocol.states import TERMINAL, KVPoll, Role, quiet_at
from pdrt.shm_status import (
    CLAIMED,
    DEADLINE,
    GENERATION_SHIFT,
    OPENER,
    OWNER_BITS,
    QUIET_BIT,
    SLOT_BYTES,
    STATE_MASK,
    USE,
    VALUE_MASK,
    StatusTable,
    unpack,
)
from tests.actors.engines import Engine
from tests.actors.tree import Tree

SLACK_MS = 120  # two sweeps of the janitor: law 2 needs no engine to be alive
GENERATION_MASK = (1 << 32) - 1

#: What may be undone (`StatusTable.discard`): nobody was told of it.
UNTOLD = (CLAIMED, KVPoll.Bootstrapping)


class Witness(Protocol):
    """Who wants to know what happens, beside the law."""

    def word(self, role: Role, before: int, after: int) -> None:
        """A word of a slot has changed."""

    def watch(self, table: StatusTable) -> None:
        """A view of a table is about to be used."""


class Watch:
    """Sees every word of a tree's table as it is swapped, whoever does it, and holds the swap
    against the laws.  So nothing has to be looked at where nothing changed, and nothing can change
    and change back between two looks."""

    def __init__(self, tree: Tree, witness: Witness | None = None) -> None:
        self._tree, self._witness = tree, witness
        assert isinstance(tree.engine, Engine)
        self._ledger = tree.engine.ledger
        self._words: list[int] = tree.table.words.tolist()
        self._open: set[int] = set()  # slots
        self._unobserved_ns = 0  # when nobody looked at the table, the last time that we saw it
        for table in tree.tables:
            self.attach(table)
        tree.on_view = self.attach

    def attach(self, table: StatusTable) -> None:
        """See what this view of the table writes."""
        cas, store, load, first = table._cas, table._store, table._load, table._slots

        def watched_cas(at: int, old: int, new: int) -> int:
            seen: int = cas(at, old, new)
            if seen == old and at >= first and not (at - first) % SLOT_BYTES:
                self._changed((at - first) // SLOT_BYTES, old, new)
            return seen

        def watched_store(at: int, value: int) -> None:
            if at >= first and not (at - first) % SLOT_BYTES:
                self._changed((at - first) // SLOT_BYTES, load(at), value)
            store(at, value)

        table._cas, table._store = watched_cas, watched_store  # type: ignore[assignment]
        if self._witness is not None:
            self._witness.watch(table)

    def look(self, now_ns: int) -> None:
        """At what no change would show: a room that nobody ended, and a byte that came by a way
        that we do not see."""
        if self._tree.observed:
            late = [slot for slot in self._open if self._is_late(slot, now_ns)]
            assert not late, f"{self._tree.name}: open past its deadline: slots {late}"
        else:
            self._unobserved_ns = now_ns
        if self._tree.engine is not None:
            assert isinstance(self._tree.engine, Engine)
            self._tree.engine.check_freed()

    def close(self) -> None:
        words = self._tree.table.words.tolist()
        assert words == self._words, f"{self._tree.name}: a word changed, and not by a swap"

    def _is_late(self, slot: int, now_ns: int) -> bool:
        table = self._tree.table
        due_ms = int(table._rows[slot, DEADLINE // 8]) & VALUE_MASK  # nobody gets in between
        was_observed = self._unobserved_ns <= due_ms * MILLISECOND_NS
        return was_observed and due_ms < now_ns // MILLISECOND_NS - SLACK_MS

    def _changed(self, slot: int, before: int, after: int) -> None:
        broken = "unseen" if self._words[slot] != before else self._broken(slot, before, after)
        if broken:
            old, new = (unpack(w & ~STATE_MASK | min(w & STATE_MASK, 4)) for w in (before, after))
            raise AssertionError(f"{broken}: {self._tree.name} slot {slot}: {old} -> {new}")
        self._words[slot] = after
        (self._open.add if 0 < after & STATE_MASK < 4 else self._open.discard)(slot)
        if 0 < before & STATE_MASK < 4 and after & STATE_MASK in TERMINAL:
            self._note_end(slot, KVPoll(after & STATE_MASK))
        if self._witness is not None:
            self._witness.word(self._tree.role, before, after)

    def _note_end(self, slot: int, verdict: KVPoll) -> None:
        """How a use ended on prefill: decode's half must not have succeeded without it."""
        row = self._tree.table._rows[slot]  # nobody gets in between
        use, rank = int(row[USE // 8]) & VALUE_MASK, int(row[OPENER // 8]) >> 40
        if self._tree.role is Role.PREFILL and use:
            self._ledger.ended[use, rank] = verdict

    def _broken(self, slot: int, before: int, after: int) -> str:
        """The law that a change of a word breaks; "" if none."""
        generation, state, now = before >> GENERATION_SHIFT, before & STATE_MASK, after & STATE_MASK
        if after >> GENERATION_SHIFT != generation:
            if after >> GENERATION_SHIFT != (generation + 1) & GENERATION_MASK:
                return "generation"
            freed = generation & 1 and state not in UNTOLD
            return "freed and not quiet" if freed and not before & QUIET_BIT else ""
        if not generation & 1:
            return "a free slot changed"
        if state == CLAIMED:
            return "" if now == KVPoll.Bootstrapping else "published"
        if state in TERMINAL:
            return "" if after in (before, before | QUIET_BIT) else "verdict"
        if now not in TERMINAL:
            if now < state:
                return "backwards"
            moved = state == KVPoll.Transferring and (before ^ after) & OWNER_BITS
            return "a moving room changed its owner" if moved else ""
        if bool(after & QUIET_BIT) != quiet_at(KVPoll(state), KVPoll(now)):
            return "quiet"
        # By the time that has passed for them: a test may set the clock, and nobody saw it go by.
        now_ns = self._tree.post.now_ns + self._tree.clock.skew_ns
        late = self._tree.observed and self._is_late(slot, now_ns)
        return "open past its deadline" if late else ""


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
                fields = ["_rooms", "_by_id", "_failing"]
                note("vanished", len(actor._past.vanished))
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
