"""The reference engine's process: attach, load, serve, leave.

It attaches to its own runtime over the Unix socket, exactly as a foreign engine would.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from pdrt.child import Descriptor
from pdrt.clock import SECOND_NS, monotonic_ns, to_ns
from pdrt.config import Settings
from pdrt.engine.manager import KVManager
from pdrt.logs import start_logging
from pdrt.metrics import StatsCollector, TableCollector, exposition
from pdrt.protocol.states import Role
from pdrt.serving.app import ServerInfo, build_app
from pdrt.serving.generator import AsyncGenerator
from pdrt.serving.http import uvicorn_config
from pdrt.serving.model_config import read_model_config
from pdrt.serving.scheduler import EngineLimits, EngineLoop
from pdrt.serving.tokens import Tokens

DRAIN_POLL_S = 0.02
BEAT_MAX_NS = 2 * SECOND_NS  # an actor silent for longer makes /health say so

log = logging.getLogger("pdrt.engine")


@dataclass(frozen=True)
class EngineFacts:
    """What the engine child is told besides where to attach."""

    settings: Settings
    folder: Path
    served_model_name: str
    http: Descriptor  # the listening socket; the supervisor keeps it across restarts
    version: str


def run_engine(attach_address: str, facts: EngineFacts) -> None:
    """Target of the engine child."""
    # Imported here: the supervisor imports this module too, and must not load torch.
    from pdrt.serving.model import PagedModel

    settings = facts.settings
    start_logging(settings)
    manager = KVManager.attach(attach_address, name="engine")
    config = read_model_config(facts.folder)
    tokens = Tokens(facts.folder)
    pools = [manager.kv(rank) for rank in range(manager.layout.ranks)]
    model = PagedModel(facts.folder, manager.layout, pools, threads=settings.torch_threads)
    # Pages that a predecessor's rooms may still be written to must not be used yet.
    pause = threading.Event().wait
    if not manager.wait_quiet(2 * settings.timeouts.quiet_s + 5.0, pause=pause):
        raise SystemExit("rooms of the engine before this one did not become quiet")
    model.warm_up(page=0)
    limits = EngineLimits(
        context_tokens=config.context_tokens,
        eos_token_ids=config.eos_token_ids,
        chunked_prefill_size=settings.chunked_prefill_size,
        running_max=settings.max_running_requests,
        queue_max=settings.queue_max,
    )
    loop = EngineLoop(
        model,
        tokens.decode,
        limits,
        manager=manager,
        role=manager.role,
        default_peer_port=settings.bootstrap_port,
        checksum=settings.kv_checksum,
        recompute=settings.on_transfer_failure == "recompute",
    )
    loop.start()
    manager.table.announce_ready()
    try:
        asyncio.run(_serve(loop, manager, tokens, facts, config.context_tokens))
    finally:
        loop.close()
        manager.close()


async def _serve(
    loop: EngineLoop, manager: KVManager, tokens: Tokens, facts: EngineFacts, context_tokens: int
) -> None:
    settings = facts.settings
    info = ServerInfo(
        served_model_name=facts.served_model_name,
        model_path=str(facts.folder),
        role=settings.role,
        bootstrap_port=settings.bootstrap_port,
        max_model_len=context_tokens,
        tokens_max=settings.pages_count * settings.page_size,
        running_max=settings.max_running_requests,
        version=facts.version,
    )
    generator = AsyncGenerator(loop)
    collectors = (
        TableCollector(manager.table, role=settings.role, restarts=tuple),
        StatsCollector(loop.stats, role=settings.role),
    )
    app = build_app(
        generator,
        tokens,
        info,
        lambda: _health(manager, loop),
        exposition(*collectors),
        rooms=loop.finished_rooms,
    )
    server = DrainingServer(
        uvicorn_config(app, graceful_shutdown_s=1), loop, settings.timeouts.drain_s
    )
    listening = socket.socket(fileno=facts.http.fd)
    log.info("serving model=%s on %s:%d", facts.served_model_name, *listening.getsockname()[:2])
    await server.serve(sockets=[listening])


class DrainingServer(uvicorn.Server):
    """The first SIGTERM finishes what was started, within a limit; the second ends it."""

    def __init__(self, config: uvicorn.Config, engine: EngineLoop, drain_s: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_s = drain_s
        self._task: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._engine.draining:
            super().handle_exit(sig, frame)
            return
        self._engine.drain()
        asyncio.get_running_loop().call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        log.info("draining for at most %.1f s", self._drain_s)
        deadline_ns = monotonic_ns() + to_ns(self._drain_s)
        # The engine is another thread's and has no event for it: looked at for seconds in a life.
        while not self._engine.idle and monotonic_ns() < deadline_ns:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_S)
        self.should_exit = True


def _health(manager: KVManager, loop: EngineLoop) -> tuple[bool, dict[str, Any]]:
    """Cheap: are the actors this engine depends on alive and turning, and is it not draining?"""
    table, now_ns = manager.table, monotonic_ns()
    reasons = [
        f"{name} is not running"
        if not table.incarnation(row)
        else f"{name} has not beaten for {(now_ns - table.beat_ns(row)) / 1e9:.1f} s"
        for name, row in manager.actor_rows.items()
        if not table.incarnation(row) or now_ns - table.beat_ns(row) > BEAT_MAX_NS
    ]
    if loop.draining:
        reasons.append("draining")
    role = "prefill" if manager.role is Role.PREFILL else "decode"
    return not reasons, {"role": role, "reasons": reasons}
