"""Live, ready, healthy: three answers over HTTP from the supervisor's own process.

Computed from the table and the supervisor's view of its children, never from "a process exists".
Served by a thread, so it answers while any child is stopped or dead; the thread reads copies only.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pdrt.clock import MILLISECOND_NS, SECOND_NS, Clock
from pdrt.http_door import HttpDoor
from pdrt.protocol.peers import TRANSPORT_CODES
from pdrt.protocol.states import KVPoll, Reason
from pdrt.shm_status import (
    CLAIMED,
    DEADLINE,
    ENTERED,
    MOVED,
    OPENER,
    PATH,
    QUIET_BIT,
    REASON_SHIFT,
    STATE_MASK,
    VALUE_MASK,
    StatusTable,
    transport_of,
)
from pdrt.supervision import ChildState, Phase

ROOMS_SHOWN_MAX = 10_000
LATE_NS = 250 * MILLISECOND_NS  # past its deadline by this much, a room is a fault of ours
AGAIN_S = 1.0  # from an end of the serving to its next beginning
LOOP_SILENT_NS = 2 * SECOND_NS

log = logging.getLogger("pdrt.health")


class Health:
    """What is wrong now, as reasons for people."""

    def __init__(
        self,
        table: StatusTable,
        *,
        children: Callable[[], Sequence[ChildState]],
        clock: Clock,
        stopping: Callable[[], bool],
        rows: dict[str, int],
        silent_ns: int,
    ) -> None:
        """`rows`: child name -> its row.  A child silent for `silent_ns` is named."""
        self._table = table
        self._children = children
        self._clock = clock
        self._stopping = stopping
        self._rows = rows
        self._silent_ns = silent_ns
        self.turned_ns = clock()  # the supervisor's loop sets it; it is what "live" means

    def live(self) -> list[str]:
        """Reasons why this tree should be restarted; empty if it is alive."""
        silent_ns = self._clock() - self.turned_ns
        reasons = []
        if silent_ns > LOOP_SILENT_NS:
            reasons.append(f"the supervisor's loop has not turned for {silent_ns / 1e9:.1f} s")
        reasons.extend(
            f"{child.name} survived SIGKILL: {child.cause}"
            for child in self._children()
            if child.phase is Phase.QUARANTINED
        )
        return reasons

    def ready(self) -> list[str]:
        """Reasons why no new request should come here; empty if it is ready."""
        reasons = self.live()
        if self._stopping():
            reasons.append("draining: asked to stop, finishing what was started")
        now_ns = self._clock()
        for child in self._children():
            row = self._rows.get(child.name)
            if child.standby:
                continue
            if child.phase is not Phase.UP:
                reasons.append(f"{child.name} is {child.phase.value}: {child.cause or 'starting'}")
            elif row is not None:
                silent_ns = now_ns - self._table.beat_ns(row)
                if silent_ns > self._silent_ns:
                    reasons.append(f"{child.name} has not beaten for {silent_ns / 1e9:.1f} s")
        late = self.late_rooms(now_ns)
        if late:
            reasons.append(f"{late} rooms are open past their deadline")
        return reasons

    def degraded(self) -> list[str]:
        """Reasons why the next fault will cost more than it should, or memory is held back.  No
        request suffers now."""
        reasons = [
            f"{child.name} is {child.phase.value}: {child.cause or 'starting'}"
            for child in self._children()
            if child.standby and child.phase is not Phase.UP
        ]
        words = self._table.rows(self._table.live_slots())[:, 0]
        unquiet = int(((words & STATE_MASK == KVPoll.Failed) & (words & QUIET_BIT == 0)).sum())
        if unquiet:
            reasons.append(f"{unquiet} failed rooms are not quiet: their pages wait")
        return reasons

    def late_rooms(self, now_ns: int) -> int:
        rows = self._table.rows(self._table.live_slots())
        states = rows[:, 0] & STATE_MASK
        limit_ms = (now_ns - LATE_NS) // MILLISECOND_NS
        late = (states > 0) & (states < 4) & ((rows[:, DEADLINE // 8] & VALUE_MASK) < limit_ms)
        return int(late.sum())

    def rooms(self) -> list[dict[str, Any]]:
        """Every room in the table, at most 10,000 of them."""
        now_ns = self._clock()
        slots = self._table.live_slots()[:ROOMS_SHOWN_MAX]
        rooms = []
        for slot, row in zip(slots.tolist(), self._table.rows(slots).tolist(), strict=True):
            word, state = row[0], row[0] & STATE_MASK
            if state == CLAIMED:
                continue
            entered = row[ENTERED // 8 + state]
            rooms.append(
                {
                    "room": row[1],
                    "rank": row[OPENER // 8] >> 40,
                    "slot": slot,
                    "generation": word >> 32,
                    "state": KVPoll(state).name,
                    "quiet": bool(word & QUIET_BIT),
                    "reason": Reason(word >> REASON_SHIFT & 0xFF).name,
                    "in_state_s": round((now_ns - entered) / 1e9, 3) if entered else None,
                    "deadline_in_s": (row[DEADLINE // 8] & VALUE_MASK) / 1e3 - now_ns / 1e9
                    if state in (1, 2, 3)
                    else None,
                    "moved_bytes": row[MOVED // 8] & VALUE_MASK,
                    "transport": TRANSPORT_CODES[transport_of(row[PATH // 8])],
                }
            )
        return rooms

    def report(self) -> dict[str, Any]:
        return {
            "live": self.live(),
            "ready": self.ready(),
            "degraded": self.degraded(),
            "children": [
                {
                    "name": child.name,
                    "phase": child.phase.value,
                    "pid": child.pid,
                    "incarnation": child.incarnation,
                    "restarts": child.restarts,
                    "last_death": child.cause,
                    "uptime_s": round(child.uptime_s, 3),
                }
                for child in self._children()
            ],
        }


def build_app(health: Health, metrics: Callable[[], bytes], facts: dict[str, Any]) -> Starlette:
    """/live /ready /health /metrics /rooms /info."""

    def answer(reasons: list[str], word: str) -> Response:
        body = {"status": word if not reasons else f"not {word}", "reasons": reasons}
        return JSONResponse(body, status_code=503 if reasons else 200)

    async def live(_: Request) -> Response:
        return answer(health.live(), "live")

    async def ready(_: Request) -> Response:
        return answer(health.ready(), "ready")

    async def whole(_: Request) -> Response:
        report = health.report()
        bad = bool(report["live"] or report["ready"])
        text = json.dumps(report, indent=2)
        return Response(text, status_code=503 if bad else 200, media_type="application/json")

    async def scrape(_: Request) -> Response:
        return Response(metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def rooms(_: Request) -> Response:
        return JSONResponse(health.rooms())

    async def info(_: Request) -> Response:
        return JSONResponse(facts)

    return Starlette(
        routes=[
            Route("/live", live),
            Route("/ready", ready),
            Route("/health", whole),
            Route("/metrics", scrape),
            Route("/rooms", rooms),
            Route("/info", info),
        ]
    )


class HealthServer:
    """Serves an app on a listening socket from a thread of its own.  Whatever ends the serving, it
    begins again: a tree whose health nobody can ask for only looks dead."""

    def __init__(self, app: Starlette, listening: socket.socket) -> None:
        # asyncio's own loop: another one may end the process where no descriptor is left.
        self._config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", http=HttpDoor, loop="asyncio"
        )
        self._server = uvicorn.Server(self._config)
        self._listening = listening
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="health", daemon=True)

    def _serve(self) -> None:
        while not self._stopping.is_set():
            try:
                with self._listening.dup() as listening:  # a server closes what it served on
                    self._server.run(sockets=[listening])
            except Exception:
                log.exception("health is not served; it is tried again")
            self._stopping.wait(AGAIN_S)
            self._server = uvicorn.Server(self._config)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        self._stopping.set()
        self._server.should_exit = True
        self._thread.join(timeout_s)
