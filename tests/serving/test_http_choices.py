"""Closing the choices of a body: whoever stops it, and however often."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pdrt.serving.choices import QUEUE_MAX, Choices
from pdrt.serving.types import Delta, GenerationRequest, SamplingParams
from tests.serving.http_fakes import FakeGenerator, Forever, steps, token, turn

REQUESTS = [
    GenerationRequest(rid=rid, prompt_tokens=(1,), sampling=SamplingParams()) for rid in "ab"
]


def test_leaving_the_block_closes_what_never_started():
    generator = FakeGenerator(steps(Forever()))

    async def run() -> None:
        async with Choices(generator, REQUESTS):
            pass

    asyncio.run(run())
    assert generator.aborted == ["a", "b"]


def test_a_second_cancellation_does_not_cut_the_closing_short():
    generator = FakeGenerator(steps(Forever()))
    closing = asyncio.Event()
    may_close = asyncio.Event()

    class Slow(FakeGenerator):
        """Its streams close only when told to."""

        def submit(self, request: GenerationRequest) -> AsyncIterator[Delta]:
            return stream(request)

    async def stream(request: GenerationRequest) -> AsyncIterator[Delta]:
        try:
            yield token("x")
            await asyncio.Event().wait()
        finally:
            closing.set()
            await may_close.wait()
            generator.aborted.append(request.rid)

    async def run() -> None:
        async def read() -> None:
            async with Choices(Slow(steps()), REQUESTS) as choices:
                async for _ in choices:
                    pass

        task = asyncio.create_task(read())
        await turn()
        while not closing.is_set():
            task.cancel()
            await turn()
        task.cancel()
        await turn()
        may_close.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert sorted(generator.aborted) == ["a", "b"]


def test_a_reader_that_stands_still_holds_the_engine_back():
    generator = FakeGenerator(steps(*[token("x")] * 1000))

    async def run() -> None:
        async with Choices(generator, REQUESTS) as choices:
            await anext(choices)
            for _ in range(10 * QUEUE_MAX):
                await turn()

    asyncio.run(run())
    assert generator.steps_count <= 2 * QUEUE_MAX


def test_an_error_while_closing_is_not_lost():
    async def stream() -> AsyncIterator[Delta]:
        try:
            await asyncio.Event().wait()
            yield token("x")
        finally:
            raise ValueError("the engine could not abort")

    class Broken(FakeGenerator):
        """Its streams fail when closed."""

        def submit(self, request: GenerationRequest) -> AsyncIterator[Delta]:
            return stream()

    async def run() -> None:
        async with Choices(Broken(steps()), REQUESTS):
            await turn()

    with pytest.raises(ValueError, match="could not abort"):
        asyncio.run(run())
