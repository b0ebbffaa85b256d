"""A TCP proxy that misbehaves on request: what a network does between two trees.

One thread, one selector.  `proxy.do(action)` changes what happens to bytes from now on and returns
once the thread has taken it over.  Everything that is random comes from the seed.
"""

from __future__ import annotations

import random
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Self

READ_BYTES = 65536
WAITING_MAX = 1 << 20  # bytes under way in one direction before reading pauses
RST = struct.pack("ii", 1, 0)  # SO_LINGER: close sends a reset


@dataclass(frozen=True)
class Forward:
    """Byte for byte, at once."""


@dataclass(frozen=True)
class Delay:
    """Every byte arrives this much later."""

    ms: float


@dataclass(frozen=True)
class Throttle:
    """At most so many bytes a second in each direction of each connection."""

    bytes_a_second: int


@dataclass(frozen=True)
class Freeze:
    """Nothing is read; later it goes on where it stopped.  A partition that TCP survives."""


@dataclass(frozen=True)
class BlackHole:
    """What is sent is swallowed, both ways; connections stay, and those that lost bytes stay holes
    for good.  A firewall that forgot them."""


@dataclass(frozen=True)
class HalfOpen:
    """New connections are accepted and nothing else; those that are open freeze."""


@dataclass(frozen=True)
class Truncate:
    """Each connection carries so many more bytes in each direction and is reset in mid frame."""

    bytes_left: int


@dataclass(frozen=True)
class Flip:
    """One random bit in every so many bytes is wrong."""

    every: int


@dataclass(frozen=True)
class Refuse:
    """Connections are reset, and nobody listens."""


Action = Forward | Delay | Throttle | Freeze | BlackHole | HalfOpen | Truncate | Flip | Refuse


@dataclass(eq=False)
class Pipe:
    """One direction of a connection."""

    source: socket.socket
    sink: socket.socket
    chunks: deque[tuple[float, bytes]] = field(default_factory=deque)  # (not before, bytes)
    waiting: int = 0
    carried: int = 0  # bytes read so far
    budget: float = 0.0  # Throttle: bytes that may go now
    filled_s: float = 0.0
    left: int | None = None  # Truncate: bytes before the reset
    to_flip: int = 0  # Flip: bytes before the next wrong bit
    ended: bool = False  # the source said so

    def put(self, data: bytes, not_before: float) -> None:
        self.chunks.append((not_before, data))
        self.waiting += len(data)


@dataclass(eq=False)
class Connection:
    client: socket.socket
    server: socket.socket
    there: Pipe
    back: Pipe
    hole: bool = False  # it lost bytes and can never be right again
    dangling: bool = False  # accepted under HalfOpen: no server is behind it

    @property
    def pipes(self) -> tuple[Pipe, Pipe]:
        return self.there, self.back


