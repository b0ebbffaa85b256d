from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.errors import BadRequest
from pdrt.serving.sampling import check_sampling, choose, uniform
from pdrt.serving.types import SamplingParams

LOGITS = np.random.default_rng(0).normal(0, 2, 64).astype(np.float32)


def chosen(seed: int, position: int, **params: object) -> int:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    return choose(LOGITS, sampling, seed=seed, position=position).token_id


def test_temperature_zero_is_greedy_whatever_the_seed() -> None:
    assert {chosen(seed, 0, temperature=0.0) for seed in range(20)} == {int(LOGITS.argmax())}


@given(st.integers(-(2**63), 2**64), st.integers(0, 10_000))
def test_a_choice_depends_on_seed_and_position_only(seed: int, position: int) -> None:
    first = chosen(seed, position)
    for other in range(3):
        chosen(other, position)
    assert chosen(seed, position) == first


def test_seeds_and_positions_give_different_choices() -> None:
    assert len({chosen(seed, 7) for seed in range(50)}) > 10
    assert len({chosen(7, position) for position in range(50)}) > 10


def test_the_numbers_are_uniform() -> None:
    numbers = np.array([uniform(3, position) for position in range(4000)])
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    counts, _ = np.histogram(numbers, bins=10, range=(0, 1))
    assert abs(counts - 400).max() < 100


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_choices_follow_the_distribution(temperature: float) -> None:
    draws = 6000
    counts = np.bincount(
        [chosen(1, position, temperature=temperature) for position in range(draws)], minlength=64
    )
    weights = np.exp(LOGITS.astype(float) / temperature)
    wanted = weights / weights.sum()
    assert abs(counts / draws - wanted).max() < 0.03


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    weights = np.exp(LOGITS.astype(float))
    order = np.argsort(-weights)
    reached = int(np.searchsorted((weights[order] / weights.sum()).cumsum(), 0.5)) + 1
    drawn = {chosen(1, position, top_p=0.5) for position in range(2000)}
    assert drawn == set(order[:reached].tolist())
    assert {chosen(1, position, top_p=1e-9) for position in range(50)} == {int(order[0])}


def test_nearly_equal_tokens_do_not_swap_when_the_last_bit_changes() -> None:
    logits = np.zeros(64, dtype=np.float32)
    nudged = logits.copy()
    nudged[40] = np.float32(1e-6)
    sampling = SamplingParams(top_p=0.999)
    for position in range(500):
        before = choose(logits, sampling, seed=1, position=position).token_id
        assert choose(nudged, sampling, seed=1, position=position).token_id == before


def test_banned_tokens_are_never_chosen_and_do_not_change_logprobs() -> None:
    best = int(LOGITS.argmax())
    greedy = SamplingParams(temperature=0.0, logprobs=3)
    free = choose(LOGITS, greedy, seed=0, position=0)
    banned = choose(LOGITS, greedy, seed=0, position=0, banned=(best,))
    assert free.token_id == best != banned.token_id
    assert free.logprob is not None
    assert banned.logprob is not None
    assert free.logprob.top == banned.logprob.top


@pytest.mark.parametrize("alternatives", [0, 1, 5, 20])
def test_logprobs_are_the_models_best_first(alternatives: int) -> None:
    sampling = SamplingParams(temperature=0.7, logprobs=alternatives)
    choice = choose(LOGITS, sampling, seed=4, position=9)
    exact = LOGITS - np.log(np.exp(LOGITS.astype(float)).sum())
    assert choice.logprob is not None
    assert choice.logprob.logprob == pytest.approx(exact[choice.token_id], abs=1e-5)
    assert [token for token, _ in choice.logprob.top] == np.argsort(-exact)[:alternatives].tolist()


def test_no_logprobs_unless_asked() -> None:
    assert choose(LOGITS, SamplingParams(), seed=0, position=0).logprob is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"min_tokens": 17},
        {"min_tokens": -1},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"logprobs": 21},
        {"logprobs": -1},
        {"stop": ("",)},
    ],
)
def test_senseless_parameters_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(BadRequest):
        check_sampling(SamplingParams(**wrong))  # type: ignore[arg-type]
