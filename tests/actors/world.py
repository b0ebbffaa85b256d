"""THE WORLD: a prefill tree, decode trees and the network, in one thread, in virtual time.

Everything but the engines' scheduling, the network and the supervisor is pdrt's own code.  One seed
decides everything.  The laws are checked at every change of a room and at every byte that is moved
(`laws.Watch`, `fabric`).

Time passes in one of two ways.  `step`: everybody has a turn; a test of one law wants that.
`elapse`: as with real processes, each has a turn when something has arrived for it or when it asked
to be woken, and the time between is skipped; that is how schedules are played.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from pdrt.actors.decode_listener import DecodeListener
from pdrt.clock import MILLISECOND_NS, SECOND_NS, ManualClock
from pdrt.config import Timeouts
from pdrt.protocol.layout import Layout
from pdrt.protocol.states import KVPoll, Reason, Role
from pdrt.shm_status import StatusTable
from tests.actors.engines import DecodeEngine, Engine, Job, Ledger, Plan, PrefillEngine
from tests.actors.fabric import Fabric, NixlLike, ShmLike
from tests.actors.laws import Watch, Witness, leftovers
from tests.actors.post import Box, Post
from tests.actors.preempt import Preempt
from tests.actors.tree import Process, Shape, Skewed, Tree, control_of

LAYOUT = Layout(
    model="world", layers=2, kv_heads=1, head_dim=2, dtype="float32", page_size=1, ranks=1
)
TIMEOUTS = Timeouts(
    bootstrap_s=2.0,
    waiting_s=2.0,
    stall_s=1.5,
    quiet_s=1.0,
    beat_s=0.1,
    peer_s=0.6,
    resend_s=0.05,
)
LOOK_NS = 200 * MILLISECOND_NS  # between two looks at everything, when time elapses
SERVED_MS = 3000  # a room in a world in which all is well
FRESH_ROOM = 1 << 40  # beyond it, nothing in a world has used an id
TURNS_MAX = 5000  # in one instant: somebody never sleeps


class World:
    """`decodes` names the decode trees; `shm` chooses the transport's idea of quiet."""

    def __init__(
        self,
        seed: int = 0,
        *,
        decodes: int = 1,
        ranks: int = 1,
        shm: bool = False,
        polls: int = 1,
        timeouts: Timeouts = TIMEOUTS,
        layout: Layout = LAYOUT,
        decode_layout: Layout | None = None,
        witness: Witness | None = None,
        skews_ns: Mapping[str, int] | None = None,
        preempted: int = 0,
        **shape: Any,
    ) -> None:
        """`skews_ns`: how far the clock of a tree is ahead, by its name; `preempted`: after so many
        instructions, in the mean, a process has to wait for another (0: its turns are atomic);
        `shape`: see `tree.Shape`."""
        self.rng = random.Random(seed)
        self.clock = ManualClock(10 * SECOND_NS)
        self.post = Post(seed)
        self.fabric = Fabric(polls=polls)
        self.ledger = Ledger()
        self.layout = LAYOUT.__class__(**{**_fields(layout), "ranks": ranks})
        self._timeouts, self._transport = timeouts, ShmLike if shm else NixlLike
        self._witness, self._skews_ns, self._shape = witness, skews_ns or {}, shape
        self.turns = 0
        self.elapses = False  # while rooms settle, too
        self._looked_ns = 0
        self._born = 0
        self._fresh_room = FRESH_ROOM
        self._deserted: dict[str, Tree] = {}
        self._retired: list[Tree] = []
        self.zombie_steps = self.rng.randrange(0, 30)
        self.preempt = Preempt(seed, preempted, self.clock) if preempted else None
        self.trees: dict[str, Tree] = {}
        self._watches: dict[str, Watch] = {}
        self.add("prefill", Role.PREFILL, self.layout)
        for i in range(decodes):
            self.add(f"decode{i}", Role.DECODE, decode_layout or self.layout)

    # --- trees -----------------------------------------------------------------------------------

    def add(self, name: str, role: Role, layout: Layout) -> Tree:
        self._born += 1
        shape = Shape(layout, self._timeouts, self._transport, **self._shape)
        kind = PrefillEngine if role is Role.PREFILL else DecodeEngine

        def engine(tree: Tree, box: Box, table: StatusTable) -> Engine:
            return kind(tree, box, table, self.ledger)

        instance = f"{name[0]}{self._born:07x}"
        clock = Skewed(self.clock, self._skews_ns.get(name, 0))
        tree = Tree(role, name, instance, shape, self.post, self.fabric, clock, engine)
        tree.zombie_steps = self.zombie_steps
        tree.decodes_mapped_by = self._transports_of
        self.trees[name] = tree
        self._watches[name] = Watch(tree, self._witness)
        if self.preempt is not None:
            self.preempt.attach(tree)
        return tree

    def _transports_of(self, peer: int) -> list[NixlLike]:
        found = (tree for tree in self.trees.values() if tree.digest == peer)
        return [transport for tree in found for transport in tree.transports()]

    def replace(self, name: str) -> Tree:
        """The tree dies as a whole; another instance takes its address."""
        old = self.trees[name]
        old.stop()
        self._retired.append(old)
        return self.add(name, old.role, old.shape.layout)

    def desert(self, name: str, *, silent: bool = False) -> str:
        """The tree dies as a whole, and nobody takes its address, which is returned.  `silent`: so
        does its host, which cannot say that nobody listens there."""
        old = self.trees.pop(name)
        del self._watches[name]
        old.stop()
        self._retired.append(old)
        self._deserted[name] = old
        if not silent:
            self.post.deserted.add(old.control)
        return old.control

    def revive(self, name: str) -> None:
        """Another instance at an address that was deserted."""
        old = self._deserted.pop(name)
        self.post.deserted.discard(old.control)
        self.add(name, old.role, old.shape.layout)

    def find_engine(self, name: str) -> Engine | None:
        """None if it is dead, or its tree."""
        tree = self.trees.get(name)
        engine = tree.engine if tree is not None else None
        assert engine is None or isinstance(engine, Engine)
        return engine

    def engine(self, name: str) -> Engine:
        engine = self.trees[name].processes["engine"].actor
        assert isinstance(engine, Engine)
        return engine

    # --- rooms -----------------------------------------------------------------------------------

    def send(self, room: int, **how: Any) -> None:
        """Ask the prefill engine to serve a room."""
        if (engine := self.find_engine("prefill")) is not None:
            engine.plan(Plan(room, **how))

    def receive(self, room: int, decode: str = "decode0", **how: Any) -> None:
        """Ask a decode engine to serve a room."""
        if (engine := self.find_engine(decode)) is not None:
            engine.plan(Plan(room, peer=control_of("prefill"), **how))

    def both(self, room: int, decode: str = "decode0", **how: Any) -> None:
        self.send(room, **how)
        self.receive(room, decode, pages_count=how.get("pages_count", 4))

    def job(self, name: str, room: int) -> Job:
        return self.engine(name).job(room)

    def abort(self, name: str, room: int, reason: Reason = Reason.ABORTED) -> None:
        if (engine := self.find_engine(name)) is not None:
            engine.abort(room, reason)

    # --- time ------------------------------------------------------------------------------------

    @property
    def now_ms(self) -> int:
        return self.clock() // MILLISECOND_NS

    def step(self, ms: int = 2) -> None:
        """Let some time pass; everybody who runs has one turn, in any order."""
        self.clock.now_ns += ms * MILLISECOND_NS
        now_ns = self.clock()
        self.post.deliver(now_ns)
        running = []
        for tree in self.trees.values():
            tree.upkeep()
            running += tree.running()
        self._turn(running, now_ns)
        self._look()

    def _turn(self, processes: list[Process], now_ns: int) -> None:
        if len(processes) > 1:
            self.rng.shuffle(processes)
        self.turns += len(processes)
        for process in processes:
            if process.box.alive:
                process.turn(now_ns)

    def look(self, name: str) -> None:
        """Before somebody is awake again: until now, perhaps nobody was."""
        self._watches[name].look(self.trees[name].clock())

    def _look(self) -> None:
        for tree, watch in zip(self.trees.values(), self._watches.values(), strict=True):
            watch.look(tree.clock())

    def run(self, ms: int, step_ms: int = 2) -> None:
        if self.elapses:
            self.elapse(ms)
            return
        for _ in range(0, ms, step_ms):
            self.step(step_ms)

    def elapse(self, ms: int) -> None:
        """Let time pass; whoever has something to do has turns, in any order."""
        now_ns = self.clock.now_ns
        end_ns = now_ns + ms * MILLISECOND_NS
        turns_left = TURNS_MAX
        while True:
            if self.post.due_ns <= now_ns:
                self.post.deliver(now_ns)
            due, next_ns = self._agenda(now_ns)
            if due:
                turns_left -= len(due)
                assert turns_left > 0, f"nobody sleeps: {[process.name for process in due]}"
                self._turn(due, now_ns)
                continue
            if now_ns - self._looked_ns >= LOOK_NS:
                self._looked_ns = now_ns
                self._look()
            if now_ns >= end_ns:
                return
            self.post.now_ns = self.clock.now_ns = now_ns = min(end_ns, next_ns)
            turns_left = TURNS_MAX

    def _agenda(self, now_ns: int) -> tuple[list[Process], int]:
        """Whose turn it is, and when something happens next."""
        due, next_ns = [], self.post.due_ns
        for tree in self.trees.values():
            if tree.due_ns <= now_ns:
                tree.upkeep()
            next_ns = min(next_ns, tree.due_ns)
            for process in tree.processes.values():
                due_ns = process.box.due_ns
                if due_ns < next_ns and not process.frozen_ns:
                    if due_ns <= now_ns:
                        due.append(process)
                    else:
                        next_ns = due_ns
        return due, next_ns

    def until(self, done: Callable[[], bool], within_ms: int = 5000, step_ms: int = 2) -> int:
        """Step until `done`; returns the milliseconds it took.  Fails after `within_ms`."""
        start_ms = self.now_ms
        while not done():
            assert self.now_ms - start_ms < within_ms, f"not within {within_ms} ms"
            self.step(step_ms)
        return self.now_ms - start_ms

    def settle(self, within_ms: int = 20_000, step_ms: int = 10) -> None:
        """Heal everything, let every room end, and see that nothing is left."""
        self.post.weather.loss = self.post.weather.repeat = 0.0
        for pair in list(self.post.cuts):
            self.post.mend(*pair)
        self._look()
        for tree in self.trees.values():
            tree.sweeps = tree.supervised = True
            tree.due_ns = 0
            for process in list(tree.processes.values()):
                tree.thaw(process.name)
        end_ms = self.now_ms + within_ms
        while rest := [line for tree in self.trees.values() for line in leftovers(tree)]:
            assert self.now_ms < end_ms, "left behind: " + "; ".join(rest)
            self.run(200, step_ms)
        for watch in self._watches.values():
            watch.close()

    def serves(self, within_ms: int = SERVED_MS) -> None:
        """Never wedged: once all is settled, whoever lives serves a room with every peer that does.
        Else a world in which nothing succeeds any more would break no law."""
        prefill = self.trees.get("prefill")
        if prefill is None:
            return
        decodes = [t for t in self.trees.values() if t.role is Role.DECODE]
        decodes = [t for t in decodes if t.shape.layout == prefill.shape.layout]
        for agent in self.fabric.agents.values():
            agent.failing = 0
        for tree in decodes:  # to meet for the first time may take longer than a brief deadline
            listener = tree.processes["listener"].actor
            assert isinstance(listener, DecodeListener)
            listener._prefills.dial(control_of("prefill"), tree.clock())
        self.run(int(2000 * self._timeouts.peer_s))  # so that all know who is there
        fresh: list[tuple[str, int]] = []
        for tree in decodes:
            self._fresh_room += 1
            self.both(self._fresh_room, tree.name)
            fresh += [("prefill", self._fresh_room), (tree.name, self._fresh_room)]
        end_ms = self.now_ms + within_ms
        while late := [half for half in fresh if not self._is_over(*half)]:
            assert self.now_ms < end_ms, f"wedged: {late} are open after {within_ms} ms"
            self.run(20)
        for name, room in fresh:
            job = self.job(name, room)
            served = job.verdict is KVPoll.Success
            assert served, f"not served though all is well: {name}: {job.detail}"

    def _is_over(self, name: str, room: int) -> bool:
        engine = self.engine(name)
        return room not in engine.jobs and not any(plan.room == room for plan in engine.plans)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for tree in [*self.trees.values(), *self._retired]:
            tree.close()


def _fields(layout: Layout) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in Layout.__struct_fields__}
