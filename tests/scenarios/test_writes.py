"""Scenarios of writes that fail, on the way or before the first byte.

F007 F018.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from pdrt.errors import QueueFull
from pdrt.protocol.states import KVPoll, Reason
from pdrt.transports.base import TransportError
from pdrt.transports.fake import FakeTransport
from tests.actors.steps import succeeds, until_verdict, verdict
from tests.actors.world import World

Break = Callable[[World, pytest.MonkeyPatch], None]


def _writes_raise(error: Exception) -> Break:
    """Every fourth write is refused between "taken" and the first byte."""

    def apply(world: World, patch: pytest.MonkeyPatch) -> None:
        write, calls = FakeTransport.write, itertools.count(1)

        def failing(self: FakeTransport, *args: object) -> int:
            if next(calls) % 4 == 0:
                raise error
            return write(self, *args)  # type: ignore[arg-type]

        patch.setattr(FakeTransport, "write", failing)

    return apply


def _writes_fail(world: World, patch: pytest.MonkeyPatch) -> None:
    """Five writes end in an error, after half of their bytes."""
    world.fabric.fail_next(world.trees["decode0"].processes["worker0"].agent, 5)


BREAKS = [
    pytest.param(_writes_raise(TransportError("the source is gone")), id="refused"),
    pytest.param(_writes_raise(QueueFull("no handle is free")), id="queue-full"),
    pytest.param(_writes_fail, id="failed"),
]


@pytest.mark.parametrize("shm", [False, True], ids=["nixl-like", "shm-like"])
@pytest.mark.parametrize("break_writes", BREAKS)
def test_a_write_that_fails_ends_its_room_on_both_sides_and_no_other(
    break_writes: Break, shm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with World(shm=shm) as world:
        succeeds(world, 0)
        break_writes(world, monkeypatch)
        rooms = range(1, 21)
        for room in rooms:
            world.both(room, chunks=1)
        for room in rooms:
            until_verdict(world, room, "prefill", "decode0", within_ms=1000)
        failed = [room for room in rooms if verdict(world, "decode0", room) is KVPoll.Failed]
        assert len(failed) == 5
        for room in rooms:
            assert verdict(world, "prefill", room) is verdict(world, "decode0", room)
        reasons = {
            world.job(name, room).reason for name in ("prefill", "decode0") for room in failed
        }
        assert reasons == {Reason.TRANSPORT_FAILED}
        assert world.trees["prefill"].incarnations["worker0"] == 1
        monkeypatch.undo()
        world.settle()
        succeeds(world, 30)


@pytest.mark.parametrize("shm", [False, True], ids=["nixl-like", "shm-like"])
def test_what_nobody_foresaw_in_a_write_ends_its_room_at_its_deadline_at_the_latest(
    shm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's loop drops the message that raised; the room has a deadline, as every room."""
    with World(shm=shm) as world:
        monkeypatch.setattr(world.trees["prefill"].processes["worker0"], "turn", _guarded(world))
        succeeds(world, 0)
        _writes_raise(ZeroDivisionError("a bug"))(world, monkeypatch)
        for room in range(1, 9):
            world.both(room, chunks=1)
        for room in range(1, 9):
            until_verdict(world, room, "prefill", "decode0", within_ms=2500)
        verdicts = [verdict(world, "decode0", room) for room in range(1, 9)]
        assert verdicts.count(KVPoll.Failed) == 2
        world.settle()


def _guarded(world: World) -> Callable[[int], None]:
    """A turn as `actors.base.run` has it: a message that raises is dropped."""
    process = world.trees["prefill"].processes["worker0"]

    def turn(now_ns: int) -> None:
        for sender, message in process.box.receive():
            try:
                process.actor.handle(sender, message, now_ns)
            except ZeroDivisionError:
                continue
        process.actor.tick(now_ns)
        process.box.flush()

    return turn
