"""The HTTP surface of one role: routes, and how a request becomes an answer.

Life of a request: read the body (bounded), turn it into one `GenerationRequest` a choice, submit
them all, word the deltas as they come.  Until the first event an error has a status of its own;
afterwards it is an event.  A client that leaves, at any point, closes the iterators, which aborts
the rooms on both sides.  Routers send no other abort.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pdrt.clock import Clock, monotonic_ns
from pdrt.errors import PdrtError
from pdrt.serving.choices import Choices, Reply
from pdrt.serving.generate import parse_abort, parse_generate
from pdrt.serving.http import (
    ClientGone,
    EventStream,
    Http1Only,
    RequestId,
    describe,
    encode,
    error_body,
    read_body,
    request_id_of,
    send_error,
    send_json,
    while_connected,
)
from pdrt.serving.openai import parse_chat, parse_completion
from pdrt.serving.plan import Context, ServerInfo, TokensProtocol, rooms_named
from pdrt.serving.types import GenerationRequest, Generator, SamplingParams

__all__ = ["ServerInfo", "TokensProtocol", "build_app"]

BODY_BYTES_MAX = 8 << 20
# Above this a body is parsed and tokenized off the loop: a megabyte of prompt takes long enough to
# keep /health, and every other stream, waiting.
INLINE_BODY_BYTES_MAX = 64 << 10
HEALTH_GENERATE_TIMEOUT_S = 20.0  # SGLang's
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Health = Callable[[], tuple[bool, dict[str, Any]]]
Parse = Callable[[bytes, str, Context], Reply]


class _InternalError(PdrtError):
    def __init__(self) -> None:
        super().__init__("internal error; the server's log has the details")


class GenerationEndpoint:
    """One POST endpoint that generates.  An ASGI app, so that it sees the client leave."""

    def __init__(
        self, parse: Parse, generator: Generator, context: Context, *, body_bytes_max: int
    ) -> None:
        self._parse = parse
        self._generator = generator
        self._context = context
        self._body_bytes_max = body_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(scope, receive, bytes_max=self._body_bytes_max)
        except ClientGone:
            return
        except PdrtError as error:
            await send_error(send, error)
            return
        await while_connected(receive, self._answer(body, request_id_of(scope), send))

    async def _answer(self, body: bytes, request_id: str, send: Send) -> None:
        events = EventStream(send)
        try:
            reply = await self._read(body, request_id)
            if reply.stream:
                await self._stream(reply, events)
            else:
                payload = await self._collect(reply)
                await send_json(send, 200, payload)
        except PdrtError as error:
            await _fail(send, events, error)
        except Exception:
            await _fail(send, events, _InternalError())
            raise

    async def _read(self, body: bytes, request_id: str) -> Reply:
        try:
            if len(body) <= INLINE_BODY_BYTES_MAX:
                return self._parse(body, request_id, self._context)
            return await asyncio.to_thread(self._parse, body, request_id, self._context)
        except Exception:
            # The peer got the same body, and may find nothing wrong with it: its limits are others.
            for rendezvous in rooms_named(body):
                self._generator.decline(rendezvous)
            raise

    async def _collect(self, reply: Reply) -> Any:
        async with Choices(self._generator, reply.requests) as choices:
            async for index, delta in choices:
                reply.taken[index].add(delta)
        return reply.whole()

    async def _stream(self, reply: Reply, events: EventStream) -> None:
        async with Choices(self._generator, reply.requests) as choices, events.kept_alive():
            async for index, delta in choices:
                reply.taken[index].add(delta)
                await events.send(reply.chunk(index, delta))
        await events.send(reply.tail())
        await events.close()


async def _fail(send: Send, events: EventStream, error: PdrtError) -> None:
    if not events.started:
        await send_error(send, error)
        return
    await events.send([describe(error)])
    await events.close()


class HealthGenerate:
    """GET /health_generate: one token through the engine, within a deadline.

    No room: it tests this role's engine alone, so a dead peer does not take this side out too.
    """

    def __init__(self, generator: Generator, tokens: TokensProtocol, *, timeout_s: float) -> None:
        self._generator = generator
        self._tokens = tokens
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._answer(request_id_of(scope), send))

    async def _answer(self, request_id: str, send: Send) -> None:
        request = GenerationRequest(
            rid=f"HEALTH_CHECK_{request_id}",
            prompt_tokens=tuple(self._tokens.encode("health")),
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        )
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                Choices(self._generator, [request]) as choices,
            ):
                async for _ in choices:
                    pass
        except TimeoutError:
            message = f"no token within {self._timeout_s} s"
            await send_json(send, 503, error_body(message, 503, code="health_timeout"))
        except PdrtError as error:
            # 503 whatever the error: routers and probes read any other status as "alive".
            await send_json(send, 503, error_body(str(error), 503, code=error.code))
        else:
            await send_json(send, 200, {"status": "ok"})


class AbortEndpoint:
    """POST /abort_request."""

    def __init__(self, generator: Generator, *, body_bytes_max: int) -> None:
        self._generator = generator
        self._body_bytes_max = body_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            prefix = parse_abort(await read_body(scope, receive, bytes_max=self._body_bytes_max))
        except ClientGone:
            return
        except PdrtError as error:
            await send_error(send, error)
            return
        await send_json(send, 200, {"aborted": self._generator.abort(prefix)})


class Facts:
    """The GET endpoints: what this server is and how it does.  None of them waits for anything."""

    def __init__(
        self,
        generator: Generator,
        context: Context,
        health: Health,
        ready: Health,
        metrics: Callable[[], bytes],
    ) -> None:
        self._generator = generator
        self._context = context
        self._info = context.info
        self._health = health
        self._ready = ready
        self._metrics = metrics
        self._started_s = int(context.wall_s())

    async def live(self, request: Request) -> Response:
        return _json({"status": "live"})

    async def health(self, request: Request) -> Response:
        return _verdict(self._health())

    async def ready(self, request: Request) -> Response:
        return _verdict(self._ready())

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics(), headers={"content-type": METRICS_TYPE})

    async def models(self, request: Request) -> Response:
        model = {
            "id": self._info.served_model_name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "pdrt",
            "root": self._info.model_path,
            "max_model_len": self._info.max_model_len,
        }
        return _json({"object": "list", "data": [model]})

    async def model_info(self, request: Request) -> Response:
        info = self._info
        return _json(
            {
                "model_path": info.model_path,
                "tokenizer_path": info.tokenizer_path or info.model_path,
                "served_model_name": info.served_model_name,
                "is_generation": True,
                "max_model_len": info.max_model_len,
            }
        )

    async def server_info(self, request: Request) -> Response:
        info = self._info
        return _json(
            {
                "served_model_name": info.served_model_name,
                "model_path": info.model_path,
                "tokenizer_path": info.tokenizer_path or info.model_path,
                "disaggregation_mode": info.role,
                "disaggregation_bootstrap_port": info.bootstrap_port,
                "tp_size": info.tp_size,
                "dp_size": info.dp_size,
                "max_model_len": info.max_model_len,
                "max_total_num_tokens": info.tokens_max,
                "max_running_requests": info.running_max,
                "version": info.version,
                "status": "ready" if self._ready()[0] else "not_ready",
                "internal_states": [self._generator.stats()],
            }
        )

    async def load(self, request: Request) -> Response:
        """SGLang's /get_load: a list, one entry a data-parallel rank."""
        running, waiting, tokens = self._counts()
        return _json(
            [
                {
                    "dp_rank": 0,
                    "num_reqs": running + waiting,
                    "num_waiting_reqs": waiting,
                    "num_tokens": tokens,
                }
            ]
        )

    async def loads(self, request: Request) -> Response:
        """SGLang's /v1/loads."""
        running, waiting, tokens = self._counts()
        capacity = self._info.tokens_max
        token_usage = tokens / capacity if capacity else 0.0
        rank = {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
            "num_used_tokens": tokens,
            "max_total_num_tokens": capacity,
            "token_usage": token_usage,
        }
        total = {
            "total_running_reqs": running,
            "total_waiting_reqs": waiting,
            "total_reqs": running + waiting,
            "avg_token_usage": token_usage,
        }
        now = datetime.fromtimestamp(self._context.wall_s(), UTC).isoformat()
        facts = {"timestamp": now, "version": self._info.version, "dp_rank_count": 1}
        return _json(facts | {"loads": [rank], "aggregate": total})

    async def flush_cache(self, request: Request) -> Response:
        """There is no prefix cache, so it is always flushed."""
        return _json({"status": "ok"})

    def _counts(self) -> tuple[int, int, int]:
        stats = self._generator.stats()
        return stats.get("running", 0), stats.get("waiting", 0), stats.get("tokens", 0)


