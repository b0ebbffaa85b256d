"""The five faults that pdrt was written against, each as a scenario that the true code survives.

    an abort message kills the listener          a late Transferring brings a Failed room back
    the skipped last chunk leaves a room open    a write that never completes has no deadline
    health says 200 over a wedge

Each scenario runs a second time under *mutants* that put the cause back, and must then fail: so it
tests what it says, and not something that is kept by another law.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from pdrt.actors import base
from pdrt.actors.boot import FIRST_ENGINE_ROW, FIRST_WORKER_ROW, LISTENER_ROW
from pdrt.actors.janitor import Janitor
from pdrt.actors.moving import Room
from pdrt.actors.prefill_listener import PrefillListener
from pdrt.actors.transfer import TransferWorker
from pdrt.clock import MILLISECOND_NS, SECOND_NS
from pdrt.engine.sender import KVSender
from pdrt.errors import ProtocolError
from pdrt.health import Health
from pdrt.mail.mailbox import Address, Envelope, Mailbox
from pdrt.protocol import codec
from pdrt.protocol.counters import Counter
from pdrt.protocol.messages import (
    OLDEST,
    VERSION,
    Abort,
    AbortTaken,
    AnyMessage,
    Chunk,
    Hello,
    HelloReply,
)
from pdrt.protocol.states import MOVES, Event, KVPoll, Reason, Role, Writer
from pdrt.shm_status import Owner, StatusTable
from tests.actors.post import Box
from tests.actors.test_mutants import Mutant, holds_or_breaks
from tests.actors.test_world import moving, succeeds, until_state, until_verdict, verdict
from tests.actors.tree import Process
from tests.actors.world import LAYOUT, TIMEOUTS, World
from tests.faults.trees import Tree, make_model
from tests.origin.listeners import GUARD_S, LoneListener, lone_listener
from tests.origin.probes import Probe
from tests.waiting import wait_until

ABORTS = [
    Abort(room, rank, slot, generation, instance, reason, quiet, session)
    for room in (1, 77, (1 << 63) - 1)
    for rank in (0, 255)
    for slot, generation in ((-1, 0), (0, 1), (0, 2), (3, 0xFFFFFFFF), (0x7FFFFFFF, 1))
    for instance, session in (("", ""), ("nobody", "nobody#1"))
    for reason, quiet in ((0, False), (1, True), (200, True))
]


# --- a turn of the world through the actors' own loop ---


@dataclass
class BoxMailbox:
    """A box of the world, as the loop of an actor uses a mailbox."""

    box: Box

    def receive(self, timeout_ms: int) -> list[Envelope]:
        return self.box.receive()

    def flush(self, now_ns: int) -> None:
        self.box.flush()


def _one_round(process: Process, now_ns: int) -> None:
    rounds = iter((False, True))
    base.run(
        process.actor,
        BoxMailbox(process.box),  # type: ignore[arg-type]
        process.table,
        lambda: now_ns,
        stopping=lambda: next(rounds),
        wake=lambda: None,
    )


@pytest.fixture
def real_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends an actor's loop ends its process here, too, which its tree then restarts."""
    monkeypatch.setattr(Process, "turn", _one_round)


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


# --- 1: an abort kills the listener ---


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


# --- 2: a late Transferring resurrects Failed ---


def _states_are_a_number_line(patch: pytest.MonkeyPatch) -> None:
    """Failed is 0, and the higher number wins."""
    for role, event in ((Role.PREFILL, Event.CHUNK_POSTED), (Role.DECODE, Event.DESTINATION_SENT)):
        move = (KVPoll.Transferring, Writer.ANYONE)
        patch.setitem(MOVES[role], (KVPoll.Failed, event), move)


@pytest.mark.parametrize(
    ("mutants", "breaks"), [([], None), ([_states_are_a_number_line], "verdict: prefill")]
)
def test_a_late_transferring_does_not_resurrect_a_failed_room(
    mutants: list[Mutant], breaks: str | None
) -> None:
    """The chunk waits in the worker's mailbox while the abort arrives and fails the room."""
    with holds_or_breaks(mutants, breaks), World(polls=100) as world:
        world.both(1, chunks=4, pace_ms=20)
        until_state(world, "prefill", 1, KVPoll.Transferring)
        worker = world.trees["prefill"].processes["worker0"]
        world.trees["prefill"].freeze("worker0")
        world.until(lambda: any(isinstance(m, Chunk) for _, m in worker.box.inbox))
        world.abort("decode0", 1)
        until_verdict(world, 1, "prefill", "decode0", within_ms=100)
        assert not world.job("prefill", 1).half.quiet(), "the first chunk is still under way"
        world.trees["prefill"].thaw("worker0")
        world.run(100)
        assert verdict(world, "prefill", 1) is KVPoll.Failed
        world.settle()


