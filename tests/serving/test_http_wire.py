"""What only a real server and a real socket show: leaving clients, prefaces, framing."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from starlette.types import Message

from pdrt.errors import Draining, PeerLost, PortInUse
from pdrt.runtime import listen
from pdrt.serving.http import EventStream
from pdrt.serving.types import Delta, FinishReason
from tests.serving.http_fakes import (
    FakeGenerator,
    Forever,
    make_app,
    read_until,
    say,
    serving,
    steps,
    token,
)
from tests.waiting import wait_until

PATHS = ["/v1/completions", "/v1/chat/completions", "/generate"]
DEADLINE_S = 10.0


def body(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "x"}]
    return {"prompt": "x", "text": "x", "messages": messages, "rid": "r", **fields}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token_aborts(path: str, stream: bool):
    generator = FakeGenerator(steps(Forever()))
    with serving(make_app(generator)) as wire:
        connection = wire.send(path, body(stream=stream))
        wait_until(lambda: generator.open, DEADLINE_S, "the request to reach the engine")
        connection.close()
        wait_until(lambda: generator.aborted == ["r"], DEADLINE_S, "the abort")


@pytest.mark.parametrize("path", PATHS)
def test_a_client_that_leaves_a_stream_aborts(path: str):
    generator = FakeGenerator(steps(token("a"), Forever()))
    with serving(make_app(generator)) as wire:
        connection = wire.send(path, body(stream=True))
        read_until(connection, b"data: ")  # the first token arrives while the engine still works
        connection.close()
        wait_until(lambda: generator.aborted == ["r"], DEADLINE_S, "the abort")


def test_a_client_that_leaves_after_some_tokens_aborts_without_a_stream_too():
    generator = FakeGenerator(steps(token("a"), Forever()))
    with serving(make_app(generator)) as wire:
        connection = wire.send("/v1/completions", body())
        wait_until(lambda: generator.steps_count == 1, DEADLINE_S, "the first token")
        connection.close()
        wait_until(lambda: generator.aborted == ["r"], DEADLINE_S, "the abort")


def test_a_client_that_leaves_aborts_every_choice():
    generator = FakeGenerator(steps(Forever()))
    with serving(make_app(generator)) as wire:
        connection = wire.send("/v1/completions", body(n=3))
        wait_until(lambda: len(generator.open) == 3, DEADLINE_S, "the requests")
        connection.close()
        wait_until(lambda: len(generator.aborted) == 3, DEADLINE_S, "the aborts")
    assert generator.open == set()


def test_a_client_that_stops_reading_and_leaves_aborts():
    def script(request: Any) -> Any:
        while True:
            yield token("a" * 4096)

    generator = FakeGenerator(script)
    seen = [-1]

    def stands_still() -> bool:
        before, seen[0] = seen[0], generator.steps_count
        return before == seen[0]

    with serving(make_app(generator)) as wire:
        connection = wire.send("/v1/completions", body(stream=True))
        read_until(connection, b"data: ")
        wait_until(stands_still, DEADLINE_S, "the engine to be held back")
        connection.close()
        wait_until(lambda: generator.aborted == ["r"], DEADLINE_S, "the abort")


def test_a_client_that_leaves_inside_its_body_starts_nothing():
    generator = FakeGenerator(say("ab"))
    with serving(make_app(generator)) as wire:
        wire.send("/v1/completions", body(), length_bytes=10_000).close()
        with wire.send("/v1/completions", body()) as connection:
            read_until(connection, b"usage")
    assert [each.rid for each in generator.submitted] == ["r"]


def test_a_client_that_leaves_the_health_probe_aborts_it():
    generator = FakeGenerator(steps(Forever()))
    with serving(make_app(generator)) as wire:
        connection = wire.connect()
        connection.sendall(b"GET /health_generate HTTP/1.1\r\nHost: test\r\n\r\n")
        wait_until(lambda: generator.open, DEADLINE_S, "the probe to reach the engine")
        connection.close()
        wait_until(lambda: generator.aborted, DEADLINE_S, "the abort")


@pytest.mark.parametrize("error", [Draining("going"), PeerLost(7, "gone")])
def test_the_error_of_a_stream_is_chunked_with_its_status(error: Exception):
    with serving(make_app(FakeGenerator(steps(error)))) as wire:
        with wire.send("/v1/completions", body(stream=True)) as connection:
            answer = read_until(connection, b"\r\n0\r\n\r\n")
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    assert b"transfer-encoding: chunked" in head.lower()
    assert b"content-length" not in head.lower()
    assert b'"code":' in rest


def test_a_prefill_answer_ends_with_its_generator():
    generator = FakeGenerator(
        steps(Delta(text="a", token_ids=[97], finish_reason=FinishReason.LENGTH))
    )
    with serving(make_app(generator)) as wire:
        fields = body(stream=True, stream_options={"include_usage": True}, bootstrap_room=4)
        with wire.send("/v1/completions", fields) as connection:
            answer = read_until(connection, b"0\r\n\r\n")
    assert b'"completion_tokens":1' in answer
    assert generator.aborted == []


def test_an_http2_preface_is_refused_at_once_and_harms_nobody():
    with serving(make_app(FakeGenerator(say("ab")))) as wire:
        for _ in range(2):
            with wire.connect() as connection:
                connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00")
                received = b"".join(iter(lambda: connection.recv(4096), b""))  # up to the close
                assert received.startswith(b"HTTP/1.1 400")
                assert received.count(b"HTTP/1.1 ") == 1
        with wire.connect() as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n")
            assert read_until(connection, b"ok").startswith(b"HTTP/1.1 200")


def test_a_connection_serves_many_requests_after_errors_too():
    generator = FakeGenerator(say("ab"))
    with serving(make_app(generator, body_bytes_max=1000)) as wire, wire.connect() as connection:
        for data, status in [(b"{", b"400"), (b"x" * 1001, b"413"), (b'{"prompt":"x"}', b"200")]:
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: {len(data)}\r\n\r\n"
            )
            connection.sendall(head.encode() + data)
            answer = read_until(connection, b"}\r\n0\r\n" if status != b"200" else b'"usage"')
            assert answer.startswith(b"HTTP/1.1 " + status)
    assert len(generator.submitted) == 1


def test_a_port_in_use_is_a_typed_error():
    with listen("127.0.0.1", 0, "--port") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=str(port)):
            listen("127.0.0.1", port, "--port")


def test_an_ipv6_host_can_be_served():
    with listen("::1", 0, "--port") as listener:
        assert listener.family is socket.AF_INET6


def test_a_silent_stream_says_that_it_is_still_there():
    sent: list[Message] = []

    commented = asyncio.Event()

    async def send(message: Message) -> None:
        sent.append(message)
        if message.get("body") == b": still here\n\n":
            commented.set()

    async def stream() -> None:
        events = EventStream(send)
        async with events.kept_alive(pause_s=0.001):
            await asyncio.sleep(0)
            assert not sent, "before the first event the status is still open"
            await events.send([{"n": 1}])
            await asyncio.wait_for(commented.wait(), DEADLINE_S)

    asyncio.run(stream())
