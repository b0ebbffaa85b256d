"""Where the conformance suite runs: one initiator in this process and peers it can mistreat."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pdrt.transports.base import Grid, Region, TransferState, Transport
from pdrt.transports.fake import FakeFabric, FakeTransport
from pdrt.transports.mapped import Mapped
from pdrt.transports.nixl import NixlTransport
from pdrt.transports.shm import ShmTransport
from tests.transports.peer_process import Fetched, sealed_memory, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection

    from numpy.typing import NDArray

PAGE_BYTES = 16 << 10
AUX_BYTES = 256
SCRATCH_BYTES = 4096
DEADLINE_S = 15.0


class Shape:
    """A region: pages, then aux rows, then scratch."""

    def __init__(self, pages_count: int, aux_rows: int) -> None:
        self.pages_count, self.aux_rows = pages_count, aux_rows
        self.scratch_offset = pages_count * PAGE_BYTES + aux_rows * AUX_BYTES
        self.length_bytes = self.scratch_offset + SCRATCH_BYTES
        self.pages = [Grid(0, PAGE_BYTES, PAGE_BYTES, pages_count)]
        self.aux = [Grid(pages_count * PAGE_BYTES, AUX_BYTES, AUX_BYTES, aux_rows)]


OURS = Shape(pages_count=128, aux_rows=64)
THEIRS = Shape(pages_count=512, aux_rows=32)


class Peer(Protocol):
    """The other end.  `memory`: [length_bytes] uint8, its region, readable even while frozen."""

    agent: str
    metadata: bytes
    memory: NDArray[np.uint8]

    def freeze(self) -> None: ...
    def thaw(self) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


class ProcessPeer:
    """A peer in a process of its own, frozen by SIGSTOP and killed by SIGKILL."""

    def __init__(self, kind: str, agent: str, environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.agent = agent
        self.control, theirs = context.Pipe()
        arguments = (kind, agent, THEIRS.length_bytes, THEIRS.scratch_offset, environment, theirs)
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        assert self.control.poll(DEADLINE_S), f"{agent} did not start"
        self.fd_there, self.metadata = self.control.recv()
        fd = self.open_region()
        self._mapped = Mapped(fd, THEIRS.length_bytes)
        os.close(fd)
        self.memory = self._mapped.view

    def open_region(self) -> int:
        """A descriptor of the peer's memory in this process."""
        return os.open(f"/proc/{self.process.pid}/fd/{self.fd_there}", os.O_RDWR)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_S)

    def close(self) -> None:
        if self.process.exitcode is None:
            self.thaw()
            self.control.send("end")
            self.process.join(DEADLINE_S)
        if self.process.exitcode is None:
            self.kill()
        self.process.close()
        self.control.close()
        self.memory = np.zeros(0, np.uint8)
        self._mapped.close()

    def _signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


class FakePeer:
    """A peer in this process."""

    def __init__(self, fabric: FakeFabric, agent: str) -> None:
        self.agent = agent
        self._fabric = fabric
        self._transport = FakeTransport(fabric)
        fd = sealed_memory(agent, THEIRS.length_bytes)
        region = Region(fd, THEIRS.length_bytes)
        self.metadata = self._transport.open(agent, region, THEIRS.scratch_offset)
        self._mapped = Mapped(fd, THEIRS.length_bytes)
        os.close(fd)
        self.memory = self._mapped.view

    def freeze(self) -> None:
        self._fabric.freeze(self.agent)

    def thaw(self) -> None:
        self._fabric.thaw(self.agent)

    def kill(self) -> None:
        self._fabric.kill(self.agent)

    def close(self) -> None:
        self._transport.close()
        self.memory = np.zeros(0, np.uint8)
        self._mapped.close()


