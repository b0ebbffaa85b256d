"""Mutants of pdrt: each breaks one rule, and then a law that the true code keeps must be broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol
from unittest import mock

from msgspec.structs import replace

from pdrt import shm_status
from pdrt.actors import decode_failing, prefill_failing
from pdrt.actors.decode_listener import DecodeListener
from pdrt.actors.janitor import Janitor
from pdrt.actors.past import Past
from pdrt.actors.taken import Taken
from pdrt.actors.transfer import TransferWorker
from pdrt.engine import room as engine_room
from pdrt.engine.room import KVRoom
from pdrt.protocol.messages import Landed
from pdrt.protocol.peers import TRANSPORT_CODES
from pdrt.protocol.states import TERMINAL, Event, KVPoll, Reason, Role
from pdrt.shm_status import (
    GENERATION_SHIFT,
    OPENER,
    PATH,
    QUIET_BIT,
    StatusTable,
    peer_of,
    transport_of,
)
from pdrt.transports.base import TransferState
from tests.actors.fabric import NixlLike


class Patch(Protocol):
    """`pytest.MonkeyPatch`, or `Patches`."""

    def setattr(self, target: object, name: str, value: object) -> None: ...


Mutant = Callable[[Patch], None]


class Patches:
    """Changes that last as long as a block (`mutated`)."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def setattr(self, target: object, name: str, value: object) -> None:
        self._stack.enter_context(mock.patch.object(target, name, value))


@contextmanager
def mutated(*mutants: Mutant) -> Iterator[None]:
    with ExitStack() as stack:
        for mutate in mutants:
            mutate(Patches(stack))
        yield


# --- what may land, and where --------------------------------------------------------------------


def everything_is_quiet(patch: Patch) -> None:
    patch.setattr(prefill_failing.Failing, "_is_quiet", lambda self, room: True)


def no_fence(patch: Patch) -> None:
    def quieten(self: TransferWorker, room: Any) -> bool:
        for posted, _ in room.inflight:
            room.path.transport.release(posted)
        room.inflight = []
        self._settle(room, fenced=True)
        return True

    patch.setattr(TransferWorker, "_start_fence", lambda self, room: None)
    patch.setattr(TransferWorker, "_quieten", quieten)


def successes_are_forgotten(patch: Patch) -> None:
    patch.setattr(Past, "succeed", lambda self, room, moved_bytes: None)


def one_destination_for_many_rooms(patch: Patch) -> None:
    patch.setattr(Taken, "take", lambda self, destination, ours, use: True)


def every_worker_is_believed(patch: Patch) -> None:
    """Though another listener was sent the destination, too."""
    patch.setattr(decode_failing.Room, "is_sole", True)


def ranks_of_any_use(patch: Patch) -> None:
    patch.setattr(StatusTable, "settle_use", lambda self, slot, generation, use: True)


