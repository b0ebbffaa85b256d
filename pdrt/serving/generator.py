"""The engine loop as asyncio sees it: requests in, streams of deltas out.

The loop's thread never waits for a client: a delta goes into a stream's queue, which max_tokens
bounds, and one wake-up of the event loop carries all deltas of a step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Self

from pdrt.protocol.states import Reason
from pdrt.serving.active import ActiveRequest
from pdrt.serving.scheduler import EngineLoop
from pdrt.serving.types import Delta, GenerationRequest, Rendezvous


class DeltaStream:
    """The deltas of one request.  Close it early and the request is aborted on both sides."""

    def __init__(self, owner: AsyncGenerator, rid: str) -> None:
        self.rid = rid
        self._owner = owner
        self._queue: asyncio.Queue[Delta] = asyncio.Queue()
        self._over = False
        self.active: ActiveRequest | None = None  # set once the engine took it

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self._over:
            raise StopAsyncIteration
        delta = await self._queue.get()
        if delta.finish_reason is not None or delta.error is not None:
            self._over = True
        return delta

    async def aclose(self) -> None:
        """End it.  The engine gives the room up at once and its pages once they are quiet."""
        if not self._over:
            self._over = True
            self._owner.give_up(self, Reason.CLIENT_GONE)

    def put(self, delta: Delta) -> None:
        self._queue.put_nowait(delta)


class AsyncGenerator:
    """Implements `types.Generator` over an `EngineLoop`.  Belongs to one event loop's thread."""

    def __init__(self, engine: EngineLoop) -> None:
        self._engine = engine
        self._streams: set[DeltaStream] = set()
        self._outlet: _Outlet | None = None

    def submit(self, request: GenerationRequest) -> DeltaStream:
        """Start a request.  Raises Refused or CallerError at once if it cannot be taken."""
        outlet = self._outlet_here()
        stream = DeltaStream(self, request.rid)
        stream.active = self._engine.submit(request, lambda delta: outlet.put(stream, delta))
        self._streams.add(stream)
        return stream

    def abort(self, rid_prefix: str) -> int:
        """Abort every request whose rid starts with the prefix; returns how many.  Each still gets
        its last delta."""
        matching = [stream for stream in self._streams if stream.rid.startswith(rid_prefix)]
        for stream in matching:
            self.give_up(stream, Reason.ABORTED)
        return len(matching)

    def decline(self, rendezvous: Rendezvous) -> None:
        self._engine.decline(rendezvous)

    def stats(self) -> dict[str, Any]:
        return self._engine.stats()

    def give_up(self, stream: DeltaStream, reason: Reason) -> None:
        assert stream.active is not None
        self._streams.discard(stream)
        self._engine.abort(stream.active, reason)

    def ended(self, stream: DeltaStream) -> None:
        """Its last delta came; there is nothing left to abort."""
        self._streams.discard(stream)

    def _outlet_here(self) -> _Outlet:
        loop = asyncio.get_running_loop()
        if self._outlet is None or self._outlet.loop is not loop:
            self._outlet = _Outlet(loop, self)
        return self._outlet


class _Outlet:
    """Carries deltas from the engine's thread to the event loop, many a wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop, owner: AsyncGenerator) -> None:
        self.loop = loop
        self._owner = owner
        self._deltas: deque[tuple[DeltaStream, Delta]] = deque()
        self._scheduled = False

    def put(self, stream: DeltaStream, delta: Delta) -> None:
        """Called in the engine's thread."""
        self._deltas.append((stream, delta))
        if not self._scheduled and not self.loop.is_closed():
            self._scheduled = True
            try:
                self.loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # closed since the check; nobody is left to read
                self._deltas.clear()

    def _drain(self) -> None:
        # Lowered first: a delta appended after the last pop then schedules a drain of its own.
        self._scheduled = False
        while self._deltas:
            stream, delta = self._deltas.popleft()
            stream.put(delta)
            if delta.finish_reason is not None or delta.error is not None:
                self._owner.ended(stream)
