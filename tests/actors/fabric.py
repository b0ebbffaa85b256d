"""How bytes move in the world: by pdrt's fake transport, under the eyes of the law."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pdrt.transports.base import TransportError
from pdrt.transports.fake import FakeFabric, FakeTransport, _Agent, _Operation
from pdrt.transports.metadata import FakeMetadata, decode

#: Bytes were moved to or from these offsets of the memory behind an agent; it says which verb.
Home = Callable[[list[int], str], object]


@dataclass
class Fabric(FakeFabric):
    """Knows which agents' workers are dead: their regions can be written to, and not mapped; and
    whose memory each agent has registered."""

    buried: set[str] = field(default_factory=set)
    homes: dict[_Agent, Home] = field(default_factory=dict)


class NixlLike(FakeTransport):
    """The fake, and every byte that it moves is held against the laws: none lands in what is free,
    and none is read from it by a worker that lives."""

    _fabric: Fabric
    haunts = False  # the worker is dead, and its adapter goes on with what it has read by then

    def _end(self, agent: _Agent, operation: _Operation) -> None:
        if agent.alive and len(operation.targets):
            landing = len(operation.targets) // (2 if agent.failing else 1)
            self._fabric.homes[agent](operation.targets[:landing].tolist(), "landed in")
            if self._agent is not None and not self.haunts:
                ours = self._fabric.homes[self._agent[1]]
                ours(operation.sources[:landing].tolist(), "were read from")
        super()._end(agent, operation)


class ShmLike(NixlLike):
    """Shm's quiet: the writer's death ends its writes, ours does not.  It ends what can be mapped,
    as the attach server does."""

    name = "shm"

    def __init__(self, fabric: Fabric) -> None:
        super().__init__(fabric)
        self._buried = fabric.buried

    def lost(self) -> list[str]:
        return [name for name in self._peers if name in self._buried]

    def connect(self, peer: str, metadata: bytes) -> int:
        agent = decode(metadata, FakeMetadata).agent
        if agent in self._buried:
            raise TransportError(f"the worker of {agent} is gone")
        return super().connect(peer, metadata)
