"""THE WORLD: a prefill tree, decode trees and the network, in one thread, in virtual time.

Everything but the engines' scheduling, the network and the supervisor is pdrt's own code.  One seed
decides everything.  After every `step` the laws are checked (`laws.Watch`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from pdrt.actors.base import Actor
from pdrt.clock import MILLISECOND_NS, SECOND_NS, ManualClock
from pdrt.config import Timeouts
from pdrt.protocol.layout import Layout
from pdrt.protocol.states import Role
from pdrt.shm_status import StatusTable
from pdrt.transports.fake import FakeTransport
from tests.actors.engines import DecodeEngine, Engine, Job, Ledger, Plan, PrefillEngine
from tests.actors.laws import Watch, leftovers
from tests.actors.post import Box, Post
from tests.actors.tree import Fabric, Shape, ShmLike, Tree

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
    ) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock(10 * SECOND_NS)
        self.post = Post(seed)
        self.fabric = Fabric(polls=polls)
        self.ledger = Ledger()
        self.layout = LAYOUT.__class__(**{**_fields(layout), "ranks": ranks})
        self._timeouts, self._transport = timeouts, ShmLike if shm else FakeTransport
        self._born = 0
        self._retired: list[Tree] = []
        self.zombie_steps = self.rng.randrange(0, 30)
        self.trees: dict[str, Tree] = {}
        self._watches: dict[str, Watch] = {}
        self.add("prefill", Role.PREFILL, self.layout)
        for i in range(decodes):
            self.add(f"decode{i}", Role.DECODE, decode_layout or self.layout)

    # --- trees -----------------------------------------------------------------------------------

    def add(self, name: str, role: Role, layout: Layout) -> Tree:
        self._born += 1
        shape = Shape(layout, self._timeouts, self._transport)
        kind = PrefillEngine if role is Role.PREFILL else DecodeEngine

        def engine(tree: Tree, box: Box, table: StatusTable) -> Actor:
            return kind(tree, box, table, self.ledger)

        instance = f"{name[0]}{self._born:07x}"
        tree = Tree(role, name, instance, shape, self.post, self.fabric, self.clock, engine)
        tree.zombie_steps = self.zombie_steps
        tree.decodes_mapped_by = self._transports_of
        self.trees[name] = tree
        self._watches[name] = Watch(tree)
        return tree

    def _transports_of(self, peer: int) -> list[FakeTransport]:
        found = (tree for tree in self.trees.values() if tree.digest == peer)
        return [transport for tree in found for transport in tree.transports()]

    def replace(self, name: str) -> Tree:
        """The tree dies as a whole; another instance takes its address."""
        old = self.trees[name]
        old.stop()
        self._retired.append(old)
        return self.add(name, old.role, old.shape.layout)

    def desert(self, name: str) -> str:
        """The tree dies as a whole, and nobody takes its address, which is returned."""
        old = self.trees.pop(name)
        del self._watches[name]
        old.stop()
        self._retired.append(old)
        self.post.deserted.add(old.control)
        return old.control

    def engine(self, name: str) -> Engine:
        engine = self.trees[name].processes["engine"].actor
        assert isinstance(engine, Engine)
        return engine

    # --- rooms -----------------------------------------------------------------------------------

    def send(self, room: int, **how: Any) -> None:
        """Ask the prefill engine to serve a room."""
        if "engine" in self.trees["prefill"].processes:
            self.engine("prefill").plan(Plan(room, **how))

    def receive(self, room: int, decode: str = "decode0", **how: Any) -> None:
        """Ask a decode engine to serve a room."""
        if "engine" in self.trees[decode].processes:
            peer = self.trees["prefill"].control
            self.engine(decode).plan(Plan(room, peer=peer, **how))

    def both(self, room: int, decode: str = "decode0", **how: Any) -> None:
        self.send(room, **how)
        self.receive(room, decode, pages_count=how.get("pages_count", 4))

    def job(self, name: str, room: int) -> Job:
        return self.engine(name).job(room)

    def abort(self, name: str, room: int) -> None:
        if "engine" in self.trees[name].processes:
            self.engine(name).abort(room)

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
            tree.upkeep(now_ns)
            running += tree.running()
        self.rng.shuffle(running)
        for process in running:
            if process.box.alive:
                process.turn(now_ns)
        for watch in self._watches.values():
            watch.look(now_ns)

    def run(self, ms: int, step_ms: int = 2) -> None:
        for _ in range(0, ms, step_ms):
            self.step(step_ms)

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
        for tree in self.trees.values():
            tree.sweeps = tree.supervised = True
            for process in list(tree.processes.values()):
                tree.thaw(process.name)
        end_ms = self.now_ms + within_ms
        while rest := [line for tree in self.trees.values() for line in leftovers(tree)]:
            assert self.now_ms < end_ms, "left behind: " + "; ".join(rest)
            self.run(200, step_ms)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        for tree in [*self.trees.values(), *self._retired]:
            tree.close()


def _fields(layout: Layout) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in Layout.__struct_fields__}
