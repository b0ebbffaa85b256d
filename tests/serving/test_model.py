"""The paged model against the same model as transformers runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pdrt.errors import BadModel
from pdrt.memory.pages import PageAllocator
from pdrt.serving.feed import Feed
from pdrt.serving.model import PagedModel
from tests.serving.engines import TIE, layout_of, pools_of
from tests.serving.tiny_model import VOCAB_SIZE, make_tiny_model

PROMPTS = [
    np.random.default_rng(length).integers(3, VOCAB_SIZE, length).tolist()
    for length in (1, 2, 7, 16, 33, 90)
]


def plain_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def greedy_by_transformers(model: Any, prompt: list[int], count: int) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
    )
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def greedy_by_pages(
    model: PagedModel, prompt: list[int], count: int, chunk: int, pages: Any
) -> tuple[list[int], list[float]]:
    """Tokens, and for each the distance between the two best logits."""
    row = np.empty(0)
    for start in range(0, len(prompt), chunk):
        row = model.forward([Feed(prompt[start : start + chunk], start, pages)])[0]
    tokens, margins = list(prompt), []
    for _ in range(count):
        row = row.copy()
        row[2] = -np.inf  # min_new_tokens bans the end
        second, best = np.sort(row)[-2:]
        margins.append(float(best - second))
        tokens.append(int(row.argmax()))
        row = model.forward([Feed(tokens[-1:], len(tokens) - 1, pages)])[0]
    return tokens[len(prompt) :], margins


@pytest.mark.parametrize(("page_size", "ranks"), [(1, 1), (4, 2), (16, 1), (16, 3)])
@pytest.mark.parametrize("chunk", [1, 5, 16, 1000])
def test_chunked_paged_greedy_output_is_that_of_generate(
    tiny_folder: Path, ranks: int, page_size: int, chunk: int
) -> None:
    layout = layout_of(tiny_folder, page_size, ranks)
    pages_count = layout.pages_for(128) + 3
    model = PagedModel(tiny_folder, layout, pools_of(layout, pages_count), threads=1)
    plain = plain_model(tiny_folder)
    # Pages out of order, with a gap, to tell page numbers from positions.
    pages = np.random.default_rng(1).permutation(pages_count).astype(np.int32)
    for prompt in PROMPTS:
        wanted = greedy_by_transformers(plain, prompt, 12)
        got, margins = greedy_by_pages(model, prompt, 12, chunk, pages)
        at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b), None)
        assert at is None or margins[at] < TIE, (len(prompt), got, wanted)


def test_requests_in_one_batch_do_not_see_each_other(tiny_folder: Path) -> None:
    layout = layout_of(tiny_folder, 4, 2)
    model = PagedModel(tiny_folder, layout, pools_of(layout, 128), threads=1)
    allocator = PageAllocator(128)
    pages = [allocator.allocate(layout.pages_for(len(prompt) + 1)) for prompt in PROMPTS]
    alone = [model.forward([Feed(p, 0, n)])[0] for p, n in zip(PROMPTS, pages, strict=True)]
    # Half of each prompt first, so that the batch mixes starts, chunks and single tokens.
    for prompt, own in zip(PROMPTS, pages, strict=True):
        if half := len(prompt) // 2:
            model.forward([Feed(prompt[:half], 0, own, wants_logits=False)])
    feeds = [
        Feed(prompt[len(prompt) // 2 :], len(prompt) // 2, own)
        for prompt, own in zip(PROMPTS, pages, strict=True)
    ]
    together = model.forward(feeds)
    assert np.abs(together - np.stack(alone)).max() < 1e-4


def test_only_wanted_logits_come_back(tiny_folder: Path) -> None:
    layout = layout_of(tiny_folder, 4, 1)
    model = PagedModel(tiny_folder, layout, pools_of(layout, 8), threads=1)
    first, second = np.array([0, 1], dtype=np.int32), np.array([2, 3], dtype=np.int32)
    feeds = [Feed([5, 6], 0, first, wants_logits=False), Feed([7, 8, 9], 0, second)]
    assert model.forward(feeds).shape == (1, VOCAB_SIZE)
    assert model.forward(feeds[:1]).shape == (0, VOCAB_SIZE)


def test_a_request_writes_into_its_own_pages_only(tiny_folder: Path) -> None:
    layout = layout_of(tiny_folder, 4, 2)
    pools = pools_of(layout, 8)
    for pool in pools:
        pool[:] = b"\xff" * len(pool)  # NaN: whoever reads a byte it did not write shows it
    model = PagedModel(tiny_folder, layout, pools, threads=1)
    logits = model.forward([Feed([5, 6, 7, 8, 9], 0, np.array([6, 2], dtype=np.int32))])
    assert np.isfinite(logits).all()
    for rank, pool in enumerate(pools):
        size = layout.page_bytes(rank)
        touched = [
            page for page in range(8) if pool[page * size : (page + 1) * size] != b"\xff" * size
        ]
        assert touched == [2, 6]


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])
def test_each_supported_type_runs(tmp_path: Path, model_type: str) -> None:
    folder = make_tiny_model(tmp_path, model_type=model_type)
    layout = layout_of(folder, 4, 1)
    model = PagedModel(folder, layout, pools_of(layout, 32), threads=1)
    pages = np.arange(32, dtype=np.int32)
    wanted = greedy_by_transformers(plain_model(folder), PROMPTS[4], 8)
    got, margins = greedy_by_pages(model, PROMPTS[4], 8, 10, pages)
    assert got == wanted or min(margins) < TIE


def test_weights_that_do_not_load_are_a_bad_model(tiny_folder: Path, tmp_path: Path) -> None:
    layout = layout_of(tiny_folder, 4, 1)
    (tmp_path / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    with pytest.raises(BadModel, match="cannot be loaded"):
        PagedModel(tmp_path, layout, pools_of(layout, 4), threads=1)