def _json(payload: Any, status: int = 200) -> Response:
    return Response(encode(payload), status, media_type="application/json")


def _verdict(verdict: tuple[bool, dict[str, Any]]) -> Response:
    good, facts = verdict
    return _json(facts, 200 if good else 503)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{error.detail}: {request.method} {request.url.path}"
    response = _json(error_body(message, error.status_code, code=code), error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _crash(request: Request, error: Exception) -> Response:
    return _json(describe(_InternalError()), 500)


def build_app(
    generator: Generator,
    tokens: TokensProtocol,
    info: ServerInfo,
    health: Health,
    metrics: Callable[[], bytes],
    *,
    ready: Health | None = None,
    rooms: Callable[[], list[dict[str, Any]]] = list,
    clock: Clock = monotonic_ns,
    wall_s: Callable[[], float] = time.time,
    body_bytes_max: int = BODY_BYTES_MAX,
    health_generate_timeout_s: float = HEALTH_GENERATE_TIMEOUT_S,
) -> Starlette:
    """The app of one role.  `health`, `ready` and `metrics` must answer at once: they run inline.

    `health` False is the drain switch: routers take the server out while it finishes what it has;
    refusing new requests (Draining) is the generator's part.  `ready` None: the same as `health`.
    `rooms`: timelines of the last rooms that ended.  `generator.stats()` is read for `running`,
    `waiting` (requests) and `tokens` (in the pool).
    """
    context = Context(tokens=tokens, info=info, clock=clock, wall_s=wall_s)
    facts = Facts(generator, context, health, ready or health, metrics)

    def generation(path: str, parse: Parse) -> Route:
        endpoint = GenerationEndpoint(parse, generator, context, body_bytes_max=body_bytes_max)
        return Route(path, endpoint, methods=["POST"])

    abort = AbortEndpoint(generator, body_bytes_max=body_bytes_max)
    probe = HealthGenerate(generator, tokens, timeout_s=health_generate_timeout_s)
    routes = [
        generation("/v1/completions", parse_completion),
        generation("/v1/chat/completions", parse_chat),
        generation("/generate", parse_generate),
        Route("/abort_request", abort, methods=["POST"]),
        Route("/health_generate", probe, methods=["GET"]),
        Route("/health", facts.health),
        Route("/ready", facts.ready),
        Route("/live", facts.live),
        Route("/metrics", facts.metrics),
        Route("/v1/models", facts.models),
        Route("/server_info", facts.server_info),
        Route("/get_server_info", facts.server_info),
        Route("/model_info", facts.model_info),
        Route("/get_model_info", facts.model_info),
        Route("/loads", facts.loads),
        Route("/v1/loads", facts.loads),
        Route("/get_load", facts.load),
        Route("/rooms", lambda _: _json({"finished": rooms()})),
        Route("/flush_cache", facts.flush_cache, methods=["GET", "POST"]),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Http1Only), Middleware(RequestId)],
        exception_handlers={HTTPException: _http_error, Exception: _crash},
    )
