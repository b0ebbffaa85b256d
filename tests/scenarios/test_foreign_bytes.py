"""Whoever reaches a port may send what he likes: counted, dropped, and never obeyed.

F123 F127.
"""

from __future__ import annotations

import os
import pickle
import secrets
import selectors
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pdrt.protocol.codec import Malformed, encode
from pdrt.protocol.messages import NewsTaken
from tests.attach.services import serve, turn
from tests.mail.site import Site, collect
from tests.waiting import wait_until

NEWS = NewsTaken(1, 3)
HUGE_BYTES = 100 << 20
#: How a DEALER introduces itself: ZMTP 3, no security.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


class Trap:
    """Whoever unpickles one makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_not_opened_at_a_control_port(
    site: Site, tmp_path: Path, protocol: int
) -> None:
    trap = tmp_path / "sprung"
    bomb = pickle.dumps(Trap(trap), protocol)
    endpoint, owner, counts, _ = site.door()
    raw = site.raw(endpoint)
    raw.send(bomb)
    raw.send(encode([NEWS])[:5] + bomb)
    raw.send_multipart([bomb, bomb])
    raw.send(encode([NEWS]))
    assert collect(owner, 1) == [(("door", b"raw"), NEWS)]
    assert sum(counts.malformed().values()) == 3
    assert not trap.exists()
    with pytest.raises(FileNotFoundError):  # and it is one
        pickle.loads(pickle.dumps(Trap(tmp_path / "not" / "there"), protocol))


def test_a_pickle_is_not_opened_at_the_attach_socket(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    address, selector = f"@pdrt-test-{secrets.token_hex(8)}", selectors.DefaultSelector()

    service = serve(address, selector)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect("\0" + address[1:])
        client.send(pickle.dumps(Trap(trap)))
        client.setblocking(False)

        def answered() -> bytes | None:
            turn(selector)
            try:
                return client.recv(4096)
            except BlockingIOError:
                return None

        assert b"error" in (wait_until(answered, 5, "a refusal") or b"")
    assert not trap.exists()
    service.close()
    selector.close()


@pytest.mark.parametrize("count", [2, 3, 5, 1000])
def test_any_number_of_frames_but_one_is_counted_and_costs_nobody_else(
    site: Site, count: int
) -> None:
    endpoint, owner, counts, _ = site.door()
    raw = site.raw(endpoint)
    raw.send_multipart([encode([NEWS])] * count)
    raw.send(encode([NEWS]))
    assert collect(owner, 1) == [(("door", b"raw"), NEWS)]
    assert counts.malformed() == {Malformed.PARTS: 1}


def test_a_frame_of_a_hundred_megabytes_is_refused_by_its_header(site: Site) -> None:
    _, _, counts, server = site.door()
    usual = psutil.Process().memory_info().rss
    with socket.create_connection(server.getsockname(), timeout=10) as hostile:
        hostile.sendall(GREETING + READY + b"\x02" + HUGE_BYTES.to_bytes(8, "big"))
        with pytest.raises(ConnectionError):
            hostile.sendall(memoryview(bytes(HUGE_BYTES)))
        assert psutil.Process().memory_info().rss - usual < 10 << 20
    assert counts.malformed() == {}
