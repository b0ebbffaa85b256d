"""The HTTP surface under a generator of requests: never a 500, never a hang, errors of one shape.

schemathesis makes requests from a description of the surface, right ones and wrong ones, and holds
each answer against it: status, content type, body.  The bodies are described by the very types that
read them, so the description cannot fall behind.  Without schemathesis only the raw bytes at the
end are played.
"""

from __future__ import annotations

import socket
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette

from pdrt.serving.generate import AbortRequest, GenerateRequest
from pdrt.serving.openai import ChatRequest, CompletionRequest
from pdrt.serving.plan import Routing
from stress.fuzz.mutate import JSON_LIES
from stress.fuzz.wire import GREETING
from tests.serving.http_fakes import (
    FakeGenerator,
    Wire,
    call,
    make_app,
    read_until,
    say,
    serving,
)

EXAMPLES = 8
MANY = 300
JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/generate": GenerateRequest,
    "/abort_request": AbortRequest,
}
FACTS = [
    *("/health", "/ready", "/live", "/health_generate", "/v1/models", "/server_info"),
    *("/get_server_info", "/model_info", "/get_model_info", "/loads", "/v1/loads", "/get_load"),
    *("/rooms", "/flush_cache"),
]
ERROR = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": {"enum": ["invalid_request_error", "server_error"]},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def answer(kinds: dict[str, Any]) -> dict[str, Any]:
    return {"description": "see there", "content": {t: {"schema": s} for t, s in kinds.items()}}


def description() -> dict[str, Any]:
    """OpenAPI, from the types that read the bodies."""
    refs, components = msgspec.json.schema_components(
        [*BODIES.values(), Routing], ref_template="#/components/schemas/{name}"
    )
    errors = {status: answer({JSON: ERROR}) for status in ("400", "405", "408", "413", "503")}
    paths: dict[str, Any] = {}
    for (path, kind), ref in zip(BODIES.items(), refs[:-1], strict=True):
        streams = path != "/abort_request"
        body = {"allOf": [ref, refs[-1]]} if streams else ref
        good = {JSON: {"type": ["object", "array"]}} | ({EVENTS: {}} if streams else {})
        paths[path] = {
            "post": {
                "operationId": kind.__name__,
                "requestBody": {"required": True, "content": {JSON: {"schema": body}}},
                "responses": {"200": answer(good), **errors},
            }
        }
    for path in FACTS:
        good = {JSON: {"type": ["object", "array"]}}
        paths[path] = {"get": {"responses": {"200": answer(good), **errors}}}
    paths["/metrics"] = {"get": {"responses": {"200": answer({TEXT: {}}), **errors}}}
    info = {"title": "pdrt", "version": "1"}
    return {
        "openapi": "3.1.0",
        "info": info,
        "paths": paths,
        "components": {"schemas": components},
    }


def test_every_route_is_described() -> None:
    app = make_app(FakeGenerator(say("ab")))
    assert {getattr(route, "path", "") for route in app.routes} == set(description()["paths"])


def play(app: Starlette, generator: FakeGenerator, path: str, mode: str, examples: int) -> None:
    """Requests of one operation."""
    schemathesis = pytest.importorskip("schemathesis")
    checks = pytest.importorskip("schemathesis.checks")
    loaded = schemathesis.openapi.from_dict(description())
    method = "POST" if path in BODIES else "GET"
    operation = loaded[path][method]
    right = schemathesis.GenerationMode.POSITIVE
    wrong = schemathesis.GenerationMode.NEGATIVE
    strategy = operation.as_strategy(generation_mode=right if mode == "right" else wrong)
    # What the types cannot say is refused with a 400: n times prompts, two rooms of one id.  And
    # what they say too narrowly is taken: a null field, one that nobody knows.
    excluded = [
        getattr(checks, name)
        for name in ("positive_data_acceptance", "negative_data_rejection", "unsupported_method")
        if hasattr(checks, name)
    ]

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def check(case: Any) -> None:
        how = case.as_transport_kwargs(base_url="http://test")
        how["content"] = how.pop("data", None)
        how.pop("cookies", None)
        response = call(app, how.pop("method"), how.pop("url"), **how)
        case.validate_response(response, excluded_checks=excluded)
        assert generator.open == set()

    check()


PATHS = [*BODIES, *FACTS, "/metrics"]


@pytest.mark.parametrize("mode", ["right", "wrong"])
def test_requests_are_answered_as_described(mode: str) -> None:
    """One endpoint by default, since schemathesis alone takes seconds to import."""
    generator = FakeGenerator(say("ab"))
    play(make_app(generator), generator, "/generate", mode, EXAMPLES)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["right", "wrong"])
@pytest.mark.parametrize("path", PATHS)
def test_a_great_many_requests(path: str, mode: str) -> None:
    if mode == "wrong" and path not in BODIES:
        pytest.skip("there is nothing to be wrong about")
    generator = FakeGenerator(say("ab"))
    play(make_app(generator), generator, path, mode, MANY)


# --- bytes that are no request, on a real socket ---


RAW = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    GREETING,
    b"\0" * 100,
    b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    b"POST /generate HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: \xff\xfe\r\n\r\n",
    b"GET /he\xffalth HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /%00%ff%zz HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET //health HTTP/0.9\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
]


def end_of(wire: Wire, data: bytes, *, hang_up: bool = True) -> bytes:
    """What comes back until the server hangs up; `hang_up`: we do first."""
    received = b""
    with wire.connect() as connection:
        try:
            connection.sendall(data)
            if hang_up:
                connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65536):
                received += piece
        except (ConnectionResetError, BrokenPipeError):
            pass
    return received


def test_bytes_that_are_no_request_are_refused_and_cost_nobody_else() -> None:
    generator = FakeGenerator(say("ab"))

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.binary(max_size=200) | st.sampled_from(RAW))
    def check(data: bytes) -> None:
        assert not end_of(wire, data).startswith(b"HTTP/1.1 5")

    with serving(make_app(generator)) as wire:
        for data in RAW:
            assert not end_of(wire, data).startswith(b"HTTP/1.1 5"), data[:80]
        for lie in JSON_LIES:
            head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(lie)}\r\n"
            body = head.encode() + b"Connection: close\r\n\r\n" + lie
            assert end_of(wire, body, hang_up=False).startswith(b"HTTP/1.1 400"), lie[:80]
        check()
        with wire.send("/v1/completions", {"prompt": "x"}) as connection:
            read_until(connection, b'"usage"')
    assert generator.open == set()
