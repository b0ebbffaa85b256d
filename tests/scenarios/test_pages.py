"""Scenarios of pages: two sides that do not agree on them, and pages that somebody still writes to.

F002 F037 F039 F040 F043.
"""

from __future__ import annotations

import pytest

from pdrt.protocol.states import KVPoll, Reason
from tests.actors.mutants import no_fence
from tests.actors.steps import moving, succeeds, until_state, until_verdict, verdict
from tests.actors.test_mutants import LANDED, Mutant, holds_or_breaks
from tests.actors.world import TIMEOUTS, World


@pytest.mark.parametrize("shm", [False, True], ids=["nixl-like", "shm-like"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("sent", "prepared"), [(8, 0), (0, 8), (1, 40), (8, 7), (7, 8)])
def test_sides_that_disagree_on_the_number_of_pages_fail_that_room_and_no_other(
    sent: int, prepared: int, ranks: int, shm: bool
) -> None:
    """Success would hand an engine pages that nobody wrote."""
    with World(ranks=ranks, shm=shm) as world:
        succeeds(world, 0)
        before = [dict(tree.incarnations) for tree in world.trees.values()]
        others = range(10, 20)
        for room in others:
            world.both(room, pages_count=1)
        world.send(17_000, pages_count=sent)
        world.receive(17_000, pages_count=prepared)
        until_verdict(world, 17_000, "prefill", "decode0", within_ms=1000)
        for name in ("prefill", "decode0"):
            assert verdict(world, name, 17_000) is KVPoll.Failed
            assert world.job(name, 17_000).reason in (Reason.BAD_DESTINATION, Reason.RANK_FAILED)
        for room in others:
            until_verdict(world, room, "prefill", "decode0")
            assert verdict(world, "decode0", room) is KVPoll.Success
        assert before == [tree.incarnations for tree in world.trees.values()], "somebody died"
        world.settle()


def test_a_room_without_a_page_is_a_room_all_the_same() -> None:
    """Decode may have every page already; then only the aux row travels."""
    with World() as world:
        world.both(1, pages_count=0, chunks=1)
        until_verdict(world, 1, "prefill", "decode0")
        assert verdict(world, "decode0", 1) is KVPoll.Success
        world.settle()


@pytest.mark.parametrize("shm", [False, True], ids=["nixl-like", "shm-like"])
@pytest.mark.parametrize("aborter", ["prefill", "decode0"])
def test_the_next_room_gets_no_page_of_an_aborted_one_before_that_is_quiet(
    aborter: str, shm: bool
) -> None:
    """Every page of both pools is the aborted room's, and its write takes its time."""
    with World(polls=150, shm=shm) as world:
        world.both(1, pages_count=64, chunks=2)
        until_state(world, "prefill", 1, KVPoll.Transferring)
        world.abort(aborter, 1)
        world.both(2, pages_count=64)
        until_verdict(world, 1, "prefill", "decode0", within_ms=100)
        while not world.job("decode0", 1).cleared:
            assert verdict(world, "decode0", 2) is None
            engine = world.engine("decode0")
            assert engine.pages is not None
            assert engine.pages.free_count == 0
            world.step()
        (transport,) = world.trees["prefill"].transports()
        assert not any(link.operations for link in transport._links), "its write is under way"
        until_verdict(world, 2, "prefill", "decode0")
        assert verdict(world, "decode0", 2) is KVPoll.Success  # and its bytes were compared
        world.settle()


@pytest.mark.parametrize("mutants", [[], [no_fence]])
def test_one_broken_write_does_not_make_its_siblings_quiet(mutants: list[Mutant]) -> None:
    """Four chunks are under way and the first fails: the room is over at once, and its pages are
    free only when the other three have landed."""
    with World(polls=80) as world, holds_or_breaks(mutants, LANDED if mutants else None):
        succeeds(world, 0)
        world.fabric.fail_next(world.trees["decode0"].processes["worker0"].agent)
        world.both(1, chunks=4)
        until_verdict(world, 1, "prefill", "decode0")
        assert world.job("prefill", 1).reason is Reason.TRANSPORT_FAILED
        assert not world.job("decode0", 1).cleared
        world.run(1000)
        world.settle()


def test_deadlines_that_pass_in_the_middle_of_writes_free_nothing_early() -> None:
    """Twelve rooms, a wire slower than their deadline: each fails in time; not one page is handed
    out before its bytes have stopped (the world looks at every free page after every step)."""
    with World() as world:
        succeeds(world, 0)
        world.fabric.polls = 40_000
        for room in range(1, 13):
            world.both(room)
        stall_ms = int(TIMEOUTS.stall_s * 1000)
        for room in range(1, 13):
            until_state(world, "prefill", room, KVPoll.Transferring)
        started_ms = world.now_ms
        for room in range(1, 13):
            until_verdict(world, room, "prefill", "decode0", within_ms=stall_ms + 500)
        assert world.now_ms - started_ms <= stall_ms + 500
        world.fabric.polls = 1
        world.settle()
        succeeds(world, 100)


def test_a_destination_that_comes_after_prefills_deadline_is_answered_at_once() -> None:
    """Prefill gave up and freed its pages: nobody can read them later, and decode hears why."""
    with World() as world:
        succeeds(world, 0)
        world.send(1)
        world.until(lambda: verdict(world, "prefill", 1) is not None)
        assert world.job("prefill", 1).reason is Reason.BOOTSTRAP_TIMEOUT
        world.run(1000)
        world.receive(1)
        until_verdict(world, 1, "decode0", within_ms=500)
        assert world.job("decode0", 1).reason is Reason.BOOTSTRAP_TIMEOUT
        world.settle()


def test_an_abort_leaves_the_path_and_the_other_rooms_on_it_alone() -> None:
    """Rooms of one pair of workers share a path; one that is given up in the middle tears nothing
    of it down."""
    with World(decodes=1, polls=20) as world:
        moving(world, 1)
        worker = world.trees["prefill"].processes["worker0"].actor
        path = worker._paths.get(world.trees["decode0"].instance)  # type: ignore[attr-defined]
        for room in range(2, 22):
            world.both(room, chunks=4, pages_count=2, pace_ms=10)
        for room in range(2, 22, 2):
            world.run(room)
            world.abort("prefill" if room % 4 else "decode0", room)
        for room in range(2, 22):
            until_verdict(world, room, "prefill", "decode0")
            if room % 2:
                assert verdict(world, "decode0", room) is KVPoll.Success
        until_verdict(world, 1, "prefill", "decode0")
        assert verdict(world, "decode0", 1) is KVPoll.Success
        assert worker._paths.get(world.trees["decode0"].instance) is path  # type: ignore[attr-defined]
        world.settle()
