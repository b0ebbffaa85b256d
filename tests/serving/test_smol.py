"""The real default model: conversion, the paged model, and disaggregation, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pdrt.serving.tokens import Tokens
from pdrt.serving.types import GenerationRequest
from tests.serving.engines import Pair, Single, ask, ties_between

pytestmark = pytest.mark.timeout(600)  # the first run converts the model

SENTENCES = (
    "The capital of France is",
    "A paged pool keeps the keys and values of many requests in pages of equal size, so that",
    "Once upon a time, in a harbour town by the northern sea, there lived a clockmaker who",
)


@pytest.fixture(scope="module")
def single(smol_folder: Path) -> Iterator[Single]:
    with Single(smol_folder, page_size=16, pages_count=64) as single:
        yield single


def asks(folder: Path) -> list[GenerationRequest]:
    tokens = Tokens(folder)
    return [ask(tokens.encode(text), text, max_tokens=12, ignore_eos=True) for text in SENTENCES]


def test_it_knows_the_capital_of_france(smol_folder: Path, single: Single) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    (answer,) = single.run([ask(Tokens(smol_folder).apply_chat([question]), max_tokens=16)])
    assert answer.text == "The capital of France is Paris."


def test_output_is_that_of_generate(smol_folder: Path, single: Single) -> None:
    requests = asks(smol_folder)
    answers = [single.run([request])[0] for request in requests]
    plain: Any = AutoModelForCausalLM.from_pretrained(smol_folder, dtype=torch.float32)
    for request, answer in zip(requests, answers, strict=True):
        prompt = torch.tensor([request.prompt_tokens])
        output = plain.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
        )
        assert answer.token_ids == output[0, prompt.shape[1] :].tolist()


def test_disaggregated_output_is_that_of_one_process(smol_folder: Path, single: Single) -> None:
    wanted = [single.run([request])[0] for request in asks(smol_folder)]
    with Pair(smol_folder, page_size=16, pages_count=64, ranks=2, chunked_prefill_size=7) as pair:
        _, got = pair.run(asks(smol_folder))
        assert ties_between(got, wanted) == 0
        pair.assert_nothing_is_left()
