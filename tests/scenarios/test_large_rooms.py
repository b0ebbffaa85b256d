"""A room of many pages beside rooms of few.

F130 F135.
"""

from __future__ import annotations

from typing import Any

import pytest

from pdrt.actors import transfer
from pdrt.protocol.states import KVPoll
from pdrt.transports.fake import FakeTransport
from tests.actors.steps import until_state, until_verdict, verdict
from tests.actors.world import LAYOUT, TIMEOUTS, World

PIECE_PAGES, LARGE_PAGES, SMALL = 4, 40, range(2, 6)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Items of each write, in the order of posting; no write is larger than a piece and its aux
    row."""
    sizes: list[int] = []
    write = FakeTransport.write

    def noting(self: FakeTransport, peer: str, local: int, items: Any, *theirs: Any) -> int:
        sizes.append(len(items))
        return write(self, peer, local, items, *theirs)

    monkeypatch.setattr(transfer, "WRITE_BYTES_MAX", PIECE_PAGES * LAYOUT.page_bytes(0))
    monkeypatch.setattr(FakeTransport, "write", noting)
    return sizes


def test_small_rooms_do_not_wait_for_the_posting_of_a_large_one(written: list[int]) -> None:
    with World(decodes=2) as world:
        world.both(1, pages_count=LARGE_PAGES, chunks=1, mute=True)
        for room in SMALL:
            world.both(room, "decode1", pages_count=1, chunks=1, mute=True)
        for room in (1, *SMALL):
            until_state(world, "prefill", room, KVPoll.WaitingForInput)
        for room in (1, *SMALL):  # all at once, the large one first
            world.engine("prefill").unmute(room)
        until_verdict(world, 1, "prefill", "decode0")
        assert verdict(world, "decode0", 1) is KVPoll.Success
        for room in SMALL:
            assert verdict(world, "decode1", room) is KVPoll.Success
        large = [at for at, size in enumerate(written) if size > 2]
        small = [at for at, size in enumerate(written) if size == 2]  # a page and its aux row
        assert len(large) == LARGE_PAGES // PIECE_PAGES
        assert len(small) == len(SMALL)
        assert max(written) <= PIECE_PAGES + 1
        assert max(small) < large[3]
        world.settle()


def test_an_abort_ends_the_posting(written: list[int]) -> None:
    with World() as world:
        world.both(1, pages_count=LARGE_PAGES, chunks=1)
        world.until(lambda: len(written) == 2)
        world.abort("decode0", 1)
        until_verdict(world, 1, "prefill", "decode0")
        world.run(100)
        assert len(written) < LARGE_PAGES // PIECE_PAGES
        world.settle()


@pytest.mark.usefixtures("written")
def test_one_chunk_may_take_longer_than_the_deadline_if_its_pieces_do_not() -> None:
    with World(polls=1300) as world:  # of the last piece alone: 1.3 s
        world.both(1, pages_count=LARGE_PAGES, chunks=1)
        until_state(world, "prefill", 1, KVPoll.Transferring)
        took_ms = until_verdict(world, 1, "prefill", "decode0", within_ms=20_000)
        assert verdict(world, "decode0", 1) is KVPoll.Success
        assert took_ms > 2 * 1000 * TIMEOUTS.stall_s
        world.settle()
