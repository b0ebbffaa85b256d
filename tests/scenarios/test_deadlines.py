"""Waits that last: for a transfer that never ends, for a queue, for a peer that is gone.

F074 F076 F129 F130.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdrt.clock import MILLISECOND_NS
from pdrt.protocol.states import KVPoll, Reason
from tests.actors.engines import Engine
from tests.actors.steps import succeeds, until_state, verdict
from tests.actors.world import TIMEOUTS, World

MARGIN_MS = 500
TRANSFER_MS = int(TIMEOUTS.stall_s * 1000)
LEASE_MS = int(TIMEOUTS.bootstrap_s * 1000)


@pytest.fixture(params=[False, True], ids=["nixl-like", "shm-like"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(shm=request.param) as world:
        yield world
        world.settle()


def test_transfers_that_never_end_fail_in_time_and_their_pages_wait() -> None:
    """Neither they nor a fence behind them is ever done: only a new worker makes them quiet."""
    stuck, whole = range(45, 50), range(45)
    with World(decodes=2) as world:
        succeeds(world, 1000, "decode1")
        world.fabric.freeze(world.trees["decode1"].processes["worker0"].agent)
        for room in stuck:
            world.both(room, "decode1", pages_count=1)
        for room in whole:
            world.both(room, "decode0", pages_count=1)
        for room in stuck:
            until_state(world, "prefill", room, KVPoll.Transferring)
        held = world.engine("prefill").pages
        assert held is not None
        world.until(
            lambda: all(verdict(world, "prefill", room) is not None for room in stuck),
            within_ms=TRANSFER_MS + MARGIN_MS,
        )
        world.until(
            lambda: all(verdict(world, "decode1", room) is KVPoll.Failed for room in stuck),
            within_ms=100,
        )
        assert held.used_count + held.held_count == len(stuck)
        for room in stuck:
            assert world.job("prefill", room).reason is Reason.TRANSFER_STALLED
        assert all(verdict(world, "decode0", room) is KVPoll.Success for room in whole)
        world.until(lambda: not held.used_count + held.held_count)
        assert world.trees["prefill"].forced == ["worker0"]
        succeeds(world, 1001, "decode0")
        world.settle()


@pytest.fixture
def _queues_are_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As KVManager.tick does; the world's engines leave it out, or they could never be late."""
    upkeep = Engine._upkeep

    def with_renewal(self: Engine, now_ns: int) -> None:
        upkeep(self, now_ns)
        for job in self.jobs.values():
            job.half.renew_queued(now_ns)

    monkeypatch.setattr(Engine, "_upkeep", with_renewal)


@pytest.mark.usefixtures("_queues_are_renewed")
def test_a_wait_of_ten_leases_costs_nothing_while_the_peer_lives() -> None:
    with World() as world:
        world.send(1)
        world.receive(1, pace_ms=10 * LEASE_MS)  # decode's queue
        world.both(2, mute=True)  # prefill's
        world.run(10 * LEASE_MS - 200, step_ms=40)
        assert verdict(world, "prefill", 1) is verdict(world, "decode0", 2) is None
        world.engine("prefill").unmute(2)
        for room in (1, 2):
            world.until(lambda: verdict(world, "decode0", room) is KVPoll.Success)  # noqa: B023
        world.settle()


@pytest.mark.usefixtures("_queues_are_renewed")
@pytest.mark.parametrize("waits_ms", [3 * LEASE_MS, 0], ids=["asked", "destined"])
def test_what_is_held_for_a_dead_decode_is_free_soon(world: World, waits_ms: int) -> None:
    world.send(1, eager=True, mute=not waits_ms)
    world.receive(1, pace_ms=waits_ms)
    world.run(2 * LEASE_MS, step_ms=20)
    assert verdict(world, "prefill", 1) is None
    world.replace("decode0").stop()  # and nobody comes back
    world.until(lambda: verdict(world, "prefill", 1) is KVPoll.Failed, within_ms=LEASE_MS + 1000)
    world.until(lambda: world.job("prefill", 1).cleared, within_ms=LEASE_MS)
    world.replace("decode0")


def test_a_slow_transfer_that_moves_succeeds_whatever_its_size() -> None:
    """No chunk takes as long as the deadline; all of them together do, eight times."""
    with World() as world:
        chunks = 16
        pace_ms = TRANSFER_MS // 2
        world.both(1, pages_count=chunks, chunks=chunks, pace_ms=pace_ms)
        world.run(chunks * pace_ms + 500, step_ms=40)
        assert verdict(world, "decode0", 1) is KVPoll.Success
        timeline = world.job("decode0", 1)
        assert timeline.verdict_ns - timeline.opened_ns > 7 * TRANSFER_MS * MILLISECOND_NS
        world.settle()
