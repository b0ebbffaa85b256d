"""The third fault: the skipped last chunk leaves a room open."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdrt.actors.transfer import TransferWorker
from pdrt.engine.sender import KVSender
from pdrt.protocol.messages import Chunk
from pdrt.protocol.states import KVPoll
from tests.actors.steps import until_verdict, verdict
from tests.actors.test_mutants import Mutant, holds_or_breaks
from tests.actors.world import World


def _empty_chunks_are_skipped(patch: pytest.MonkeyPatch) -> None:
    send = KVSender.send

    def skip(self: KVSender, pages: object, last: bool = False) -> None:
        if len(pages):  # type: ignore[arg-type]
            send(self, pages, last)  # type: ignore[arg-type]

    patch.setattr(KVSender, "send", skip)


def _workers_skip_empty_chunks(patch: pytest.MonkeyPatch) -> None:
    on_chunk = TransferWorker._on_chunk

    def skip(self: TransferWorker, chunk: Chunk, now_ns: int) -> None:
        if chunk.pages:
            on_chunk(self, chunk, now_ns)

    patch.setattr(TransferWorker, "_on_chunk", skip)


SPLITS = [(4, 4), (4, 4, 4), (0, 4), (0, 0, 2, 2, 4, 4)]


@pytest.fixture(params=[False, True], ids=["nixl-like", "shm-like"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(shm=request.param) as world:
        yield world
        world.settle()


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_last_chunk_without_pages_still_ends_the_room(
    world: World, split: tuple[int, ...], eager: bool
) -> None:
    """All pages were sent before, so only the aux row is left, and nothing skips it."""
    for room in range(3):
        world.both(room, split=split, eager=eager)
        until_verdict(world, room, "prefill", "decode0")
        assert verdict(world, "prefill", room) is verdict(world, "decode0", room) is KVPoll.Success


@pytest.mark.parametrize("mutant", [_empty_chunks_are_skipped, _workers_skip_empty_chunks])
def test_a_last_chunk_that_is_skipped_leaves_the_room_open(mutant: Mutant) -> None:
    with holds_or_breaks([mutant], "not within 1000 ms"), World() as world:
        world.both(1, split=(4, 4))
        until_verdict(world, 1, "prefill", "decode0", within_ms=1000)
