"""The engine loop: rooms, admission, one forward, and again.

    iterate   attend ── new requests, aborts, what happened in the rooms, what became quiet
              admit  ── pages for those that wait, first come first served
              step   ── one packed forward: a token of every decoding request, and chunks of prompts

`attend` also runs between the layers of a forward: an abort reaches the peer, and a finished
transfer its client, without waiting for the chunk that happens to be in the model.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pdrt.clock import MILLISECOND_NS, Clock, monotonic_ns, to_ns
from pdrt.errors import BadRequest, CallerError, Draining, PromptTooLong, QueueFull, Refused
from pdrt.memory.pages import PageAllocator
from pdrt.protocol.layout import Layout
from pdrt.protocol.states import Reason, Role
from pdrt.serving.active import ADMITTED, ActiveRequest, Phase, Side, Sink
from pdrt.serving.alone import AloneSide
from pdrt.serving.decode import DecodeSide
from pdrt.serving.detokenize import Decode
from pdrt.serving.feed import Feed
from pdrt.serving.holdings import Holdings
from pdrt.serving.prefill import PrefillSide
from pdrt.serving.rooms import Manager
from pdrt.serving.sampling import check_sampling
from pdrt.serving.types import GenerationRequest, Rendezvous

log = logging.getLogger(__name__)

ATTEND_EVERY_NS = 5 * MILLISECOND_NS  # between layers
WAIT_ROOMS_MS = 10  # a lost wake-up costs no more than this
WAIT_IDLE_MS = 100
DECLINED_MAX = 4096
FORWARD_MAX_S = 60.0  # what the loop may stand in when it is told to close
ONE = (1).to_bytes(8, "little")  # what an eventfd is written


class Model(Protocol):
    """What the loop needs of `PagedModel`."""

    layout: Layout
    pages_count: int
    vocab_size: int

    def forward(
        self, batch: Sequence[Feed], between: Callable[[], None]
    ) -> NDArray[np.float32]: ...


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """What the loop is held to."""

    context_tokens: int  # prompt and answer of one request together
    eos_token_ids: tuple[int, ...]
    chunked_prefill_size: int = 512  # prompt tokens in one forward
    running_max: int = 32  # requests that hold pages
    queue_max: int = 256  # requests in the engine, running ones included


class EngineLoop:
    """Owns the model, the pages and the rooms of one engine.

    `submit`, `abort`, `decline`, `stats`, `start` and `close` may be called from any thread;
    everything else belongs to the loop's own.
    """

    def __init__(
        self,
        model: Model,
        decode: Decode,
        limits: EngineLimits,
        *,
        manager: Manager | None = None,
        role: Role | None = None,
        default_peer_port: int = 0,
        checksum: bool = False,
        recompute: bool = False,
        clock: Clock = monotonic_ns,
    ) -> None:
        """Without a manager every request runs alone, and one with a room is refused.
        `recompute`: decode computes the prompts of rooms that a fault ended."""
        self.allocator = PageAllocator(model.pages_count)
        self._model, self._layout, self._decode = model, model.layout, decode
        self._limits, self._manager, self._clock = limits, manager, clock
        self._alone = AloneSide(model.layout, self.allocator)
        self._paired: Side | None = None
        self._holdings: Holdings | None = None
        if manager is not None:
            self._holdings = Holdings(self.allocator, manager.aux)
            parts = (manager, model.layout, self.allocator, self._holdings)
            if role is Role.PREFILL:
                self._paired = PrefillSide(*parts, checksum=checksum)
            else:
                self._paired = DecodeSide(
                    *parts,
                    default_peer_port=default_peer_port,
                    instead=self._alone if recompute else None,
                )
        self._active: list[ActiveRequest] = []  # in order of arrival
        self._arrivals: deque[ActiveRequest] = deque()
        self._aborts: deque[tuple[ActiveRequest, Reason]] = deque()
        self._declined: deque[Rendezvous] = deque()
        # A file object, not a bare number: a wake-up after close must not reach whoever got the
        # number next.
        self._wake_file = os.fdopen(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "r+b", 0)
        self._poller = select.poll()
        self._poller.register(self._wake_file, select.POLLIN)
        if manager is not None:
            self._poller.register(manager.wake_fd, select.POLLIN)
        self._attended_ns = 0
        self._draining = False
        self._closing_ns: int | None = None  # when a closing loop stops waiting for rooms
        self._thread: threading.Thread | None = None
        self.output_tokens_count = 0
        self.prompt_tokens_count = 0

    # Called from any thread.

    def submit(self, request: GenerationRequest, sink: Sink) -> ActiveRequest:
        """Take a request; its deltas go to `sink`, in the loop's thread, until one ends it.

        Returns the handle for `abort`.  Raises Refused or CallerError, and has taken nothing.
        """
        side, output_tokens_max = self._judge(request)
        if self._draining or self._closing_ns is not None:
            raise Draining("this engine finishes what it has and takes nothing new")
        if len(self._active) + len(self._arrivals) >= self._limits.queue_max:
            raise QueueFull(f"{self._limits.queue_max} requests are in the engine already")
        active = ActiveRequest(
            request,
            side,
            sink,
            self._decode,
            eos_token_ids=self._limits.eos_token_ids,
            output_tokens_max=output_tokens_max,
        )
        self._arrivals.append(active)
        self._wake()
        return active

    def abort(self, active: ActiveRequest, reason: Reason = Reason.ABORTED) -> None:
        """Give a request up, on both sides.  Safe to call twice, and after its end."""
        self._aborts.append((active, reason))
        self._wake()

    def decline(self, rendezvous: Rendezvous) -> None:
        """The room of a request that `submit` refused, or never saw: its peer is told that nobody
        here will open it.  Beyond DECLINED_MAX at once the peers' own deadlines tell them."""
        if len(self._declined) < DECLINED_MAX:
            self._declined.append(rendezvous)
            self._wake()

    def stats(self) -> dict[str, Any]:
        """Facts as of now; counts of pages, requests, rooms and tokens."""
        alive = [active for active in list(self._active) if active.phase is not Phase.OVER]
        running = sum(active.phase in ADMITTED for active in alive)
        return {
            "running": running,
            "waiting": len(alive) - running + len(self._arrivals),
            "pages_total": self.allocator.pages_count,
            "pages_used": self.allocator.used_count,
            "pages_held": self.allocator.held_count,
            "pages_free": self.allocator.free_count,
            "aux_used": self._manager.aux.used_count if self._manager else 0,
            "rooms_open": sum(active.room is not None for active in alive),
            "rooms_releasing": len(self._holdings) if self._holdings is not None else 0,
            "recomputed": self._alone.recomputed_count,
            "prompt_tokens": self.prompt_tokens_count,
            "output_tokens": self.output_tokens_count,
        }

    def finished_rooms(self) -> list[dict[str, Any]]:
        """Timelines of the last rooms that ended here, oldest first."""
        return list(self._holdings.finished) if self._holdings is not None else []

    def start(self) -> None:
        """Run in a thread of its own.  An exception there ends the process: the supervisor starts
        a new one, and rooms of this one fail with a typed reason."""
        self._thread = threading.Thread(target=self._run_or_exit, name="engine", daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Take nothing new from here on; what is here goes on."""
        self._draining = True

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def idle(self) -> bool:
        """Nothing runs, waits, or is held for a room that is not quiet."""
        return not (self._active or self._arrivals or self._holdings)

    def close(self, *, wait_s: float = 2.0) -> None:
        """Abort everything, wait until all rooms are quiet or `wait_s` is over, end the thread."""
        self._closing_ns = self._clock() + to_ns(wait_s)
        self._wake()
        if self._thread is None:
            self.run()
        else:
            self._thread.join(wait_s + FORWARD_MAX_S)
        self._wake_file.close()

    def _wake(self) -> None:
        with contextlib.suppress(ValueError):  # closed: there is nobody to wake
            self._wake_file.write(ONE)

    # Called from the loop's thread.

    def run(self) -> None:
        """Iterate until closed."""
        while not self._closed():
            if not self.iterate():
                self._wait()

    def iterate(self) -> bool:
        """One turn.  Returns whether the model ran; if not, the caller may wait for news."""
        self._attend()
        self._admit()
        return self._step()

    def _attend(self) -> None:
        self._attended_ns = self._clock()
        if self._closing_ns is not None:
            self._aborts.extend((active, Reason.SHUTDOWN) for active in self._active)
        while self._arrivals:
            self._open(self._arrivals.popleft())
        while self._aborts:
            self._give_up(*self._aborts.popleft())
        while self._declined:
            rendezvous = self._declined.popleft()
            if self._paired is not None:
                self._paired.decline(rendezvous)
        if self._manager is not None:
            self._manager.tick()
        for active in self._active:
            if active.phase is not Phase.OVER:
                active.side.follow(active)
        self._active = [active for active in self._active if active.phase is not Phase.OVER]
        if self._holdings is not None:
            self._holdings.sweep()

    def _attend_if_due(self) -> None:
        if self._aborts or self._clock() - self._attended_ns >= ATTEND_EVERY_NS:
            self._attend()

    def _open(self, active: ActiveRequest) -> None:
        if active.phase is Phase.OVER:  # it came, and was given up, since we looked at arrivals
            if active.request.rendezvous is not None:
                active.side.decline(active.request.rendezvous)
            return
        self._active.append(active)
        try:
            active.side.open(active)
        except (Refused, CallerError) as error:
            if active.request.rendezvous is not None:
                active.side.decline(active.request.rendezvous)
            active.fail(error)

    def _give_up(self, active: ActiveRequest, reason: Reason) -> None:
        if active.phase is not Phase.OVER:
            active.abort_room(reason)
            active.note_room()
            active.finish_aborted()

    def _admit(self) -> None:
        """Reserve for those that wait, in order of arrival; the first that does not fit holds back
        the rest, or a large request would never start."""
        room_left = self._limits.running_max - sum(a.phase in ADMITTED for a in self._active)
        waiting = [active for active in self._active if active.phase is Phase.WAITING]
        for active in waiting[: max(room_left, 0)]:
            try:
                active.side.admit(active)
            except Refused:
                return

    def _step(self) -> bool:
        batch = self._next_batch()
        if not batch:
            return False
        logits = iter(self._model.forward([feed for _, feed in batch], self._attend_if_due))
        for active, feed in batch:
            row = next(logits) if feed.wants_logits else None
            if active.phase is Phase.OVER:  # given up while it was in the model
                continue
            active.computed_tokens += len(feed.tokens)
            choice = None if row is None else active.choose(row)
            if active.phase is Phase.PREFILL:
                self.prompt_tokens_count += len(feed.tokens)
                active.side.computed(active, choice)
            elif choice is not None:
                active.accept(choice)
            self.output_tokens_count += choice is not None
        return True

    def _next_batch(self) -> list[tuple[ActiveRequest, Feed]]:
        """Every decoding request's last token, then chunks of prompts up to the budget."""
        batch: list[tuple[ActiveRequest, Feed]] = []
        for active in self._active:
            if active.phase is Phase.DECODING:
                start = active.computed_tokens
                batch.append((active, Feed(active.tokens[start:], start, active.pages)))
        budget = self._limits.chunked_prefill_size
        for active in self._active:
            if active.phase is Phase.PREFILL and budget > 0:
                start = active.computed_tokens
                chunk = active.tokens[start : start + budget]
                last = start + len(chunk) == active.prompt_count
                batch.append((active, Feed(chunk, start, active.pages, wants_logits=last)))
                budget -= len(chunk)
        return batch

    def _judge(self, request: GenerationRequest) -> tuple[Side, int]:
        """Who runs it, and how many tokens it may generate.  Raises Refused or CallerError."""
        check_sampling(request.sampling)
        prompt = request.prompt_tokens
        if not prompt:
            raise BadRequest("the prompt has no tokens")
        if min(prompt) < 0 or max(prompt) >= self._model.vocab_size:
            raise BadRequest(f"a prompt token is outside 0..{self._model.vocab_size - 1}")
        pool_tokens = self.allocator.pages_count * self._layout.page_size
        left = min(self._limits.context_tokens, pool_tokens + 1) - len(prompt)
        if left < 1:
            raise PromptTooLong(
                f"a prompt of {len(prompt)} tokens leaves no room for an answer: the model takes "
                f"{self._limits.context_tokens} tokens, the pool holds {pool_tokens}"
            )
        output_tokens_max = min(request.sampling.max_tokens, left)
        if request.rendezvous is None:
            return self._alone, output_tokens_max
        if self._paired is None:
            raise BadRequest("bootstrap_room given to an engine without a transfer runtime")
        return self._paired, output_tokens_max

    def _wait(self) -> None:
        """Block until there may be news.  Wake-ups are hints; the time-out replaces lost ones."""
        quiet = not self._active and not self._holdings
        for fd, _ in self._poller.poll(WAIT_IDLE_MS if quiet else WAIT_ROOMS_MS):
            with contextlib.suppress(BlockingIOError):
                os.read(fd, len(ONE))

    def _closed(self) -> bool:
        if self._closing_ns is None:
            return False
        return self.idle or self._clock() >= self._closing_ns

    def _run_or_exit(self) -> None:
        try:
            self.run()
        except BaseException:
            log.critical("the engine loop failed; the process ends", exc_info=True)
            logging.shutdown()
            os._exit(1)
