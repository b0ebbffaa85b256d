"""What the HTTP side and the engine loop say to each other.  Plain data, no torch, no HTTP.

The HTTP side submits one `GenerationRequest` for each choice (a prompt list or n > 1 becomes
several) and reads `Delta`s until one has a finish reason or an error.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from pdrt.errors import PdrtError


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen.  temperature 0 is greedy; `seed` makes sampling repeatable."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = (
        None  # how many alternatives a token; None: no logprobs at all; 0: chosen token only
    )


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where and under which room the two halves of a request meet (the router chose it)."""

    room: int
    host: str | None = None  # bootstrap_host: the prefill server's host
    port: int | None = None  # bootstrap_port; None: our default


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    rid: str
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    rendezvous: Rendezvous | None = None  # None: no transfer, prefill and decode here


@dataclass(frozen=True)
class TokenLogprob:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass
class Delta:
    """A step of one request.  The last one has `finish_reason` or `error`."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: PdrtError | None = None
    meta: dict[str, Any] = field(default_factory=dict)  # on the last delta: facts about the room


class Generator(Protocol):
    """The engine as the HTTP side sees it."""

    def submit(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Start a request.  Closing the iterator early aborts it on both sides.
        Raises Refused or CallerError at once when the request cannot be taken."""

    def abort(self, rid_prefix: str) -> int:
        """Abort every request whose rid starts with the prefix ('' for all); returns how many."""

    def decline(self, rendezvous: Rendezvous) -> None:
        """The room of a request that was refused before or by `submit`: tell its peer."""

    def stats(self) -> dict[str, Any]:
        """Facts for /server_info, /metrics and /get_load: running, waiting, pages in use, ..."""
