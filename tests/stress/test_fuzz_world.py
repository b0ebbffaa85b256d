"""What strangers and other processes say never makes an actor raise, nor say what nobody can read;
rooms that nobody named exactly succeed beside it.  In virtual time; `python -m stress.fuzz` does
the same to real trees.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdrt.actors.boot import RegionFetch
from pdrt.errors import AttachFailed, ProtocolError
from pdrt.mail.mailbox import Address
from pdrt.protocol.messages import (
    PEER_MESSAGES,
    TEXT_MAX,
    Agent,
    AnyMessage,
    Destination,
    PeerUp,
    PeerWarm,
    WorkerUp,
)
from pdrt.protocol.states import KVPoll
from pdrt.transports.base import TransportError
from pdrt.transports.metadata import FakeMetadata, encode
from stress.fuzz.hostile import Known, Names
from tests.actors.steps import succeeds, until_state, until_verdict, verdict
from tests.actors.tree import Process, Tree
from tests.actors.world import World

MESSAGES = 60  # to each actor in each round
ROUNDS = 4
UNGUESSED = 10**15 + 37  # multiples of it are ids that nobody comes upon


def names_of(tree: Tree, rng: random.Random, *, epoch: int) -> Names:
    table = tree.table
    slots = table.live_slots()
    rooms = [
        {"room": int(row[1]), "slot": slot, "generation": int(row[0]) >> 32}
        for slot, row in zip(slots.tolist(), table.rows(slots), strict=True)
    ]
    known = Known(tree.role.name.lower(), tree.instance, epoch, rooms)
    return Names(rng, known, tree.shape.layout.digest, "host", "@nobody")


def tell(tree: Tree, process: Process, sender: Address, message: AnyMessage) -> None:
    """Raises what the handler raises, and if it answers what cannot be read."""
    try:
        process.actor.handle(sender, message, tree.clock())
    except Exception as error:
        raise AssertionError(f"{tree.name} {process.name} raised at {message!r:.500}") from error


@pytest.mark.parametrize("shm", [False, True])
def test_rooms_succeed_whatever_strangers_say(shm: bool) -> None:
    rng = random.Random(shm)
    with World(shm=shm) as world:
        world.elapses = True
        for room in range(UNGUESSED, UNGUESSED * (ROUNDS + 1), UNGUESSED):
            world.both(room, pages_count=4, chunks=4, pace_ms=20)
            for _ in range(3):
                world.run(10)
                for tree in world.trees.values():
                    speak(tree, rng)
            until_verdict(world, room, "prefill", "decode0")
            assert verdict(world, "decode0", room) is KVPoll.Success, world.job("decode0", room)
        world.settle(within_ms=60_000)


def speak(tree: Tree, rng: random.Random) -> None:
    names = names_of(tree, rng, epoch=tree.processes["listener"].incarnation)
    for name, process in tree.processes.items():
        if name == "engine":
            continue
        for _ in range(MESSAGES):
            local = name != "listener" or rng.random() < 0.3
            message = names.stale() if local else names.any_of(PEER_MESSAGES)
            tell(tree, process, ("local" if local else "control", b"stranger"), message)
        process.box.flush()  # through the codec, to where it is read


# --- one test for each fault of this kind that was found ---


def test_a_destination_is_believed_only_of_our_own_engine() -> None:
    """Slot and generation are small numbers, so whoever guesses them would choose the pages."""
    with World() as world:
        world.send(1, pages_count=1)
        world.receive(1, pages_count=1, pace_ms=200)
        until_state(world, "decode0", 1, KVPoll.WaitingForInput)
        tree = world.trees["decode0"]
        handle = world.job("decode0", 1).handles[0]
        forged = Destination(1, 0, handle.slot, handle.generation, tree.instance, 1, bytes(4), 0)
        tell(tree, tree.processes["listener"], ("control", b"stranger"), forged)
        until_verdict(world, 1, "prefill", "decode0")
        assert verdict(world, "decode0", 1) is KVPoll.Success
        world.settle()


@pytest.mark.parametrize("control", ["x" * TEXT_MAX, "nowhere.invalid:1"])
@pytest.mark.parametrize("offers", [{}, {"n" * TEXT_MAX: b""}, {"nixl": b"x"}])
@pytest.mark.parametrize("is_place", [True, False])
def test_what_a_worker_says_of_a_path_can_be_read(
    monkeypatch: pytest.MonkeyPatch, control: str, offers: dict[str, bytes], is_place: bool
) -> None:
    """A refusal quotes what it refuses.  A text that is too long spoils a frame, and with it what
    else is in there."""
    with World() as world:
        tree = world.trees["prefill"]
        up = PeerUp("i" * TEXT_MAX, control, Agent(0, 1, 4, 4, offers), same_host=True)
        process = tree.processes["worker0"]

        def link(name: str, endpoint: str, *, from_peer: bool = False) -> None:
            raise ProtocolError("VALUE", f"{endpoint!r}: no place")  # as a mailbox has it

        if not is_place:
            monkeypatch.setattr(process.box, "link", link)
        tell(tree, process, ("worker", b"stranger"), up)
        said = [m for each in process.box._outgoing.values() for m in each]
        assert any(isinstance(message, PeerWarm) for message in said)
        process.box.flush()
        world.run(50)  # the codec refuses nothing of it
        world.settle()


def test_a_worker_of_a_rank_that_is_none_is_ignored() -> None:
    with World() as world:
        succeeds(world, 0)
        for tree in world.trees.values():
            listener = tree.processes["listener"]
            for rank in (1, 255):
                offers = {"nixl": encode(FakeMetadata("x"))}
                tell(tree, listener, ("local", b"stranger"), WorkerUp(rank, 1, offers))
        succeeds(world, 1)
        world.settle()


@settings(deadline=None, max_examples=50)
@given(key=st.text(max_size=30) | st.from_regex(r"[0-9]{0,30}#[0-9]{0,30}", fullmatch=True))
@example(key="0#" + "9" * 40)
@example(key="0#" + "9" * 5000)
@example(key="256#1")
@example(key="\N{ARABIC-INDIC DIGIT ONE}#1")
def test_any_key_of_a_region_asks_for_it_or_is_refused(key: str) -> None:
    """It came with a peer's metadata."""
    fetch: Any = None
    try:
        fetch = RegionFetch("@pdrt-nobody-listens-here", key, "instance")
        fetch.poll()
    except (TransportError, AttachFailed):
        pass
    finally:
        if fetch is not None:
            fetch.close()
