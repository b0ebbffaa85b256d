"""Peers that come back, come late, or come in crowds: who they are is an instance and an epoch."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest

from pdrt.actors.decodes import is_older
from pdrt.actors.prefills import HELLO_MAX_S
from pdrt.process_rows import INCARNATION_MASK
from pdrt.protocol import codec
from pdrt.protocol.counters import Counter
from pdrt.protocol.messages import AnyMessage, Hello, HelloReply, Introduction
from pdrt.protocol.states import KVPoll, Reason
from tests.actors.steps import moving, succeeds, until_verdict, verdict
from tests.actors.tree import Tree
from tests.actors.world import TIMEOUTS, World


class Overheard:
    """Every message between trees: when, by whom, what."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heard: list[tuple[int, str, AnyMessage]] = []
        send = world.post.send

        def listen(source: Any, endpoint: str, link: str, target: Any, data: bytes) -> None:
            if endpoint.startswith("tcp://"):
                messages = codec.decode(data, from_peer=True)
                self.heard += [(world.now_ms, source.tree, message) for message in messages]
            send(source, endpoint, link, target, data)

        monkeypatch.setattr(world.post, "send", listen)

    def last(self, kind: type[Any]) -> Any:
        return next(m for _, _, m in reversed(self.heard) if isinstance(m, kind))

    def times_ms(self, kind: type[Any], tree: str) -> list[int]:
        return [ms for ms, name, m in self.heard if name == tree and isinstance(m, kind)]


@pytest.fixture
def overheard(world: World, monkeypatch: pytest.MonkeyPatch) -> Overheard:
    return Overheard(world, monkeypatch)


def tell_prefill(world: World, message: AnyMessage) -> None:
    """As if it had been under way all the time."""
    listener = world.trees["prefill"].processes["listener"]
    listener.actor.handle(("control", b"late"), message, world.clock())


def resyncs(world: World) -> int:
    return sum(int(tree.table.counters[:, Counter.RESYNCS].sum()) for tree in world.trees.values())


def goes_on(world: World, room: int) -> None:
    until_verdict(world, room, "prefill", "decode0")
    assert verdict(world, "prefill", room) is verdict(world, "decode0", room) is KVPoll.Success


def test_a_dead_peer_does_not_come_back_by_a_late_introduction(
    world: World, overheard: Overheard
) -> None:
    succeeds(world, 0)
    late = overheard.last(Introduction)
    world.replace("decode0")
    moving(world, 1)
    tell_prefill(world, late)
    goes_on(world, 1)


def test_a_peer_whose_address_another_has_is_told_so(world: World, overheard: Overheard) -> None:
    succeeds(world, 0)
    hello = overheard.last(Hello)
    dead = world.trees["decode0"]
    world.replace("decode0")
    succeeds(world, 1)
    assert dead.instance == hello.instance
    source = world.trees["decode0"].processes["listener"].box.identity
    listener = world.trees["prefill"].processes["listener"]
    listener.actor.handle(("control", source), hello, world.clock())
    world.run(10)
    reply = overheard.last(HelloReply)
    assert reply.refusal == Reason.PEER_REFUSED
    assert "address" in reply.detail


@pytest.mark.parametrize("restarted", ["listener", "worker0"])
def test_an_introduction_that_another_overtook_changes_nothing(
    world: World, overheard: Overheard, restarted: str
) -> None:
    succeeds(world, 0)
    late = overheard.last(Introduction)
    world.trees["decode0"].kill(restarted)
    world.run(300)
    succeeds(world, 1)
    latest = overheard.last(Introduction)
    assert (latest.epoch, latest.serial) != (late.epoch, late.serial)
    moving(world, 2)
    before = resyncs(world)
    tell_prefill(world, late)
    goes_on(world, 2)
    world.run(300)
    assert resyncs(world) == before


@pytest.mark.parametrize("old", [1, 2, 1024, INCARNATION_MASK - 1, INCARNATION_MASK])
@pytest.mark.parametrize("by", [1, 2, 100, 1023])
def test_epochs_are_told_apart_across_their_end(old: int, by: int) -> None:
    new = (old - 1 + by) % INCARNATION_MASK + 1
    assert is_older(old, new)
    assert not is_older(new, old)
    assert not is_older(new, new)


def test_a_prefill_that_is_gone_is_asked_ever_more_seldom_and_not_in_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"decode{number}" for number in range(4)]
    with World(decodes=len(names)) as world:
        overheard = Overheard(world, monkeypatch)
        world.post.cuts |= {frozenset(("prefill", name)) for name in names}
        for room, name in enumerate(names):
            world.receive(room, name)
        world.run(15_000, step_ms=10)
        tick_ms, longest_ms = 40, HELLO_MAX_S * 1000
        moments = {name: overheard.times_ms(Hello, name) for name in names}
        for times in moments.values():
            pauses = [b - a for a, b in itertools.pairwise(times)]
            assert pauses[0] <= TIMEOUTS.resend_s * 1000 + tick_ms
            assert all(pause <= longest_ms + tick_ms for pause in pauses)
            assert min(pauses[6:]) >= longest_ms * 0.75
            assert len(set(pauses[6:])) > 3  # chance
        alike = [
            ms
            for ms in moments["decode0"]
            if all(any(abs(ms - other) <= tick_ms for other in moments[n]) for n in names)
        ]
        assert len(alike) < len(moments["decode0"]) / 2
        for pair in list(world.post.cuts):
            world.post.mend(*pair)
        succeeds(world, 9)
        world.settle()


def test_a_decode_that_is_started_again_and_again_leaves_nothing_in_prefill(world: World) -> None:
    """Also see tests/faults, where the sockets are real."""
    for room in range(30):
        succeeds(world, room)
        world.replace("decode0")
    processes = world.trees["prefill"].processes
    listener: Any = processes["listener"].actor
    worker: Any = processes["worker0"].actor
    succeeds(world, 100)
    world.until(lambda: len(worker._paths._paths) <= 1)
    assert len(listener._decodes._known) == 1
    assert worker._paths.leaving_count == 0
    assert len(processes["worker0"].box.links) <= 2  # the listener's and the living decode's


def test_a_prefill_that_is_started_again_and_again_leaves_nothing_in_decode(world: World) -> None:
    process = world.trees["decode0"].processes["listener"]
    listener: Any = process.actor

    def met(prefill: Tree) -> bool:
        return any(p.ready and p.instance == prefill.instance for p in known.values())

    known = listener._prefills._known
    for room in range(30):
        succeeds(world, room)
        world.until(partial(met, world.replace("prefill")))
    succeeds(world, 100)
    assert len(listener._prefills._known) == len(listener._prefills._by_link) == 1
    assert len(process.box.links) <= 2  # the worker's and the living prefill's
