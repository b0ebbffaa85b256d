"""Health of a tree of the world, asked as a probe would."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import httpx

from pdrt.clock import SECOND_NS
from pdrt.health import Health, build_app
from pdrt.supervision import ChildState, Phase
from tests.actors.world import World


@dataclass
class Probe:
    """Health of one tree of a world, asked over HTTP."""

    world: World
    name: str
    phases: dict[str, Phase] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tree = self.world.trees[self.name]
        self.health = Health(
            tree.table,
            children=lambda: [self._child(name) for name in tree.names],
            clock=self.world.clock,
            stopping=lambda: False,
            rows={name: tree.row(name) for name in tree.names},
            silent_ns=SECOND_NS,
        )
        self._app = build_app(self.health, lambda: b"", {})

    def _child(self, name: str) -> ChildState:
        pid = 1000 if name in self.world.trees[self.name].processes else None
        phase = Phase.UP if pid else Phase.BACKOFF
        return ChildState(
            name=name, phase=phase, pid=pid, incarnation=1, restarts=0, cause="", uptime_s=1.0
        )

    def statuses(self, *, turned: bool = True) -> tuple[int, int, int]:
        """Of /live, /ready and /health."""
        if turned:
            self.health.turned_ns = self.world.clock()

        async def ask() -> tuple[int, int, int]:
            transport = httpx.ASGITransport(app=self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://health") as client:
                live, ready, whole = [
                    (await client.get(path)).status_code for path in ("/live", "/ready", "/health")
                ]
            return live, ready, whole

        return asyncio.run(ask())
