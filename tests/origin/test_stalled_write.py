"""The fourth fault: a write that never completes has no deadline."""

from __future__ import annotations

import pytest

from pdrt.actors.janitor import Janitor
from pdrt.actors.moving import Room
from pdrt.actors.transfer import TransferWorker
from pdrt.protocol.states import KVPoll, Reason
from pdrt.shm_status import StatusTable
from tests.actors.steps import succeeds, until_state, until_verdict
from tests.actors.test_mutants import Mutant, holds_or_breaks
from tests.actors.world import TIMEOUTS, World


def _transferring_has_no_deadline(patch: pytest.MonkeyPatch) -> None:
    expire = StatusTable.expire

    def only_early_states(
        self: StatusTable, slot: int, generation: int, word: int, now_ns: int
    ) -> None:
        if word & 0xF != KVPoll.Transferring:
            expire(self, slot, generation, word, now_ns)

    patch.setattr(StatusTable, "expire", only_early_states)


def _looking_is_progress(patch: pytest.MonkeyPatch) -> None:
    """Every look at a write renews the room's time, whether it moved or not."""
    advance = TransferWorker._advance

    def renewing(self: TransferWorker, room: Room, now_ns: int) -> bool:
        self._table.renew_state(room.handle.slot, room.handle.generation, now_ns)
        return advance(self, room, now_ns)

    patch.setattr(TransferWorker, "_advance", renewing)


def _nobody_makes_it_quiet(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Janitor, "_settle", lambda *_: None)


@pytest.mark.parametrize(
    ("mutants", "breaks"),
    [
        ([], None),
        ([_transferring_has_no_deadline], "open past its deadline"),
        ([_looking_is_progress], "not within"),
        ([_nobody_makes_it_quiet], "not within"),
    ],
)
def test_a_write_that_never_completes_ends_at_its_deadline(
    mutants: list[Mutant], breaks: str | None
) -> None:
    """Every process lives and beats; the bytes stand still.  All rooms end in time, and their pages
    come back once a fence has made them safe; then the same two sides serve the next room."""
    with holds_or_breaks(mutants, breaks), World() as world:
        succeeds(world, 0)
        decode = world.trees["decode0"]
        world.fabric.freeze(decode.processes["worker0"].agent)
        for room in range(1, 6):
            world.both(room)
            until_state(world, "prefill", room, KVPoll.Transferring)
        stall_ms = int(TIMEOUTS.stall_s * 1000)
        for room in range(1, 6):
            until_verdict(world, room, "prefill", "decode0", within_ms=stall_ms + 500)
            assert world.job("prefill", room).reason is Reason.TRANSFER_STALLED
        assert decode.incarnations["worker0"] == 1, "ended by a death, and not by the deadline"

        def all_cleared() -> bool:
            names = ("prefill", "decode0")
            return all(world.job(name, room).cleared for name in names for room in range(1, 6))

        world.until(all_cleared, within_ms=int(TIMEOUTS.quiet_s * 1000) + 1500)
        world.settle()
        succeeds(world, 6)