class Proxy:
    """Listens on `address` and connects to `target`.  Use as a context manager."""

    def __init__(
        self, target: tuple[str, int], *, host: str = "127.0.0.1", port: int = 0, seed: int = 0
    ) -> None:
        self._target = target
        self._random = random.Random(seed)
        self._action: Action = Forward()
        self._selector = selectors.DefaultSelector()
        self._connections: set[Connection] = set()
        self._of: dict[socket.socket, tuple[Connection, Pipe]] = {}  # by source
        self._commands: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._listening: socket.socket | None = None
        self._place = (host, port)
        self._listen()
        self._running = True
        self.accepted = 0  # connections so far
        self.carried = 0  # bytes so far, swallowed ones included
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def port(self) -> int:
        return self._place[1]

    @property
    def address(self) -> str:
        return f"{self._place[0]}:{self.port}"

    @property
    def open(self) -> int:
        """Connections now."""
        return len(self._connections)

    def do(self, action: Action) -> None:
        self._tell(lambda: self._switch(action))

    def cut(self) -> None:
        """Reset every connection, once."""
        self._tell(self._cut)

    def retarget(self, target: tuple[str, int]) -> None:
        def change() -> None:
            self._target = target

        self._tell(change)

    def close(self) -> None:
        if self._running:

            def stop() -> None:
                self._running = False

            self._tell(stop)
            self._thread.join()

    # --- the thread ------------------------------------------------------------------------------

    def _tell(self, command: Callable[[], None]) -> None:
        done: Future[None] = Future()
        self._commands.append((command, done))
        self._wake_write.send(b"!")
        done.result(timeout=10)

    def _run(self) -> None:
        try:
            while self._running:
                for key, _ in self._selector.select(self._pause_s()):
                    self._serve(key.fileobj)
                self._take_commands()
                for connection in list(self._connections):
                    for pipe in connection.pipes:
                        self._push(connection, pipe)
                    self._watch(connection)
        finally:
            self._cut()
            self._unlisten()
            self._selector.close()
            self._wake_read.close()
            self._wake_write.close()

    def _serve(self, ready: object) -> None:
        if ready is self._wake_read:
            self._wake_read.recv(READ_BYTES)
        elif ready is self._listening:
            self._accept()
        elif isinstance(ready, socket.socket) and ready in self._of:
            self._pull(*self._of[ready])

    def _take_commands(self) -> None:
        while self._commands:
            command, done = self._commands.popleft()
            command()
            done.set_result(None)

    def _pause_s(self) -> float:
        """Until the next byte is due; short while something waits."""
        now = time.monotonic()
        pause = 0.5
        for connection in self._connections:
            for pipe in connection.pipes:
                if pipe.chunks:
                    pause = min(pause, max(pipe.chunks[0][0] - now, 0.002))
        return pause

    def _switch(self, action: Action) -> None:
        self._action = action
        if isinstance(action, Refuse):
            self._cut()
            self._unlisten()
            return
        if self._listening is None:
            self._listen()
        for connection in list(self._connections):
            if connection.dangling and not isinstance(action, HalfOpen):
                self._drop(connection)
            for pipe in connection.pipes:
                self._ready_for(pipe, action)

    @staticmethod
    def _ready_for(pipe: Pipe, action: Action) -> None:
        pipe.left = action.bytes_left if isinstance(action, Truncate) else None
        pipe.budget, pipe.filled_s = 0.0, time.monotonic()
        pipe.to_flip = action.every if isinstance(action, Flip) else 0

    def _listen(self) -> None:
        self._listening = socket.create_server(self._place, backlog=512)
        self._place = (self._place[0], self._listening.getsockname()[1])
        self._listening.setblocking(False)
        self._selector.register(self._listening, selectors.EVENT_READ)

    def _unlisten(self) -> None:
        if self._listening is not None:
            self._selector.unregister(self._listening)
            self._listening.close()
            self._listening = None

    def _cut(self) -> None:
        for connection in list(self._connections):
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        """Reset both ends."""
        self._connections.discard(connection)
        for end in (connection.client, connection.server):
            if self._of.pop(end, None) is not None and end in self._selector.get_map():
                self._selector.unregister(end)
            try:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
            finally:
                end.close()

    def _accept(self) -> None:
        assert self._listening is not None
        try:
            client, _ = self._listening.accept()
        except BlockingIOError:
            return
        self.accepted += 1
        client.setblocking(False)
        server = socket.socket()
        dangling = isinstance(self._action, HalfOpen)
        if not dangling:
            try:
                server.settimeout(2)
                server.connect(self._target)
            except OSError:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
                client.close()
                server.close()
                return
        server.setblocking(False)
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        there, back = Pipe(client, server), Pipe(server, client)
        connection = Connection(client, server, there, back, dangling=dangling)
        self._connections.add(connection)
        for pipe in connection.pipes:
            self._of[pipe.source] = connection, pipe
            self._ready_for(pipe, self._action)

    def _watch(self, connection: Connection) -> None:
        """Read only what may go on."""
        if connection not in self._connections:
            return
        for pipe in connection.pipes:
            stopped = isinstance(self._action, Freeze | HalfOpen) or connection.dangling
            wanted = not stopped and not pipe.ended and pipe.waiting < WAITING_MAX
            watched = pipe.source in self._selector.get_map()
            if wanted and not watched:
                self._selector.register(pipe.source, selectors.EVENT_READ)
            elif watched and not wanted:
                self._selector.unregister(pipe.source)

    def _pull(self, connection: Connection, pipe: Pipe) -> None:
        try:
            data = pipe.source.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)
            return
        if not data:
            if connection.hole:  # its other end never hears of it; our own is done
                self._drop(connection)
            pipe.ended = True
            return
        pipe.carried += len(data)
        self.carried += len(data)
        action = self._action
        if connection.hole or isinstance(action, BlackHole):
            connection.hole = True
            return
        if isinstance(action, Flip):
            data = self._flip(pipe, data, action)
        later = action.ms / 1000 if isinstance(action, Delay) else 0.0
        pipe.put(data, time.monotonic() + later)

    def _flip(self, pipe: Pipe, data: bytes, action: Flip) -> bytes:
        wrong = bytearray(data)
        while pipe.to_flip < len(wrong):
            wrong[pipe.to_flip] ^= 1 << self._random.randrange(8)
            pipe.to_flip += 1 + self._random.randrange(2 * action.every)
        pipe.to_flip -= len(wrong)
        return bytes(wrong)

    def _push(self, connection: Connection, pipe: Pipe) -> None:
        """Send on what is due."""
        now, action = time.monotonic(), self._action
        if isinstance(action, Freeze | HalfOpen):
            return
        if isinstance(action, Throttle):
            rate = action.bytes_a_second
            pipe.budget = min(pipe.budget + (now - pipe.filled_s) * rate, max(1.0, rate / 10))
            pipe.filled_s = now
        while pipe.chunks and connection in self._connections:
            not_before, data = pipe.chunks[0]
            if not_before > now:
                return
            size = len(data)
            if isinstance(action, Throttle):
                size = min(size, int(pipe.budget))
            if pipe.left is not None:
                size = min(size, pipe.left)
            if not size and pipe.left != 0:
                return
            try:
                sent = pipe.sink.send(data[:size]) if size else 0
            except BlockingIOError:
                return
            except OSError:
                self._drop(connection)
                return
            pipe.budget -= sent
            pipe.waiting -= sent
            pipe.chunks.popleft()
            if sent < len(data):
                pipe.chunks.appendleft((not_before, data[sent:]))
            if pipe.left is not None:
                pipe.left -= sent
                if pipe.left <= 0:
                    self._drop(connection)
                    return
        if pipe.ended and not pipe.chunks and connection in self._connections:
            self._drop(connection)
