"""ZMTP 3 by hand: a peer that says whatever it likes, and knows that every byte has left.

libzmq's own sockets drop what they cannot send at once.  A plain socket waits instead, so whoever
writes with it knows how many frames its other end was given.
"""

from __future__ import annotations

import contextlib
import select
import socket

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
MORE, LONG, COMMAND = 1, 2, 4
SHORT_MAX = 255
TIMEOUT_S = 60.0
CHUNK_BYTES = 16 << 10

#: (host, port), or the name of an abstract Unix socket.
Place = tuple[str, int] | str


def ready(identity: bytes = b"", *, kind: bytes = b"DEALER") -> bytes:
    """The command that ends a handshake without security."""
    body = b"\x05READY" + _property(b"Socket-Type", kind)
    if identity:
        body += _property(b"Identity", identity)
    return bytes([COMMAND, len(body)]) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def frame(data: bytes, *, more: bool = False) -> bytes:
    if len(data) <= SHORT_MAX:
        return bytes([MORE * more, len(data)]) + data
    return bytes([LONG | MORE * more]) + len(data).to_bytes(8, "big") + data


def multipart(parts: list[bytes]) -> bytes:
    return b"".join(frame(part, more=True) for part in parts[:-1]) + frame(parts[-1])


class Connection:
    """To a door.  Nothing of ours is lost unless the other end hangs up."""

    def __init__(self, place: Place, *, timeout_s: float = TIMEOUT_S) -> None:
        family = socket.AF_UNIX if isinstance(place, str) else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.socket.settimeout(timeout_s)
        self.socket.connect("\0" + place if isinstance(place, str) else place)

    def shake(self, identity: bytes = b"") -> None:
        """Wait until its other end is ready, too: what it is sent before may be refused."""
        self.socket.sendall(GREETING + ready(identity))
        self._read(64)
        head = self._read(2)
        self._read(head[1])

    def _read(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            more = self.socket.recv(length - len(data))
            if not more:
                raise ConnectionResetError("hung up during the handshake")
            data += more
        return data

    def send(self, data: bytes) -> None:
        """Reads meanwhile, whatever it is: who takes nothing for long is hung up on."""
        rest = memoryview(data)
        while rest:
            reading, writing, _ = select.select(
                [self.socket], [self.socket], [], self.socket.gettimeout()
            )
            if not (reading or writing):
                raise TimeoutError("nothing can be sent")
            if reading and not self.socket.recv(1 << 16):
                raise ConnectionResetError("hung up")
            if writing:
                rest = rest[self.socket.send(rest[:CHUNK_BYTES], socket.MSG_DONTWAIT) :]

    def finish(self) -> None:
        """Until the other end has read everything, and hangs up.  Raises OSError if it does not."""
        try:
            self.socket.shutdown(socket.SHUT_WR)
            while self.socket.recv(1 << 16):
                pass
        finally:
            self.socket.close()

    def break_off(self) -> None:
        """At once, with a reset: what is on its way may be lost."""
        with contextlib.suppress(OSError):
            linger = (1).to_bytes(4, "little") + bytes(4)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.socket.close()
