"""One process tree of the world: table, regions, listener, workers, engine, janitor, and the hand
that kills, freezes and restarts them as the supervisor would."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdrt import shm_status
from pdrt.actors.base import Actor
from pdrt.actors.boot import ENGINES_MAX, FIRST_ENGINE_ROW, FIRST_WORKER_ROW, LISTENER_ROW
from pdrt.actors.decode_listener import DecodeListener
from pdrt.actors.decodes import worker_link
from pdrt.actors.janitor import Janitor
from pdrt.actors.paths import LISTENER
from pdrt.actors.prefill_listener import PrefillListener
from pdrt.actors.transfer import TransferWorker
from pdrt.clock import MILLISECOND_NS, ManualClock, to_ns
from pdrt.config import Timeouts
from pdrt.protocol.layout import Layout, RegionMap
from pdrt.protocol.peers import instance_digest
from pdrt.protocol.states import KVPoll, Role
from pdrt.shm_status import Owner, StatusTable
from pdrt.transports.base import Region, TransportError
from pdrt.transports.fake import FakeFabric, FakeTransport
from pdrt.transports.metadata import FakeMetadata, decode
from tests.actors.post import Box, Post

SWEEP_NS = 50 * MILLISECOND_NS
ENGINE_ROW = FIRST_ENGINE_ROW
assert ENGINES_MAX >= 1


@dataclass
class Fabric(FakeFabric):
    """Knows which agents' workers are dead: their regions can be written to, and not mapped."""

    buried: set[str] = field(default_factory=set)


class ShmLike(FakeTransport):
    """The fake with shm's quiet: the writer's death ends its writes, ours does not.  It ends what
    can be mapped, as the attach server does."""

    name = "shm"

    def __init__(self, fabric: Fabric) -> None:
        super().__init__(fabric)
        self._buried = fabric.buried

    def connect(self, peer: str, metadata: bytes) -> int:
        agent = decode(metadata, FakeMetadata).agent
        if agent in self._buried:
            raise TransportError(f"the worker of {agent} is gone")
        return super().connect(peer, metadata)


@dataclass(eq=False)
class Process:
    name: str
    row: int
    incarnation: int
    box: Box
    table: StatusTable
    actor: Actor
    transport: FakeTransport | None = None
    agent: str = ""
    frozen_ns: int = 0  # since when; 0: it runs

    def turn(self, now_ns: int) -> None:
        for sender, message in self.box.receive():
            self.actor.handle(sender, message, now_ns)
        self.actor.tick(now_ns)
        self.box.flush()


@dataclass
class Shape:
    """What all trees of a world share."""

    layout: Layout
    timeouts: Timeouts
    transport: Callable[[Fabric], FakeTransport]
    rooms_max: int = 256
    pages_count: int = 64
    aux_rows: int = 32
    restart_ms: int = 30
    hang_s: float = 1.0


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
        clock: ManualClock,
        engine: Callable[[Tree, Box, StatusTable], Actor],
    ) -> None:
        self.role, self.name, self.instance, self.shape = role, name, instance, shape
        self.post, self.fabric, self.clock = post, fabric, clock
        self._engine = engine
        self.control = f"{name}:8998"
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
        self._tables: list[StatusTable] = []
        self.table = self._view(Owner(1, 1))
        self._fds = [shm_status.memory_fd(f"{name}{m.rank}", m.length_bytes) for m in self.maps]
        self._mapped = [
            mmap.mmap(fd, m.length_bytes) for fd, m in zip(self._fds, self.maps, strict=True)
        ]
        self.regions = [memoryview(m) for m in self._mapped]
        self.memory: list[NDArray[np.uint8]] = [np.frombuffer(m, np.uint8) for m in self._mapped]
        self.processes: dict[str, Process] = {}
        self.incarnations: dict[str, int] = {}
        self.zombies: list[tuple[FakeTransport, int]] = []  # dead workers whose bytes still fly
        self.zombie_steps = 0
        self._dead: list[FakeTransport] = []
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
            wake=lambda row: None,
        )
        self.decodes_mapped_by: Callable[[int], list[FakeTransport]] = lambda peer: []
        self.names = ["listener", *(worker_link(m.rank) for m in self.maps), "engine"]
        for each in self.names:
            self.start(each)

    def _view(self, me: Owner) -> StatusTable:
        table = StatusTable(self._table_fd, me)
        self._tables.append(table)
        return table

    # --- the supervisor's hand -------------------------------------------------------------------

    def row(self, name: str) -> int:
        if name.startswith("worker"):
            return FIRST_WORKER_ROW + int(name.removeprefix("worker"))
        return LISTENER_ROW if name == "listener" else ENGINE_ROW

    def start(self, name: str) -> None:
        incarnation = self.incarnations[name] = self.incarnations.get(name, 0) + 1
        row = self.row(name)
        self.table.incarnate(row, incarnation, 1000 + incarnation, name)
        table = self._view(Owner(row, incarnation))
        box = Box(self.post, self.name, f"{self.instance}-{row}.{incarnation}")
        process = Process(name, row, incarnation, box, table, None)  # type: ignore[arg-type]
        if name == "listener":
            process.actor = self._listener(box, table)
        elif name == "engine":
            box.link(LISTENER, f"ipc://{self.instance}-listener")
            for m in self.maps:
                box.link(worker_link(m.rank), f"ipc://{self.instance}-worker{m.rank}")
            process.actor = self._engine(self, box, table)
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
            "wake": lambda row: None,
            "nobody_listens": lambda peer, now_ns: peer in self.post.deserted,
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
        name = process.transport.name
        process.actor = TransferWorker(
            region=region_map,
            transports={name: (process.transport, metadata)},
            preferred=name,
            table=process.table,
            mailbox=box,
            timeouts=self.shape.timeouts,
            clock=self.clock,
            wake=lambda row: None,
            listener_row=self.row("listener"),
        )

    def kill(self, name: str, *, again_ms: int | None = None) -> None:
        """SIGKILL, and a successor after a while.  Nothing happens to what is dead already."""
        process = self.processes.pop(name, None)
        if process is None:
            return
        if self.supervised:
            self.table.bury(process.row)
        else:
            self._unseen.append(process.row)
        self.post.bury(process.box)
        if process.transport is not None:
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

    def upkeep(self, now_ns: int) -> None:
        """What the supervisor does of its own accord."""
        self._haunt()
        if not self.supervised:
            return
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

    def transports(self) -> list[FakeTransport]:
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
        for table in self._tables:
            with contextlib.suppress(BufferError):
                table.close()
        self.memory.clear()
        for region, mapped in zip(self.regions, self._mapped, strict=True):
            with contextlib.suppress(BufferError):  # a failing test's traceback holds views
                region.release()
                mapped.close()
        for fd in (self._table_fd, *self._fds):
            os.close(fd)