@pytest.mark.parametrize("mutants", [[], [_states_are_a_number_line]])
@pytest.mark.parametrize("name", ["prefill", "decode0"])
def test_no_event_moves_a_failed_room(name: str, mutants: list[Mutant]) -> None:
    breaks = "a Failed room moved" if mutants else None
    with holds_or_breaks(mutants, breaks), World() as world:
        tree = world.trees[name]
        handle = tree.table.open(5, 0, now_ns=world.clock())
        how = {"now_ns": world.clock(), "owner": Owner(FIRST_WORKER_ROW, 1)}
        assert tree.table.move(*handle[1:], Event.FAULT, now_ns=world.clock())
        before = tree.table.read(*handle[1:])
        for event in Event:
            tree.table.move(*handle[1:], event, **how)  # type: ignore[arg-type]
            assert tree.table.read(*handle[1:]) == before, "a Failed room moved"


# --- 3: the skipped last chunk leaves the room open ---


def _empty_chunks_are_skipped(patch: pytest.MonkeyPatch) -> None:
    send = KVSender.send

    def skip(self: KVSender, pages: object, last: bool = False) -> None:
        if len(pages):  # type: ignore[arg-type]
            send(self, pages, last)  # type: ignore[arg-type]

    patch.setattr(KVSender, "send", skip)


def _workers_skip_empty_chunks(patch: pytest.MonkeyPatch) -> None:
    on_chunk = TransferWorker._on_chunk

    def skip(self: TransferWorker, chunk: Chunk, now_ns: int) -> None:
        if chunk.pages:
            on_chunk(self, chunk, now_ns)

    patch.setattr(TransferWorker, "_on_chunk", skip)


SPLITS = [(4, 4), (4, 4, 4), (0, 4), (0, 0, 2, 2, 4, 4)]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_last_chunk_without_pages_still_ends_the_room(
    world: World, split: tuple[int, ...], eager: bool
) -> None:
    """All pages were sent before, so only the aux row is left, and nothing skips it."""
    for room in range(3):
        world.both(room, split=split, eager=eager)
        until_verdict(world, room, "prefill", "decode0")
        assert verdict(world, "prefill", room) is verdict(world, "decode0", room) is KVPoll.Success


