"""One room has one use: all that lands in it is of one use of its id on the other side, and if it
is a Success, nothing more is going to land there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from pdrt.actors.decode_listener import DecodeListener
from pdrt.actors.prefill_listener import PrefillListener
from pdrt.protocol import codec
from pdrt.protocol.counters import Counter
from pdrt.protocol.messages import Abort, Destination, Expect, Landed
from pdrt.protocol.states import KVPoll, Reason
from pdrt.shm_status import StatusTable, Word
from tests.actors.mutants import every_worker_is_believed, ranks_of_any_use
from tests.actors.post import Frame
from tests.actors.steps import succeeds, until_state, until_verdict, verdict
from tests.actors.test_mutants import LANDED, Mutant, holds_or_breaks
from tests.actors.world import World


def word_of(world: World, room: int, rank: int = 0) -> Word:
    word = world.trees["decode0"].table.read(*world.job("decode0", room).handles[rank][1:])
    assert word is not None
    return word


def moved_bytes(world: World) -> int:
    return int(world.trees["decode0"].table.counters[:, Counter.BYTES_MOVED].sum())


def say_landed(world: World, rank: int, use: int) -> None:
    handle = world.job("decode0", 1).handles[rank]
    instance = world.trees["decode0"].instance
    landed = Landed(1, rank, handle.slot, handle.generation, 64, 1, instance, use)
    world.trees["decode0"].processes["listener"].actor.handle("worker", landed, world.clock())


@contextmanager
def held_landed(world: World) -> Iterator[list[Frame]]:
    """What prefill says of rooms that have landed does not arrive, but is kept."""
    kept: list[Frame] = []
    arrive = world.post._arrive

    def hold(frame: Frame) -> None:
        from_peer = frame.endpoint.startswith("tcp://")
        messages = codec.decode(frame.data, from_peer=True) if from_peer else []
        if any(isinstance(message, Landed) for message in messages):
            kept.append(frame)
        else:
            arrive(frame)

    world.post._arrive = hold  # type: ignore[method-assign]
    yield kept
    world.post._arrive = arrive  # type: ignore[method-assign]


def landed_unheard(world: World) -> Frame:
    """Room 1 has landed, and is over on prefill; decode has yet to hear it, and sends the
    destination to another listener.  Answers what the worker said."""
    succeeds(world, 0)
    with held_landed(world) as kept:
        world.both(1)
        until_verdict(world, 1, "prefill")
        world.until(lambda: world.job("prefill", 1).cleared and bool(kept))
        world.trees["prefill"].kill("listener", again_ms=1)
        listener = world.trees["decode0"].processes["listener"].actor
        assert isinstance(listener, DecodeListener)
        slot = world.job("decode0", 1).handles[0].slot
        world.until(lambda: listener._rooms[slot].shared)
        world.run(20)
    assert verdict(world, "decode0", 1) is None
    return kept[0]


# --- ranks ---------------------------------------------------------------------------------------


def test_the_ranks_of_a_room_have_one_use_and_two_rooms_have_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uses: list[int] = []
    settle = StatusTable.settle_use

    def settled(self: StatusTable, slot: int, generation: int, use: int) -> bool:
        uses.append(use)
        return settle(self, slot, generation, use)

    monkeypatch.setattr(StatusTable, "settle_use", settled)
    with World(ranks=2) as world:
        for _ in range(2):
            succeeds(world, 1)
        world.settle()
    assert len(uses) == 4
    assert uses[0] == uses[1] != uses[2] == uses[3]
    assert all(uses)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_rank_of_another_use_ends_the_room(restarted: bool) -> None:
    with World(ranks=2) as world:
        succeeds(world, 0)
        world.both(1, mute=True)
        until_state(world, "decode0", 1, KVPoll.Transferring)
        world.run(20)
        say_landed(world, 1, use=5)
        if restarted:
            world.trees["decode0"].kill("listener", again_ms=1)
            world.run(60)
        assert word_of(world, 1, rank=0).state is KVPoll.Transferring
        if restarted:  # a new listener asks before it believes; prefill's room is open, of use 2
            say_landed(world, 0, use=2)
            world.run(20)
        else:
            say_landed(world, 0, use=6)
            assert word_of(world, 1, rank=0).quiet
        until_verdict(world, 1, "decode0", "prefill")
        job = world.job("decode0", 1)
        assert (job.verdict, job.reason) == (KVPoll.Failed, Reason.PEER_LOST)
        assert job.detail.endswith("ranks of two uses")
        world.settle()


@pytest.mark.parametrize(("mutants", "breaks"), [([], None), ([ranks_of_any_use], "Success, and")])
def test_one_use_on_prefill_and_two_on_decode(mutants: list[Mutant], breaks: str | None) -> None:
    """Rank 0 has landed when decode gives the room up, and prefill has yet to hear of rank 1: the
    next use of the id gets that, and its rank 0 from the next use on prefill."""
    lost: set[tuple[int, int]] = set()
    handle = PrefillListener.handle

    def deaf(self: PrefillListener, sender: Any, message: Any, now_ns: int) -> None:
        asked = isinstance(message, (Destination, Abort, Expect))
        if not asked or (message.slot, message.generation) not in lost:
            handle(self, sender, message, now_ns)

    with World(ranks=2) as world, holds_or_breaks([*mutants, deafened(deaf)], breaks):
        succeeds(world, 0)
        world.send(1, eager=True)
        world.receive(1, pace_ms=50)
        until_state(world, "decode0", 1, KVPoll.WaitingForInput)
        lost.add(world.job("decode0", 1).handles[1][1:])
        world.until(lambda: word_of(world, 1).state is KVPoll.Success)
        world.abort("decode0", 1)
        world.receive(1)
        until_verdict(world, 1, "prefill")
        world.send(1, eager=True)  # it waits for a destination of rank 1 in vain
        until_verdict(world, 1, "decode0")
        job = world.job("decode0", 1)
        assert (job.verdict, job.reason) == (KVPoll.Failed, Reason.PEER_LOST)
        world.settle()


def deafened(handle: Callable[..., None]) -> Mutant:
    return lambda patch: patch.setattr(PrefillListener, "handle", handle)


# --- what a worker says, when there was another listener before ----------------------------------


def test_the_present_listener_confirms_what_it_never_gave_away(world: World) -> None:
    frame = landed_unheard(world)
    world.post._arrive(frame)
    assert until_verdict(world, 1, "decode0", within_ms=500) < 100
    assert verdict(world, "decode0", 1) is KVPoll.Success
    succeeds(world, 1)


@pytest.mark.parametrize(
    ("mutants", "breaks"), [([], None), ([every_worker_is_believed], "Success, and")]
)
def test_a_landed_that_comes_when_another_room_has_the_destination(
    mutants: list[Mutant], breaks: str | None
) -> None:
    """The worker that wrote is dead as well, so nobody on prefill knows of it."""
    with World() as world, holds_or_breaks(mutants, breaks):
        frame = landed_unheard(world)
        world.trees["prefill"].kill("worker0", again_ms=1)
        world.run(40)
        world.send(1, pages_count=4, chunks=4, pace_ms=100)
        until_state(world, "prefill", 1, KVPoll.Transferring)
        world.post._arrive(frame)
        world.run(50)
        until_verdict(world, 1, "decode0", "prefill")
        assert verdict(world, "decode0", 1) is verdict(world, "prefill", 1) is KVPoll.Success
        world.settle()


@pytest.mark.parametrize(("mutants", "breaks"), [([], None), ([every_worker_is_believed], LANDED)])
def test_a_failed_room_is_not_quiet_by_what_one_of_two_writers_says(
    mutants: list[Mutant], breaks: str | None
) -> None:
    with World(polls=200) as world, holds_or_breaks(mutants, breaks):
        frame = landed_unheard(world)
        world.trees["prefill"].kill("worker0", again_ms=1)
        world.run(40)
        world.send(1, pages_count=4, chunks=4, pace_ms=100)
        until_state(world, "prefill", 1, KVPoll.Transferring)
        world.abort("decode0", 1)
        world.post._arrive(frame)
        world.run(50)
        world.settle()


def test_a_prefill_that_names_no_uses_is_believed_as_ever(world: World) -> None:
    frame = landed_unheard(world)
    old = [
        replace(message, use=0)
        for message in codec.decode(frame.data, from_peer=True)
        if isinstance(message, Landed)
    ]
    frame.data = codec.encode(old)
    world.post._arrive(frame)
    until_verdict(world, 1, "decode0", within_ms=50)
    assert verdict(world, "decode0", 1) is KVPoll.Success


def test_what_has_landed_is_asked_for_until_it_is_answered(world: World) -> None:
    """And its destination is not given to anybody else meanwhile."""
    frame = landed_unheard(world)
    world.post.weather.held_when_cut = 0.0
    world.post.cuts.add(("prefill", "decode0"))
    landed = codec.decode(frame.data, from_peer=True)[0]
    world.trees["decode0"].processes["listener"].actor.handle("worker", landed, world.clock())
    world.run(300)
    assert verdict(world, "decode0", 1) is None
    world.post.mend("prefill", "decode0")
    until_verdict(world, 1, "decode0", within_ms=1200)
    assert verdict(world, "decode0", 1) is KVPoll.Success
    world.send(1)  # nobody waits for it
    world.run(100)
    assert world.engine("prefill").job(1).half.poll() is KVPoll.Bootstrapping
    world.abort("prefill", 1)


def test_what_has_landed_is_not_given_to_the_next_listener(world: World) -> None:
    """It has a room of the next use of that id, which would be given the pages."""
    frame = landed_unheard(world)
    world.post.weather.held_when_cut = 0.0
    world.post.cuts.add(("decode0", "prefill"))
    landed = codec.decode(frame.data, from_peer=True)[0]
    assert isinstance(landed, Landed)
    listener = world.trees["decode0"].processes["listener"].actor
    listener.handle("worker", landed, world.clock())
    world.run(400)  # by now it asks seldom
    world.trees["prefill"].kill("listener", again_ms=1)
    world.send(1)
    world.run(5)
    world.post.mend("prefill", "decode0")
    counted = moved_bytes(world)
    until_verdict(world, 1, "decode0", within_ms=1200)
    assert verdict(world, "decode0", 1) is KVPoll.Success
    assert moved_bytes(world) - counted == landed.length_bytes > 0  # as the worker said
    assert world.engine("prefill").job(1).half.poll() is KVPoll.Bootstrapping
    world.abort("prefill", 1)


def test_an_answer_is_given_once_the_other_room_is_over(world: World) -> None:
    """Prefill's listener is asked for a use that is not the one it serves."""
    succeeds(world, 0)
    world.both(1, mute=True)
    until_state(world, "prefill", 1, KVPoll.WaitingForInput)
    listener = world.trees["prefill"].processes["listener"].actor
    assert isinstance(listener, PrefillListener)
    handle = world.job("decode0", 1).handles[0]
    theirs = world.trees["decode0"].instance, *handle[1:]
    expect = Expect(1, 0, handle.slot, handle.generation, theirs[0], True, "", landed=99)
    listener.handle("anybody", expect, world.clock())
    assert theirs not in listener._past.over
    world.engine("prefill").unmute(1)
    until_verdict(world, 1, "prefill", "decode0")
    listener.handle("anybody", expect, world.clock())
    answer = listener._past.over[theirs]
    assert isinstance(answer, Landed)
    assert answer.use == world.job("prefill", 1).use
    assert answer.session == listener._session
