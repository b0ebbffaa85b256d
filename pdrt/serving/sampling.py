"""Choosing the next token from a row of logits.

Prefill chooses a request's first token and decode the others, yet together they must choose what
one process would have chosen.  So nothing here has a state: the random number of a token depends
on the request's seed and the token's position alone, not on the process, the batch, or how many
numbers others drew before.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdrt.errors import BadRequest
from pdrt.serving.types import SamplingParams, TokenLogprob

GREEDY_BELOW = 1e-5  # a lower temperature would overflow; its limit is greedy
LOGPROBS_MAX = 20  # what an aux row can carry
SEED_MASK = (1 << 64) - 1

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Choice:
    """A chosen token, and its logprob if the request asked for logprobs."""

    token_id: int
    logprob: TokenLogprob | None = None


def check_sampling(params: SamplingParams) -> None:
    """Raise BadRequest if the parameters make no sense."""
    if params.max_tokens < 1:
        raise BadRequest(f"max_tokens must be at least 1, got {params.max_tokens}")
    if params.min_tokens < 0 or params.min_tokens > params.max_tokens:
        raise BadRequest(f"min_tokens must be in 0..{params.max_tokens}, got {params.min_tokens}")
    if not 0.0 <= params.temperature < float("inf"):
        raise BadRequest(f"temperature must be 0 or more, got {params.temperature}")
    if not 0.0 < params.top_p <= 1.0:
        raise BadRequest(f"top_p must be in (0, 1], got {params.top_p}")
    if params.logprobs is not None and not 0 <= params.logprobs <= LOGPROBS_MAX:
        raise BadRequest(f"logprobs must be in 0..{LOGPROBS_MAX}, got {params.logprobs}")
    if any(not stop for stop in params.stop):
        raise BadRequest("a stop string must not be empty")


def choose(
    logits: Logits,
    params: SamplingParams,
    *,
    seed: int,
    position: int,
    banned: tuple[int, ...] = (),
) -> Choice:
    """Choose the token for `position` (tokens before it, prompt included) from logits [vocab].

    `banned` tokens are never chosen.  Logprobs are those of the model: before temperature, top-p
    and bans.
    """
    allowed = logits
    if banned:
        allowed = logits.copy()
        allowed[list(banned)] = -np.inf
    if params.temperature < GREEDY_BELOW:
        token_id = int(allowed.argmax())
    else:
        token_id = _sample(allowed, params, uniform(seed, position))
    if params.logprobs is None:
        return Choice(token_id)
    return Choice(token_id, _logprob(logits, token_id, params.logprobs))


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on the seed and the position, and on nothing else."""
    counter = struct.pack("<QQ", seed & SEED_MASK, position)
    (bits,) = struct.unpack("<Q", hashlib.blake2b(counter, digest_size=8).digest())
    return float(bits >> 11) * 2.0**-53


def _sample(logits: Logits, params: SamplingParams, fraction: float) -> int:
    """Invert the cumulative distribution at `fraction`.

    The sum runs in the order of token ids, not of probabilities: two tokens of nearly the same
    probability may swap ranks when a batch changes the last bits, and the choice must not swap.
    """
    scaled = logits.astype(np.float64) / params.temperature
    weights = np.exp(scaled - scaled.max())
    if params.top_p < 1.0:
        weights = _nucleus(weights, params.top_p)
    cumulative = weights.cumsum()
    index = int(np.searchsorted(cumulative, fraction * cumulative[-1], side="right"))
    return min(index, int(np.flatnonzero(weights)[-1]))  # rounding must not choose a zero weight


def _nucleus(weights: NDArray[np.float64], top_p: float) -> NDArray[np.float64]:
    """Keep the likeliest tokens up to and including the one that reaches `top_p`; zero the rest."""
    order = np.argsort(-weights, kind="stable")
    before = weights[order].cumsum() - weights[order]
    kept = order[before < top_p * weights.sum()]
    nucleus = np.zeros_like(weights)
    nucleus[kept] = weights[kept]
    return nucleus


def rounded(logprob: float) -> float:
    """To the precision of an aux row, so that a first token that travelled reads like any other."""
    return float(np.float32(logprob))


def _logprob(logits: Logits, token_id: int, alternatives: int) -> TokenLogprob:
    exact = logits.astype(np.float64)
    exact -= exact.max()
    logprobs = exact - np.log(np.exp(exact).sum())
    top: tuple[tuple[int, float], ...] = ()
    if alternatives:
        best = np.argpartition(-logprobs, min(alternatives, len(logprobs)) - 1)[:alternatives]
        ranked = sorted(best.tolist(), key=lambda token: (-logprobs[token], token))
        top = tuple((token, rounded(logprobs[token])) for token in ranked)
    return TokenLogprob(token_id, rounded(logprobs[token_id]), top)
