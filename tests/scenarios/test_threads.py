"""Scenario of one socket, or one NIXL agent, driven by two threads.

F045 F050.  An actor is one thread with one loop.  The modules that start another thread are named
here with what it does; none of them can touch a socket of ours or an agent.  The one process with
several threads at work is the engine's: there it is recorded who calls its manager.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pdrt.protocol.states import Reason, Role
from pdrt.serving.feed import Feed
from pdrt.serving.scheduler import EngineLimits, EngineLoop
from pdrt.serving.types import (
    Delta,
    FinishReason,
    GenerationRequest,
    Rendezvous,
    SamplingParams,
)
from tests.actors.world import LAYOUT
from tests.fakes import FakePair
from tests.test_tidy import ROOT, Module, modules
from tests.waiting import wait_until

STARTERS = {"Thread", "Timer", "to_thread", "run_in_executor", "ThreadPoolExecutor"}
#: module -> what its threads do.
THREADS = {
    "pdrt/health.py": "answers probes from copies and from reads of the table",
    "pdrt/mail/names.py": "asks the name server, and hands back an address",
    "pdrt/serving/app.py": "parses one request body",
    "pdrt/serving/scheduler.py": "is the engine's loop, which alone uses its manager",
}


def starters(module: Module) -> Iterator[ast.AST]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in STARTERS:
                yield node


def test_threads_are_started_where_it_is_said_and_share_neither_sockets_nor_agents() -> None:
    found = {module.path: module for module in modules(ROOT, "pdrt") if any(starters(module))}
    assert set(found) == set(THREADS)
    for path in set(THREADS) - {"pdrt/serving/scheduler.py"}:
        tree = found[path].tree
        used = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not {"pdrt.mail.mailbox", "pdrt.engine.manager"} & used
        assert not any(name.startswith("pdrt.transports") for name in used)


@pytest.mark.parametrize(
    "line",
    ["threading.Thread(target=f).start()", "Thread(target=f)", "await asyncio.to_thread(f)"],
)
def test_a_planted_thread_is_found(line: str) -> None:
    text = f"async def g():\n    {line}\n"
    assert any(starters(Module("pdrt/actors/x.py", text, ast.parse(text))))


class Recorder:
    """A manager or a room of it, and which thread called what."""

    CALLS = ("sender", "receiver", "decline", "tick", "init", "send", "send_metadata", "clear")

    def __init__(self, inner: Any, seen: dict[int, set[str]]) -> None:
        self._inner, self._seen = inner, seen

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in (*self.CALLS, "poll", "quiet", "abort", "digest"):
            return found

        def called(*args: Any, **more: Any) -> Any:
            self._seen.setdefault(threading.get_ident(), set()).add(name)
            answer = found(*args, **more)
            return Recorder(answer, self._seen) if name in ("sender", "receiver") else answer

        return called


class Zeros:
    """A model that knows one token."""

    layout, pages_count, vocab_size = LAYOUT, 64, 8

    def forward(self, batch: Sequence[Feed], between: Callable[[], None]) -> NDArray[np.float32]:
        between()
        return np.zeros((sum(feed.wants_logits for feed in batch), self.vocab_size), np.float32)


def engine_of(pair: FakePair, role: Role, seen: dict[int, set[str]]) -> EngineLoop:
    manager = pair.prefill if role is Role.PREFILL else pair.decode
    manager.on_tick = pair.pump
    limits = EngineLimits(context_tokens=64, eos_token_ids=())
    return EngineLoop(
        Zeros(), lambda tokens: "", limits, manager=Recorder(manager, seen), role=role
    )


def ask(room: int | None) -> GenerationRequest:
    meeting = None if room is None else Rendezvous(room=room, host="127.0.0.1", port=1)
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    return GenerationRequest(rid="r", prompt_tokens=(1, 2), sampling=sampling, rendezvous=meeting)


def hurry(loop: EngineLoop, number: int) -> None:
    """What threads of the HTTP side do to an engine."""
    for turn in range(20):
        room = 1000 * number + turn
        active = loop.submit(ask(room if turn % 4 else None), lambda delta: None)
        loop.decline(Rendezvous(room=10**6 + room, host="127.0.0.1", port=1))
        loop.stats()
        if turn % 4:
            loop.abort(active)
        loop.finished_rooms()


@pytest.mark.parametrize("role", Role)
def test_an_engines_manager_is_called_by_its_loops_thread_alone(role: Role) -> None:
    pair, seen = FakePair(LAYOUT, 64), dict[int, set[str]]()
    loop = engine_of(pair, role, seen)
    threads = [threading.Thread(target=hurry, args=(loop, number)) for number in range(4)]
    loop.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    try:
        nothing_left = lambda: loop.idle and not pair.prefill.rooms and not pair.decode.rooms  # noqa: E731
        wait_until(nothing_left, 20, "all requests to be over")
    finally:
        loop.close()
        pair.close()
    (calls,) = seen.values()
    opened = "sender" if role is Role.PREFILL else "receiver"
    assert {opened, "decline", "tick", "poll", "abort", "clear"} <= calls


@pytest.mark.parametrize("room", [7, None])
@pytest.mark.parametrize("role", Role)
def test_a_request_given_up_before_the_loop_has_seen_it_opens_nothing(
    role: Role, room: int | None
) -> None:
    """Its abort may be read before its arrival, which came between two looks of the loop."""
    pair, seen = FakePair(LAYOUT, 64), dict[int, set[str]]()
    loop = engine_of(pair, role, seen)
    deltas: list[Delta] = []
    loop._give_up(loop.submit(ask(room), deltas.append), Reason.ABORTED)
    for _ in range(10):
        loop.iterate()
    assert loop.idle
    assert not pair.prefill.rooms
    assert not pair.decode.rooms
    assert [delta.finish_reason for delta in deltas] == [FinishReason.ABORT]
    declined = pair.prefill.declined | pair.decode.declined
    assert declined == ({room} if room else set())
    loop.close()
    pair.close()
