"""The world is worth something only if it sees faults: each mutant below breaks one rule of the
actors, and a law that the true code keeps must be broken by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from msgspec.structs import replace

from pdrt.actors.prefill_listener import PrefillListener
from pdrt.protocol.states import KVPoll
from tests.actors import schedule
from tests.actors.mutants import (
    everything_is_quiet,
    no_fence,
    one_destination_for_many_rooms,
    successes_are_forgotten,
    unmapped_is_quiet,
)
from tests.actors.steps import moving, succeeds, to_phase, until_verdict, verdict
from tests.actors.world import World

LANDED = "bytes landed in free"

Mutant = Callable[[pytest.MonkeyPatch], None]


@contextmanager
def holds_or_breaks(mutants: list[Mutant], breaks: str | None) -> Iterator[None]:
    """The laws hold, or one of them is broken with these words."""
    with pytest.MonkeyPatch.context() as patch:
        for mutate in mutants:
            mutate(patch)
        if breaks is None:
            yield
        else:
            with pytest.raises(AssertionError, match=breaks):
                yield


@pytest.mark.parametrize("mutants", [[], [everything_is_quiet], [no_fence]])
def test_an_aborted_room_whose_bytes_are_still_under_way(mutants: list[Mutant]) -> None:
    with World(polls=200) as world, holds_or_breaks(mutants, LANDED if mutants else None):
        moving(world)
        world.abort("decode0", 1)
        world.run(1000)
        world.settle()


@pytest.mark.parametrize(
    ("mutants", "breaks"),
    [
        ([], None),
        ([successes_are_forgotten], None),  # as a restart of the listener does
        ([successes_are_forgotten, one_destination_for_many_rooms], LANDED),
    ],
)
def test_a_destination_that_comes_again_when_its_id_is_used_again(
    mutants: list[Mutant], breaks: str | None
) -> None:
    with World() as world, holds_or_breaks(mutants, breaks):
        world.post.weather.repeat = 1.0
        for room in range(5):
            succeeds(world, room)
            world.send(room)  # and nobody on decode waits for it
            world.run(400)
            assert world.engine("prefill").job(room).half.poll() is KVPoll.Bootstrapping
            world.abort("prefill", room)
        world.settle()


@pytest.mark.parametrize(
    ("mutants", "breaks"), [([], None), ([one_destination_for_many_rooms], LANDED)]
)
def test_a_destination_that_is_sent_again_to_a_new_listener_when_its_room_is_over(
    mutants: list[Mutant], breaks: str | None
) -> None:
    """Decode's room was open when it left, since `Landed` was still on its way."""
    with World() as world, holds_or_breaks(mutants, breaks):
        succeeds(world, 1)
        destination = world.job("decode0", 1).half._destinations[0]  # type: ignore[union-attr]
        world.run(100)
        world.trees["prefill"].kill("listener")
        succeeds(world, 2)  # so decode is known to the new one
        listener = world.trees["prefill"].processes["listener"].actor
        assert isinstance(listener, PrefillListener)
        world.send(1)
        world.run(10)
        sender = listener._decodes.get(destination.instance).address  # type: ignore[union-attr]
        for session in ("", "another#1", listener._session):
            assert verdict(world, "prefill", 1) is None
            again = replace(destination, session=session)
            listener.handle(sender, again, world.clock())
            world.run(20)
        until_verdict(world, 1, "prefill")
        assert verdict(world, "prefill", 1) is KVPoll.Failed
        world.settle()


@pytest.mark.parametrize(("mutants", "breaks"), [([], None), ([unmapped_is_quiet], LANDED)])
def test_a_worker_over_shm_that_is_restarted_while_decodes_abort_is_lost(
    mutants: list[Mutant], breaks: str | None
) -> None:
    """Its successor maps the region again and writes to the old destination."""
    with World(shm=True) as world, holds_or_breaks(mutants, breaks):
        to_phase(world, "WaitingForInput")
        world.post.weather.held_when_cut = 0.0
        world.post.cuts.add(frozenset(("prefill", "decode0")))
        world.trees["prefill"].kill("worker0", again_ms=100)
        world.abort("decode0", 1)
        world.run(150)
        world.engine("prefill").unmute(1)
        world.run(300)
        world.settle()
        assert world.trees["decode0"].forced in ([], ["worker0"])


@pytest.mark.parametrize(
    ("mutant", "seeds"), [(everything_is_quiet, range(40)), (no_fence, range(40))]
)
def test_chaos_finds_it(mutant: Mutant, seeds: range) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        settings = map(schedule.setting, seeds)
        lines = (schedule.failure(setting, schedule.schedule(setting)) for setting in settings)
        assert LANDED in next(line for line in lines if line is not None)