def unmapped_is_quiet(patch: Patch) -> None:
    """Over shm, without asking whether our own worker is dead: somebody may map it again."""
    settle = Janitor._settle
    shm = TRANSPORT_CODES.index("shm")

    def too_soon(self: Janitor, row: Any, slot: int, generation: int, *rest: Any) -> None:
        peer, rank = peer_of(int(row[PATH // 8])), int(row[OPENER // 8]) >> 40
        owner = int(row[0]) >> 21 & 0x7FF
        by_shm = self._table.role is Role.DECODE and transport_of(int(row[PATH // 8])) == shm
        if by_shm and not self._mapped(peer, rank, owner):
            self._table.set_quiet(slot, generation)
        settle(self, row, slot, generation, *rest)

    patch.setattr(Janitor, "_settle", too_soon)


def reused_at_the_verdict(patch: Patch) -> None:
    """The engine does not wait for quiet."""
    patch.setattr(KVRoom, "quiet", lambda self: True)

    def clear(self: KVRoom) -> None:
        self._desk.forget(self.room)

    patch.setattr(KVRoom, "clear", clear)


def quiet_when_failed(patch: Patch) -> None:
    """A verdict is taken for permission to reuse memory."""
    patch.setattr(shm_status, "quiet_at", lambda state, after: True)


def done_when_posted(patch: Patch) -> None:
    """A transport that says DONE before the bytes have landed."""
    poll = NixlLike.poll

    def hasty(self: NixlLike, handle: int) -> TransferState:
        state = poll(self, handle)
        return TransferState.DONE if state is TransferState.PENDING else state

    patch.setattr(NixlLike, "poll", hasty)


# --- words and verdicts --------------------------------------------------------------------------


def a_verdict_changes(patch: Patch) -> None:
    """Late news turns Failed into Success."""
    steps_of = StatusTable._steps_of

    def steps(self: StatusTable, event: Event) -> list[tuple[int, int] | None]:
        found = steps_of(self, event)
        if event is Event.LANDED:
            found[KVPoll.Failed] = KVPoll.Success | QUIET_BIT, 0
        return found

    patch.setattr(StatusTable, "_steps_of", steps)


def nobody_ends_late(patch: Patch) -> None:
    patch.setattr(StatusTable, "expire", lambda self, slot, generation, word, now_ns: None)


def no_generation(patch: Patch) -> None:
    """News of a room counts for whichever room has its slot."""
    on_landed = DecodeListener._on_landed

    def untagged(self: DecodeListener, sender: Any, landed: Landed, now_ns: int) -> None:
        generation = int(self._table.words[landed.slot]) >> GENERATION_SHIFT
        on_landed(self, sender, replace(landed, generation=generation), now_ns)

    patch.setattr(DecodeListener, "_on_landed", untagged)


def a_landed_room_fails_on_prefill(patch: Patch) -> None:
    """Its worker ends it, and tells decode that it has landed."""
    move = StatusTable.move

    def spoiled(
        self: StatusTable, slot: int, generation: int, event: Event, *, now_ns: int, **how: Any
    ) -> bool:
        if event is not Event.LANDED or self.role is not Role.PREFILL:
            return move(self, slot, generation, event, now_ns=now_ns, **how)
        lost = Reason.TRANSPORT_FAILED
        moved = move(self, slot, generation, Event.FAULT, now_ns=now_ns, reason=lost)
        return moved and self.set_quiet(slot, generation)

    patch.setattr(StatusTable, "move", spoiled)


def no_landed_is_heard(patch: Patch) -> None:
    """So no room of decode succeeds, and none does what it should not."""
    patch.setattr(DecodeListener, "_on_landed", lambda self, sender, landed, now_ns: None)


def no_abort_is_heard(patch: Patch) -> None:
    """On decode: its rooms end all the same, by their deadlines."""
    patch.setattr(DecodeListener, "_on_abort", lambda self, sender, abort, now_ns: None)


def one_rank_is_enough(patch: Patch) -> None:
    patch.setattr(engine_room, "agree", max)


def cleared_before_quiet(patch: Patch) -> None:
    """Slots of a dead engine are freed as soon as they have a verdict."""

    def hasty(self: StatusTable, slot: int, generation: int) -> bool:
        if self.state(slot, generation) not in TERMINAL:
            return False
        self.discard(slot, generation)
        return True

    patch.setattr(StatusTable, "clear", hasty)


#: Those that schedules of random faults must find by themselves.  The others take a coincidence
#: that is too rare for that; each has its own test (test_mutants.py).
MUTANTS: dict[str, Mutant] = {
    mutant.__name__: mutant
    for mutant in (
        everything_is_quiet,
        no_fence,
        reused_at_the_verdict,
        quiet_when_failed,
        done_when_posted,
        a_verdict_changes,
        nobody_ends_late,
        no_generation,
        one_rank_is_enough,
        cleared_before_quiet,
        ranks_of_any_use,
        a_landed_room_fails_on_prefill,
        no_landed_is_heard,
        no_abort_is_heard,
    )
}
