"""The world is worth something only if it sees faults: each mutant below breaks one rule of the
actors, and a law that the true code keeps must be broken by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from pdrt.actors import prefill_failing
from pdrt.actors.janitor import Janitor
from pdrt.actors.past import Past
from pdrt.actors.prefill_listener import PrefillListener
from pdrt.actors.taken import Taken
from pdrt.actors.transfer import TransferWorker
from pdrt.protocol.peers import TRANSPORT_CODES
from pdrt.protocol.states import KVPoll, Role
from pdrt.shm_status import OPENER, PATH, peer_of, transport_of
from tests.actors import schedule
from tests.actors.test_world import moving, succeeds, to_phase, until_verdict, verdict
from tests.actors.world import World

LANDED = "bytes landed in free"


def _everything_is_quiet(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefill_failing.Failing, "_is_quiet", lambda self, room: True)


def _no_fence(patch: pytest.MonkeyPatch) -> None:
    def quieten(self: TransferWorker, room: Any) -> bool:
        for posted, _ in room.inflight:
            room.path.transport.release(posted)
        room.inflight = []
        self._settle(room, fenced=True)
        return True

    patch.setattr(TransferWorker, "_start_fence", lambda self, room: None)
    patch.setattr(TransferWorker, "_quieten", quieten)


def _successes_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Past, "succeed", lambda self, room, moved_bytes: None)


def _one_destination_for_many_rooms(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Taken, "take", lambda self, destination, ours: True)


def _unmapped_is_quiet(patch: pytest.MonkeyPatch) -> None:
    """Over shm, without asking whether our own worker is dead: somebody may map it again."""
    settle = Janitor._settle
    shm = TRANSPORT_CODES.index("shm")

    def too_soon(self: Janitor, row: Any, slot: int, generation: int, *rest: Any) -> None:
        peer, rank = peer_of(int(row[PATH // 8])), int(row[OPENER // 8]) >> 40
        owner = int(row[0]) >> 21 & 0x7FF
        by_shm = self._table.role is Role.DECODE and transport_of(int(row[PATH // 8])) == shm
        if by_shm and not self._mapped(peer, rank, owner):
            self._table.set_quiet(slot, generation)
        settle(self, row, slot, generation, *rest)

    patch.setattr(Janitor, "_settle", too_soon)


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


@pytest.mark.parametrize("mutants", [[], [_everything_is_quiet], [_no_fence]])
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
        ([_successes_are_forgotten], None),  # as a restart of the listener does
        ([_successes_are_forgotten, _one_destination_for_many_rooms], LANDED),
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
    ("mutants", "breaks"), [([], None), ([_one_destination_for_many_rooms], LANDED)]
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


@pytest.mark.parametrize(("mutants", "breaks"), [([], None), ([_unmapped_is_quiet], LANDED)])
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
    ("mutant", "seeds"), [(_everything_is_quiet, range(40)), (_no_fence, range(40))]
)
def test_chaos_finds_it(mutant: Mutant, seeds: range) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        settings = map(schedule.setting, seeds)
        lines = (schedule.failure(setting, schedule.schedule(setting)) for setting in settings)
        assert LANDED in next(line for line in lines if line is not None)
