"""The real table does what the model of the room word does, swap by swap.

The traces in `traces/` are for machines without spin; `python -m stress.models.replay --record`
writes them anew, and without --record it replays hundreds more.
"""

from __future__ import annotations

from typing import Any

import pytest

from pdrt.process_rows import Owner
from pdrt.protocol.states import Event, KVPoll, Reason
from pdrt.shm_status import QUIET_BIT
from stress.models import check
from stress.models.replay import (
    RECORDED,
    WORLDS,
    Told,
    WatchedTable,
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


@pytest.mark.parametrize(("world", "seed"), RECORDED)
def test_the_table_does_what_the_model_did(world, seed):
    assert replay(trace(world, seed)).total() > 50


def test_the_recorded_traces_have_every_operation_go_every_way():
    counts = sum((replay(trace(*recorded)) for recorded in RECORDED), start=replay([]))
    moves = ("peer_known", "posted", "landed", "fault")
    assert all(counts[move, how] for move in moves for how in ("refused", "swapped"))
    assert all(counts[name, "beaten"] for name in ("peer_known", "posted", "fault", "expire"))
    assert all(counts[name, "swapped"] for name in ("set_quiet", "clear", "discard", "expire"))
    assert counts["posted", "kept"]
    assert counts["reborn", "refused"]  # processes died, some between look and swap


def diverges(lines: list[Told], table_type: type[WatchedTable] = WatchedTable) -> bool:
    try:
        replay(lines, table_type)
    except Diverged:
        return True
    return False


class Blind(WatchedTable):
    def swap(self, at: int, old: int, new: int) -> int:
        self.really_store(at, new)
        return old


class Ageless(WatchedTable):
    """A handle fits whatever room is in the slot."""

    def move(self, slot: int, generation: int, event: Event, **how: Any) -> bool:
        present = self.really_load(self._slots) >> 32
        return super().move(slot, present, event, **how)


class Adopting(WatchedTable):
    def move(
        self, slot: int, generation: int, event: Event, *, owner: Owner | None = None, **how: Any
    ) -> bool:
        moving = self.state(slot, generation) is KVPoll.Transferring
        mine = None if moving else owner
        return super().move(slot, generation, event, owner=mine, **how)


class Hasty(WatchedTable):
    """Clears a room that has its verdict, quiet or not."""

    def clear(self, slot: int, generation: int) -> bool:
        self.set_quiet(slot, generation)
        return super().clear(slot, generation)


class GivingUp(WatchedTable):
    """Does not try again when it was beaten."""

    def swap(self, at: int, old: int, new: int) -> int:
        seen = super().swap(at, old, new)
        return seen if at != self._slots or seen == old else 0


class Fickle(WatchedTable):
    """A fault ends a room that has ended."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._steps[Event.FAULT][KVPoll.Success] = (KVPoll.Failed | QUIET_BIT, 0)


class QuietAtOnce(WatchedTable):
    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._steps[Event.FAULT][KVPoll.Transferring] = (KVPoll.Failed | QUIET_BIT, 0)


class Patient(WatchedTable):
    """No deadline ends a room."""

    def expire(self, slot: int, generation: int, word: int, now_ns: int) -> None:
        pass


class Reasonless(WatchedTable):
    def move(self, *where: Any, reason: Reason = Reason.NONE, **how: Any) -> bool:
        return super().move(*where, **how)


@pytest.mark.parametrize(
    "mutant",
    [Blind, Ageless, Adopting, Hasty, GivingUp, Fickle, QuietAtOnce, Patient, Reasonless],
)
def test_a_table_that_lacks_a_guard_does_not(mutant):
    assert any(diverges(trace(*recorded), mutant) for recorded in RECORDED)


@pytest.mark.parametrize(
    "lines",
    [
        "EV 1 peer_known 1 0 0 looking 0",
        "EV 0 claim 1 0 6 looking 0\nEV 0 claim 1 0 6 beaten 0",
        "EV 0 claim 1 0 6 looking 0\nEV 0 claim 1 0 6 swapped 902",
        "EV 1 set_quiet 1 0 0 swapped 0",
        "EV 0 claim 1 0 6 looking 0\nEV 0 claim 1 0 6 swapped 901\nEV 1 clear 1 0 0 looking 901",
    ],
)
def test_a_trace_that_cannot_be_is_not_replayed(lines):
    with pytest.raises(Diverged):
        replay(parse(lines))


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_line_that_is_not_understood_is_not_passed_over(damaged):
    refuses(parse, recorded(*RECORDED[0]), damaged)


@needs_spin
@pytest.mark.parametrize(("world", "seed"), RECORDED)
def test_the_recorded_traces_are_what_spin_tells(world, seed):
    assert simulate(world, seed) == recorded(world, seed).read_text(), (
        "the model was changed: python -m stress.models.replay --record"
    )


@needs_spin
@pytest.mark.parametrize(
    ("world", "mutant"),
    [
        ("late", "BLIND_STORE"),
        ("driven", "NO_GENERATION"),
        ("driven", "ADOPT"),
        ("driven", "REUSE_ON_VERDICT"),
    ],
)
def test_the_table_does_not_what_a_mutant_of_the_model_does(world, mutant):
    assert any(diverges(parse(simulate(world, seed, mutant=mutant))) for seed in range(1, 20))


@needs_spin
@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_the_table_does_what_hundreds_of_simulations_do(world):
    for seed in range(100, 300):
        replay(parse(simulate(world, seed)))
