"""Scenarios of peers that are not there, do not answer, or all come at once.

F003 F012 F017.
"""

from __future__ import annotations

import pytest

from pdrt.protocol.messages import PeerUp
from pdrt.protocol.states import OPEN, KVPoll, Reason
from tests.actors.engines import Plan
from tests.actors.steps import succeeds, until_verdict, verdict
from tests.actors.world import TIMEOUTS, World


def latency_ms(world: World, room: int, decode: str = "decode0") -> int:
    world.both(room, decode)
    return until_verdict(world, room, "prefill", decode)


@pytest.mark.parametrize("shm", [False, True], ids=["nixl-like", "shm-like"])
def test_the_very_first_rooms_may_all_come_at_once_from_two_decodes(shm: bool) -> None:
    """A cold start: nobody has met anybody yet.  Each agent is dialled once, and all succeed."""
    with World(decodes=2, shm=shm) as world:
        world.trees["prefill"].freeze("worker0")  # so that introductions are repeated meanwhile
        dialled = []
        worker = world.trees["prefill"].processes["worker0"].actor
        connect = worker._paths._connect  # type: ignore[attr-defined]

        def counting(name: str, up: PeerUp) -> object:
            dialled.append(name)
            return connect(name, up)

        worker._paths._connect = counting  # type: ignore[attr-defined]
        for room in range(8):
            world.both(room, f"decode{room % 2}")
        world.run(200)
        world.trees["prefill"].thaw("worker0")
        for room in range(8):
            until_verdict(world, room, "prefill", f"decode{room % 2}", within_ms=500)
            assert verdict(world, f"decode{room % 2}", room) is KVPoll.Success
        assert len(dialled) == len(set(dialled)) == 2
        world.settle()


def test_prefills_that_never_answer_cost_the_rooms_of_one_that_does_nothing() -> None:
    """Two of three addresses take what is sent to them and say nothing, for ever."""
    with World() as world:
        succeeds(world, 0)
        alone_ms = latency_ms(world, 1)
        for number in range(40):
            plan = Plan(100 + number, peer=f"silent{number % 2}:8998")
            world.engine("decode0").plan(plan)
        for room in range(2, 40):
            assert latency_ms(world, room) <= alone_ms + 10
        bootstrap_ms = int(TIMEOUTS.bootstrap_s * 1000)
        for number in range(40):
            until_verdict(world, 100 + number, "decode0", within_ms=bootstrap_ms + 200)
            assert world.job("decode0", 100 + number).reason is Reason.BOOTSTRAP_TIMEOUT
        world.settle()


def test_a_prefill_that_freezes_is_lost_in_time_and_slows_no_other() -> None:
    """Its connection stays open and its tree does not die.  Rooms with it fail once it has been
    silent for the peer's timeout; those that come later fail at the latest at their deadline."""
    with World() as world:
        second = world.add("second", world.trees["prefill"].role, world.layout)
        succeeds(world, 0)
        alone_ms = _with(world, "second", 1)
        for room in range(10, 20):
            world.both(room, chunks=4, pages_count=1)
        world.run(6)
        world.trees["prefill"].shape.hang_s = 1000.0
        for name in ("listener", "worker0", "engine"):
            world.trees["prefill"].freeze(name)
        for room in range(40, 140):
            world.receive(room, pace_ms=10_000)  # none of them holds a page
        for room in range(200, 230):
            assert _with(world, "second", room) <= 2 * alone_ms + 10
        lost_ms = int((TIMEOUTS.peer_s + TIMEOUTS.bootstrap_s) * 1000) + 500
        for room in (*range(10, 20), *range(40, 140)):
            until_verdict(world, room, "decode0", within_ms=lost_ms)
        reasons = {world.job("decode0", room).reason for room in range(40, 140)}
        assert reasons <= {Reason.PEER_LOST, Reason.BOOTSTRAP_TIMEOUT}
        table = world.trees["prefill"].table
        world.run(3000, step_ms=10)  # nobody on that side reads, and yet
        assert all(word & 0xF not in OPEN for word in table.words[table.live_slots()].tolist())
        assert second.incarnations["listener"] == 1
        world.settle()


def _with(world: World, prefill: str, room: int) -> int:
    tree = world.trees[prefill]
    world.engine(prefill).plan(Plan(room))
    world.engine("decode0").plan(Plan(room, peer=tree.control))
    return until_verdict(world, room, prefill, "decode0")
