"""The second fault: a late Transferring brings a Failed room back."""

from __future__ import annotations

import pytest

from pdrt.actors.boot import FIRST_WORKER_ROW
from pdrt.process_rows import Owner
from pdrt.protocol.messages import Chunk
from pdrt.protocol.states import MOVES, Event, KVPoll, Role, Writer
from tests.actors.steps import until_state, until_verdict, verdict
from tests.actors.test_mutants import Mutant, holds_or_breaks
from tests.actors.world import World


def _states_are_a_number_line(patch: pytest.MonkeyPatch) -> None:
    """Failed is 0, and the higher number wins."""
    for role, event in ((Role.PREFILL, Event.CHUNK_POSTED), (Role.DECODE, Event.DESTINATION_SENT)):
        move = (KVPoll.Transferring, Writer.ANYONE)
        patch.setitem(MOVES[role], (KVPoll.Failed, event), move)


@pytest.mark.parametrize(
    ("mutants", "breaks"), [([], None), ([_states_are_a_number_line], "verdict: prefill")]
)
def test_a_late_transferring_does_not_resurrect_a_failed_room(
    mutants: list[Mutant], breaks: str | None
) -> None:
    """The chunk waits in the worker's mailbox while the abort arrives and fails the room."""
    with holds_or_breaks(mutants, breaks), World(polls=100) as world:
        world.both(1, chunks=4, pace_ms=20)
        until_state(world, "prefill", 1, KVPoll.Transferring)
        worker = world.trees["prefill"].processes["worker0"]
        world.trees["prefill"].freeze("worker0")
        world.until(lambda: any(isinstance(m, Chunk) for _, m in worker.box.inbox))
        world.abort("decode0", 1)
        until_verdict(world, 1, "prefill", "decode0", within_ms=100)
        assert not world.job("prefill", 1).half.quiet(), "the first chunk is still under way"
        world.trees["prefill"].thaw("worker0")
        world.run(100)
        assert verdict(world, "prefill", 1) is KVPoll.Failed
        world.settle()


@pytest.mark.parametrize("mutants", [[], [_states_are_a_number_line]])
@pytest.mark.parametrize("name", ["prefill", "decode0"])
def test_no_event_moves_a_failed_room(name: str, mutants: list[Mutant]) -> None:
    breaks = f"verdict: {name}" if mutants else None
    with holds_or_breaks(mutants, breaks), World() as world:
        tree = world.trees[name]
        handle = tree.table.open(5, 0, now_ns=world.clock())
        how = {"now_ns": world.clock(), "owner": Owner(FIRST_WORKER_ROW, 1)}
        assert tree.table.move(*handle[1:], Event.FAULT, now_ns=world.clock())
        before = tree.table.read(*handle[1:])
        for event in Event:
            tree.table.move(*handle[1:], event, **how)  # type: ignore[arg-type]
            assert tree.table.read(*handle[1:]) == before, "a Failed room moved"
