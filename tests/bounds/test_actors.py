"""Every table and memory of an actor at its bound, in the world of processes in virtual time: what
is refused or forgotten is counted, and once there is a place everything works again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from pdrt.actors import (
    decode_failing,
    decodes,
    news,
    past,
    prefill_failing,
    prefills,
    taken,
)
from pdrt.actors.decode_listener import DecodeListener
from pdrt.actors.decodes import BEAT_MIN_NS
from pdrt.actors.prefill_listener import PrefillListener
from pdrt.errors import NoDescriptors
from pdrt.protocol.counters import Counter
from pdrt.protocol.messages import Ended, Heartbeat, Introduced, Introduction, Resync
from pdrt.protocol.states import KVPoll, Reason
from pdrt.transports.base import TransferState
from tests.actors.engines import Plan
from tests.actors.steps import succeeds, until_state, until_verdict, verdict
from tests.actors.world import World

ANOTHER = 50  # ids of the rooms that come after


def counted(world: World, tree: str, counter: Counter) -> int:
    return int(world.trees[tree].table.counters.sum(axis=0)[counter])


def prefill_listener(world: World) -> PrefillListener:
    actor = world.trees["prefill"].processes["listener"].actor
    assert isinstance(actor, PrefillListener)
    return actor


def decode_listener(world: World) -> DecodeListener:
    actor = world.trees["decode0"].processes["listener"].actor
    assert isinstance(actor, DecodeListener)
    return actor


def posted(world: World, tree: str) -> list[Any]:
    """What its listener has posted since its last turn."""
    box = world.trees[tree].processes["listener"].box
    return [message for messages in box._outgoing.values() for message in messages]


# --- peers ---------------------------------------------------------------------------------------


def test_a_decode_beyond_the_bound_is_refused_by_name_until_another_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decodes, "DECODES_MAX", 2)
    with World(decodes=3) as world:
        for i in range(2):
            world.both(i, f"decode{i}")
            until_verdict(world, i, "prefill", f"decode{i}")
        world.receive(2, "decode2")
        until_verdict(world, 2, "decode2")
        job = world.job("decode2", 2)
        assert job.reason is Reason.PEER_REFUSED
        assert "2 decodes known" in job.detail
        world.both(3, "decode0")
        until_verdict(world, 3, "prefill", "decode0")
        assert verdict(world, "decode0", 3) is KVPoll.Success
        world.trees["decode1"].stop()
        world.run(4000, step_ms=10)  # it is lost, and the refusal is asked about again
        world.both(ANOTHER, "decode2")
        until_verdict(world, ANOTHER, "prefill", "decode2")
        assert verdict(world, "decode2", ANOTHER) is KVPoll.Success


def test_who_introduces_itself_without_a_hello_finds_no_place_either(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    succeeds(world, 0)
    monkeypatch.setattr(decodes, "DECODES_MAX", 1)
    listener = prefill_listener(world)
    known = listener._decodes._known
    agents = next(iter(known.values())).introduction.agents
    for number in range(100):
        foreign = Introduction(f"x{number}", 1, f"x:{number}", "host", agents, 1)
        listener.handle(("control", b"x"), foreign, world.clock())
    assert len(known) == 1
    assert sum(isinstance(message, Resync) for message in posted(world, "prefill")) == 100
    succeeds(world, ANOTHER)


def test_a_decode_that_offers_too_much_is_refused_and_not_remembered(world: World) -> None:
    succeeds(world, 0)
    listener = prefill_listener(world)
    known = listener._decodes._known
    agent = next(iter(known.values())).introduction.agents[0]
    for offered, remembered in (
        (decodes.OFFERS_BYTES_MAX, True),
        (decodes.OFFERS_BYTES_MAX + 1, False),
    ):
        offers = {"a": bytes(offered - 1), "b": b"x"}
        name = f"x{offered}"
        foreign = Introduction(name, 1, f"{name}:1", "host", [replace(agent, offers=offers)], 1)
        listener.handle(("control", b"x"), foreign, world.clock())
        assert (name in known) == remembered
    refused = [each for each in posted(world, "prefill") if isinstance(each, Introduced)]
    assert [(each.instance, each.transport) for each in refused] == [(name, "")]
    assert "offers more than" in refused[0].detail
    succeeds(world, ANOTHER)


def test_a_prefill_beyond_the_bound_is_refused_by_name_until_another_is_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefills, "PREFILLS_MAX", 1)
    monkeypatch.setattr(prefills, "UNUSED_S", 1.0)
    world.engine("decode0").plan(Plan(1, peer="nobody:1"))
    world.run(20)
    world.receive(2)
    until_verdict(world, 2, "decode0", within_ms=100)
    assert world.job("decode0", 2).reason is Reason.PEER_REFUSED
    assert "1 prefills known" in world.job("decode0", 2).detail
    until_verdict(world, 1, "decode0")
    world.run(1100, step_ms=10)
    succeeds(world, ANOTHER)


def test_a_link_without_a_descriptor_is_a_refusal_and_works_when_there_is_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object, **__: object) -> None:
        raise NoDescriptors("no descriptor is left: Too many open files")

    box = world.trees["decode0"].processes["listener"].box
    with monkeypatch.context() as patch:
        patch.setattr(box, "link", none_left)
        world.receive(1)
        until_verdict(world, 1, "decode0", within_ms=100)
        assert world.job("decode0", 1).reason is Reason.PEER_REFUSED
        assert "no descriptor is left" in world.job("decode0", 1).detail
    box = world.trees["prefill"].processes["worker0"].box
    with monkeypatch.context() as patch:
        patch.setattr(prefills, "DOUBTED_S", 0.3)
        patch.setattr(box, "link", none_left)
        world.both(2)
        until_verdict(world, 2, "decode0")
        assert world.job("decode0", 2).reason is Reason.TRANSPORT_FAILED
        assert "no descriptor is left" in world.job("decode0", 2).detail
    world.run(2500, step_ms=10)  # a refusal is remembered for two seconds
    succeeds(world, ANOTHER)


# --- what prefill remembers ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "value"), [("MEMORY_MAX", 3), ("EARLY_BYTES_MAX", 3 * 4 * 4)], ids=["count", "bytes"]
)
def test_early_destinations_beyond_the_bound_are_refused_and_the_others_served(
    world: World, monkeypatch: pytest.MonkeyPatch, bound: str, value: int
) -> None:
    monkeypatch.setattr(past, bound, value)
    succeeds(world, 0)
    for room in (1, 2, 3):
        world.receive(room)
        world.run(100)
    world.receive(4)
    until_verdict(world, 4, "decode0", within_ms=200)
    assert world.job("decode0", 4).reason is Reason.PEER_REFUSED
    for room in (1, 2, 3):
        world.send(room)
        until_verdict(world, room, "prefill", "decode0")
        assert verdict(world, "decode0", room) is KVPoll.Success
    for room in (ANOTHER, ANOTHER + 1, ANOTHER + 2):
        world.receive(room)
    world.run(100)
    for room in (ANOTHER, ANOTHER + 1, ANOTHER + 2):
        world.send(room)
        until_verdict(world, room, "decode0")
        assert verdict(world, "decode0", room) is KVPoll.Success


def test_a_destination_with_more_pages_than_the_pool_is_no_destination(world: World) -> None:
    succeeds(world, 0)
    decode = next(iter(prefill_listener(world)._decodes._known.values()))
    world.receive(1)
    until_state(world, "decode0", 1, KVPoll.Transferring)
    world.run(20)
    destination = prefill_listener(world)._past.early[1, 0]
    pool = world.trees["decode0"].shape.pages_count
    for count, reason in ((pool, Reason.NONE), (pool + 1, Reason.BAD_DESTINATION)):
        longer = replace(destination, pages=np.zeros(count, dtype="<i4").tobytes())
        assert decode.refusal(longer) is reason
    world.abort("decode0", 1)


Fill = Callable[[World, int], None]


def over(world: World, room: int) -> None:
    succeeds(world, room)


def unclaimed(world: World, room: int) -> None:
    world.send(room)
    world.run(30)
    world.abort("prefill", room)
    world.run(30)


def asked(world: World, room: int) -> None:
    world.receive(room, pace_ms=1500)
    world.run(100)


def given_up(world: World, room: int) -> None:
    world.receive(room)
    until_state(world, "decode0", room, KVPoll.Transferring)
    world.abort("decode0", room)
    world.run(30)


@pytest.mark.parametrize("fill", [over, unclaimed, asked, given_up])
def test_a_full_memory_forgets_the_oldest_says_so_and_costs_no_later_room(
    world: World, monkeypatch: pytest.MonkeyPatch, fill: Fill
) -> None:
    succeeds(world, 0)
    monkeypatch.setattr(past, "MEMORY_MAX", 4)
    assert counted(world, "prefill", Counter.FORGOTTEN) == 0
    for room in range(1, 9):
        fill(world, room)
    assert counted(world, "prefill", Counter.FORGOTTEN) >= 4
    kept = prefill_listener(world)._past
    for memory in (kept.over, kept.unclaimed, kept.asked, kept.early, kept._given_up):
        assert len(memory) <= 4
    succeeds(world, ANOTHER)


def test_instances_that_were_replaced_are_forgotten_beyond_the_bound(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decodes, "BURIED_MAX", 2)
    succeeds(world, 0)
    kept = prefill_listener(world)._decodes
    agents = next(iter(kept._known.values())).introduction.agents
    for number in range(6):
        moved = Introduction(f"x{number}", 1, "one place:1", "host", agents, 1)
        prefill_listener(world).handle(("control", b"x"), moved, world.clock())
    assert list(kept._buried) == ["x3", "x4"]
    assert counted(world, "prefill", Counter.FORGOTTEN) == 3
    succeeds(world, ANOTHER)


def test_slots_beyond_the_bound_are_forgotten_and_said_so(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taken, "SLOTS_MAX", 2)
    rooms = range(5)
    for room in rooms:
        world.both(room)
    for room in rooms:
        until_verdict(world, room, "prefill", "decode0")
        assert verdict(world, "decode0", room) is KVPoll.Success
    assert counted(world, "prefill", Counter.FORGOTTEN) > 0
    succeeds(world, ANOTHER)


# --- what waits for an acknowledgement -----------------------------------------------------------


def test_news_beyond_the_bound_are_forgotten_and_asked_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(news, "NEWS_MAX", 2)
    succeeds(world, 0)
    rooms = range(1, 6)
    for room in rooms:
        world.both(room, pace_ms=60)
    for room in rooms:
        until_state(world, "prefill", room, KVPoll.Transferring)
    world.post.weather.held_when_cut = 0.0
    world.post.cuts.add(frozenset(("prefill", "decode0")))
    for room in rooms:
        until_verdict(world, room, "prefill")
    assert counted(world, "prefill", Counter.FORGOTTEN) == 3
    world.post.mend("prefill", "decode0")
    for room in rooms:
        until_verdict(world, room, "decode0")
        assert verdict(world, "decode0", room) is KVPoll.Success
    succeeds(world, ANOTHER)


@pytest.mark.parametrize("side", ["prefill", "decode0"])
def test_failed_rooms_beyond_the_bound_are_told_once_and_end_all_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    module = prefill_failing if side == "prefill" else decode_failing
    monkeypatch.setattr(module, "FAILING_MAX", 2)
    succeeds(world, 0)
    rooms = range(1, 7)
    for room in rooms:
        world.both(room, mute=True)
    for room in rooms:
        until_state(world, "prefill", room, KVPoll.WaitingForInput)
    world.post.weather.held_when_cut = 0.0
    world.post.cuts.add(frozenset(("prefill", "decode0")))
    for room in rooms:
        world.abort(side, room)
    world.run(50)
    listener = prefill_listener(world) if side == "prefill" else decode_listener(world)
    assert len(listener._failing) <= 2
    assert counted(world, side, Counter.FORGOTTEN) >= 4
    world.run(100)
    world.post.mend("prefill", "decode0")
    for room in rooms:
        until_verdict(world, room, "prefill", "decode0")
    succeeds(world, ANOTHER)


# --- a worker's transfers ------------------------------------------------------------------------


def test_a_write_beyond_the_transports_bound_fails_its_room_and_no_later_one() -> None:
    with World(polls=50) as world:
        succeeds(world, 0)
        transport = world.trees["prefill"].processes["worker0"].transport
        assert transport is not None
        transport._operations._handles_max = 2
        for room in (1, 2, 3):
            world.both(room, chunks=1)
        for room in (1, 2, 3):
            until_verdict(world, room, "prefill", "decode0")
        verdicts = [verdict(world, "prefill", room) for room in (1, 2, 3)]
        assert sorted(v for v in verdicts if v is not None) == [
            KVPoll.Failed,
            KVPoll.Success,
            KVPoll.Success,
        ]
        failed = (1, 2, 3)[verdicts.index(KVPoll.Failed)]
        assert world.job("prefill", failed).reason is Reason.TRANSPORT_FAILED
        states = {operation.state for _, operation in transport._operations.values()}
        assert TransferState.PENDING not in states
        succeeds(world, ANOTHER)
        world.settle()


# --- what one message may cost -------------------------------------------------------------------


def test_heartbeats_that_come_too_fast_are_answered_once(world: World) -> None:
    succeeds(world, 0)
    listener, tree = prefill_listener(world), world.trees["decode0"]
    decode = listener._decodes._known[tree.instance]
    beat = Heartbeat(tree.instance, decode.introduction.epoch)
    now_ns = world.clock() + BEAT_MIN_NS
    for _ in range(1000):
        listener.handle(decode.address, beat, now_ns)
    assert sum(isinstance(message, Heartbeat) for message in posted(world, "prefill")) == 1
    listener.handle(decode.address, beat, now_ns + BEAT_MIN_NS)
    assert sum(isinstance(message, Heartbeat) for message in posted(world, "prefill")) == 2
    assert decode.heard_ns == now_ns + BEAT_MIN_NS


def test_a_heartbeat_is_read_no_further_than_there_can_be_rooms(world: World) -> None:
    """4 MiB of it would be half a million."""
    succeeds(world, 0)
    world.send(1)
    world.run(10)
    listener, tree = prefill_listener(world), world.trees["decode0"]
    decode = listener._decodes._known[tree.instance]
    table = world.trees["prefill"].table
    handle = world.job("prefill", 1).handles[0]
    for place, renewed in ((table.rooms_max, False), (table.rooms_max - 1, True)):
        rooms = np.full(place + 1, 7777, dtype="<u8")
        rooms[place] = 1
        before = table.rows(np.array([handle.slot]))[0].copy()
        world.clock.now_ns += 50_000_000
        beat = Heartbeat(tree.instance, decode.introduction.epoch, rooms.tobytes())
        listener.handle(decode.address, beat, world.clock())
        changed = (table.rows(np.array([handle.slot]))[0] != before).any()
        assert changed == renewed


def test_the_end_of_a_room_in_a_slot_that_is_none_is_not_remembered(world: World) -> None:
    succeeds(world, 0)
    for listener in (prefill_listener(world), decode_listener(world)):
        for slot in range(256, 1256):
            ended = Ended(slot, 1, failed=True, reason=1, room=slot, peer="nobody:1")
            listener.handle(("local", b"x"), ended, world.clock())
        assert max(listener._seen._last) < 256
    succeeds(world, ANOTHER)
