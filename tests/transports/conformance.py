"""What every transport must do, whatever moves the bytes.  Subclasses say where it runs.

The initiator is `rig.transport`; a peer's memory is looked at directly, so that a test sees what is
there and not what the peer says.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdrt.transports.base import Grid, Indices, TransferState, TransportError
from tests.transports.rigs import AUX_BYTES, OURS, PAGE_BYTES, THEIRS, Peer, Rig

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

DONE, FAILED, PENDING = TransferState.DONE, TransferState.FAILED, TransferState.PENDING
PATTERN = 0x55  # what the next owner of a page would write there
SOME = np.arange(4, dtype=np.int32)
EVERY_PAGE = list(range(THEIRS.pages_count))
EVERY_SOURCE = [page % OURS.pages_count for page in EVERY_PAGE]


def digest(memory: NDArray[np.uint8]) -> str:
    return hashlib.blake2b(memory.data, digest_size=16).hexdigest()


def page(memory: NDArray[np.uint8], number: int) -> NDArray[np.uint8]:
    return memory[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]


def expected(rig: Rig, peer: Peer, local: list[int], remote: list[int]) -> NDArray[np.uint8]:
    """[length_bytes] what the peer's memory holds after that write of pages."""
    memory = peer.memory.copy()
    for source, target in zip(local, remote, strict=True):
        page(memory, target)[:] = page(rig.memory, source)
    return memory


def pairs(shape: str, count: int, seed: int) -> tuple[list[int], list[int]]:
    """`count` pages on each side, none twice."""
    pick = random.Random(seed)
    if shape == "random":
        return (
            pick.sample(range(OURS.pages_count), count),
            pick.sample(range(THEIRS.pages_count), count),
        )
    local = pick.randrange(OURS.pages_count - count + 1)
    remote = pick.randrange(THEIRS.pages_count - count + 1)
    ours, theirs = list(range(local, local + count)), list(range(remote, remote + count))
    if shape == "contiguous":
        return ours, theirs
    # Runs: the same pages, cut in places and put together in another order.
    cuts = sorted({0, count, *(pick.randint(0, count) for _ in range(4))})
    pieces = [(ours[a:b], theirs[a:b]) for a, b in itertools.pairwise(cuts)]
    pick.shuffle(pieces)
    return [n for a, _ in pieces for n in a], [n for _, b in pieces for n in b]


