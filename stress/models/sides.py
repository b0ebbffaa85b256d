"""A prefill and a decode tree whose every step is somebody else's: what `replay_sides` drives.

Listeners, transfer worker, KVSender and KVReceiver are pdrt's own.  Held in hand are: what the
trees say to each other about rooms (`Wire`), the bytes on their way (`Air`), and what engines
decide.  Time passes only when it is asked to; no deadline comes by itself, and no janitor sweeps.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from pdrt.actors import past
from pdrt.actors.decode_listener import DecodeListener
from pdrt.actors.moving import Room
from pdrt.actors.prefills import Prefills
from pdrt.actors.transfer import TransferWorker
from pdrt.clock import MILLISECOND_NS, SECOND_NS, ManualClock
from pdrt.config import Timeouts
from pdrt.protocol import codec
from pdrt.protocol.messages import (
    Abort,
    AbortTaken,
    AnyMessage,
    Destination,
    DestinationTaken,
    Heartbeat,
    Landed,
    NewsTaken,
    session_of,
)
from pdrt.protocol.states import TERMINAL, KVPoll, Role
from pdrt.shm_status import StatusTable, Word
from pdrt.transports.base import Indices, TransferState
from pdrt.transports.fake import _Agent, _Operation
from stress.models.traces import Diverged
from tests.actors.engines import DecodeEngine, Engine, Job, Ledger, Plan, PrefillEngine, Sent
from tests.actors.fabric import Fabric, NixlLike
from tests.actors.laws import Watch
from tests.actors.post import Box, Frame, Post
from tests.actors.tree import Process, Shape, Skewed, Tree, control_of
from tests.actors.world import LAYOUT

FOREVER_S = 1e6
FOREVER_NS = int(FOREVER_S) * SECOND_NS
TIMEOUTS = Timeouts(
    bootstrap_s=FOREVER_S,
    waiting_s=FOREVER_S,
    stall_s=FOREVER_S,
    quiet_s=FOREVER_S,
    peer_s=FOREVER_S,
    resend_s=0.05,
)
STEP_MS = 20
SETTLE_MS = 80  # a local message is under way for a step, and a table is scanned in each
PATIENCE_MS = 4000  # of the longest pause between two copies of a message, a few
EXPECT_MS = 1200  # decode asks once a second at least
PREFILL, DECODE = "prefill", "decode"
KINDS: dict[type[AnyMessage], str] = {
    Destination: "destination",
    DestinationTaken: "destination_taken",
    Abort: "abort",
    AbortTaken: "abort_taken",
    Landed: "landed",
    NewsTaken: "news_taken",
}


class Offer(NamedTuple):
    """What a side has said; whether it is heard is the trace's to say."""

    to: str  # name of the tree
    kind: str
    message: Any
    frame: Frame | None  # None: to a process that is no more


class Wire(Post):
    """Carries what is said within a tree, and of what is said between two what is not about rooms;
    the rest is offered.  Heartbeats are lost but when the two have to find each other: one that
    lists a room says that its destination was taken, which the model says in one way only."""

    def __init__(self) -> None:
        super().__init__(0)
        self.offers: list[Offer] = []
        self.met = True  # False: neither tree knows of the other, since one is new
        self.beats = False

    def send(self, source: Box, endpoint: str, link: str, target: Box | None, data: bytes) -> None:
        if not endpoint.startswith("tcp://"):
            super().send(source, endpoint, link, target, data)
            return
        others: list[AnyMessage] = []
        for message in codec.decode(data, from_peer=True):
            kind = KINDS.get(type(message))
            if kind is None:
                if self.met and (self.beats or not isinstance(message, Heartbeat)):
                    others.append(message)
                continue
            frame = Frame(source, endpoint, link, target, codec.encode([message]))
            to = DECODE if source.tree == PREFILL else PREFILL
            self.offers.append(Offer(to, kind, message, frame))
        if others:
            super().send(source, endpoint, link, target, codec.encode(others))


@dataclass(eq=False)
class Write:
    """On its way: what it moves was read when it was posted, so it survives its worker."""

    room: int
    session: int
    bit: int  # of the first page 1, of the second and the aux row 2
    agent: _Agent
    targets: list[int]
    data: list[NDArray[np.uint8]]
    operation: _Operation


class Air(list[Write]):
    """The writes that have not landed."""

    session = 1  # of those to come
    whose: Callable[[int], tuple[int, int]]  # a page of prefill's -> its room, its bit

    def land(self, write: Write, fabric: Fabric) -> None:
        self.remove(write)
        fabric.homes[write.agent](write.targets, "landed in")
        for target, data in zip(write.targets, write.data, strict=True):
            write.agent.region.view[target : target + len(data)] = data
        if write.operation.state is TransferState.PENDING:
            write.operation.state = TransferState.DONE


