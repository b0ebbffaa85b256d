"""One process tree of the world: table, regions, listener, workers, engine, janitor, and the hand
that kills, freezes and restarts them as the supervisor would."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pdrt import shm_status
from pdrt.actors.base import Actor, Beating
from pdrt.actors.boot import ENGINES_MAX, FIRST_ENGINE_ROW, FIRST_WORKER_ROW, LISTENER_ROW
from pdrt.actors.decode_listener import DecodeListener
from pdrt.actors.decodes import worker_link
from pdrt.actors.janitor import Janitor
from pdrt.actors.paths import LISTENER
from pdrt.actors.prefill_listener import PrefillListener
from pdrt.actors.transfer import TransferWorker
from pdrt.clock import MILLISECOND_NS, Clock, to_ns
from pdrt.config import Timeouts
from pdrt.memfd import memory_fd
from pdrt.process_rows import INCARNATION_MASK, Owner
from pdrt.protocol.layout import Layout, RegionMap
from pdrt.protocol.peers import instance_digest
from pdrt.protocol.states import KVPoll, Role
from pdrt.shm_status import StatusTable
from pdrt.transports.base import Region
from tests.actors.fabric import Fabric, NixlLike
from tests.actors.post import NEVER_NS, Box, Post

SWEEP_NS = 50 * MILLISECOND_NS
HAUNT_NS = 5 * MILLISECOND_NS  # between two steps of what a dead worker's adapter still moves
ENGINE_ROW = FIRST_ENGINE_ROW
assert ENGINES_MAX >= 1


def control_of(name: str) -> str:
    """Where the tree of that name is dialled."""
    return f"{name}:8998"


def beating(table: StatusTable, clock: Clock) -> Beating:
    return Beating(lambda: table.beat(clock()))


class EngineActor(Actor, Protocol):
    def check_moved(self, rank: int, offsets: list[int], verb: str) -> None:
        """Bytes "landed in" these offsets, or "were read from" them: nothing there may be free."""


@dataclass(frozen=True)
class Skewed:
    """The clock of one host: no two were started at the same time."""

    clock: Clock
    skew_ns: int = 0

    def __call__(self) -> int:
        return self.clock() + self.skew_ns


@dataclass(eq=False)
class Process:
    name: str
    row: int
    incarnation: int
    box: Box
    table: StatusTable
    clock: Skewed
    spin_ns: int
    actor: Actor = field(init=False)
    transport: NixlLike | None = None
    agent: str = ""
    frozen_ns: int = 0  # since when; 0: it runs

    def turn(self, now_ns: int) -> None:
        """One turn of its loop, by the world's time.  Until when it then sleeps is in its box."""
        actor, box = self.actor, self.box
        our_ns = now_ns + self.clock.skew_ns
        for sender, message in box.receive():
            actor.handle(sender, message, our_ns)
        sleep_ns = actor.tick(our_ns) * MILLISECOND_NS
        box.flush()
        box.due_ns = now_ns + max(sleep_ns, self.spin_ns)


@dataclass
class Shape:
    """What all trees of a world share."""

    layout: Layout
    timeouts: Timeouts
    transport: Callable[[Fabric], NixlLike]
    rooms_max: int = 256
    pages_count: int = 64
    aux_rows: int = 32
    restart_ms: int = 30
    hang_s: float = 1.0
    spin_ms: int = 1  # a process that does not want to sleep turns again after so long
    renew_ms: int = 0  # engines say so often that rooms wait in their queue; 0: never
    deaf: float = 0.0  # of the engine's wake-ups, these are lost
    born: int = 1  # incarnation of the first processes


