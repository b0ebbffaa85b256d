"""A process of chat clients, each with conversations of several turns, that may be killed at any
instant.  It asks a router for streams, reads them, leaves some, aborts some, and writes down what
came.  A conversation is its own: each turn repeats all that was said.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import zlib
from pathlib import Path
from time import monotonic_ns
from typing import Any

import msgspec

from pdrt.child import PR_SET_PDEATHSIG, prctl
from stress.cascades.agents.wire import Answer, Broken, Events, code_of, post
from stress.cascades.agents.words import (
    CONTEXT_MESSAGES_MAX,
    FIRST_PROMPTS,
    FIRST_TOKENS,
    NEXT_PROMPTS,
    Kind,
    code_index,
)
from stress.cascades.history import Writer

LOOK_S = 0.05
LEAVES, ABORTS = 0.15, 0.10  # of the turns
MEDDLES_S = 3.0  # after it has asked, at most
PAUSE_S = 1.0  # between turns, at most
TURNS = (1, 2, 3, 4)


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """`stop_file`: once it is there, no turn begins.  `first`: number of the first client here;
    `references`: digests of what the first prompts were answered before."""

    router_port: int
    engine_ports: tuple[int, int]
    model: str
    seed: int
    first: int
    clients: int
    life: int
    history: str
    stop_file: str
    hang_s: float
    references: tuple[int, ...]


def digest(text: str) -> int:
    return zlib.crc32(text.encode())


def rid_of(request: int) -> str:
    """No other one begins with it: what is aborted is named by how its id begins."""
    return f"agent-{request:016x}"


class Client:
    def __init__(self, told: Told, number: int, writer: Writer) -> None:
        self._told, self._number, self._writer = told, number, writer
        self._chance = random.Random(f"{told.seed} {number} {told.life}")
        self._asked = 0
        self._messages: list[dict[str, str]] = []

    async def run(self) -> None:
        """Conversations until it is told to stop."""
        while True:
            self._messages = []
            for turn in range(self._chance.choice(TURNS)):
                await asyncio.sleep(self._chance.random() * PAUSE_S)
                if self._is_over():
                    return
                if not await self._turn(turn):
                    break

    def _is_over(self) -> bool:
        return Path(self._told.stop_file).exists()

    def _body(self, turn: int) -> tuple[dict[str, Any], int]:
        """Of a request, and which first prompt it is, from 1; 0: it is none."""
        chance, first = self._chance, 0
        body: dict[str, Any] = {"model": self._told.model, "stream": True}
        if turn == 0:
            index = chance.randrange(len(FIRST_PROMPTS))
            self._messages = [{"role": "user", "content": FIRST_PROMPTS[index]}]
            body |= {"temperature": 0, "max_tokens": FIRST_TOKENS}
            first = index + 1
        else:
            self._messages.append({"role": "user", "content": chance.choice(NEXT_PROMPTS)})
            body |= {"temperature": 1, "seed": chance.randrange(1000)}
            body |= {"max_tokens": chance.randrange(2, 17)}
        return body | {"messages": self._messages[-CONTEXT_MESSAGES_MAX:]}, first

    async def _turn(self, turn: int) -> bool:
        """True if the conversation goes on."""
        self._asked += 1
        request = self._number << 40 | self._told.life << 24 | self._asked
        body, first = self._body(turn)
        self._note(Kind.ASKED, request, turn, first)
        draw = self._chance.random()
        events = Events()
        talk = asyncio.ensure_future(self._talk(request, body, events))
        moved = asyncio.ensure_future(self._meddle(request, draw, talk))
        done, _ = await asyncio.wait([talk], timeout=self._told.hang_s)
        ended_ns = monotonic_ns()
        moved.cancel()
        await asyncio.wait([moved])
        if not done:
            talk.cancel()
            await asyncio.wait([talk])
            self._note(Kind.HUNG, request, ns=ended_ns)
            return False
        if talk.cancelled():
            self._note(Kind.LEFT, request, ns=ended_ns)
            return False
        status, code = talk.result()
        if code:
            self._note(Kind.FAILED, request, status, code_index(code), ns=ended_ns)
            print(f"{request}: {status} {code}", flush=True)
            return False
        aborted = events.finish == "abort"
        self._note(Kind.DONE, request, len(events.text), int(aborted), ns=ended_ns)
        if first and not aborted and digest(events.text) != self._told.references[first - 1]:
            self._note(Kind.DIFFERS, request, first - 1)
            print(f"{request}: {FIRST_PROMPTS[first - 1]!r} -> {events.text!r}", flush=True)
        self._messages.append({"role": "assistant", "content": events.text})
        return not aborted

    async def _talk(self, request: int, body: dict[str, Any], events: Events) -> tuple[int, str]:
        """Status, and the code of an error or ""."""
        headers = {"x-request-id": rid_of(request)}
        answer = None
        try:
            port = self._told.router_port
            answer = await Answer.to(port, "/v1/chat/completions", body, headers)
            status = await answer.head()
            if status != 200:
                return status, code_of((await answer.whole()).decode("utf-8", "replace"))
            async for part in answer.parts():
                had = bool(events.text)
                events.feed(part)
                if events.text and not had:
                    self._note(Kind.FIRST, request)
        except Broken as error:
            print(f"{request}: broken: {error}", flush=True)
            return 0, events.error or "broken"
        finally:
            if answer is not None:
                answer.leave()
        whole = events.done and events.finish
        return status, events.error or ("" if whole else "broken")

    async def _meddle(self, request: int, draw: float, talk: asyncio.Future[Any]) -> None:
        """Leave, or have the request aborted, at some moment."""
        if draw > LEAVES + ABORTS:
            return
        await asyncio.sleep(self._chance.random() ** 2 * MEDDLES_S)
        if draw < LEAVES:
            talk.cancel()
            return
        abort = asyncio.ensure_future(self._abort(request))
        try:
            await asyncio.wait([abort])
        finally:  # it may have ended the request before it was answered: what it found is noted
            await abort

    async def _abort(self, request: int) -> None:
        port = self._chance.choice(self._told.engine_ports)
        try:
            status, text = await post(port, "/abort_request", {"rid": rid_of(request)})
        except Broken:
            status, text = 0, b""
        count = int(msgspec.json.decode(text)["aborted"]) if status == 200 else 0
        self._note(Kind.ABORTED, request, status, count)

    def _note(self, kind: Kind, request: int, b: int = 0, c: int = 0, *, ns: int = 0) -> None:
        self._writer.append(kind, request, self._number, b, c, ns)


async def play(told: Told) -> None:
    writer = Writer(Path(told.history))
    numbers = range(told.first, told.first + told.clients)
    async with asyncio.TaskGroup() as group:
        for number in numbers:
            group.create_task(Client(told, number, writer).run())
    writer.append(Kind.EXIT, a=told.first)
    writer.close()


def main() -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asyncio.run(play(msgspec.json.decode(sys.argv[1], type=Told)))