@pytest.fixture(params=[False, True], ids=["nixl-like", "shm-like"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(shm=request.param) as world:
        yield world
        world.settle()


@pytest.mark.parametrize("mutant", [_empty_chunks_are_skipped, _workers_skip_empty_chunks])
def test_a_last_chunk_that_is_skipped_leaves_the_room_open(mutant: Mutant) -> None:
    with holds_or_breaks([mutant], "not within 1000 ms"), World() as world:
        world.both(1, split=(4, 4))
        until_verdict(world, 1, "prefill", "decode0", within_ms=1000)


# --- 4: no deadline on the room in flight ---


def _transferring_has_no_deadline(patch: pytest.MonkeyPatch) -> None:
    expire = StatusTable.expire

    def only_early_states(
        self: StatusTable, slot: int, generation: int, word: int, now_ns: int
    ) -> None:
        if word & 0xF != KVPoll.Transferring:
            expire(self, slot, generation, word, now_ns)

    patch.setattr(StatusTable, "expire", only_early_states)


def _looking_is_progress(patch: pytest.MonkeyPatch) -> None:
    """Every look at a write renews the room's time, whether it moved or not."""
    advance = TransferWorker._advance

    def renewing(self: TransferWorker, room: Room, now_ns: int) -> bool:
        self._table.renew_state(room.handle.slot, room.handle.generation, now_ns)
        return advance(self, room, now_ns)

    patch.setattr(TransferWorker, "_advance", renewing)


def _nobody_makes_it_quiet(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Janitor, "_settle", lambda *_: None)


@pytest.mark.parametrize(
    ("mutants", "breaks"),
    [
        ([], None),
        ([_transferring_has_no_deadline], "open past its deadline"),
        ([_looking_is_progress], "not within"),
        ([_nobody_makes_it_quiet], "not within"),
    ],
)
def test_a_write_that_never_completes_ends_at_its_deadline(
    mutants: list[Mutant], breaks: str | None
) -> None:
    """Every process lives and beats; the bytes stand still.  All rooms end in time, and their pages
    come back once a fence has made them safe; then the same two sides serve the next room."""
    with holds_or_breaks(mutants, breaks), World() as world:
        succeeds(world, 0)
        decode = world.trees["decode0"]
        world.fabric.freeze(decode.processes["worker0"].agent)
        for room in range(1, 6):
            world.both(room)
            until_state(world, "prefill", room, KVPoll.Transferring)
        stall_ms = int(TIMEOUTS.stall_s * 1000)
        for room in range(1, 6):
            until_verdict(world, room, "prefill", "decode0", within_ms=stall_ms + 500)
            assert world.job("prefill", room).reason is Reason.TRANSFER_STALLED
        assert decode.incarnations["worker0"] == 1, "ended by a death, and not by the deadline"

        def all_cleared() -> bool:
            names = ("prefill", "decode0")
            return all(world.job(name, room).cleared for name in names for room in range(1, 6))

        world.until(all_cleared, within_ms=int(TIMEOUTS.quiet_s * 1000) + 1500)
        world.settle()
        succeeds(world, 6)


# --- 5: health says 200 over a wedge ---


def _health_is_that_the_process_exists(patch: pytest.MonkeyPatch) -> None:
    def ready(self: Health) -> list[str]:
        return [c.name for c in self._children() if c.pid is None]

    patch.setattr(Health, "ready", ready)


def _health_does_not_look_at_rooms(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Health, "late_rooms", lambda self, now_ns: 0)


def _is_wrong_within(probe: Probe, within_ms: int) -> None:
    """Ready and health turn 503 within that time, and live does not."""
    assert probe.statuses() == (200, 200, 200), "it was well before"
    world, end_ms = probe.world, probe.world.now_ms + within_ms
    while probe.statuses() == (200, 200, 200):
        assert world.now_ms < end_ms, f"still 200 after {within_ms} ms"
        world.run(50)
    assert probe.statuses() == (200, 503, 503)


@pytest.mark.usefixtures("real_loop")
@pytest.mark.parametrize(
    ("mutants", "breaks"), [([], None), ([_health_is_that_the_process_exists], "still 200")]
)
@pytest.mark.parametrize("tree", ["prefill", "decode0"])
@pytest.mark.parametrize("name", ["listener", "worker0", "engine"])
def test_health_is_not_200_while_an_actor_hangs(
    tree: str, name: str, mutants: list[Mutant], breaks: str | None
) -> None:
    with holds_or_breaks(mutants, breaks), World() as world:
        world.trees[tree].shape.hang_s = 1000.0  # and nobody kills it
        succeeds(world, 0)
        world.run(100)
        world.trees[tree].freeze(name)
        probe = Probe(world, tree)
        _is_wrong_within(probe, 1000 + 150)
        world.trees[tree].thaw(name)
        world.run(50)
        assert probe.statuses() == (200, 200, 200), "and it is well again"


@pytest.mark.usefixtures("real_loop")
@pytest.mark.parametrize("name", ["listener", "worker0", "engine"])
def test_health_is_not_200_while_an_actor_is_dead(name: str) -> None:
    with World() as world:
        succeeds(world, 0)
        probe = Probe(world, "decode0")
        assert probe.statuses() == (200, 200, 200)
        world.trees["decode0"].kill(name, again_ms=100)
        assert probe.statuses() == (200, 503, 503)
        world.run(200)
        assert probe.statuses() == (200, 200, 200)


@pytest.mark.usefixtures("real_loop")
@pytest.mark.parametrize(
    ("mutants", "breaks"), [([], None), ([_health_does_not_look_at_rooms], "still 200")]
)
def test_health_is_not_200_while_a_room_is_open_past_its_deadline(
    mutants: list[Mutant], breaks: str | None
) -> None:
    """Nobody enforces it: the engine, its only reader, stands, and so does the janitor."""
    with holds_or_breaks(mutants, breaks), World() as world:
        tree = world.trees["prefill"]
        handle = tree.table.open(5, 0, now_ns=world.clock())
        world.clock.now_ns += int(TIMEOUTS.bootstrap_s * SECOND_NS)
        for row in (LISTENER_ROW, FIRST_WORKER_ROW, FIRST_ENGINE_ROW):
            StatusTable(tree._table_fd, Owner(row, 1)).beat(world.clock())
        probe = Probe(world, "prefill")
        assert probe.statuses() == (200, 200, 200), "it was well before"
        world.clock.now_ns += 300 * MILLISECOND_NS
        assert probe.statuses() == (200, 503, 503), "still 200"
        assert tree.table.poll(*handle[1:], world.clock()) is KVPoll.Failed
        assert probe.statuses() == (200, 200, 200)


def test_a_supervisor_whose_loop_stands_is_not_even_live() -> None:
    with World() as world:
        probe = Probe(world, "prefill")
        for row in (LISTENER_ROW, FIRST_WORKER_ROW, FIRST_ENGINE_ROW):
            StatusTable(world.trees["prefill"]._table_fd, Owner(row, 1)).beat(world.clock())
        world.clock.now_ns += 2100 * MILLISECOND_NS
        assert probe.statuses(turned=False) == (503, 503, 503)


# --- and once with real processes ---


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
