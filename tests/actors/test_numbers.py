"""Numbers that peers name: each may be as large as the wire lets it, and what is made of several of
them must be possible still, or be refused.  A worker meets them in `tick`, where an exception would
end it, and every room that it moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pdrt.actors import decodes, prefills
from pdrt.actors.decodes import ITEMS_MAX, Decode
from pdrt.actors.moving import Room
from pdrt.actors.paths import Path
from pdrt.protocol import codec
from pdrt.protocol.codec import Malformed
from pdrt.protocol.counters import Counter
from pdrt.protocol.layout import RegionMap
from pdrt.protocol.messages import Agent, Chunk, Destination, Introduced, Introduction
from pdrt.protocol.states import KVPoll, Reason
from pdrt.shm_status import Handle
from pdrt.transports import tables
from pdrt.transports.fake import FakeTransport
from tests.actors.post import Frame
from tests.actors.steps import succeeds, until_verdict, verdict
from tests.actors.world import LAYOUT, World

U31_MAX = 2**31 - 1
COUNTS = st.integers(0, U31_MAX) | st.sampled_from([0, 1, U31_MAX - 1, U31_MAX])
CAUSES = [
    pytest.param(OverflowError("too large"), id="overflow"),
    pytest.param(MemoryError("2 TiB"), id="memory"),
    pytest.param(ZeroDivisionError("a bug"), id="bug"),
]


@given(pages=COUNTS, aux=COUNTS, aux_index=COUNTS, page=COUNTS)
def test_whatever_is_accepted_of_a_decode_can_be_written(
    pages: int, aux: int, aux_index: int, page: int
) -> None:
    agent = Agent(0, 1, pages, aux, {})
    assert bool(decodes._impossible(agent)) == (pages + aux > ITEMS_MAX)
    decode = Decode(Introduction("d", 1, "h:1", "b", [agent], 1), "link", 0)
    numbers = page.to_bytes(4, "little")
    destination = Destination(1, 0, 0, 1, "d", 1, numbers, aux_index)
    if decodes._impossible(agent) or decode.refusal(destination) is not Reason.NONE:
        return
    room = Room(Handle(1, 0, 1), 1, destination=destination, path=Path(agent, "d", "d#1", "link"))
    region = RegionMap(layout=LAYOUT, rank=0, pages_count=4, aux_rows=4)
    room.queue(Chunk(1, 0, 1, 0, 0, bytes(4), True, 3), region, 1)
    items = np.concatenate([piece.remote for piece in room.pieces])
    assert items.tolist() == [page, pages + aux_index]


@pytest.mark.parametrize(
    ("pages", "aux", "possible"),
    [
        (U31_MAX, 0, True),
        (U31_MAX - 1, 1, True),
        (U31_MAX, 1, False),
        (1, U31_MAX, False),
        (U31_MAX, U31_MAX, False),
    ],
)
def test_an_agent_of_more_items_than_can_be_numbered_is_refused_by_name(
    world: World, pages: int, aux: int, possible: bool
) -> None:
    succeeds(world, 0)
    process = world.trees["prefill"].processes["listener"]
    actor: Any = process.actor
    foreign = Introduction("x", 1, "x:1", "host", [Agent(0, 1, pages, aux, {"fake": b""})], 1)
    actor.handle(("control", b"x"), foreign, world.clock())
    assert ("x" in actor._decodes._known) == possible
    posted = [message for each in process.box._outgoing.values() for message in each]
    answers = [message for message in posted if isinstance(message, Introduced)]
    if not possible:
        assert [answer.transport for answer in answers] == [""]
        assert answers[0].detail == f"an agent has more than {ITEMS_MAX} pages and aux rows"
    succeeds(world, 1)


def exceptions(world: World) -> int:
    counters = world.trees["prefill"].table.counters
    return int(counters[:, Counter.MALFORMED + Malformed.VALUE].sum())


def fails_alone(world: World, detail: str) -> None:
    """Room 1 does, and it costs nothing else."""
    world.both(1)
    world.both(2)
    until_verdict(world, 1, "prefill", "decode0", within_ms=200)
    for name in ("prefill", "decode0"):
        assert verdict(world, name, 1) is KVPoll.Failed
        assert world.job(name, 1).reason is Reason.TRANSPORT_FAILED
    assert detail in world.job("prefill", 1).detail
    until_verdict(world, 2, "prefill", "decode0")
    assert verdict(world, "prefill", 2) is verdict(world, "decode0", 2) is KVPoll.Success
    assert world.trees["prefill"].incarnations["worker0"] == 1
    assert exceptions(world) == 1  # it is not tried again


@pytest.mark.parametrize("error", CAUSES)
def test_a_room_that_cannot_be_cut_into_writes_fails_and_no_other(
    world: World, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    succeeds(world, 0)
    queue = Room.queue

    def failing(room: Room, *what: Any) -> None:
        if room.handle.room == 1:
            raise error
        queue(room, *what)

    monkeypatch.setattr(Room, "queue", failing)
    fails_alone(world, str(error))


@pytest.mark.parametrize("error", CAUSES)
def test_a_room_whose_write_raises_fails_and_no_other(
    world: World, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    succeeds(world, 0)
    write, causes = FakeTransport.write, [error]

    def failing(transport: FakeTransport, *what: Any) -> int:
        if causes:
            raise causes.pop()
        return write(transport, *what)

    monkeypatch.setattr(FakeTransport, "write", failing)
    fails_alone(world, str(error))


def test_a_number_that_no_item_can_have_fails_its_room_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if the listener had let it pass."""

    def boastful(rank: int, epoch: int, pages: int, _: int, offers: dict[str, bytes]) -> Agent:
        return Agent(rank, epoch, pages, U31_MAX, offers)

    monkeypatch.setattr(decodes, "ITEMS_MAX", 2 * U31_MAX)
    monkeypatch.setattr(prefills, "Agent", boastful)
    monkeypatch.setattr(tables, "_check", lambda grid, region_bytes: None)
    with World() as world:
        arrive = world.post._arrive

        def forge(frame: Frame) -> None:
            if frame.endpoint.startswith("tcp://prefill") and frame.target is None:
                messages = codec.decode(frame.data)
                frame.data = codec.encode([forged(message) for message in messages])
            arrive(frame)

        def forged(message: Any) -> Any:
            hostile = isinstance(message, Destination) and message.room == 1
            return replace(message, aux_index=U31_MAX - 1) if hostile else message

        monkeypatch.setattr(world.post, "_arrive", forge)
        succeeds(world, 0)
        fails_alone(world, "")
        world.settle()
