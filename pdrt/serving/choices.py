"""The choices of one body while they run: started together, merged, closed together.  No HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self, cast

from pdrt.errors import PdrtError
from pdrt.serving.types import Delta, FinishReason, GenerationRequest, Generator, TokenLogprob

QUEUE_MAX = 16  # deltas of all choices of one body that wait to be worded


@dataclass
class Taken:
    """What one choice has given so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def recomputed(self) -> bool:
        """Was its prompt computed here, after its room was lost?  Known with the last delta."""
        return bool(self.meta.get("recomputed"))

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.meta |= delta.meta


class Reply(Protocol):
    """How one endpoint words its answer.  The caller adds each delta to `taken` first."""

    requests: Sequence[GenerationRequest]
    stream: bool
    taken: list[Taken]

    def chunk(self, index: int, delta: Delta) -> list[Any]:
        """The events for a delta that `taken[index]` already holds; none if it has no news."""

    def tail(self) -> list[Any]:
        """The events after the last delta of the last choice."""

    def whole(self) -> Any:
        """The answer in one piece."""


class Choices:
    """Runs one request a choice and hands out (choice index, delta) as they come.

    Guarantees: the first error of any choice is raised and ends them all; leaving the `async with`
    block, in whatever way, closes every iterator, and no cancellation cuts that short; the peers of
    choices that were never started hear of it.  Assumption:
    closing an iterator tells the engine and returns; it never waits for a peer.

    A client that reads slowly holds back its own iterators only, once the queue is full.
    """

    def __init__(self, generator: Generator, requests: Sequence[GenerationRequest]) -> None:
        self._generator = generator
        self._requests = requests
        self._streams: list[AsyncGenerator[Delta, None]] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._queue: asyncio.Queue[tuple[int, Delta | Exception]] = asyncio.Queue(QUEUE_MAX)
        self._closing = False
        self._open_count = len(requests)

    async def __aenter__(self) -> Self:
        try:
            for request in self._requests:
                # The seam promises that its iterators can be closed; AsyncIterator cannot say so.
                stream = cast("AsyncGenerator[Delta, None]", self._generator.submit(request))
                self._streams.append(stream)
        except BaseException:
            for request in self._requests[len(self._streams) :]:
                if request.rendezvous is not None:
                    self._generator.decline(request.rendezvous)
            await self._close()
            raise
        self._pumps = [
            asyncio.create_task(self._pump(index, stream))
            for index, stream in enumerate(self._streams)
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        closing = asyncio.create_task(self._close())
        interrupted = False
        while not closing.done():
            try:
                await asyncio.wait({closing})  # unlike awaiting it, does not pass a cancel on
            except asyncio.CancelledError:
                interrupted = True
        closing.result()
        if interrupted:
            raise asyncio.CancelledError

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Delta]:
        if self._open_count == 0:
            raise StopAsyncIteration
        index, delta = await self._queue.get()
        if isinstance(delta, Exception):
            raise delta
        if delta.error is not None:
            raise delta.error
        if delta.finish_reason is not None:
            self._open_count -= 1
        return index, delta

    async def _pump(self, index: int, stream: AsyncGenerator[Delta, None]) -> None:
        try:
            async for delta in stream:
                await self._queue.put((index, delta))
                if delta.finish_reason is not None or delta.error is not None:
                    return
        except Exception as error:
            # The task ends here; whoever reads the queue raises it again in the request's own task.
            # While closing nobody reads: the task keeps its error for _close.
            if self._closing:
                raise
            await self._queue.put((index, error))
            return
        rid = self._requests[index].rid
        await self._queue.put((index, PdrtError(f"request {rid} ended without a finish reason")))

    async def _close(self) -> None:
        # An iterator cannot be closed while a task stands in it, so the pumps go first.
        self._closing = True
        for pump in self._pumps:
            pump.cancel()
        ended = await asyncio.gather(*self._pumps, return_exceptions=True)
        closed = await asyncio.gather(
            *(stream.aclose() for stream in self._streams), return_exceptions=True
        )
        for outcome in [*ended, *closed]:
            if isinstance(outcome, Exception):  # not CancelledError: that is how pumps end
                raise outcome
