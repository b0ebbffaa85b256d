"""The fifth fault: health says 200 over a wedge."""

from __future__ import annotations

import pytest

from pdrt.actors.boot import FIRST_ENGINE_ROW, FIRST_WORKER_ROW, LISTENER_ROW
from pdrt.clock import MILLISECOND_NS, SECOND_NS
from pdrt.health import Health
from pdrt.process_rows import Owner
from pdrt.protocol.states import KVPoll
from pdrt.shm_status import StatusTable
from tests.actors.steps import succeeds
from tests.actors.test_mutants import Mutant, holds_or_breaks
from tests.actors.world import TIMEOUTS, World
from tests.origin.probes import Probe


def _health_is_that_the_process_exists(patch: pytest.MonkeyPatch) -> None:
    def ready(self: Health) -> list[str]:
        return [c.name for c in self._children() if c.pid is None]

    patch.setattr(Health, "ready", ready)


def _health_does_not_look_at_rooms(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Health, "late_rooms", lambda self, now_ns: 0)


def _is_wrong_within(probe: Probe, within_ms: int) -> None:
    """Ready and health turn 503 within that time, and live does not."""
    assert probe.statuses() == (200, 200, 200), "it was well before"
    world, end_ms = probe.world, probe.world.now_ms + within_ms
    while probe.statuses() == (200, 200, 200):
        assert world.now_ms < end_ms, f"still 200 after {within_ms} ms"
        world.run(50)
    assert probe.statuses() == (200, 503, 503)


@pytest.mark.usefixtures("real_loop")
@pytest.mark.parametrize(
    ("mutants", "breaks"), [([], None), ([_health_is_that_the_process_exists], "still 200")]
)
@pytest.mark.parametrize("tree", ["prefill", "decode0"])
@pytest.mark.parametrize("name", ["listener", "worker0", "engine"])
def test_health_is_not_200_while_an_actor_hangs(
    tree: str, name: str, mutants: list[Mutant], breaks: str | None
) -> None:
    with holds_or_breaks(mutants, breaks), World() as world:
        world.trees[tree].shape.hang_s = 1000.0  # and nobody kills it
        succeeds(world, 0)
        world.run(100)
        world.trees[tree].freeze(name)
        probe = Probe(world, tree)
        _is_wrong_within(probe, 1000 + 150)
        world.trees[tree].thaw(name)
        world.run(50)
        assert probe.statuses() == (200, 200, 200), "and it is well again"


@pytest.mark.usefixtures("real_loop")
@pytest.mark.parametrize("name", ["listener", "worker0", "engine"])
def test_health_is_not_200_while_an_actor_is_dead(name: str) -> None:
    with World() as world:
        succeeds(world, 0)
        probe = Probe(world, "decode0")
        assert probe.statuses() == (200, 200, 200)
        world.trees["decode0"].kill(name, again_ms=100)
        assert probe.statuses() == (200, 503, 503)
        world.run(200)
        assert probe.statuses() == (200, 200, 200)


@pytest.mark.usefixtures("real_loop")
@pytest.mark.parametrize(
    ("mutants", "breaks"), [([], None), ([_health_does_not_look_at_rooms], "still 200")]
)
def test_health_is_not_200_while_a_room_is_open_past_its_deadline(
    mutants: list[Mutant], breaks: str | None
) -> None:
    """Nobody enforces it: the engine, its only reader, stands, and so does the janitor."""
    with holds_or_breaks(mutants, breaks), World() as world:
        tree = world.trees["prefill"]
        handle = tree.table.open(5, 0, now_ns=world.clock())
        world.clock.now_ns += int(TIMEOUTS.bootstrap_s * SECOND_NS)
        for row in (LISTENER_ROW, FIRST_WORKER_ROW, FIRST_ENGINE_ROW):
            StatusTable(tree._table_fd, Owner(row, 1)).beat(world.clock())
        probe = Probe(world, "prefill")
        assert probe.statuses() == (200, 200, 200), "it was well before"
        world.clock.now_ns += 300 * MILLISECOND_NS
        assert probe.statuses() == (200, 503, 503), "still 200"
        assert tree.table.poll(*handle[1:], world.clock()) is KVPoll.Failed
        assert probe.statuses() == (200, 200, 200)


def test_a_supervisor_whose_loop_stands_is_not_even_live() -> None:
    with World() as world:
        probe = Probe(world, "prefill")
        for row in (LISTENER_ROW, FIRST_WORKER_ROW, FIRST_ENGINE_ROW):
            StatusTable(world.trees["prefill"]._table_fd, Owner(row, 1)).beat(world.clock())
        world.clock.now_ns += 2100 * MILLISECOND_NS
        assert probe.statuses(turned=False) == (503, 503, 503)