class Rig:
    """The initiator, its memory, and a way to make peers.

    memory: [OURS.length_bytes] uint8, our region, filled with random bytes.
    hears_of_deaths: this transport is told when a peer has died.
    """

    def __init__(
        self,
        transport: Transport,
        start_peer: Callable[[str], Peer],
        *,
        hears_of_deaths: bool = False,
    ) -> None:
        self.transport = transport
        self.hears_of_deaths = hears_of_deaths
        self._start_peer = start_peer
        self._peers: list[Peer] = []  # of the test that runs
        self._names: list[str] = []  # under which it connected to them
        self._agents = 0
        fd = sealed_memory("ours", OURS.length_bytes)
        self._mapped = Mapped(fd, OURS.length_bytes)
        self.memory = self._mapped.view
        self.memory[:] = np.random.default_rng(7).integers(0, 256, OURS.length_bytes, np.uint8)
        region = Region(fd, OURS.length_bytes)
        self.metadata = transport.open(f"ours-{os.getpid()}#1", region, OURS.scratch_offset)
        os.close(fd)
        self.pages = transport.prepare(None, OURS.pages)
        self.aux = transport.prepare(None, OURS.aux)
        # One peer for all tests that treat it well: a process and an agent cost a second.
        self.standing = self.connected("standing")
        self._peers.clear()
        self._names.clear()

    def start(self, agent: str | None = None) -> Peer:
        """A running peer that nobody is connected to."""
        self._agents += 1
        peer = self._start_peer(agent or f"peer-{os.getpid()}-{id(self)}#{self._agents}")
        self._peers.append(peer)
        return peer

    def connected(self, name: str) -> Peer:
        """A running peer under that name, connected and warm."""
        peer = self.start()
        self.connect(name, peer.metadata)
        return peer

    def connect(self, name: str, metadata: bytes) -> None:
        """Connect under that name until the end of the test."""
        self._names.append(name)
        handle = self.transport.connect(name, metadata)
        assert self.finish(handle) is TransferState.DONE

    def finish(self, handle: int) -> TransferState:
        """Poll to a final state and release."""
        self.wait_for(lambda: self.transport.poll(handle) is not TransferState.PENDING)
        state = self.transport.poll(handle)
        self.transport.release(handle)
        return state

    def write(self, name: str, local: list[int], remote: list[int], *, aux: bool = False) -> int:
        """Post a write of pages, or of aux rows, through tables made for it."""
        table = self.transport.prepare(name, THEIRS.aux if aux else THEIRS.pages)
        return self.transport.write(
            name,
            self.aux if aux else self.pages,
            np.array(local, np.int32),
            table,
            np.array(remote, np.int32),
        )

    def wait_for(self, condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        assert self.happens(condition, deadline_s), f"not within {deadline_s} s"

    def happens(self, condition: Callable[[], bool], within_s: float) -> bool:
        """Whether the condition comes true, with our side making progress meanwhile."""
        end = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > end:
                return False
            self.transport.progress()
            os.sched_yield()
        return True

    def end_test(self) -> None:
        """Forget and end every peer but the standing one."""
        for name in self._names:
            self.transport.disconnect(name)
        for peer in self._peers:
            peer.close()
        self._names.clear()
        self._peers.clear()

    def close(self) -> None:
        self.end_test()
        self.transport.close()
        self.standing.close()
        self.memory = np.zeros(0, np.uint8)
        self._mapped.close()


def nixl_rig(environment: Mapping[str, str]) -> Rig:
    """NIXL; the caller has put `environment` into our own process already."""
    return Rig(NixlTransport(), lambda agent: ProcessPeer("nixl", agent, environment))


def shm_rig(budget_bytes: int) -> Rig:
    """shm, with a control connection as the one that comes with a region."""
    peers: dict[str, ProcessPeer] = {}

    def start(agent: str) -> ProcessPeer:
        peers[agent] = ProcessPeer("shm", agent, {})
        return peers[agent]

    def open_region(address: str, key: str) -> Fetched:
        if address != f"@{key}" or key not in peers:
            raise ConnectionRefusedError(f"{address} {key}")
        connection: Connection = peers[key].control
        return Fetched(peers[key].open_region(), os.dup(connection.fileno()))

    transport = ShmTransport(
        address="@ours", key="ours", open_region=open_region, budget_bytes=budget_bytes
    )
    return Rig(transport, start, hears_of_deaths=True)


def fake_rig(polls: int) -> Rig:
    fabric = FakeFabric(polls=polls)
    return Rig(FakeTransport(fabric), lambda agent: FakePeer(fabric, agent))