class Conformance:
    """The suite.  A subclass has a fixture `rig` of class scope."""

    @pytest.fixture(autouse=True)
    def _peers_end_with_the_test(self, rig: Rig) -> Generator[None]:
        yield
        rig.end_test()

    # --- bytes ---

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        shape=st.sampled_from(["random", "contiguous", "runs"]),
        count=st.integers(1, OURS.pages_count),
        seed=st.integers(0, 2**32),
    )
    def test_done_means_exactly_the_named_pages_are_in_place(self, rig, shape, count, seed):
        local, remote = pairs(shape, count, seed)
        peer = rig.standing
        peer.memory[:] = seed % 251
        after = expected(rig, peer, local, remote)
        assert rig.finish(rig.write("standing", local, remote)) is DONE
        assert digest(peer.memory) == digest(after)

    def test_a_room_writes_its_pages_and_its_aux_row(self, rig):
        peer = rig.standing
        pages = rig.write("standing", [3, 1, 2], [400, 500, 7])
        row = rig.write("standing", [63], [31], aux=True)
        assert rig.finish(row) is DONE
        assert rig.finish(pages) is DONE
        aux = peer.memory[THEIRS.pages_count * PAGE_BYTES :][31 * AUX_BYTES : 32 * AUX_BYTES]
        ours = rig.memory[OURS.pages_count * PAGE_BYTES :][63 * AUX_BYTES : 64 * AUX_BYTES]
        assert digest(aux) == digest(ours)
        assert digest(page(peer.memory, 500)) == digest(page(rig.memory, 1))

    def test_items_are_numbered_through_the_grids_of_a_table(self, rig):
        """Two grids with gaps between their items on our side, one dense grid on theirs."""
        transport, peer = rig.transport, rig.standing
        low, high = Grid(256, 1024, 4096, 3), Grid(1 << 20, 1024, 2048, 5)
        local = transport.prepare(None, [low, Grid(0, 1024, 1024, 0), high])
        remote = transport.prepare("standing", [Grid(0, 1024, 1024, 64)])
        items = np.array([7, 2, 3, 0], np.int32)
        targets = np.array([0, 1, 2, 63], np.int32)
        peer.memory[:] = PATTERN
        after = peer.memory.copy()
        sources = [(1 << 20) + 4 * 2048, 256 + 2 * 4096, 1 << 20, 256]
        for source, target in zip(sources, targets.tolist(), strict=True):
            after[target * 1024 :][:1024] = rig.memory[source:][:1024]
        handle = transport.write("standing", local, items, remote, targets)
        assert rig.finish(handle) is DONE
        assert digest(peer.memory) == digest(after)

    def test_a_write_of_nothing_is_done(self, rig):
        before = digest(rig.standing.memory)
        assert rig.finish(rig.write("standing", [], [])) is DONE
        assert digest(rig.standing.memory) == before

    def test_a_table_may_be_empty(self, rig):
        empty = rig.transport.prepare("standing", [])
        with pytest.raises(TransportError):
            rig.transport.write("standing", rig.pages, SOME[:1], empty, SOME[:1])

    def test_a_verdict_repeats_until_it_is_released(self, rig):
        handle = rig.write("standing", [0], [0])
        rig.wait_for(lambda: rig.transport.poll(handle) is DONE)
        assert [rig.transport.poll(handle) for _ in range(3)] == [DONE] * 3
        rig.transport.release(handle)
        with pytest.raises(TransportError):
            rig.transport.poll(handle)

    # --- what is refused ---

    @pytest.mark.parametrize(
        ("local", "remote"),
        [
            (SOME, SOME + THEIRS.pages_count - 3),
            (SOME + OURS.pages_count - 3, SOME),
            (SOME, SOME - 1),
            (SOME - 1, SOME),
            (SOME, np.array([0, 1, 2, 2**31 - 1], np.int32)),
            (SOME, SOME[:3]),
            (SOME, SOME.astype(np.int64)),
            (SOME.reshape(2, 2), SOME.reshape(2, 2)),
        ],
    )
    def test_a_refused_write_changes_no_byte(self, rig, local: Indices, remote: Indices):
        before = digest(rig.standing.memory)
        table = rig.transport.prepare("standing", THEIRS.pages)
        with pytest.raises(TransportError):
            rig.transport.write("standing", rig.pages, local, table, remote)
        assert rig.finish(rig.transport.fence("standing")) is DONE
        assert digest(rig.standing.memory) == before

    def test_items_of_different_sizes_do_not_match(self, rig):
        table = rig.transport.prepare("standing", THEIRS.pages)
        with pytest.raises(TransportError, match="differ"):
            rig.transport.write("standing", rig.aux, SOME, table, SOME)

    @pytest.mark.parametrize(
        "grid",
        [
            Grid(0, PAGE_BYTES, PAGE_BYTES, THEIRS.pages_count + 1),
            Grid(-1, 8, 8, 1),
            Grid(0, 0, 8, 1),
            Grid(0, 8, 4, 2),
            Grid(0, 8, 8, -1),
            Grid(2**62, 8, 2**62, 2),
        ],
    )
    def test_a_table_must_fit_its_region(self, rig, grid):
        for peer in ("standing", None):
            with pytest.raises(TransportError):
                rig.transport.prepare(peer, [grid])

    def test_an_unknown_peer_is_refused_and_forgetting_it_is_not(self, rig):
        rig.transport.disconnect("nobody")
        with pytest.raises(TransportError):
            rig.transport.fence("nobody")
        with pytest.raises(TransportError):
            rig.transport.prepare("nobody", THEIRS.pages)
        with pytest.raises(TransportError):
            rig.write("nobody", [0], [0])

    def test_a_table_of_ours_is_no_table_of_a_peer(self, rig):
        with pytest.raises(TransportError):
            rig.transport.write("standing", rig.pages, SOME, rig.pages, SOME)

    def test_bad_metadata_is_refused_and_harms_nobody(self, rig):
        good = rig.standing.metadata
        pick = random.Random(11)
        bad = [b"", b"\x00" * 64, good[:-1], good + b"\x00", good[: len(good) // 2]]
        bad += [pick.randbytes(200), b"\x81\xa4type\xa6other1", b"\xc1" * 10_000]
        for metadata in bad:
            with pytest.raises(TransportError):
                rig.transport.connect("stranger", metadata)
        assert rig.finish(rig.write("standing", [1], [1])) is DONE

    def test_damaged_metadata_never_ends_the_process(self, rig):
        """A flipped bit may happen to say something else that is true; mostly it is refused."""
        peer = rig.start()
        pick = random.Random(12)
        for _ in range(40):
            damaged = bytearray(peer.metadata)
            damaged[pick.randrange(len(damaged))] ^= 1 << pick.randrange(8)
            try:
                rig.transport.release(rig.transport.connect("damaged", bytes(damaged)))
            except TransportError:
                continue
            rig.transport.disconnect("damaged")
        assert rig.finish(rig.write("standing", [1], [1])) is DONE

    # --- peers that come and go ---

    def test_a_new_epoch_replaces_the_old_one(self, rig):
        old = rig.connected("decode")
        table = rig.transport.prepare("decode", THEIRS.pages)
        new = rig.connected("decode")
        with pytest.raises(TransportError):
            rig.transport.write("decode", rig.pages, SOME, table, SOME)
        before = digest(old.memory)
        after = expected(rig, new, [1, 2], [3, 9])
        assert rig.finish(rig.write("decode", [1, 2], [3, 9])) is DONE
        assert digest(new.memory) == digest(after)
        assert digest(old.memory) == before

    def test_a_peer_may_come_back_under_its_old_name(self, rig):
        old = rig.connected("decode")
        old.kill()
        new = rig.start(old.agent)
        rig.connect("decode", new.metadata)
        after = expected(rig, new, [4], [4])
        assert rig.finish(rig.write("decode", [4], [4])) is DONE
        assert digest(new.memory) == digest(after)

    def test_writes_to_a_peer_that_died_fail(self, rig):
        peer = rig.connected("dying")
        peer.freeze()
        under_way = rig.write("dying", EVERY_SOURCE, EVERY_PAGE)
        peer.kill()
        # On one host the copy may have ended before the peer did; new ones cannot succeed for long.
        rig.finish(under_way)

        def write_fails() -> bool:
            return rig.finish(rig.write("dying", [0], [0])) is FAILED

        rig.wait_for(write_fails)
        assert rig.finish(rig.write("standing", [0], [0])) is DONE

    def test_no_living_peer_is_lost_and_a_lost_one_is_so_until_it_is_forgotten(self, rig):
        peer = rig.connected("dying")
        assert list(rig.transport.lost()) == []
        peer.freeze()  # silence is no death
        assert list(rig.transport.lost()) == []
        peer.kill()
        if rig.hears_of_deaths:
            rig.wait_for(lambda: list(rig.transport.lost()) == ["dying"])
            assert list(rig.transport.lost()) == ["dying"]
        rig.transport.disconnect("dying")
        assert list(rig.transport.lost()) == []

    def test_a_frozen_peer_slows_nobody(self, rig):
        frozen = rig.connected("frozen")
        frozen.freeze()
        stuck = rig.write("frozen", EVERY_SOURCE, EVERY_PAGE)
        for number in range(20):
            assert rig.finish(rig.write("standing", [number], [number])) is DONE
        frozen.thaw()
        assert rig.finish(stuck) is DONE

    def test_connecting_to_a_frozen_peer_waits_in_its_handle_only(self, rig):
        peer = rig.start()
        peer.freeze()
        handle = rig.transport.connect("late", peer.metadata)
        assert rig.finish(rig.write("standing", [0], [0])) is DONE
        peer.thaw()
        assert rig.finish(handle) is DONE
        rig.transport.disconnect("late")

    def test_disconnect_ends_handles_and_closing_them_is_clean(self, rig):
        peer = rig.connected("leaving")
        peer.freeze()
        handles = [rig.write("leaving", EVERY_SOURCE, EVERY_PAGE), rig.transport.fence("leaving")]
        rig.transport.disconnect("leaving")
        for handle in handles:
            assert rig.transport.poll(handle) is not PENDING
            rig.transport.release(handle)
        peer.thaw()
        assert rig.finish(rig.write("standing", [0], [0])) is DONE

    # --- fences ---

    def test_after_a_fence_no_byte_lands(self, rig):
        """The write was released while it moved and the pages have a new owner."""
        peer = rig.connected("fenced")
        peer.freeze()
        rig.transport.release(rig.write("fenced", EVERY_SOURCE, EVERY_PAGE))
        fence = rig.transport.fence("fenced")
        peer.thaw()
        assert rig.finish(fence) is DONE
        peer.memory[:] = PATTERN
        assert not rig.happens(lambda: bool((peer.memory != PATTERN).any()), within_s=0.3)

    def test_a_fence_waits_for_writes_that_are_still_wanted(self, rig):
        peer = rig.connected("fenced")
        after = expected(rig, peer, EVERY_SOURCE, EVERY_PAGE)
        write = rig.write("fenced", EVERY_SOURCE, EVERY_PAGE)
        assert rig.finish(rig.transport.fence("fenced")) is DONE
        assert digest(peer.memory) == digest(after)
        assert rig.finish(write) is DONE

    def test_many_fences_and_writes_end_in_any_order_of_polling(self, rig):
        handles = []
        for number in range(32):
            handles.append(rig.write("standing", [number], [number]))
            handles.append(rig.transport.fence("standing"))
        random.Random(3).shuffle(handles)
        assert {rig.finish(handle) for handle in handles} == {DONE}


def see_late_bytes_without_a_fence(rig: Rig) -> None:
    """The reason for fences: released, and yet it lands in pages that have a new owner."""
    peer = rig.connected("unfenced")
    peer.freeze()
    rig.transport.release(rig.write("unfenced", EVERY_SOURCE, EVERY_PAGE))
    peer.memory[:] = PATTERN
    peer.thaw()
    rig.wait_for(lambda: bool((peer.memory != PATTERN).any()))
    assert rig.finish(rig.transport.fence("unfenced")) is DONE
