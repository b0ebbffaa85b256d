"""One request inside the engine: its tokens, its pages, its room, and the text it gave so far."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Protocol

import msgspec
import numpy as np

from pdrt.errors import PdrtError
from pdrt.protocol.states import Reason
from pdrt.serving.detokenize import Decode, Detokenizer, StopStrings
from pdrt.serving.rooms import Pages, Room
from pdrt.serving.sampling import Choice, Logits, choose
from pdrt.serving.types import Delta, FinishReason, GenerationRequest, Rendezvous

Sink = Callable[[Delta], None]


class Phase(Enum):
    """Where a request is.  Not a room's state: a request without a room has phases too.

    alone     WAITING -> PREFILL -> DECODING -> OVER
    prefill   MEETING -> WAITING -> PREFILL -> SENDING -> OVER
    decode    MEETING -> WAITING -> LANDING -> DECODING -> OVER
    recompute decode's, and from wherever the room was lost: WAITING -> ..., as alone
    """

    MEETING = auto()  # its peer is not known yet; it holds nothing
    WAITING = auto()  # for pages and an aux row
    PREFILL = auto()  # its prompt goes through the model, chunk by chunk
    LANDING = auto()  # its KV is on the way here
    SENDING = auto()  # its last chunk is on the way to the peer
    DECODING = auto()  # it is in every batch
    OVER = auto()


#: Phases in which a request holds pages.
ADMITTED = frozenset({Phase.PREFILL, Phase.LANDING, Phase.SENDING, Phase.DECODING})


class Side(Protocol):
    """What a request's way through the engine depends on: its role, or that it runs alone."""

    def open(self, active: ActiveRequest) -> None:
        """Begin.  Raises Refused or CallerError if the request cannot have its room."""

    def decline(self, rendezvous: Rendezvous) -> None:
        """Nobody here will open this room: its peer need not wait for it."""

    def follow(self, active: ActiveRequest) -> None:
        """Look at its room once and act on what happened there."""

    def admit(self, active: ActiveRequest) -> None:
        """Reserve pages and an aux row.  Raises Refused, and has taken nothing, if it must wait."""

    def computed(self, active: ActiveRequest, choice: Choice | None) -> None:
        """Another chunk of its prompt is in the pool; with the last one comes the first token."""

    def release(self, active: ActiveRequest) -> None:
        """It is over: give back what it holds, as soon as that is safe."""


class ActiveRequest:
    """State of one request.  After construction only the engine's thread touches it."""

    def __init__(
        self,
        request: GenerationRequest,
        side: Side,
        sink: Sink,
        decode: Decode,
        *,
        eos_token_ids: tuple[int, ...],
        output_tokens_max: int,
    ) -> None:
        sampling = request.sampling
        self.request = request
        self.side = side
        self.phase = Phase.MEETING
        self.tokens = list(request.prompt_tokens)
        self.output_tokens_max = output_tokens_max
        self.computed_tokens = 0  # leading tokens whose KV is in the pool
        self.pages: Pages = np.empty(0, dtype=np.int32)
        self.room: Room | None = None
        self.aux_index: int | None = None
        self.meta: dict[str, Any] = {}
        self._sink = sink
        self._seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self._ends = sampling.stop_token_ids + (() if sampling.ignore_eos else eos_token_ids)
        # Before min_tokens nothing may end the answer, so not even an ignored eos is chosen.
        self._banned = tuple({*sampling.stop_token_ids, *eos_token_ids})
        self._detokenizer = Detokenizer(decode, request.prompt_tokens)
        self._stops = StopStrings(sampling.stop)

    @property
    def prompt_count(self) -> int:
        return len(self.request.prompt_tokens)

    @property
    def output_count(self) -> int:
        return len(self.tokens) - self.prompt_count

    @property
    def kv_tokens_max(self) -> int:
        """Tokens whose KV it can come to hold; that of the very last token is never needed."""
        return self.prompt_count + self.output_tokens_max - 1

    def choose(self, logits: Logits) -> Choice:
        """Choose the next token from logits [vocab].  Changes nothing."""
        return choose(
            logits,
            self.request.sampling,
            seed=self._seed,
            position=len(self.tokens),
            banned=self._banned if self.output_count < self.request.sampling.min_tokens else (),
        )

    def accept(self, choice: Choice) -> None:
        """Append a chosen token, tell the client, and end the request if this token ends it."""
        sampling = self.request.sampling
        self.tokens.append(choice.token_id)
        finish: FinishReason | None = None
        if choice.token_id in self._ends:
            finish, text = FinishReason.STOP, ""
            self.meta["matched"] = choice.token_id
        elif self.output_count < sampling.min_tokens:
            text = self._stops.skip(self._detokenizer.push(choice.token_id))
        else:
            text = self._stops.push(self._detokenizer.push(choice.token_id))
            if self._stops.matched is not None:
                finish = FinishReason.STOP
                self.meta["matched"] = self._stops.matched
        if finish is None and self.output_count >= self.output_tokens_max:
            finish = FinishReason.LENGTH
        if finish is not None:
            text += self._rest()
        logprobs = [] if choice.logprob is None else [choice.logprob]
        self._tell(Delta(text, [choice.token_id], logprobs, finish))

    def finish_aborted(self) -> None:
        """End it because somebody asked to."""
        self._tell(Delta(text=self._rest(), finish_reason=FinishReason.ABORT))

    def fail(self, error: PdrtError) -> None:
        """End it with an error."""
        self._tell(Delta(error=error))

    def note_room(self) -> None:
        """Keep the room's timeline for the last delta; the room may be cleared after this."""
        if self.room is not None:
            self.meta |= msgspec.to_builtins(self.room.timeline())

    def abort_room(self, reason: Reason) -> None:
        """Tell the peer at once, whatever else has to wait."""
        if self.room is not None:
            self.room.abort(reason)

    def _rest(self) -> str:
        """Text that was held back and will not be continued."""
        if self._stops.matched is not None:
            return ""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()

    def _tell(self, delta: Delta) -> None:
        if delta.finish_reason is not None or delta.error is not None:
            delta.meta = self.meta
            self.side.release(self)
            # Only now: whoever counts requests from another thread must find the pages given back.
            self.phase = Phase.OVER
        self._sink(delta)
