"""Disaggregated output equals the same model's in one process, token for token."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pdrt.config import cache_folder
from pdrt.serving.convert import model_folder
from pdrt.serving.local import Answer, LocalEngine
from pdrt.serving.types import SamplingParams
from tests.e2e.conftest import StartCluster
from tests.e2e.driver import Driver, Outcome, wait_idle

SENTENCES = (
    "The lighthouse keeper walked down the stone stairs before dawn and lit the old lamp. ",
    "In the market square, traders from the north sold wool, honey and iron nails. ",
    "A river that begins in the mountains will carry sand to the sea over many years. ",
    "Computers store numbers as patterns of bits, and programs move those patterns around. ",
    "The committee voted to build a new library next to the railway station. ",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen. ",
    "Her grandmother kept a notebook of recipes written in three languages. ",
    "When the storm ended, the fishermen repaired their nets and counted the boats. ",
)
#: 40 prompts: every length round a page border, then up to 1,500 tokens.
LENGTHS = (
    *range(1, 19),
    *(31, 32, 33, 47, 48, 63, 64, 65, 80, 96, 100, 127, 128, 129, 160, 200, 255, 256, 257),
    *(400, 777, 1500),
)
TOKENS_MAX = 6
CLOSE = 1e-4  # two logits nearer than this may change places when the order of sums does


@pytest.fixture(scope="module")
def smol_folder() -> Path:
    return model_folder(None, cache=cache_folder())


@pytest.fixture(scope="module")
def alone(smol_folder: Path) -> Iterator[LocalEngine]:
    with LocalEngine(smol_folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts(alone: LocalEngine) -> list[list[int]]:
    assert len(LENGTHS) == 40
    chance = random.Random(7)
    text = "".join(chance.choice(SENTENCES) for _ in range(400))
    tokens = alone.tokens.encode(text)
    starts = [chance.randrange(len(tokens) - n) for n in LENGTHS]
    return [tokens[s : s + n] for s, n in zip(starts, LENGTHS, strict=True)]


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "top_p": 0.9, "seed": 11},
}


@pytest.fixture(scope="module")
def expected(alone: LocalEngine, prompts: list[list[int]]) -> dict[str, list[Answer]]:
    """What one process says."""
    return {
        name: alone.answer(
            prompts,
            SamplingParams(max_tokens=TOKENS_MAX, ignore_eos=True, logprobs=2, **sampling),
        )
        for name, sampling in SAMPLINGS.items()
    }


def compare(outcomes: Sequence[Outcome], answers: Sequence[Answer]) -> int:
    """Assert equality; return how often two near-equal logits changed places."""
    swaps = 0
    for outcome, answer in zip(outcomes, answers, strict=True):
        assert outcome.succeeded, outcome
        found = outcome.decode["output_ids"]
        if found == answer.token_ids:
            continue
        at = next(i for i, (a, b) in enumerate(zip(found, answer.token_ids, strict=True)) if a != b)
        (_, best), (_, second) = answer.logprobs[at].top[:2]
        assert best - second < CLOSE, f"token {at}: {found} instead of {answer.token_ids}"
        swaps += 1
    return swaps


CONFIGURATIONS = [
    pytest.param("nixl", 1, 512, id="nixl-1-device"),
    pytest.param("shm", 2, 100, id="shm-2-devices-chunks-of-100"),
    pytest.param("nixl", 2, 160, id="nixl-2-devices-chunks-of-160", marks=pytest.mark.slow),
    pytest.param("shm", 1, 512, id="shm-1-device", marks=pytest.mark.slow),
    pytest.param("nixl", 1, 7, id="nixl-chunks-of-7", marks=pytest.mark.slow),
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("transport", "devices_count", "chunk"), CONFIGURATIONS)
def test_disaggregated_output_equals_that_of_one_process(
    start_cluster: StartCluster,
    smol_folder: Path,
    prompts: list[list[int]],
    expected: dict[str, list[Answer]],
    transport: str,
    devices_count: int,
    chunk: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    devices = ",".join(f"cpu:{i}" for i in range(devices_count))
    flags = ["--transport", transport, "--devices", devices, "--kv-checksum"]
    cluster = start_cluster(*flags, "--chunked-prefill-size", str(chunk), model=smol_folder)
    driver = Driver(cluster)
    try:
        for name, sampling in SAMPLINGS.items():
            for concurrency, few in ((16, prompts), (1, prompts[::4])):
                bodies = [
                    driver.body(p, max_new_tokens=TOKENS_MAX, ignore_eos=True, **sampling)
                    for p in few
                ]
                outcomes = driver.ask(*bodies, concurrency=concurrency)
                answers = expected[name] if few is prompts else expected[name][::4]
                swaps = compare(outcomes, answers)
                with capsys.disabled():
                    print(
                        f"\n{transport} {devices} chunk={chunk} {name} at once={concurrency}: "
                        f"{len(few)} prompts, {swaps} near-equal logits swapped"
                    )
        wait_idle(cluster, 5)
    finally:
        cluster.stop()