class HeldTransport(NixlLike):
    """Nothing ends by itself but the first transfer to a peer."""

    def __init__(self, fabric: Fabric, air: Air) -> None:
        super().__init__(fabric)
        self._air, self._session = air, air.session

    def connect(self, peer: str, metadata: bytes) -> int:
        handle = super().connect(peer, metadata)
        self.operation(handle).state = TransferState.DONE
        return handle

    def write(
        self, peer: str, local: int, local_items: Indices, remote: int, remote_items: Indices
    ) -> int:
        handle = super().write(peer, local, local_items, remote, remote_items)
        if len(local_items):
            operation, view = self.operation(handle), self._region(None).view
            data = [
                view[at : at + size].copy()
                for at, size in zip(operation.sources, operation.sizes, strict=True)
            ]
            room, bit = self._air.whose(int(local_items[0]))
            agent = self._link(peer).agent
            targets = operation.targets.tolist()
            self._air.append(Write(room, self._session, bit, agent, targets, data, operation))
        return handle

    def operation(self, handle: int) -> _Operation:
        return self._operations.get(handle)[1]

    def _post(self, peer: str, operation: _Operation) -> int:
        self._operations.check_room()
        return self._operations.add((peer, operation))


class HeldEngine(Engine):
    """Does nothing with a room that it was not told to do."""

    def __init__(self, tree: Tree, box: Box, table: StatusTable, ledger: Ledger) -> None:
        super().__init__(tree, box, table, ledger)
        self.may: Counter[int] = Counter()  # how often each room may be driven
        self.may_clear: set[int] = set()

    def _drive(self, job: Job, state: KVPoll, now_ns: int) -> None:
        if self.may[job.plan.room]:
            before = job.sent_chunks, job.pages is None
            super()._drive(job, state, now_ns)
            if before != (job.sent_chunks, job.pages is None):
                self.may[job.plan.room] -= 1

    def _serve(self, job: Job, now_ns: int) -> None:
        if job.half.poll() not in TERMINAL or job.plan.room in self.may_clear:
            super()._serve(job, now_ns)


class HeldPrefill(HeldEngine, PrefillEngine):
    pass


class HeldDecode(HeldEngine, DecodeEngine):
    pass


