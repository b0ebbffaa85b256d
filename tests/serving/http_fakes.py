"""A scripted generator, a trivial tokenizer, and two ways to reach an app: called, or by socket."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import httpx
import uvicorn
from starlette.applications import Starlette

from pdrt.clock import ManualClock
from pdrt.runtime import listen
from pdrt.serving.app import ServerInfo, build_app
from pdrt.serving.http import uvicorn_config
from pdrt.serving.plan import Message
from pdrt.serving.types import Delta, FinishReason, GenerationRequest, Rendezvous, TokenLogprob
from tests.waiting import wait_until

WALL_S = 1_700_000_000.0
INFO = ServerInfo(
    served_model_name="tiny",
    model_path="/models/tiny",
    role="decode",
    version="1.2.3",
    max_model_len=64,
    vocab_size=0x110000,
    tokens_max=1000,
    running_max=48,
    choices_max=8,
)


class FakeTokens:
    """One token a character."""

    def encode(self, text: str, /) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int], /) -> str:
        return "".join(map(chr, ids))

    def apply_chat(self, messages: Sequence[Message], /) -> list[int]:
        return self.encode("".join(f"<{each['role']}>{each['content']}" for each in messages))

    def token_text(self, token_id: int, /) -> str:
        return chr(token_id)


class Forever:
    """A step of a script that never comes: only closing the stream ends it."""


Step = Delta | Exception | Forever
Script = Callable[[GenerationRequest], Iterable[Step]]


def say(text: str, finish: FinishReason = FinishReason.STOP) -> Script:
    """Each request answers with the text, a token a delta."""

    def script(request: GenerationRequest) -> Iterator[Step]:
        for position, character in enumerate(text, 1):
            last = position == len(text)
            logprobs = []
            if request.sampling.logprobs is not None:
                top = [(ord(character), -0.5), (ord("?"), float("-inf"))]
                logprobs = [
                    TokenLogprob(ord(character), -0.5, tuple(top[: request.sampling.logprobs]))
                ]
            yield Delta(
                text=character,
                token_ids=[ord(character)],
                logprobs=logprobs,
                finish_reason=finish if last else None,
                meta={"state": "Success"} if last else {},
            )

    return script


def steps(*given: Step) -> Script:
    return lambda request: given


def token(text: str) -> Delta:
    return Delta(text=text, token_ids=[ord(character) for character in text])


class FakeStream:
    def __init__(self, owner: FakeGenerator, request: GenerationRequest) -> None:
        self._owner = owner
        self._rid = request.rid
        self._steps = iter(owner.script(request))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        for step in self._steps:
            if isinstance(step, Forever):
                await asyncio.Event().wait()
            if isinstance(step, Exception):
                self._owner.open.discard(self._rid)
                raise step
            assert isinstance(step, Delta)
            self._owner.steps_count += 1
            if step.finish_reason or step.error:
                self._owner.open.discard(self._rid)
            return step
        self._owner.open.discard(self._rid)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        # Closing takes a turn of the loop, as telling an engine does.
        closing = asyncio.create_task(self._close())
        await closing

    async def _close(self) -> None:
        if self._rid in self._owner.open:
            self._owner.open.discard(self._rid)
            self._owner.aborted.append(self._rid)


class FakeGenerator:
    """Answers from a script and remembers what happened to each request."""

    def __init__(self, script: Script, *, refusal: Exception | None = None, takes: int = 0) -> None:
        self.script = script
        self.refusal = refusal  # raised by submit after `takes` requests
        self.takes = takes
        self.submitted: list[GenerationRequest] = []
        self.open: set[str] = set()
        self.aborted: list[str] = []
        self.abort_prefixes: list[str] = []
        self.declined: list[Rendezvous] = []
        self.steps_count = 0

    def submit(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        if self.refusal is not None and len(self.submitted) >= self.takes:
            raise self.refusal
        self.submitted.append(request)
        self.open.add(request.rid)
        return FakeStream(self, request)

    def abort(self, rid_prefix: str) -> int:
        self.abort_prefixes.append(rid_prefix)
        return len(self.open)

    def decline(self, rendezvous: Rendezvous) -> None:
        self.declined.append(rendezvous)

    def stats(self) -> dict[str, Any]:
        return {"running": 3, "waiting": 2, "tokens": 250}


async def turn() -> None:
    """Let everything that is ready run once."""
    ready = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(ready.set_result, None)
    await ready


def make_app(generator: FakeGenerator, **options: Any) -> Starlette:
    given: dict[str, Any] = {
        "info": INFO,
        "health": lambda: (True, {"status": "ok"}),
        "metrics": lambda: b"pdrt_rooms 0\n",
        "clock": ManualClock(),
        "wall_s": lambda: WALL_S,
    }
    return build_app(generator, FakeTokens(), **given | options)


def call(app: Starlette, method: str, path: str, **options: Any) -> httpx.Response:
    """One request in process.  A crash of the app shows as the response it sent, as on a wire."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


def post(app: Starlette, path: str, body: Any, **options: Any) -> httpx.Response:
    return call(app, "POST", path, json=body, **options)


def events(text: str) -> list[Any]:
    """The payloads of an event stream, after checking its frame: data lines, [DONE] last."""
    assert text.endswith("data: [DONE]\n\n")
    frames = text.removesuffix("data: [DONE]\n\n").split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


@dataclass
class Wire:
    """A real uvicorn on loopback, spoken to by raw sockets."""

    port: int

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def send(self, path: str, body: Any, *, length_bytes: int | None = None) -> socket.socket:
        """Send a POST and return the connection with the answer still unread."""
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: test\r\n"
            f"Content-Length: {len(data) if length_bytes is None else length_bytes}\r\n\r\n"
        )
        connection = self.connect()
        connection.sendall(head.encode() + data)
        return connection


def read_until(connection: socket.socket, end: bytes) -> bytes:
    received = b""
    while end not in received:
        piece = connection.recv(65536)
        assert piece, f"closed before {end!r}; received {received!r}"
        received += piece
    return received


@contextmanager
def serving(app: Starlette, **options: Any) -> Iterator[Wire]:
    """Run the app as pdrt runs it, in a thread of this process."""
    listener = listen("127.0.0.1", 0, "--port")
    server = uvicorn.Server(uvicorn_config(app, **options))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        wait_until(lambda: server.started, 10, "uvicorn to start")
        yield Wire(listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listener.close()
    assert not thread.is_alive()
