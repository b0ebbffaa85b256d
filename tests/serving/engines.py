"""Engines for tests: one alone, or two with a fake runtime between them, driven turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Self

from pdrt.memory.pages import PageState
from pdrt.protocol.layout import Layout
from pdrt.protocol.states import Role
from pdrt.serving.model import PagedModel
from pdrt.serving.model_config import read_model_config
from pdrt.serving.scheduler import EngineLimits, EngineLoop
from pdrt.serving.tokens import Tokens
from pdrt.serving.types import (
    Delta,
    FinishReason,
    GenerationRequest,
    Rendezvous,
    SamplingParams,
    TokenLogprob,
)
from tests.fakes import FakePair

TURNS_MAX = 20_000
TIE = 1e-4  # batching changes the order of sums; two logits nearer than this may swap


@dataclass
class Answer:
    """All deltas of one request, put together."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: Delta | None = None

    def add(self, delta: Delta) -> None:
        assert self.last is None, "nothing follows the last delta"
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.finish_reason is not None or delta.error is not None:
            self.last = delta

    @property
    def finish(self) -> FinishReason | None:
        return self.last.finish_reason if self.last else None


def limits_of(folder: Path, **changes: int) -> EngineLimits:
    config = read_model_config(folder)
    limits = EngineLimits(
        context_tokens=config.context_tokens, eos_token_ids=config.eos_token_ids, queue_max=64
    )
    return replace(limits, **changes)  # type: ignore[arg-type]


def layout_of(folder: Path, page_size: int, ranks: int) -> Layout:
    return read_model_config(folder).layout(page_size=page_size, ranks=ranks)


def pools_of(layout: Layout, pages_count: int) -> list[memoryview]:
    return [
        memoryview(bytearray(pages_count * layout.page_bytes(rank))) for rank in range(layout.ranks)
    ]


class Engines:
    """To be left by `close`, which ends them in the order they were made."""

    engines: Sequence[EngineLoop] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self.engines:
            engine.close()


class Single(Engines):
    """One engine that runs everything alone: the reference."""

    def __init__(
        self,
        folder: Path,
        *,
        page_size: int = 4,
        pages_count: int = 128,
        ranks: int = 1,
        **limits: int,
    ) -> None:
        layout = layout_of(folder, page_size, ranks)
        model = PagedModel(folder, layout, pools_of(layout, pages_count), threads=1)
        self.engine = EngineLoop(model, Tokens(folder).decode, limits_of(folder, **limits))
        self.engines = (self.engine,)

    def run(self, requests: Sequence[GenerationRequest]) -> list[Answer]:
        answers = [Answer() for _ in requests]
        for request, answer in zip(requests, answers, strict=True):
            self.engine.submit(request, answer.add)
        for _ in range(TURNS_MAX):
            if all(answer.last for answer in answers):
                return answers
            self.engine.iterate()
        raise AssertionError("the requests do not end")


class Pair(Engines):
    """Prefill and decode engines over a `FakePair`."""

    def __init__(
        self,
        folder: Path,
        *,
        page_size: int = 4,
        pages_count: int = 128,
        ranks: int = 1,
        aux_rows: int = 64,
        recompute: bool = False,
        checksum: bool = False,
        **limits: int,
    ) -> None:
        self._recompute, self._checksum = recompute, checksum
        layout = layout_of(folder, page_size, ranks)
        self.fakes = FakePair(layout, pages_count, aux_rows)
        self.prefill = self._engine(folder, layout, Role.PREFILL, limits)
        self.decode = self._engine(folder, layout, Role.DECODE, limits)
        states = self.decode.allocator._state
        self.fakes.page_in_use = lambda page: bool(states[page] != PageState.FREE)
        self._rooms = count(1000)
        self.engines = (self.prefill, self.decode)

    def __exit__(self, *_: object) -> None:
        for manager in (self.fakes.prefill, self.fakes.decode):
            manager.on_tick = self.fakes.pump  # what is aborted now still becomes quiet
        super().__exit__()
        self.fakes.close()

    def turn(self) -> None:
        self.prefill.iterate()
        self.fakes.pump()
        self.decode.iterate()
        self.fakes.pump()

    def with_room(self, request: GenerationRequest) -> GenerationRequest:
        meeting = Rendezvous(room=next(self._rooms), host="127.0.0.1", port=8998)
        return replace(request, rendezvous=meeting)

    def run(self, requests: Sequence[GenerationRequest]) -> tuple[list[Answer], list[Answer]]:
        """Answers of prefill and of decode."""
        paired = [self.with_room(request) for request in requests]
        firsts, answers = [Answer() for _ in paired], [Answer() for _ in paired]
        for request, first, answer in zip(paired, firsts, answers, strict=True):
            self.prefill.submit(request, first.add)
            self.decode.submit(request, answer.add)
        self.turn_until(lambda: all(answer.last for answer in firsts + answers))
        return firsts, answers

    def turn_until(self, condition: Callable[[], object]) -> None:
        for _ in range(TURNS_MAX):
            if condition():
                return
            self.turn()
        raise AssertionError("it does not come to that")

    def assert_nothing_is_left(self) -> None:
        self.turn_until(lambda: not self.fakes.prefill.rooms and not self.fakes.decode.rooms)
        for engine in (self.prefill, self.decode):
            stats = engine.stats()
            left = {name: value for name, value in stats.items() if not name.endswith("_tokens")}
            for name in ("pages_total", "pages_free", "recomputed"):
                del left[name]
            assert not any(left.values()), left

    def _engine(
        self, folder: Path, layout: Layout, role: Role, limits: dict[str, int]
    ) -> EngineLoop:
        manager = self.fakes.prefill if role is Role.PREFILL else self.fakes.decode
        pools = [manager.kv(rank) for rank in range(layout.ranks)]
        model = PagedModel(folder, layout, pools, threads=1)
        decode = Tokens(folder).decode
        return EngineLoop(
            model,
            decode,
            limits_of(folder, **limits),
            manager=manager,
            role=role,
            recompute=self._recompute,
            checksum=self._checksum,
        )


def ask(prompt: Sequence[int], rid: str = "r", **sampling: object) -> GenerationRequest:
    values = {"max_tokens": 8, "temperature": 0.0, "logprobs": 2, **sampling}
    return GenerationRequest(
        rid=rid,
        prompt_tokens=tuple(prompt),
        sampling=SamplingParams(**values),  # type: ignore[arg-type]
    )


def ties_between(got: Sequence[Answer], wanted: Sequence[Answer]) -> int:
    """How many answers part at a tie.  Any other difference is an AssertionError."""
    ties = 0
    for ours, theirs in zip(got, wanted, strict=True):
        if ours.token_ids == theirs.token_ids:
            assert ours.text == theirs.text
            assert ours.finish is theirs.finish
            continue
        pairs = zip(ours.token_ids, theirs.token_ids, strict=False)
        at = next(index for index, (a, b) in enumerate(pairs) if a != b)
        (_, best), (_, second) = theirs.logprobs[at].top[:2]
        assert best - second < TIE, f"token {at}: {ours.token_ids} is not {theirs.token_ids}"
        ties += 1
    return ties