class Tree:
    """`engine(process-less) -> Actor` builds the engine; the rest is pdrt's own."""

    def __init__(
        self,
        role: Role,
        name: str,
        instance: str,
        shape: Shape,
        post: Post,
        fabric: Fabric,
        clock: Skewed,
        engine: Callable[[Tree, Box, StatusTable], EngineActor],
    ) -> None:
        self.role, self.name, self.instance, self.shape = role, name, instance, shape
        self.post, self.fabric, self.clock = post, fabric, clock
        self.due_ns = 0  # when there is something for the supervisor to do, by the world's time
        self.on_view: Callable[[StatusTable], object] = lambda table: None
        self._engine = engine
        self.control = control_of(name)
        self.maps = tuple(
            RegionMap(
                layout=shape.layout, rank=r, pages_count=shape.pages_count, aux_rows=shape.aux_rows
            )
            for r in range(shape.layout.ranks)
        )
        t = shape.timeouts
        self._table_fd = shm_status.create(
            role,
            rooms_max=shape.rooms_max,
            instance=instance.encode().ljust(16, b"\0")[:16],
            timeouts_ms={
                KVPoll.Bootstrapping: int(t.bootstrap_s * 1000),
                KVPoll.WaitingForInput: int(t.waiting_s * 1000),
                KVPoll.Transferring: int(t.stall_s * 1000),
            },
            now_ns=clock(),
            queue_ms=int(t.queue_s * 1000),
        )
        self.tables: list[StatusTable] = []
        self.table = self._view(Owner(1, 1))
        self._fds = [memory_fd(f"{name}{m.rank}", m.length_bytes) for m in self.maps]
        self._mapped = [
            mmap.mmap(fd, m.length_bytes) for fd, m in zip(self._fds, self.maps, strict=True)
        ]
        self.regions = [memoryview(m) for m in self._mapped]
        self.memory: list[NDArray[np.uint8]] = [np.frombuffer(m, np.uint8) for m in self._mapped]
        self.processes: dict[str, Process] = {}
        self.engine: EngineActor | None = None  # None: dead
        self.incarnations: dict[str, int] = {}
        self.zombies: list[tuple[NixlLike, int]] = []  # dead workers whose bytes still fly
        self.zombie_steps = 0
        self._dead: list[NixlLike] = []
        self.reborn: dict[str, int] = {}  # name -> when it is started again
        self.forced: list[str] = []  # workers restarted on purpose, by the janitor
        self._swept_ns = 0
        self.sweeps = True  # False: the janitor's timer has stopped
        self.supervised = True  # False: the supervisor is frozen; it sees no death and no hang
        self._unseen: list[int] = []  # rows of those that died meanwhile
        self.janitor = Janitor(
            table=self.table,
            timeouts=t,
            mapped=self._is_mapped,
            fence=self._fence,
            wake=self._wake,
            beating=beating(self.table, clock),
        )
        self.decodes_mapped_by: Callable[[int], list[NixlLike]] = lambda peer: []
        self.names = ["listener", *(worker_link(m.rank) for m in self.maps), "engine"]
        for each in self.names:
            self.start(each)

    def _view(self, me: Owner) -> StatusTable:
        table = StatusTable(self._table_fd, me)
        self.tables.append(table)
        self.on_view(table)
        return table

    def _wake(self, row: int) -> None:
        """An eventfd: the engine turns at once.  It loses nothing but time without."""
        engine = self.processes.get("engine")
        deaf = self.shape.deaf
        if engine is not None and row == engine.row and not (deaf and self._is_deaf(deaf)):
            engine.box.due_ns = 0

    def _is_deaf(self, share: float) -> bool:
        return self.post.rng.random() < share

    # --- the supervisor's hand -------------------------------------------------------------------

    def row(self, name: str) -> int:
        if name.startswith("worker"):
            return FIRST_WORKER_ROW + int(name.removeprefix("worker"))
        return LISTENER_ROW if name == "listener" else ENGINE_ROW

    def start(self, name: str) -> None:
        number = self.incarnations.get(name, self.shape.born - 1)
        incarnation = self.incarnations[name] = number % INCARNATION_MASK + 1  # as `Board` has it
        row = self.row(name)
        self.table.incarnate(row, incarnation, 1000 + incarnation, name)
        table = self._view(Owner(row, incarnation))
        box = Box(self.post, self.name, f"{self.instance}-{row}.{incarnation}")
        spin_ns = self.shape.spin_ms * MILLISECOND_NS
        process = Process(name, row, incarnation, box, table, self.clock, spin_ns)
        if name == "listener":
            process.actor = self._listener(box, table)
        elif name == "engine":
            box.link(LISTENER, f"ipc://{self.instance}-listener")
            for m in self.maps:
                box.link(worker_link(m.rank), f"ipc://{self.instance}-worker{m.rank}")
            process.actor = self.engine = self._engine(self, box, table)
        else:
            self._worker(process, int(name.removeprefix("worker")))
        self.processes[name] = process

    def _listener(self, box: Box, table: StatusTable) -> Actor:
        self.post.open_door(box, "local", f"ipc://{self.instance}-listener")
        self.post.open_door(box, "control", f"tcp://{self.control}")
        for m in self.maps:
            box.link(worker_link(m.rank), f"ipc://{self.instance}-worker{m.rank}")
        common: dict[str, Any] = {
            "instance": self.instance,
            "boot_id": "host",
            "layout": self.shape.layout,
            "table": table,
            "mailbox": box,
            "timeouts": self.shape.timeouts,
            "wake": self._wake,
            "nobody_listens": lambda peer, now_ns: peer in self.post.deserted,
            "beating": beating(table, self.clock),
        }
        if self.role is Role.PREFILL:
            return PrefillListener(**common)
        return DecodeListener(
            control=self.control,
            maps=self.maps,
            **common,
        )

    def _worker(self, process: Process, rank: int) -> None:
        box, region_map = process.box, self.maps[rank]
        self.post.open_door(box, "worker", f"ipc://{self.instance}-worker{rank}")
        box.link(LISTENER, f"ipc://{self.instance}-listener")
        process.transport = self.shape.transport(self.fabric)
        process.agent = f"{self.instance}.{rank}#{process.incarnation}"
        region = Region(self._fds[rank], region_map.length_bytes)
        metadata = process.transport.open(process.agent, region, region_map.scratch_offset)
        self.fabric.homes[self.fabric.agents[process.agent]] = partial(self._moved, rank)
        name = process.transport.name
        process.actor = TransferWorker(
            region=region_map,
            transports={name: (process.transport, metadata)},
            preferred=name,
            table=process.table,
            mailbox=box,
            timeouts=self.shape.timeouts,
            clock=self.clock,
            wake=self._wake,
            listener_row=self.row("listener"),
            beating=beating(process.table, self.clock),
        )

    def _moved(self, rank: int, offsets: list[int], verb: str) -> None:
        if self.engine is not None:
            self.engine.check_moved(rank, offsets, verb)

    def kill(self, name: str, *, again_ms: int | None = None) -> None:
        """SIGKILL, and a successor after a while.  Nothing happens to what is dead already."""
        process = self.processes.pop(name, None)
        if process is None:
            return
        self.due_ns = 0
        if name == "engine":
            self.engine = None
        if self.supervised:
            self.table.bury(process.row)
        else:
            self._unseen.append(process.row)
        self.post.bury(process.box)
        if process.transport is not None:
            process.transport.haunts = True
            if process.transport.name == "shm":
                self._dead.append(process.transport)
                self.fabric.buried.add(process.agent)
                self.fabric.thaw(process.agent)
            else:
                self.fabric.kill(process.agent)
                self.zombies.append((process.transport, self.zombie_steps))
        ms = self.shape.restart_ms if again_ms is None else again_ms
        self.reborn[name] = self.clock() + ms * MILLISECOND_NS

    def freeze(self, name: str) -> None:
        process = self.processes.get(name)
        if process is not None and not process.frozen_ns:
            process.frozen_ns = self.clock()
            self.due_ns = 0
            if process.agent and process.transport and process.transport.name != "shm":
                self.fabric.freeze(process.agent)

    def thaw(self, name: str) -> None:
        process = self.processes.get(name)
        if process is not None and process.frozen_ns:
            process.frozen_ns = 0
            if process.agent:
                self.fabric.thaw(process.agent)

    def _fence(self, row: int, reason: str) -> None:
        name = next(n for n in self.names if self.row(n) == row)
        if name in self.processes:
            self.forced.append(name)
            self.kill(name, again_ms=10)

    def _is_mapped(self, peer: int, rank: int, epoch: int) -> bool:
        """shm: does a living worker of that peer hold that region, as that worker offered it?"""
        agent = self.fabric.agents.get(f"{self.instance}.{rank}#{epoch}")
        return any(
            link.agent is agent
            for transport in self.decodes_mapped_by(peer)
            if transport.name == "shm"
            for link in transport._peers.values()
        )

    # --- time ------------------------------------------------------------------------------------

    def upkeep(self) -> None:
        """What the supervisor does of its own accord."""
        self._haunt()
        if self.supervised:
            self._supervise(self.clock())
        self.due_ns = self._next_ns() - self.clock.skew_ns

    def _next_ns(self) -> int:
        """When there will be something to do, by our time."""
        dues = [self._swept_ns + SWEEP_NS] if self.sweeps else [NEVER_NS]
        dues += self.reborn.values()
        hang_ns = to_ns(self.shape.hang_s) + 1
        dues += [p.frozen_ns + hang_ns for p in self.processes.values() if p.frozen_ns]
        if not self.supervised:
            dues = [NEVER_NS]
        return min([*dues, self.clock() + HAUNT_NS]) if self.zombies else min(dues)

    def _supervise(self, now_ns: int) -> None:
        for row in self._unseen:
            self.table.bury(row)
        self._unseen.clear()
        for name, due_ns in list(self.reborn.items()):
            if now_ns >= due_ns:
                del self.reborn[name]
                self.start(name)
        hang_ns = to_ns(self.shape.hang_s)
        for process in list(self.processes.values()):
            if process.frozen_ns and now_ns - process.frozen_ns > hang_ns:
                self.kill(process.name)
        if self.sweeps and now_ns - self._swept_ns >= SWEEP_NS:
            self._swept_ns = now_ns
            self.janitor.sweep(now_ns)

    @property
    def observed(self) -> bool:
        """Is anybody awake who looks at every room of the table?"""
        listener = self.processes.get("listener")
        awake = listener is not None and not listener.frozen_ns
        return awake or (self.supervised and self.sweeps)

    def _haunt(self) -> None:
        zombies, self.zombies = self.zombies, []
        for transport, steps in zombies:
            if steps > 0:
                transport.progress()
                self.zombies.append((transport, steps - 1))
            else:
                self._dead.append(transport)

    def running(self) -> list[Process]:
        return [p for p in self.processes.values() if not p.frozen_ns]

    @property
    def digest(self) -> int:
        return instance_digest(self.instance)

    def transports(self) -> list[NixlLike]:
        return [p.transport for p in self.processes.values() if p.transport is not None]

    def stop(self) -> None:
        """The whole tree dies.  Its memory is given back by `close`."""
        for name in list(self.processes):
            self.kill(name)
        self.reborn.clear()
        for agent in self.fabric.agents:
            if agent.startswith(self.instance):
                self.fabric.kill(agent)

    def close(self) -> None:
        for process in self.processes.values():
            if process.transport is not None:
                self._dead.append(process.transport)
        for transport in [*self._dead, *(t for t, _ in self.zombies)]:
            with contextlib.suppress(BufferError):
                transport.close()
        self.processes.clear()
        for table in self.tables:
            with contextlib.suppress(BufferError):
                table.close()
        self.memory.clear()
        for region, mapped in zip(self.regions, self._mapped, strict=True):
            with contextlib.suppress(BufferError):  # a failing test's traceback holds views
                region.release()
                mapped.close()
        for fd in (self._table_fd, *self._fds):
            os.close(fd)
