"""HTTP at its bounds: connections that only hold a place, too many of them, bodies that never end,
and a health endpoint whose serving fails."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import Message

from pdrt import health, http_door
from pdrt.health import HealthServer
from pdrt.runtime import listen
from pdrt.serving.http import BodyTooSlow, read_body, status_of
from tests.serving.http_fakes import (
    FakeGenerator,
    Forever,
    Wire,
    make_app,
    read_until,
    serving,
    steps,
    token,
)
from tests.waiting import wait_until

WAIT_S = 10.0
GET = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"


def rest(connection: socket.socket) -> bytes:
    """What still comes until the server hangs up."""
    received = b""
    try:
        while piece := connection.recv(65536):
            received += piece
    except ConnectionError:
        pass
    return received


def answers(wire: Wire) -> bool:
    with wire.connect() as connection:
        try:
            connection.sendall(GET)
            return connection.recv(64).startswith(b"HTTP/1.1 200")
        except ConnectionError:
            return False


def test_connections_beyond_the_bound_get_a_503_and_those_inside_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_door, "connections_max", lambda: 3)
    with serving(make_app(FakeGenerator(steps()))) as wire:
        inside = [wire.connect() for _ in range(3)]
        for connection in inside:
            connection.sendall(GET)
            read_until(connection, b'{"status":"live"}')
        for _ in range(5):
            with wire.connect() as late:
                head, _, body = rest(late).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 503")
                assert b"retry-after: 1" in head
                assert json.loads(body)["error"]["code"] == "connections_max"
        for connection in inside:
            connection.sendall(GET)
            read_until(connection, b'{"status":"live"}')
        inside.pop().close()
        wait_until(lambda: answers(wire), WAIT_S, "the place to be free")
        for connection in inside:
            connection.close()


def test_a_connection_without_a_whole_request_is_ended_and_a_served_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_door, "HEAD_S", 0.3)
    generator = FakeGenerator(steps(token("a"), Forever()))
    with serving(make_app(generator)) as wire:
        stream = wire.send("/generate", {"text": "x", "rid": "r", "stream": True})
        read_until(stream, b"data: ")
        with wire.connect() as idle, wire.connect() as served:
            served.sendall(GET)
            read_until(served, b'{"status":"live"}')
            for said in (b"", b"GET /li", b"GET /live HTTP/1.1\r\nHost: x\r\n"):
                with wire.connect() as stranger:
                    stranger.sendall(said)
                    assert rest(stranger) == b""
            assert rest(idle) == b""
            served.sendall(GET)  # between requests it is the keep-alive that counts
            read_until(served, b'{"status":"live"}')
            served.sendall(b"GET /li")  # but half of one is as good as none
            assert rest(served) == b""
        assert generator.open == {"r"}
        stream.close()
        wait_until(lambda: generator.aborted == ["r"], WAIT_S, "the abort")


def test_a_body_that_never_ends_is_given_up() -> None:
    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    scope: dict[str, Any] = {"type": "http", "headers": []}
    with pytest.raises(BodyTooSlow) as given_up:
        asyncio.run(read_body(scope, never, bytes_max=10, timeout_s=0.05))
    assert status_of(given_up.value) == 408


def test_health_is_served_again_whatever_ended_its_serving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "AGAIN_S", 0.01)
    run: Callable[..., None] = uvicorn.Server.run
    failures = [OSError(errno.EMFILE, os.strerror(errno.EMFILE)), RuntimeError("no loop")]

    def fail_first(self: uvicorn.Server, *arguments: Any, **options: Any) -> None:
        if failures:
            raise failures.pop()
        run(self, *arguments, **options)

    monkeypatch.setattr(uvicorn.Server, "run", fail_first)
    listening = listen("127.0.0.1", 0, "--port")
    server = HealthServer(make_app(FakeGenerator(steps())), listening)
    server.start()
    try:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/live"
        assert httpx.get(url, timeout=WAIT_S).status_code == 200
        assert not failures
    finally:
        server.stop()
        listening.close()
