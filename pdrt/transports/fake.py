"""A transport inside one process for tests and the simulator: real bytes, no clock, no threads.

    fabric = FakeFabric(polls=3)
    prefill, decode = FakeTransport(fabric), FakeTransport(fabric)

An operation ends after a number of polls (of any handle, or calls of `progress`) of the transport
that posted it.  Operations to one peer land whole and in the order of posting, as on a wire:
releasing one does not stop it, a fence waits for all before it.  A test can freeze an agent
(nothing lands there until it thaws), kill it, or fail the next write to it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pdrt.transports.base import TransferState, TransportError
from pdrt.transports.handles import HANDLES_MAX, Handles, Tables
from pdrt.transports.mapped import Mapped
from pdrt.transports.metadata import FakeMetadata, check_scratch, decode, encode
from pdrt.transports.tables import Table, check_write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from pdrt.transports.base import Grid, Indices, Region


@dataclass(eq=False)
class _Agent:
    region: Mapped
    alive: bool = True
    frozen: bool = False
    failing: int = 0  # writes to it that will fail


@dataclass
class FakeFabric:
    """What connects the transports of one test, and the test's hand on it.

    polls: how many polls an operation takes once it is the oldest to its peer; 0: done when posted.
    """

    polls: int = 1
    agents: dict[str, _Agent] = field(default_factory=dict)

    def freeze(self, agent: str) -> None:
        """Nothing lands at the agent, and nothing to it ends, until `thaw`."""
        self.agents[agent].frozen = True

    def thaw(self, agent: str) -> None:
        self.agents[agent].frozen = False

    def kill(self, agent: str) -> None:
        """Everything to the agent fails from now on, what is on its way included."""
        self.agents[agent].alive = False

    def fail_next(self, agent: str, writes: int = 1) -> None:
        """The next writes to the agent fail, each after half of its items has landed."""
        self.agents[agent].failing += writes


@dataclass(eq=False)
class _Operation:
    """A write of items, or a fence or warm-up, which has none."""

    polls_left: int
    sources: NDArray[np.int64]
    targets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    state: TransferState = TransferState.PENDING


@dataclass(eq=False)
class _Link:
    """To one peer.  Outlives `disconnect`: what was posted still lands."""

    agent: _Agent
    operations: deque[_Operation] = field(default_factory=deque)


class FakeTransport:
    """See the module, and `Transport` for the contract."""

    name = "fake"

    def __init__(self, fabric: FakeFabric, *, handles_max: int = HANDLES_MAX) -> None:
        self._fabric = fabric
        self._agent: tuple[str, _Agent] | None = None
        self._peers: dict[str, _Link] = {}
        self._links: list[_Link] = []
        self._tables = Tables[None]()
        self._operations = Handles[tuple[str, _Operation]](handles_max)

    def open(self, agent: str, region: Region, scratch_offset: int) -> bytes:
        """See Transport."""
        if self._agent is not None:
            raise TransportError("already open")
        if agent in self._fabric.agents and self._fabric.agents[agent].alive:
            raise TransportError(f"an agent {agent!r} exists; names carry an epoch")
        check_scratch(scratch_offset, region.length_bytes)
        ours = _Agent(Mapped(region.fd, region.length_bytes))
        self._agent = agent, ours
        self._fabric.agents[agent] = ours
        return encode(FakeMetadata(agent=agent))

    def connect(self, peer: str, metadata: bytes) -> int:
        """See Transport."""
        self._region(None)
        theirs = decode(metadata, FakeMetadata)
        if theirs.agent not in self._fabric.agents:
            raise TransportError(f"there is no agent {theirs.agent!r}")
        self.disconnect(peer)
        self._peers[peer] = _Link(self._fabric.agents[theirs.agent])
        still_used = [link for link in self._links if link.operations]
        self._links = list(dict.fromkeys([*still_used, *self._peers.values()]))
        return self.fence(peer)

    def disconnect(self, peer: str) -> None:
        """See Transport.  What was posted to the peer is FAILED, and lands all the same."""
        if self._peers.pop(peer, None) is None:
            return
        for owner, operation in self._operations.values():
            if owner == peer and operation.state is TransferState.PENDING:
                operation.state = TransferState.FAILED
        self._tables.drop(peer)

    def prepare(self, peer: str | None, grids: Sequence[Grid]) -> int:
        """See Transport."""
        return self._tables.add(peer, Table(grids, len(self._region(peer).view)), None)

    def write(
        self, peer: str, local: int, local_items: Indices, remote: int, remote_items: Indices
    ) -> int:
        """See Transport."""
        self._link(peer)
        source, _ = self._tables.get(local, None)
        target, _ = self._tables.get(remote, peer)
        check_write(source, local_items, target, remote_items)
        return self._post(
            peer,
            _Operation(
                self._fabric.polls,
                source.offsets(local_items),
                target.offsets(remote_items),
                source.sizes(local_items),
            ),
        )

    def fence(self, peer: str) -> int:
        """See Transport."""
        self._link(peer)
        nothing = np.zeros(0, np.int64)
        return self._post(peer, _Operation(self._fabric.polls, nothing, nothing, nothing))

    def poll(self, handle: int) -> TransferState:
        """See Transport."""
        _, operation = self._operations.get(handle)
        if operation.state is TransferState.PENDING:
            self.progress()
        return operation.state

    def release(self, handle: int) -> None:
        """See Transport.  What was posted still lands."""
        self._operations.pop(handle)

    def lost(self) -> list[str]:
        """See Transport.  Nobody is known to be."""
        return []

    def progress(self) -> None:
        """See Transport.  One poll for the oldest operation to each peer."""
        for link in self._links:
            self._advance(link, 1)

    def close(self) -> None:
        """See Transport.  Peers that still write to us see a dead agent."""
        if self._agent is None:
            return
        for peer in list(self._peers):
            self.disconnect(peer)
        self._operations.clear()
        self._links.clear()
        self._tables.drop(None)
        name, agent = self._agent
        self._agent = None
        agent.alive = False
        agent.region.close()
        if self._fabric.agents[name] is agent:  # not one that took its name after a kill
            del self._fabric.agents[name]

    def _link(self, peer: str) -> _Link:
        link = self._peers.get(peer)
        if link is None:
            raise TransportError(f"peer {peer!r} is not connected")
        return link

    def _region(self, peer: str | None) -> Mapped:
        """The peer's region; None: ours."""
        if peer is not None:
            return self._link(peer).agent.region
        if self._agent is None:
            raise TransportError("not open")
        return self._agent[1].region

    def _post(self, peer: str, operation: _Operation) -> int:
        """Put the operation on the wire, behind those before it."""
        self._operations.check_room()
        link = self._link(peer)
        link.operations.append(operation)
        self._advance(link, 0)
        return self._operations.add((peer, operation))

    def _advance(self, link: _Link, polls: int) -> None:
        """Count polls for the oldest operation and end what is due."""
        if link.agent.alive and link.agent.frozen:
            return
        if link.operations:
            link.operations[0].polls_left -= polls
        while link.operations and (not link.agent.alive or link.operations[0].polls_left <= 0):
            self._end(link.agent, link.operations.popleft())

    def _end(self, agent: _Agent, operation: _Operation) -> None:
        """Land the operation, as far as the agent lets it.  A verdict given before stays."""
        landing = len(operation.targets) if agent.alive else 0
        state = TransferState.DONE if agent.alive else TransferState.FAILED
        if agent.failing and landing:
            agent.failing -= 1
            landing, state = landing // 2, TransferState.FAILED
        ours, theirs = self._region(None).view, agent.region.view
        for i in range(landing):
            source, target, size = operation.sources[i], operation.targets[i], operation.sizes[i]
            theirs[target : target + size] = ours[source : source + size]
        if operation.state is TransferState.PENDING:
            operation.state = state
