"""The same model in one process, without rooms: what disaggregated answers are compared with."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pdrt.config import Settings
from pdrt.protocol.layout import RegionMap
from pdrt.serving.generator import AsyncGenerator
from pdrt.serving.model import PagedModel
from pdrt.serving.model_config import read_model_config
from pdrt.serving.scheduler import EngineLimits, EngineLoop
from pdrt.serving.tokens import Tokens
from pdrt.serving.types import GenerationRequest, SamplingParams, TokenLogprob


@dataclass
class Answer:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class LocalEngine:
    """Loads the model into this process.  Use as a context manager."""

    def __init__(self, folder: Path, *, threads: int = 1, pool_tokens: int = 16384) -> None:
        """Raises BadModel."""
        defaults = Settings(role="prefill")
        config = read_model_config(folder)
        layout = config.layout(page_size=defaults.page_size, dtype=defaults.dtype, ranks=1)
        region = RegionMap(
            layout=layout, rank=0, pages_count=pool_tokens // layout.page_size, aux_rows=1
        )
        pool = memoryview(mmap.mmap(-1, region.length_bytes))[: region.aux_offset]
        self.tokens = Tokens(folder)
        model = PagedModel(folder, layout, [pool], threads=threads)
        limits = EngineLimits(
            context_tokens=config.context_tokens, eos_token_ids=config.eos_token_ids
        )
        self._loop = EngineLoop(model, self.tokens.decode, limits)

    def __enter__(self) -> Self:
        self._loop.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.close()

    def answer(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Answer]:
        """Answers to prompts given as token ids, one after the other: nothing is batched."""
        return asyncio.run(self._answer(prompts, sampling))

    async def _answer(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> list[Answer]:
        generator = AsyncGenerator(self._loop)
        answers = []
        for index, prompt in enumerate(prompts):
            request = GenerationRequest(
                rid=f"local-{index}", prompt_tokens=tuple(prompt), sampling=sampling
            )
            answer = Answer()
            async for delta in generator.submit(request):
                if delta.error is not None:
                    raise delta.error
                answer.text += delta.text
                answer.token_ids += delta.token_ids
                answer.logprobs += delta.logprobs
            answers.append(answer)
        return answers
