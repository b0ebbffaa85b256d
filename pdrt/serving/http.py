"""HTTP as pdrt speaks it: bodies, errors, event streams, disconnects, uvicorn.  Knows no endpoint.

Plain ASGI where Starlette's responses would wait on the wrong thing: a client that leaves is
noticed in every phase, because something always waits for `http.disconnect`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdrt.errors import (
    CallerError,
    Closed,
    IllegalMove,
    PdrtError,
    Refused,
    TransferError,
)
from pdrt.http_door import HttpDoor
from pdrt.serving.plan import RID_CHARS_MAX, BadField

JSON_TYPE = (b"content-type", b"application/json")
RETRY_AFTER_S = 1
# Idle connections of routers live for 90 s (llm-d's sidecar); a server that closes first makes the
# next request on such a connection fail with a reset.
KEEP_ALIVE_S = 120
BODY_S = 60.0  # for a body to arrive
STREAM_SILENCE_S = 1.0

encode = msgspec.json.encode


class BodyTooLarge(CallerError):
    code = "request_too_large"


class BodyTooSlow(CallerError):
    code = "request_timeout"


class ClientGone(Exception):
    """The client closed the connection.  Nobody is left to answer."""


def status_of(error: PdrtError) -> int:
    """The HTTP status of an error: who must act decides it.

    * 503: retrying helps.  Routers retry every 5xx with a new room and a newly chosen pair, which
      is what a failed room (TransferError) and a limit (Refused) need.  Never 429: sglang-router
      turns a 429 from decode into a 500.
    * 400: the same body will be refused again; routers do not retry it.
    * 500: our own fault.  IllegalMove and Closed blame the caller of an internal API: us.
    """
    match error:
        case BodyTooLarge():
            return 413
        case BodyTooSlow():
            return 408
        case IllegalMove() | Closed():
            return 500
        case CallerError():
            return 400
        case Refused() | TransferError():
            return 503
        case _:
            return 500


def error_body(
    message: str, status: int, *, code: str | None, param: str | None = None
) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: PdrtError) -> dict[str, Any]:
    param = error.param if isinstance(error, BadField) else None
    return error_body(str(error), status_of(error), code=error.code, param=param)


async def send_json(send: Send, status: int, payload: Any) -> None:
    body = encode(payload)
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [JSON_TYPE, length]})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: PdrtError) -> None:
    """Answer with the error's status and no Content-Length.

    sglang-router 0.3.2 rewords the error of a streaming request and keeps our Content-Length, which
    cuts its own body.  Chunked, it arrives whole; the status of a body that did not parse has to be
    right too, so every error of these endpoints goes out this way.
    """
    headers = [JSON_TYPE]
    if isinstance(error, Refused):
        headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
    await send({"type": "http.response.start", "status": status_of(error), "headers": headers})
    await send({"type": "http.response.body", "body": encode(describe(error)), "more_body": True})
    await send({"type": "http.response.body", "body": b""})


class EventStream:
    """Server-sent events.  The headers go out with the first event: until then a status can."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self._written = 0

    @asynccontextmanager
    async def kept_alive(self, pause_s: float = STREAM_SILENCE_S) -> AsyncIterator[None]:
        """Send a comment whenever the started stream was silent for so long.

        A router that only passes chunks on notices a client that left when there is one to pass;
        without this, a request whose decode stalls would never be given up.
        """
        task = asyncio.create_task(self._comment(pause_s))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _comment(self, pause_s: float) -> None:
        while True:
            written = self._written
            await asyncio.sleep(pause_s)
            if self.started and self._written == written:
                await self._write(b": still here\n\n")

    async def send(self, payloads: Sequence[Any]) -> None:
        if payloads:
            await self._write(b"".join(b"data: %b\n\n" % encode(payload) for payload in payloads))

    async def close(self) -> None:
        await self._write(b"data: [DONE]\n\n")
        await self._send({"type": "http.response.body", "body": b""})

    async def _write(self, body: bytes) -> None:
        self._written += 1
        if not self.started:
            self.started = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": True})


async def read_body(
    scope: Scope, receive: Receive, *, bytes_max: int, timeout_s: float = BODY_S
) -> bytes:
    """The whole body.  Raises BodyTooLarge as soon as it is known, BodyTooSlow, and ClientGone on a
    disconnect."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _read_body(scope, receive, bytes_max)
    except TimeoutError:
        raise BodyTooSlow(f"the body did not arrive within {timeout_s:g} s") from None


async def _read_body(scope: Scope, receive: Receive, bytes_max: int) -> bytes:
    """The connection stays open after BodyTooLarge: closing it with unread bytes would reset it,
    and the client would not see the 413."""
    too_large = BodyTooLarge(f"the body is larger than {bytes_max} bytes")
    declared = Headers(scope=scope).get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > bytes_max:
        raise too_large
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > bytes_max:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or cancel it when the client leaves and wait until it has cleaned up.

    Call it once the body is read: it consumes what `receive` gives.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_wait_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.wait({task, watch})
    if not watch.cancelled():
        watch.result()
    if not task.cancelled():
        task.result()


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def request_id_of(scope: Scope) -> str:
    """The id that `RequestId` gave this request: unique, and it starts with the client's own.

    A router's retry comes with the same x-request-id while its first try may still run here, so the
    client's id alone would name two requests.
    """
    request_id: str = scope["state"]["request_id"]
    return request_id


class RequestId:
    """Middleware: gives each request an id and returns x-request-id with the response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        fresh = uuid.uuid4().hex
        given = Headers(scope=scope).get("x-request-id")
        request_id = f"{given[:RID_CHARS_MAX]}-{fresh[:12]}" if given else fresh
        scope.setdefault("state", {})["request_id"] = request_id
        header = (b"x-request-id", (given or fresh).encode("latin-1"))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self._app(scope, receive, send_with_id)


class Http1Only:
    """Middleware: refuses an HTTP/2 preface and closes.  Routers probe for gRPC with one.

    h11 reads `PRI * HTTP/2.0` as a request like any other.  Routed, it gets a 404, the connection
    stays open, and the rest of the preface a second answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["http_version"] in ("1.0", "1.1"):
            await self._app(scope, receive, send)
            return
        body = encode(error_body("this server speaks HTTP/1.1", 400, code="http_version"))
        headers = [JSON_TYPE, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 400, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def uvicorn_config(
    app: ASGIApp, *, graceful_shutdown_s: int | None = None, **options: Any
) -> uvicorn.Config:
    """How pdrt runs uvicorn.  Serve it on sockets: `Server(config).serve(sockets=[listening])`.

    `graceful_shutdown_s`: how long running requests may go on after shutdown was asked for; None:
    until they end.  `options` override anything else.
    """
    fixed: Mapping[str, Any] = {
        "http": HttpDoor,
        "ws": "none",
        "loop": "asyncio",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": KEEP_ALIVE_S,
        "timeout_graceful_shutdown": graceful_shutdown_s,
    }
    return uvicorn.Config(app, **{**fixed, **options})
