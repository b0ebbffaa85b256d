"""The first fault: an abort message kills the listener."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from pdrt.actors import base
from pdrt.actors.prefill_listener import PrefillListener
from pdrt.errors import ProtocolError
from pdrt.mail.mailbox import Address, Mailbox
from pdrt.protocol import codec
from pdrt.protocol.counters import Counter
from pdrt.protocol.messages import OLDEST, VERSION, Abort, AbortTaken, AnyMessage, Hello, HelloReply
from pdrt.protocol.states import KVPoll, Reason
from pdrt.shm_status import StatusTable
from tests.actors.steps import moving, succeeds, until_state, until_verdict, verdict
from tests.actors.test_mutants import Mutant
from tests.actors.world import LAYOUT, World
from tests.faults.trees import Tree, make_model
from tests.origin.listeners import GUARD_S, LoneListener, lone_listener
from tests.waiting import wait_until

ABORTS = [
    Abort(room, rank, slot, generation, instance, reason, quiet, session)
    for room in (1, 77, (1 << 63) - 1)
    for rank in (0, 255)
    for slot, generation in ((-1, 0), (0, 1), (0, 2), (3, 0xFFFFFFFF), (0x7FFFFFFF, 1))
    for instance, session in (("", ""), ("nobody", "nobody#1"))
    for reason, quiet in ((0, False), (1, True), (200, True))
]


def _unguarded(
    actor: base.Actor,
    mailbox: Mailbox,
    table: StatusTable,
    clock: Callable[[], int],
    *,
    stopping: Callable[[], bool],
    wake: Callable[[], None],
) -> None:
    """The loop without a guard round each message."""
    while not stopping():
        now_ns = clock()
        for sender, message in mailbox.receive(5):
            actor.handle(sender, message, now_ns)
        actor.tick(now_ns)
        mailbox.flush(now_ns)
        table.beat(now_ns)


def _loop_is_unguarded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(base, "run", _unguarded)


def _aborts_are_looked_up(patch: pytest.MonkeyPatch) -> None:
    """A handler that takes it for granted that an abort names a room it knows."""

    def on_abort(self: PrefillListener, sender: Address, abort: Abort, now_ns: int) -> None:
        room = self._by_id[abort.room, abort.rank]
        self._fault(room, Reason(abort.reason), now_ns, tell=False)

    patch.setattr(PrefillListener, "_on_abort", on_abort)


def _frames_are_trusted(patch: pytest.MonkeyPatch) -> None:
    """What does not decode raises, as unpacking a fixed number of parts does."""

    class Untyped(Exception):
        pass

    def decode(frame: bytes, *, from_peer: bool = False) -> list[AnyMessage]:
        try:
            return true_decode(frame, from_peer=from_peer)
        except ProtocolError as error:
            raise Untyped(str(error)) from None

    true_decode = codec.decode
    patch.setattr(codec, "decode", decode)


@pytest.fixture
def lone() -> Iterator[LoneListener]:
    with lone_listener() as made:
        yield made


MALFORMED = [
    [b""],
    [b"abort"],
    [b"7", b"abort"],
    [b"None", b"0.0.0.0"],
    [b""] * 9,
    [codec.encode([ABORTS[0]])[:-1]],
    [codec.encode([ABORTS[0]]), b""],
    [codec.seal(b"\x91\x91\x0d")],  # an abort without a field
    [codec.seal(b"\x91\x92\x0d\xa31")],  # a room that is no number
    [codec.seal(b"\x91\x98\x0d\x01\x00\x00\x01\xa0\xcd\x01\x00\xc2")],  # reason 256
]


def _listener_survives(lone: LoneListener) -> None:
    for parts in MALFORMED:
        lone.peer.send_multipart(parts)
    for abort in ABORTS:
        lone.peer.send(codec.encode([abort]))
    lone.peer.send(codec.encode(ABORTS))
    lone.peer.send(codec.encode([Hello(VERSION, OLDEST, "d", 1, LAYOUT.digest)]))
    lone.run_until(lambda: any(isinstance(each, HelloReply) for each in lone.answers))
    taken = [each for each in lone.answers if isinstance(each, AbortTaken)]
    assert len(taken) == lone.count(Counter.ABORTS_TAKEN) == 2 * len(ABORTS)
    kinds = len(codec.Malformed)
    assert lone.count(Counter.MALFORMED, kinds) == len(MALFORMED)


def test_an_abort_does_not_kill_the_listener(lone: LoneListener) -> None:
    """Of any shape, whole or not, of rooms known and unknown; each is answered or counted."""
    _listener_survives(lone)


@pytest.mark.parametrize(
    ("mutants", "ends_with"),
    [
        ([_loop_is_unguarded, _aborts_are_looked_up], "KeyError"),
        ([_frames_are_trusted], "Untyped"),
    ],
)
def test_an_abort_that_is_trusted_kills_the_listener(
    lone: LoneListener, mutants: list[Mutant], ends_with: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mutate in mutants:
        mutate(monkeypatch)
    with pytest.raises(Exception) as death:  # noqa: PT011
        _listener_survives(lone)
    assert type(death.value).__name__ == ends_with


def test_the_guard_of_the_loop_holds_even_where_a_handler_does_not(
    lone: LoneListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    _aborts_are_looked_up(monkeypatch)
    with pytest.raises(AssertionError):  # for it answers less, and lives
        _listener_survives(lone)
    assert any(isinstance(each, HelloReply) for each in lone.answers)


def _rooms_live_through_aborts(world: World) -> None:
    succeeds(world, 0)
    moving(world, 1)
    world.both(2, mute=True)
    until_state(world, "prefill", 2, KVPoll.WaitingForInput)
    for name, tree in world.trees.items():
        other = next(each for each in world.trees if each != name)
        stranger = world.trees[other].processes["listener"].box
        for abort in ABORTS:
            if abort.room == 1:
                continue  # whoever knows a room may end it
            data = codec.encode([abort, abort])
            world.post.send(stranger, f"tcp://{tree.control}", "stray", None, data)
    world.run(200)
    world.engine("prefill").unmute(2)
    until_verdict(world, 1, "prefill", "decode0")
    until_verdict(world, 2, "prefill", "decode0")
    for room in (1, 2):
        assert verdict(world, "decode0", room) is KVPoll.Success, "a room of another was ended"


@pytest.mark.usefixtures("real_loop")
@pytest.mark.parametrize(
    ("mutants", "breaks"),
    [([], None), ([_loop_is_unguarded, _aborts_are_looked_up], "KeyError")],
)
def test_aborts_of_unknown_rooms_cost_no_room(mutants: list[Mutant], breaks: str | None) -> None:
    with World() as world, pytest.MonkeyPatch.context() as patch:
        for mutate in mutants:
            mutate(patch)
        if breaks is None:
            _rooms_live_through_aborts(world)
            world.settle()
            assert all(n == 1 for tree in world.trees.values() for n in tree.incarnations.values())
        else:
            with pytest.raises(KeyError):
                _rooms_live_through_aborts(world)


def test_a_real_tree_lives_through_aborts_of_every_shape(tmp_path: Path) -> None:
    """The same aborts at the control port of `pdrt-prefill`: its listener stays the same process,
    goes on answering, and says that it is well; so does the tree while the frames come."""
    tree = Tree("prefill", tmp_path, [f"--model-path={make_model(tmp_path)}", "--transport=shm"])
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    try:
        tree.wait_ready()
        pid = tree.listener().pid
        peer.connect(f"tcp://{tree.control}")
        for parts in [*MALFORMED, *([codec.encode([abort])] for abort in ABORTS)]:
            peer.send_multipart(parts)
        peer.send(codec.encode([Hello(VERSION, OLDEST, "d", 1, b"another layout")]))
        answers: list[AnyMessage] = []

        def greeted() -> bool:
            while peer.poll(0):
                answers.extend(codec.decode(peer.recv()))
            return any(isinstance(each, HelloReply) for each in answers)

        wait_until(greeted, GUARD_S, "the listener to answer")
        assert sum(isinstance(each, AbortTaken) for each in answers) == len(ABORTS)
        assert tree.total("pdrt_malformed_frames") == len(MALFORMED)
        assert (tree.listener().pid, tree.unplanned_restarts()) == (pid, {})
    finally:
        peer.close(linger=0)
        context.term()
        tree.stop()
