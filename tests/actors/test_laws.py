"""The laws of the world themselves: what they let pass, and what they do not."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pdrt.clock import SECOND_NS
from pdrt.process_rows import NOBODY, Owner
from pdrt.protocol.states import KVPoll, Reason
from pdrt.shm_status import CLAIMED, pack
from tests.actors.mutants import a_landed_room_fails_on_prefill, mutated
from tests.actors.steps import moving, succeeds
from tests.actors.world import World

FREE, CLAIM = pack(0, False, 0, NOBODY, 4), pack(CLAIMED, False, 0, Owner(48, 1), 5)
OURS, ANOTHER = Owner(8, 1), Owner(8, 2)


def word(
    state: KVPoll, *, quiet: bool = False, owner: Owner = NOBODY, reason: Reason = Reason.NONE
) -> int:
    return pack(state, quiet, reason, owner, 5)


OPENED, WAITING = word(KVPoll.Bootstrapping), word(KVPoll.WaitingForInput)
MOVING = word(KVPoll.Transferring, owner=OURS)
LANDED = word(KVPoll.Success, quiet=True, owner=OURS)
FAILED = word(KVPoll.Failed, owner=OURS, reason=Reason.ABORTED)
QUIET = word(KVPoll.Failed, owner=OURS, reason=Reason.ABORTED, quiet=True)
NEXT = pack(0, False, 0, NOBODY, 6)


LAWFUL = [
    [FREE, CLAIM, OPENED, WAITING, MOVING, MOVING, LANDED, NEXT],
    [MOVING, FAILED, QUIET, NEXT],
    [WAITING, word(KVPoll.Failed, quiet=True)],
    [CLAIM, NEXT],
    [OPENED, NEXT],  # undone, before anybody was told
]
UNLAWFUL = [
    (LANDED, FAILED, "verdict"),
    (FAILED, LANDED, "verdict"),
    (QUIET, FAILED, "verdict"),
    (FAILED, word(KVPoll.Failed, owner=OURS, reason=Reason.PEER_LOST), "verdict"),
    (FAILED, word(KVPoll.Failed, owner=ANOTHER, reason=Reason.ABORTED), "verdict"),
    (MOVING, WAITING, "backwards"),
    (MOVING, word(KVPoll.Transferring, owner=ANOTHER), "owner"),
    (MOVING, QUIET, "quiet"),
    (WAITING, FAILED, "quiet"),
    (MOVING, word(KVPoll.Success, owner=OURS), "quiet"),
    (FAILED, NEXT, "not quiet"),
    (MOVING, NEXT, "not quiet"),
    (CLAIM, WAITING, "published"),
    (FREE, pack(1, False, 0, NOBODY, 4), "free"),
    (QUIET, pack(0, False, 0, NOBODY, 8), "generation"),
    (QUIET, FREE, "generation"),
]


def test_what_is_lawful_passes_and_nothing_else() -> None:
    with World() as world:
        world.send(1)
        world.run(20)
        slot, broken = world.job("prefill", 1).handles[0].slot, world._watches["prefill"]._broken
        for words in LAWFUL:
            for before, after in pairwise(words):
                assert not broken(slot, before, after)
        for before, after, law in UNLAWFUL:
            assert law in broken(slot, before, after)
        world.post.now_ns += 60 * SECOND_NS
        assert broken(slot, MOVING, LANDED) == "open past its deadline"


def test_a_word_that_was_written_past_the_swap_is_seen() -> None:
    with World() as world:
        succeeds(world, 0)
        world.trees["prefill"].table.words[7] = MOVING
        with pytest.raises(AssertionError, match="not by a swap"):
            world._watches["prefill"].close()
        table = world.trees["prefill"].table
        with pytest.raises(AssertionError, match="unseen"):
            table._cas(table._slots + 7 * 128, MOVING, LANDED)


def test_a_success_on_decode_beside_a_failure_on_prefill_is_seen() -> None:
    with World() as world, mutated(a_landed_room_fails_on_prefill):
        with pytest.raises(AssertionError, match="Success, and on prefill"):
            succeeds(world, 0)


@pytest.mark.parametrize(("side", "verb"), [("decode0", "landed in"), ("prefill", "read from")])
def test_bytes_are_seen_that_move_to_or_from_what_is_free(side: str, verb: str) -> None:
    with World(polls=50) as world:
        moving(world)
        world.run(20)
        engine = world.engine(side)
        pages = engine.jobs[1].pages
        engine._grid(0)[pages], engine.free_pages[pages] = engine.freed, True
        with pytest.raises(AssertionError, match=verb):
            world.run(400)
        engine.free_pages[pages] = False


def test_the_watch_knows_which_rooms_are_open() -> None:
    with World() as world:
        world.send(1)
        world.run(20)
        (handle,) = world.job("prefill", 1).handles
        assert world._watches["prefill"]._open == {handle.slot}
        world.abort("prefill", 1)
        assert world._watches["prefill"]._open == set()
