"""Trees that die and come back at the same address, again and again, under load.

F053 F054 F056.
"""

from __future__ import annotations

from functools import partial

import pytest

from pdrt.protocol.states import KVPoll, Reason, Role
from tests.actors.world import TIMEOUTS, World
from tests.scenarios.pairs import Load, has_verdict, plan_pair, verdict_of

PREFILLS, DECODES = ("prefill", "prefill1"), ("decode0", "decode1")
ROUNDS = 5
STEP_MS = 10
FENCED = {Reason.WORKER_FENCED, Reason.TRANSPORT_FAILED}
BEAT_MS = int(TIMEOUTS.beat_s * 1000)
RECOVER_MS = 2 * BEAT_MS + 2000


def run_load(load: Load, ms: int) -> None:
    for _ in range(0, ms, STEP_MS):
        load.turn()
        load.world.step(STEP_MS)


def succeeds_with(load: Load, victim: str, since: int) -> bool:
    """Each pair of the victim has had a success among the rooms from `since` on."""
    pairs = {pair for pair in load.rooms.values() if victim in pair}
    done = {
        load.rooms[room]
        for room in range(since, len(load.rooms))
        if load.verdicts(room) == {KVPoll.Success}
    }
    return pairs <= done


@pytest.mark.parametrize(
    ("victims", "shm"),
    [(PREFILLS, False), (PREFILLS, True), (DECODES, False)],
    ids=["prefills-nixl-like", "prefills-shm-like", "decodes"],
)
def test_who_is_replaced_serves_again_and_nobody_else_is_touched(
    victims: tuple[str, ...], shm: bool
) -> None:
    with World(decodes=len(DECODES), shm=shm) as world:
        world.add("prefill1", Role.PREFILL, world.layout)
        load = Load(world, PREFILLS, DECODES)
        run_load(load, 300)
        for _ in range(ROUNDS):
            for victim in victims:
                first = len(load.rooms) - len(PREFILLS) * len(DECODES)
                since = len(load.rooms)
                world.replace(victim)
                end_ms = world.now_ms + RECOVER_MS
                while not succeeds_with(load, victim, since):
                    assert world.now_ms < end_ms, f"{victim} does not serve again"
                    run_load(load, STEP_MS)
                run_load(load, 100)
                others = {
                    reason
                    for room in range(first, len(load.rooms))
                    if victim not in load.rooms[room]
                    for reason in load.reasons(room)
                }
                # A dead prefill cannot say that decode's pages are quiet: unless its death ends
                # its writes, decode's worker is restarted, and with it goes what moves there.
                fenced = victims is PREFILLS and not shm
                assert others <= (FENCED if fenced else set()), others
        world.settle()


@pytest.mark.parametrize("side", ["prefill", "decode0"])
def test_a_tree_swapped_between_two_heartbeats_costs_one_room_at_most(side: str) -> None:
    survivor = "decode0" if side == "prefill" else "prefill"
    verdicts = []
    with World() as world:
        run_load(Load(world, ("prefill",), ("decode0",)), 100)
        world.replace(side)
        for room in (1001, 1002, 1003):
            plan_pair(world, room, "prefill", "decode0")
            world.until(partial(has_verdict, world, survivor, room), within_ms=BEAT_MS + 1000)
            verdicts.append(verdict_of(world, survivor, room))
        assert KVPoll.Failed not in verdicts[1:]
        world.settle()


def test_a_path_on_which_everything_fails_is_built_anew() -> None:
    """Both ends live, the connection between them does not: its fences fail too, so the worker that
    it leads to is restarted, and with it comes another path."""
    with World() as world:
        plan_pair(world, 1, "prefill", "decode0")
        world.until(partial(has_verdict, world, "decode0", 1))
        world.fabric.kill(world.trees["decode0"].processes["worker0"].agent)
        end_ms, room = world.now_ms + int(TIMEOUTS.quiet_s * 1000) + BEAT_MS + 1000, 1
        while room == 1 or verdict_of(world, "decode0", room) is not KVPoll.Success:
            assert world.now_ms < end_ms
            room += 1
            plan_pair(world, room, "prefill", "decode0")
            world.until(partial(has_verdict, world, "decode0", room))
        assert room > 2
        assert world.trees["decode0"].forced == ["worker0"]
        world.settle()