class Sides:
    """The two trees.  Rooms have two pages; decode has no more than that."""

    def __init__(self) -> None:
        self.clock = ManualClock(10 * SECOND_NS)
        self.wire, self.fabric, self.air, self.ledger = Wire(), Fabric(), Air(), Ledger()
        self.air.whose = self._whose
        self.trees: dict[str, Tree] = {}
        self.sessions: list[str] = []  # of prefill's listeners
        self.sent: dict[int, list[Sent]] = {}  # by room: what each of prefill's trees wrote for it
        self._all: list[Tree] = []
        self._stack = contextlib.ExitStack()

    def _add(self, name: str) -> None:
        role = Role.PREFILL if name == PREFILL else Role.DECODE
        pages_count = {PREFILL: 8, DECODE: 2}[name]
        shape = Shape(
            LAYOUT,
            TIMEOUTS,
            lambda fabric: HeldTransport(fabric, self.air),
            rooms_max=8,
            pages_count=pages_count,
            aux_rows=pages_count // 2,
        )
        kind = HeldPrefill if name == PREFILL else HeldDecode

        def engine(tree: Tree, box: Box, table: StatusTable) -> Engine:
            return kind(tree, box, table, self.ledger)

        instance = f"{name[0]}{len(self._all):07x}"
        clock = Skewed(self.clock)
        self.air.session = len(self.sessions) + 1
        tree = Tree(role, name, instance, shape, self.wire, self.fabric, clock, engine)
        Watch(tree)
        self.trees[name] = tree
        self._all.append(tree)
        self._stack.callback(tree.close)
        if name == PREFILL:
            self.sessions.append(session_of(instance, tree.incarnations["listener"]))

    def __enter__(self) -> Sides:
        with self._stack:  # what was begun ends, should this fail
            # No limit of time is the model's, but those that a trace says have passed.
            self._stack.enter_context(mock.patch.object(past, "EARLY_NS", FOREVER_NS))
            self._add(PREFILL)
            self._add(DECODE)
            self._prefills.dial(control_of(PREFILL), self.clock.now_ns)
            self.meet()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # --- time ------------------------------------------------------------------------------------

    def run(self, ms: int = SETTLE_MS) -> None:
        """Everybody has a turn now and every few milliseconds."""
        for _ in range(0, ms, STEP_MS):
            self.clock.now_ns += STEP_MS * MILLISECOND_NS
            self.wire.deliver(self.clock.now_ns)
            for tree in self.trees.values():
                for process in tree.processes.values():
                    process.turn(self.clock.now_ns)

    def wait(self, done: Callable[[], object], what: str) -> None:
        for _ in range(0, PATIENCE_MS, 2 * STEP_MS):
            if done():
                return
            self.run(2 * STEP_MS)
        if not done():
            raise Diverged(what)

    # --- messages --------------------------------------------------------------------------------

    def forget(self, to: str, kind: str, room: int) -> None:
        """What was offered is lost."""
        self.wire.offers = [o for o in self.wire.offers if not self._is(o, to, kind, room)]

    def offered(self, to: str, kind: str, room: int) -> list[Offer]:
        return [offer for offer in self.wire.offers if self._is(offer, to, kind, room)]

    def _is(self, offer: Offer, to: str, kind: str, room: int) -> bool:
        return (offer.to, offer.kind) == (to, kind) and self._room_of(offer.message) == room

    def _room_of(self, message: Any) -> int:
        if not isinstance(message, DestinationTaken | NewsTaken):
            room: int = message.room
            return room
        jobs = self.engine(DECODE).history
        theirs = message.slot, message.generation
        return next((job.plan.room for job in jobs if job.handles[0][1:] == theirs), 0)

    def hear(self, offer: Offer) -> None:
        """It arrives, and whom it is for has a turn."""
        if offer.frame is None:
            return
        self.wire._arrive(offer.frame)
        for tree in self.trees.values():
            for process in tree.processes.values():
                if process.box.inbox:
                    process.turn(self.clock.now_ns)

    # --- what is where ---------------------------------------------------------------------------

    def engine(self, name: str) -> HeldEngine:
        engine = self.trees[name].engine
        assert isinstance(engine, HeldEngine)
        return engine

    def word(self, name: str, room: int) -> Word | None:
        """Of a side's half; None if it is not open, or cleared."""
        job = self.engine(name).jobs.get(room)
        return None if job is None else self.trees[name].table.read(*job.handles[0][1:])

    @property
    def _prefills(self) -> Prefills:
        listener = self.trees[DECODE].processes["listener"].actor
        assert isinstance(listener, DecodeListener)
        return listener._prefills

    @property
    def has_met(self) -> bool:
        """Does decode know the prefill that is there now?"""
        prefill = self._prefills.get(control_of(PREFILL))
        return prefill is not None and prefill.ready and prefill.session == self.sessions[-1]

    def meet(self) -> None:
        """The two find each other; but first decode asks for its rooms, unknowing."""
        self.wire.met = True
        self.run(EXPECT_MS)
        self.wire.beats = True
        self.wait(lambda: self.has_met, "the two do not meet")
        self.wire.beats = False

    def placed(self, room: int) -> int | None:
        """Which of a room's writes are in decode's pages; None while it has none."""
        engine = self.engine(DECODE)
        job = engine.jobs.get(room)
        if job is None or job.pages is None:
            return None
        bits = 0
        for sent in self.sent.get(room, []):
            pages = zip(engine._grid(0)[job.pages], sent.pages[0], strict=True)
            bits |= sum(1 << i for i, (ours, theirs) in enumerate(pages) if (ours == theirs).all())
        return bits

    def _whose(self, page: int) -> tuple[int, int]:
        for room, job in self.engine(PREFILL).jobs.items():
            if job.pages is not None and page in job.pages:
                return room, 1 << int(np.flatnonzero(job.pages == page)[0])
        raise Diverged(f"page {page} is written, and no room has it")

    # --- prefill's worker ------------------------------------------------------------------------

    def _worker(self) -> tuple[Process, TransferWorker]:
        process = self.trees[PREFILL].processes["worker0"]
        assert isinstance(process.actor, TransferWorker)
        return process, process.actor

    def operations(self, room: int) -> list[_Operation]:
        """What a room waits for, its fence last.  Empty if it is over or has not begun."""
        process, worker = self._worker()
        transport = process.transport
        assert isinstance(transport, HeldTransport)
        found: list[Room] = [r for r in worker._active.values() if r.handle.room == room]
        if not found:
            return []
        fences = [] if found[0].fence is None else [found[0].fence]
        handles = [posted for posted, _ in found[0].inflight] + fences
        return [transport.operation(handle) for handle in handles]

    def is_ending(self, room: int) -> bool:
        _, worker = self._worker()
        active = worker._active.values()
        return any(r.handle.room == room and r.fence is not None for r in active)

    def restart_prefill(self) -> None:
        """All is forgotten but what is in the air."""
        self.trees[PREFILL].stop()
        self.wire.met = False
        self._add(PREFILL)
        self.run(200)

    def plan(self, name: str, room: int) -> None:
        """The router asks.  Nothing is moved by the first chunk, whose write is for the worker to
        wait for as long as the trace does not say that the room is done."""
        peer = control_of(PREFILL) if name == DECODE else ""
        self.engine(name).plan(Plan(room, pages_count=2, split=(0, 1, 2), peer=peer))
