"""What prefill has forgotten, for want of a place or with its listener, makes no answer wrong and
holds nothing for ever."""

from __future__ import annotations

import pytest

from pdrt.actors import past
from pdrt.actors.prefill_listener import PrefillListener
from pdrt.mail.mailbox import Address
from pdrt.protocol.messages import Destination
from pdrt.protocol.states import KVPoll, Reason
from tests.actors.steps import moving, succeeds, until_state, until_verdict, verdict
from tests.actors.world import World


def listener_of(world: World) -> PrefillListener:
    listener = world.trees["prefill"].processes["listener"].actor
    assert isinstance(listener, PrefillListener)
    return listener


def forget_the_past(world: World) -> None:
    """As after as many rooms as the listener remembers."""
    listener = listener_of(world)
    listener._past.over.clear()
    failing = listener._failing
    for memory in (failing._rooms, failing._by_theirs, failing._unfenced):
        memory.clear()


def test_a_destination_that_waits_keeps_its_place_when_it_comes_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    succeeds(world, 0)
    monkeypatch.setattr(past, "MEMORY_MAX", 1)
    world.post.weather.repeat = 1.0  # every frame once more, up to 300 ms later
    world.receive(1)
    until_state(world, "decode0", 1, KVPoll.Transferring)
    world.run(400)
    assert verdict(world, "decode0", 1) is None
    world.send(1)
    until_verdict(world, 1, "prefill", "decode0")
    assert verdict(world, "prefill", 1) is verdict(world, "decode0", 1) is KVPoll.Success


def test_a_room_whose_end_is_forgotten_is_not_said_to_be_quiet() -> None:
    """Its writes are still under way when decode asks again; the law sees where they land."""
    with World(polls=100) as world:
        moving(world)
        world.post.weather.held_when_cut = 0.0
        world.post.cuts.add(frozenset(("prefill", "decode0")))
        world.abort("prefill", 1)
        world.abort("decode0", 1)
        world.run(20)
        forget_the_past(world)
        world.post.mend("prefill", "decode0")
        world.settle()


class Copies:
    """Of the destinations that reach prefill."""

    def __init__(self, world: World) -> None:
        self._world, self._listener = world, listener_of(world)
        self._seen: dict[int, tuple[Address, Destination]] = {}
        on_destination = self._listener._on_destination

        def see(sender: Address, destination: Destination, now_ns: int) -> None:
            self._seen[destination.room] = sender, destination
            on_destination(sender, destination, now_ns)

        self._listener._on_destination = see  # type: ignore[method-assign]

    def bring(self, room: int) -> None:
        self._listener.handle(*self._seen[room], self._world.clock())


@pytest.mark.parametrize("how", ["no place", "decode gave it up", "prefill gave it up"])
def test_a_destination_of_which_nothing_lands_is_given_to_no_room_that_comes_later(
    world: World, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A copy of it comes when its end is forgotten, and the router uses its id again."""
    succeeds(world, 0)
    copies = Copies(world)
    if how == "no place":
        monkeypatch.setattr(past, "MEMORY_MAX", 0)
    if how == "prefill gave it up":
        world.send(1)
        world.run(20)
        world.receive(1, pace_ms=100)
        world.run(90)  # prefill knows whose room it is
        world.abort("prefill", 1)
        world.post.weather.delay_ms = (50, 50)  # decode sends its destination before it hears that
    else:
        world.receive(1)
    world.until(lambda: 1 in copies._seen)
    if how == "decode gave it up":
        world.abort("decode0", 1)
    world.post.weather.delay_ms = (1, 3)
    world.until(lambda: world.job("decode0", 1).cleared)
    assert verdict(world, "decode0", 1) is KVPoll.Failed
    monkeypatch.setattr(past, "MEMORY_MAX", 16)
    world.run(20)
    forget_the_past(world)
    copies.bring(1)
    world.send(1, eager=True)
    world.run(200)
    assert verdict(world, "prefill", 1) is not KVPoll.Success
    world.abort("prefill", 1)
    world.settle()


def test_an_engine_that_starts_anew_waits_for_no_path_that_nobody_knows_of() -> None:
    """Prefill's worker maps decode's old region, and both listeners are new: none has heard of the
    other, since no request is open.  Until that path is gone no engine of decode can start."""
    with World(shm=True) as world:
        succeeds(world, 0)
        world.receive(1)
        until_state(world, "decode0", 1, KVPoll.Transferring)
        for name in ("prefill", "decode0"):
            world.trees[name].kill("listener")
        world.trees["decode0"].kill("engine")
        world.settle()
        assert world.trees["decode0"].forced == ["worker0"]
        succeeds(world, 2)


def test_a_path_is_kept_for_a_decode_that_comes_back_to_a_new_listener(world: World) -> None:
    succeeds(world, 0)
    world.both(1, mute=True)
    until_state(world, "prefill", 1, KVPoll.WaitingForInput)
    world.trees["prefill"].kill("listener")
    world.run(30)
    worker = world.trees["prefill"].processes["worker0"]
    path = worker.actor._paths._paths[world.trees["decode0"].instance]  # type: ignore[attr-defined]
    worker.actor._paths._mentioned_ns = 0  # type: ignore[attr-defined]
    world.run(1000)
    assert worker.actor._paths._paths[path.instance] is path  # type: ignore[attr-defined]
    world.engine("prefill").unmute(1)
    until_verdict(world, 1, "prefill", "decode0")
    assert world.job("prefill", 1).reason is Reason.NONE
