"""Scenarios of cancelled rooms: whatever they held is back, without anybody asking for more.

F005 F006 F019 F021 F024 F025 F033 F036.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from pdrt.engine.room import KVRoom
from pdrt.protocol.states import OPEN, Event, KVPoll, Reason
from tests.actors.steps import succeeds, until_state, until_verdict, verdict
from tests.actors.test_mutants import Mutant, holds_or_breaks
from tests.actors.world import LAYOUT, TIMEOUTS, World

SECOND_MS = 1000
FOUR_LAYERS = replace(LAYOUT, layers=4)


@pytest.fixture(params=[False, True], ids=["nixl-like", "shm-like"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(shm=request.param) as world:
        yield world
        world.settle()


def used(world: World, name: str) -> int:
    """Pages that this side cannot hand out."""
    pages = world.engine(name).pages
    assert pages is not None
    return pages.used_count + pages.held_count


# --- one side's cancels ---


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_full_pool_empties_without_new_work(world: World, cancelled: bool) -> None:
    """Prefill's rooms hold every page, and no decode ever comes for them."""
    succeeds(world, 0)
    for room in range(1, 17):
        world.send(room, pages_count=4, eager=True)
    world.until(lambda: used(world, "prefill") == 64)
    if cancelled:
        for room in range(1, 17):
            world.abort("prefill", room)
    within_ms = 200 if cancelled else int(TIMEOUTS.bootstrap_s * SECOND_MS) + SECOND_MS
    world.until(lambda: used(world, "prefill") == 0, within_ms=within_ms)
    succeeds(world, 17)


def test_hundreds_of_cancels_within_100_ms_leave_nothing_in_anybodys_list(world: World) -> None:
    """In every phase, for the pools hold but few of them; the next fifty rooms find all free."""
    rooms = range(1, 241)  # there are 256 slots on either side
    for room in rooms:
        world.both(room, pages_count=2, chunks=2, pace_ms=40)
    world.run(60)
    world.rng.shuffle(order := list(rooms))
    for number, room in enumerate(order):
        if number % 5 == 0:
            world.step()
        world.abort("prefill" if room % 2 else "decode0", room)
    for room in rooms:
        until_verdict(world, room, "prefill", "decode0", within_ms=SECOND_MS)
    for name in ("prefill", "decode0"):
        world.until(lambda name=name: used(world, name) == 0, within_ms=2 * SECOND_MS)  # type: ignore[misc]
        reasons = {world.job(name, room).reason for room in rooms}
        assert reasons <= {Reason.NONE, Reason.ABORTED, Reason.PEER_ABORTED}
    for room in range(200, 250):
        world.both(room, pages_count=1)
    for room in range(200, 250):
        until_verdict(world, room, "prefill", "decode0")
        assert verdict(world, "decode0", room) is KVPoll.Success


def test_cancels_in_the_first_phase_use_up_no_budget(world: World) -> None:
    """Thrice as many as there are slots: each gives back all that it took, and the next is let
    in."""
    succeeds(world, 0)
    first = 1
    while first < 3 * 256:
        batch = range(first, first + 64)
        for room in batch:
            world.send(room) if room % 2 else world.receive(room, pace_ms=10_000)
        world.run(10)
        for room in batch:
            world.abort("prefill" if room % 2 else "decode0", room)
        world.run(40)
        first += 64
    for name in ("prefill", "decode0"):
        tree = world.trees[name]
        world.until(lambda tree=tree: not len(tree.table.live_slots()), within_ms=SECOND_MS)  # type: ignore[misc]
    succeeds(world, 10_001)


def test_hundreds_of_rooms_one_after_another_need_the_pages_of_two() -> None:
    with World() as world:
        for room in range(300):
            world.both(room % 7, pages_count=2, chunks=1)
            until_verdict(world, room % 7, "prefill", "decode0")
            assert verdict(world, "decode0", room % 7) is KVPoll.Success
            for name in ("prefill", "decode0"):
                assert used(world, name) <= 4
        world.settle()


# --- a side that is gone for good ---


