"""A room of prefill's is for one decode, and its slot says for which: the next listener knows it,
whoever else asks for that id.  And it says "quiet" of nothing that one before it gave away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pdrt.protocol import codec
from pdrt.protocol.messages import Destination
from pdrt.protocol.peers import instance_digest, transport_code
from pdrt.protocol.states import KVPoll, Reason
from tests.actors.post import Frame
from tests.actors.steps import succeeds, until_state, until_verdict, verdict
from tests.actors.world import World


@pytest.fixture(params=[False, True], ids=["nixl-like", "shm-like"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(decodes=2, shm=request.param, polls=180) as world:
        succeeds(world, 0, "decode0")
        succeeds(world, 9, "decode1")
        yield world


@contextmanager
def late_destinations(world: World, decode: str) -> Iterator[list[Frame]]:
    """Those of that decode arrive at the end."""
    kept: list[Frame] = []
    instance, arrive = world.trees[decode].instance, world.post._arrive

    def hold(frame: Frame) -> None:
        to_prefill = frame.endpoint == "tcp://prefill:8998"
        messages = codec.decode(frame.data) if to_prefill else []
        named = [m.instance for m in messages if isinstance(m, Destination)]
        (kept.append if instance in named else arrive)(frame)

    world.post._arrive = hold  # type: ignore[method-assign]
    yield kept
    world.post._arrive = arrive  # type: ignore[method-assign]
    for frame in kept:
        arrive(frame)


def test_a_moving_room_is_not_given_to_another_decode_that_asks_first(world: World) -> None:
    """The same request is at two decodes, and the listener dies while it moves to one of them."""
    world.receive(1, "decode1", pages_count=4, pace_ms=200)
    until_state(world, "decode1", 1, KVPoll.WaitingForInput)
    world.both(1, "decode0", pages_count=4, chunks=4, pace_ms=150)
    until_state(world, "prefill", 1, KVPoll.Transferring)
    world.run(20)
    with late_destinations(world, "decode0") as kept:
        world.trees["prefill"].kill("listener", again_ms=1)
        world.until(lambda: bool(kept), within_ms=3000)
        until_verdict(world, 1, "decode1", within_ms=3000)
    assert world.job("decode1", 1).reason is Reason.PEER_REFUSED
    until_verdict(world, 1, "prefill", "decode0")
    assert verdict(world, "prefill", 1) is verdict(world, "decode0", 1) is KVPoll.Success
    world.settle()


def test_an_abort_that_is_said_again_does_not_end_the_next_use_of_another_decode(
    world: World,
) -> None:
    world.both(1, "decode0", mute=True)
    until_state(world, "prefill", 1, KVPoll.WaitingForInput)
    world.abort("decode0", 1)
    until_verdict(world, 1, "decode0", "prefill")
    world.run(100)
    world.both(1, "decode1", pages_count=4, chunks=4, pace_ms=100)
    until_state(world, "prefill", 1, KVPoll.Transferring)
    world.trees["prefill"].kill("listener", again_ms=1)
    until_verdict(world, 1, "decode1", "prefill", within_ms=2000)
    assert verdict(world, "prefill", 1) is verdict(world, "decode1", 1) is KVPoll.Success
    world.settle()


def test_a_room_that_was_about_to_be_given_to_one_decode_is_free_for_another(
    world: World,
) -> None:
    """The listener died between the two: its slot names whom it has not been given to."""
    world.send(1)
    until_state(world, "prefill", 1, KVPoll.Bootstrapping)
    prefill = world.trees["prefill"]
    handle = world.job("prefill", 1).handles[0]
    digest = instance_digest(world.trees["decode0"].instance)
    prefill.table.set_path(*handle[1:], transport_code("nixl"), digest)
    prefill.kill("listener", again_ms=1)
    world.receive(1, "decode1")
    until_verdict(world, 1, "decode1", "prefill")
    assert verdict(world, "decode1", 1) is KVPoll.Success
    world.settle()


@pytest.mark.parametrize("listener_dies", [True, False])
@pytest.mark.parametrize("used_again", [True, False])
def test_the_next_use_does_not_speak_for_what_a_dead_worker_wrote(
    listener_dies: bool, used_again: bool
) -> None:
    with World(decodes=2, polls=180) as world:
        prefill = world.trees["prefill"]
        prefill.zombie_steps = 400
        succeeds(world, 0, "decode0")
        world.both(1, "decode0", chunks=1)
        until_state(world, "prefill", 1, KVPoll.Transferring)
        world.run(4)
        world.post.weather.held_when_cut = 1.0
        world.post.cuts.add(("decode0", "prefill"))
        prefill.kill("worker0", again_ms=1)
        if listener_dies:
            prefill.kill("listener", again_ms=1)
        world.abort("decode0", 1)
        until_verdict(world, 1, "prefill")
        world.until(lambda: world.job("prefill", 1).cleared)
        if used_again:
            world.send(1, mute=True)
        world.run(30)
        world.post.mend("decode0", "prefill")
        world.run(120)
        assert not world.job("decode0", 1).cleared, "the dead worker's bytes are in the air"
        world.run(1000)
        world.abort("prefill", 1)
        world.settle()
