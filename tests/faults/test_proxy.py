"""The proxy itself: each action does what it says, or the tests that use it show nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.faults.proxy import (
    Action,
    BlackHole,
    Delay,
    Flip,
    Forward,
    Freeze,
    HalfOpen,
    Proxy,
    Refuse,
    Throttle,
    Truncate,
)
from tests.waiting import wait_until


class Echo:
    """Sends back what it gets."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.place: tuple[str, int] = self._listening.getsockname()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._stopping = False

    def _run(self) -> None:
        while True:
            connection, _ = self._listening.accept()
            with connection:
                if self._stopping:
                    return
                try:
                    while data := connection.recv(65536):
                        connection.sendall(data)
                except ConnectionResetError:
                    continue

    def stop(self) -> None:
        self._stopping = True
        socket.create_connection(self.place).close()
        self._thread.join()
        self._listening.close()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    echo = Echo()
    with Proxy(echo.place, seed=7) as proxy:
        yield proxy
    echo.stop()


def dial(proxy: Proxy, timeout_s: float = 5.0) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=timeout_s)


def ask(connection: socket.socket, data: bytes) -> bytes:
    connection.sendall(data)
    back = b""
    while len(back) < len(data) and (more := connection.recv(65536)):
        back += more
    return back


def test_it_forwards_and_starts_again_after_each_fault(proxy: Proxy) -> None:
    faults: list[Action] = [
        Forward(), Delay(1), Throttle(10**6), Freeze(), BlackHole(), HalfOpen(), Truncate(3),
        Flip(5), Refuse(),
    ]  # fmt: skip
    for fault in faults:
        proxy.do(fault)
        proxy.do(Forward())
        with dial(proxy) as connection:
            assert ask(connection, b"x" * 100_000) == b"x" * 100_000, fault
        wait_until(lambda: not proxy.open, 5, "the proxy to close what its client closed")


def test_delay_is_late_and_throttle_is_slow(proxy: Proxy) -> None:
    with dial(proxy) as connection:
        assert ask(connection, b"first") == b"first"
        for action in (Delay(50), Throttle(20_000)):
            proxy.do(action)
            begun = time.monotonic()
            assert ask(connection, b"y" * 2000) == b"y" * 2000
            assert time.monotonic() - begun > 0.09, action


def test_a_frozen_connection_goes_on_and_a_hole_never(proxy: Proxy) -> None:
    with dial(proxy, 0.2) as frozen, dial(proxy, 0.2) as swallowed:
        assert ask(frozen, b"1") == b"1"
        proxy.do(Freeze())
        with pytest.raises(TimeoutError):
            ask(frozen, b"2")
        proxy.do(Forward())
        assert frozen.recv(1) == b"2"
        frozen.close()
        assert ask(swallowed, b"3") == b"3"
        proxy.do(BlackHole())
        with pytest.raises(TimeoutError):
            ask(swallowed, b"4")
        proxy.do(Forward())
        with pytest.raises(TimeoutError):
            ask(swallowed, b"5")


def test_half_open_refused_and_cut(proxy: Proxy) -> None:
    proxy.do(HalfOpen())
    with dial(proxy, 0.2) as connection, pytest.raises(TimeoutError):
        ask(connection, b"anybody?")
    proxy.do(Refuse())
    with pytest.raises(ConnectionRefusedError):
        dial(proxy)
    proxy.do(Forward())
    with dial(proxy) as connection:
        assert ask(connection, b"again") == b"again"
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            connection.recv(1)


def test_truncation_comes_in_the_middle_and_a_flip_is_one_bit(proxy: Proxy) -> None:
    with dial(proxy) as connection:
        proxy.do(Flip(100))
        back = ask(connection, bytes(10_000))
        wrong = [byte for byte in back if byte]
        assert 50 < len(wrong) < 400
        proxy.do(Truncate(10))
        with pytest.raises(ConnectionResetError):
            ask(connection, b"z" * 100)
