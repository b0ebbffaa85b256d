"""The real supervisor decides what the model of it decides.

The traces in `traces/` are for machines without spin; `python -m stress.models.replay_tree
--record` writes them anew, and without --record it replays hundreds more.
"""

from __future__ import annotations

from collections import Counter

import pytest

from pdrt.child import ChildProcess
from pdrt.children import Child
from pdrt.supervision import Phase
from pdrt.supervisor import Supervisor
from stress.models import check
from stress.models.replay_tree import (
    RECORDED,
    WORLDS,
    Told,
    parse,
    recorded,
    replay,
    simulate,
)
from stress.models.traces import Diverged
from tests.stress.damaged import DAMAGED, refuses

needs_spin = pytest.mark.skipif(bool(check.missing()), reason=check.missing())


def trace(world: str, seed: int) -> list[Told]:
    return parse(recorded(world, seed).read_text())


def test_the_supervisor_decides_what_the_model_did():
    counts: Counter[str] = Counter()
    for world, seed in RECORDED:
        counts += replay(world, trace(world, seed))
    told = "begun waits risen killed quarantined burying buried heard sticks".split()
    assert all(counts[what] for what in told)


class Tireless(Supervisor):
    """Restarts without a limit."""

    def _restart_or_escalate(self, child: Child) -> None:
        self._enter(child, Phase.BACKOFF, 0)


class Twin(Supervisor):
    """Takes what survives SIGKILL for dead."""

    def _quarantine(self, child: Child) -> None:
        self._enter(child, Phase.BACKOFF, 0)


class Lonely(Supervisor):
    """Buries a process, whatever it left behind."""

    def _on_exit(self, child: Child) -> None:
        super()._on_exit(child)
        assert child.process is not None
        self._bury(child, child.process)


class Sparing(Supervisor):
    """Promotes nobody."""

    def _promote(self, standby: Child, child: Child) -> None:
        self._adopt(child, child.launch(), 1.0, "launched")


class Spent(Supervisor):
    """Thinks that a standby is still there when it was promoted."""

    def _promote(self, standby: Child, child: Child) -> None:
        process = standby.process
        super()._promote(standby, child)
        standby.process, standby.phase = process, Phase.UP


class Harsh(Supervisor):
    """One that was ready for less than a beat has failed to start."""

    def _rise(self, child: Child) -> None:
        assert child.process is not None
        if child.process.exit_code is None:
            super()._rise(child)


class Calm(Supervisor):
    """Kills nobody for being silent."""

    def _kill(self, child: Child, blame: str) -> None:
        pass


class Meek(Supervisor):
    """A death is nobody's business."""

    def _bury(self, child: Child, process: ChildProcess) -> None:
        pass


MUTANTS = [Tireless, Twin, Lonely, Sparing, Spent, Harsh, Calm, Meek]


def diverges(world: str, lines: list[Told], mutant: type[Supervisor] = Supervisor) -> bool:
    try:
        replay(world, lines, mutant)
    except Diverged:
        return True
    return False


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_supervisor_that_lacks_a_guard_does_not(mutant):
    assert any(diverges(world, trace(world, seed), mutant) for world, seed in RECORDED)


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_line_that_is_not_understood_is_not_passed_over(damaged):
    refuses(parse, recorded(*RECORDED[0]), damaged)


@needs_spin
@pytest.mark.parametrize(("world", "seed"), RECORDED)
def test_the_recorded_traces_are_what_spin_tells(world, seed):
    assert simulate(world, seed) == recorded(world, seed).read_text(), (
        "the model was changed: python -m stress.models.replay_tree --record"
    )


@needs_spin
@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_the_supervisor_decides_what_hundreds_of_simulations_do(world):
    for seed in range(300, 600):
        replay(world, parse(simulate(world, seed)))
