"""News that comes when a room is over: an abort after the end, an end after an abort.

F051 F077 F112.
"""

from __future__ import annotations

import pytest

from pdrt.protocol.messages import Landed
from pdrt.protocol.states import KVPoll, Reason
from tests.actors.steps import moving, succeeds, until_verdict, verdict
from tests.actors.world import World

ROOMS = 60


@pytest.mark.parametrize("side", ["prefill", "decode0"])
def test_an_abort_at_any_moment_around_the_end_leaves_one_end(side: str) -> None:
    """Each side has one verdict that stands, which the laws of the world watch; decode's Success is
    never prefill's failure."""
    seen = set()
    with World(polls=2) as world:
        for room in range(ROOMS):
            world.both(room, chunks=1)
            for _ in range(room):
                world.step(1)
            world.abort(side, room)
            until_verdict(world, room, "prefill", "decode0")
            world.until(lambda: not world.engine("prefill").jobs)
            world.until(lambda: not world.engine("decode0").jobs)
            ends = verdict(world, "prefill", room), verdict(world, "decode0", room)
            assert ends != (KVPoll.Failed, KVPoll.Success)
            seen.add(ends)
        world.settle()
    assert {(KVPoll.Failed,) * 2, (KVPoll.Success,) * 2} <= seen


def test_all_bytes_seen_after_an_error_is_no_success(world: World) -> None:
    succeeds(world, 0)
    moving(world)
    job = world.job("decode0", 1)
    handle, tree = job.handles[0], world.trees["decode0"]
    world.fabric.fail_next(tree.processes["worker0"].agent)
    until_verdict(world, 1, "prefill", "decode0")
    for _ in range(2):
        news = Landed(1, 0, handle.slot, handle.generation, 4096, 4, tree.instance)
        tree.processes["listener"].actor.handle(("control", b"late"), news, world.clock())
        world.run(20)
    assert job.verdict is KVPoll.Failed
    assert job.reason is Reason.TRANSPORT_FAILED
    assert len(world.ledger.landed) == 1  # room 0


def test_two_hundred_aborts_at_prefill_are_two_hundred_messages() -> None:
    rooms = range(200)
    with World() as world:
        for room in rooms:
            world.both(room, mute=True, pages_count=1)
        world.run(300, step_ms=10)
        for room in rooms:
            world.abort("prefill", room)
        world.until(
            lambda: all(verdict(world, "decode0", room) is not None for room in rooms),
            within_ms=200,
        )
        assert {world.job("decode0", room).reason for room in rooms} == {Reason.PEER_ABORTED}
        world.until(lambda: not world.engine("decode0").jobs, within_ms=1000)
        world.settle()