def test_a_decode_that_dies_with_its_rooms_gives_prefill_its_pages_back(world: World) -> None:
    succeeds(world, 0)
    for room in range(1, 21):
        world.both(room, pages_count=3, chunks=3, pace_ms=50)
    world.until(lambda: used(world, "prefill") >= 30)
    world.trees["decode0"].stop()
    peer_ms = int(TIMEOUTS.peer_s * SECOND_MS)
    quiet_ms = int(TIMEOUTS.quiet_s * SECOND_MS)
    for room in range(1, 21):
        until_verdict(world, room, "prefill", within_ms=peer_ms + 500)
    world.until(lambda: used(world, "prefill") == 0, within_ms=quiet_ms + SECOND_MS)
    world.replace("decode0")
    succeeds(world, 30)


# --- ranks ---


def _ranks_decide_alone(patch: pytest.MonkeyPatch) -> None:
    """Nobody tells the other ranks: each keeps its own state."""
    fault = KVRoom._fault

    def only_asked_for(self: KVRoom, reason: Reason, now_ns: int) -> None:
        if reason is not Reason.RANK_FAILED:
            fault(self, reason, now_ns)

    patch.setattr(KVRoom, "_fault", only_asked_for)


@pytest.mark.parametrize(
    ("mutants", "breaks"), [([], None), ([_ranks_decide_alone], "ranks disagree")]
)
@pytest.mark.parametrize("shm", [False, True], ids=["nixl-like", "shm-like"])
def test_ranks_that_hear_of_cancels_in_any_order_agree_on_every_room(
    shm: bool, mutants: list[Mutant], breaks: str | None
) -> None:
    """Four ranks, forty rooms; each cancel reaches one rank of one side, some twice and some ranks
    up to 200 ms later.  No rank waits for another beyond the deadline."""
    rng = random.Random(5)
    with holds_or_breaks(mutants, breaks), World(ranks=4, shm=shm, layout=FOUR_LAYERS) as world:
        rooms = range(1, 41)
        for room in rooms:
            world.both(room, pages_count=1, chunks=1, pace_ms=rng.choice([0, 50, 100]))
        cancels = []
        for room in rooms[::2]:
            for _ in range(rng.choice([1, 1, 2])):
                side = rng.choice(["prefill", "decode0"])
                cancels.append((rng.randrange(200), side, room, rng.randrange(4)))
        started_ms = world.now_ms
        for at_ms, side, room, rank in sorted(cancels):
            while world.now_ms - started_ms < at_ms:
                world.step()
            _cancel_at_one_rank(world, side, room, rank)
        _all_ranks_agree(world, rooms)


def _cancel_at_one_rank(world: World, side: str, room: int, rank: int) -> None:
    job = world.engine(side).jobs.get(room)
    if job is not None:
        _, slot, generation = job.handles[rank]
        table = world.trees[side].table
        table.move(slot, generation, Event.FAULT, now_ns=world.clock(), reason=Reason.ABORTED)


def _all_ranks_agree(world: World, rooms: range) -> None:
    world.run(500)
    for side in ("prefill", "decode0"):
        tree = world.trees[side]
        words = tree.table.words[tree.table.live_slots()].tolist()
        still_open = [word for word in words if word & 0xF in OPEN]
        assert not still_open, f"ranks disagree: {len(still_open)} slots of {side} are open"
    for room in rooms:
        assert verdict(world, "prefill", room) is verdict(world, "decode0", room)
        if room % 2 == 0:
            assert verdict(world, "decode0", room) is KVPoll.Success
    world.settle()


def test_a_cancel_at_the_first_rank_reaches_ranks_that_have_not_seen_the_room() -> None:
    with World(ranks=2) as world:
        succeeds(world, 0)
        world.receive(1, pace_ms=10_000)
        until_state(world, "decode0", 1, KVPoll.WaitingForInput)
        world.send(1)
        world.trees["prefill"].freeze("worker1")
        world.trees["prefill"].freeze("listener")
        world.run(10)
        _cancel_at_one_rank(world, "prefill", 1, 0)
        world.run(10)
        assert verdict(world, "prefill", 1) is KVPoll.Failed
        world.trees["prefill"].thaw("worker1")
        world.trees["prefill"].thaw("listener")
        until_verdict(world, 1, "decode0", within_ms=200)
        world.settle()
