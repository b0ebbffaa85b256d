"""The engine in its own thread, seen from asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from pdrt.errors import Draining, PromptTooLong
from pdrt.serving.generator import AsyncGenerator, DeltaStream
from pdrt.serving.scheduler import EngineLoop
from pdrt.serving.types import FinishReason
from tests.serving.engines import Answer, Single, ask
from tests.waiting import wait_until


@pytest.fixture
def engine(single_of: Callable[..., Single]) -> EngineLoop:
    engine = single_of().engine
    engine.start()
    return engine


async def collect(stream: DeltaStream) -> Answer:
    answer = Answer()
    async for delta in stream:
        answer.add(delta)
    return answer


async def until_empty(engine: EngineLoop) -> None:
    def empty() -> bool:  # the engine has no event for this; it is what /server_info shows
        stats = engine.stats()
        return not (stats["running"] or stats["waiting"] or stats["pages_used"])

    await asyncio.to_thread(wait_until, empty, 20, "the engine to be empty")


def test_deltas_arrive_and_end(engine: EngineLoop) -> None:
    async def main() -> list[Answer]:
        generator = AsyncGenerator(engine)
        streams = [generator.submit(ask([5, 6, n], ignore_eos=True)) for n in range(3, 9)]
        return await asyncio.gather(*(collect(stream) for stream in streams))

    answers = asyncio.run(main())
    assert [len(answer.token_ids) for answer in answers] == [8] * 6
    assert {answer.finish for answer in answers} == {FinishReason.LENGTH}


def test_closing_early_aborts(engine: EngineLoop) -> None:
    async def main() -> None:
        generator = AsyncGenerator(engine)
        unread = generator.submit(ask([5, 6], max_tokens=200, ignore_eos=True))
        await unread.aclose()  # before its first delta was asked for
        stream = generator.submit(ask([5, 6], max_tokens=200, ignore_eos=True))
        async with contextlib.aclosing(stream):
            async for _ in stream:
                break
        assert [delta async for delta in stream] == []
        await until_empty(engine)

    asyncio.run(main())
    assert engine.stats()["pages_free"] == engine.stats()["pages_total"]


def test_abort_by_prefix_ends_those_requests_and_no_others(engine: EngineLoop) -> None:
    async def main() -> tuple[list[Answer], int]:
        generator = AsyncGenerator(engine)
        rids = ("a-0", "a-1", "b")
        streams = [
            generator.submit(ask([5, 6], rid, max_tokens=200 if rid != "b" else 4, ignore_eos=True))
            for rid in rids
        ]
        count = generator.abort("a")
        return await asyncio.gather(*(collect(stream) for stream in streams)), count

    answers, count = asyncio.run(main())
    assert count == 2
    assert [answer.finish for answer in answers] == [
        FinishReason.ABORT,
        FinishReason.ABORT,
        FinishReason.LENGTH,
    ]


def test_refusals_come_at_once(engine: EngineLoop) -> None:
    async def main() -> None:
        generator = AsyncGenerator(engine)
        with pytest.raises(PromptTooLong):
            generator.submit(ask([5] * 300))
        assert generator.abort("") == 0

    asyncio.run(main())


def test_closing_the_engine_ends_every_request(engine: EngineLoop) -> None:
    async def main() -> Answer:
        generator = AsyncGenerator(engine)
        stream = generator.submit(ask([5, 6], max_tokens=200, ignore_eos=True))
        await asyncio.to_thread(engine.close)
        with pytest.raises(Draining):
            generator.submit(ask([5, 6]))
        return await collect(stream)

    assert asyncio.run(main()).finish is FinishReason.ABORT
    assert engine.stats()["pages_free"] == engine.stats()["pages_total"]


def test_a_closed_event_loop_does_not_stop_the_engine(engine: EngineLoop) -> None:
    async def leave() -> None:
        AsyncGenerator(engine).submit(ask([5, 6], max_tokens=100, ignore_eos=True))

    asyncio.run(leave())
    asyncio.run(until_empty(engine))
    assert engine.stats()["pages_free"] == engine.stats()["pages_total"]
