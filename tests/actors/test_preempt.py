"""Between two looks of a process at a room, another may end it and clear it."""

from __future__ import annotations

import pytest

from tests.actors.preempt import before_each
from tests.actors.steps import succeeds, to_phase, until_verdict
from tests.actors.world import World

WHO = [(side, name) for side in ("prefill", "decode0") for name in ("listener", "worker0")]


class Stroke:
    """Before the n-th instruction of a process, its engine gives room 1 up, and clears it."""

    def __init__(self, world: World, side: str, name: str, at: int) -> None:
        self.count = 0
        self._world, self._side, self._at = world, side, at
        before_each(world.trees[side].processes[name].table, self._step)

    def _step(self) -> None:
        self.count += 1
        if self.count == self._at + 1:
            self._world.abort(self._side, 1)
            self._world.trees[self._side].processes["engine"].turn(self._world.clock())


@pytest.mark.parametrize(("side", "name"), WHO)
def test_a_room_may_be_cleared_before_any_instruction_of_anybody(side: str, name: str) -> None:
    at = struck = 0
    while True:
        with World() as world:
            to_phase(world, "WaitingForInput")
            stroke = Stroke(world, side, name, at)
            world.run(60)
            if stroke.count <= at:
                break
            until_verdict(world, 1, "prefill", "decode0")
            succeeds(world, 2)
            world.settle()
        struck += 1
        at += 1 + at // 10  # each of the first, and some of the many that follow
    assert struck > 5


def test_turns_overlap_and_rooms_succeed() -> None:
    with World(preempted=10) as world:
        for room in range(20):
            succeeds(world, room)
        assert world.preempt is not None
        assert world.preempt.overlaps > 100
        world.settle()
