"""How a process gets at shared memory: over a Unix socket that hands out descriptors.

Served from the supervisor's loop, because that process never restarts.  Two kinds of client:

* an *engine* (built in or foreign) gets the table, the pools and a wake-up eventfd, and with them a
  row of its own.  Its connection is its life line: when it closes, the row is buried.
* a *peer's worker* on the same host gets one region, to copy into it directly.  It asks for the
  region as one incarnation of our worker offered it, and gets it only while that one lives.  While
  its connection is open it may still write there.  So once our worker is dead, and no connection
  for it is left (`mapped`), nothing can land any more in rooms of that worker.

One request and one reply a connection, both msgpack; SOCK_SEQPACKET keeps their borders.  Only
processes of the same user are served.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections import Counter as Multiset
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdrt.clock import Clock, monotonic_ns, to_ns
from pdrt.errors import AttachFailed, BadConfig, PortInUse
from pdrt.protocol.codec import UNDECODABLE
from pdrt.protocol.layout import RegionMap
from pdrt.protocol.peers import instance_digest

REQUEST_BYTES_MAX = 4096
REPLY_BYTES_MAX = 65536
CLIENTS_MAX = 1024
_PEERCRED = struct.Struct("3i")


class AttachRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`kind` "engine": everything, and a row.  "region": the memory of one rank, as its worker's
    incarnation `epoch` offered it, for `instance`."""

    version: int = 1
    kind: Literal["engine", "region"]
    name: Annotated[str, Meta(max_length=64)] = ""
    rank: Annotated[int, Meta(ge=0, le=255)] = 0
    instance: Annotated[str, Meta(max_length=64)] = ""
    epoch: Annotated[int, Meta(ge=0, le=0x7FFF_FFFF)] = 0


class AttachReply(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine needs; the descriptors follow as table, regions by rank, wake eventfd."""

    error: str = ""
    instance: str = ""
    row: int = 0
    incarnation: int = 0
    maps: tuple[RegionMap, ...] = ()
    listener: str = ""  # endpoints of local doors
    workers: tuple[str, ...] = ()
    listener_row: int = 0
    worker_rows: tuple[int, ...] = ()
    resend_s: float = 0.2


def read_request(data: bytes) -> AttachRequest:
    """Raises AttachFailed and nothing else, whatever the bytes are."""
    try:
        return msgspec.msgpack.decode(data, type=AttachRequest)
    except UNDECODABLE as error:
        raise AttachFailed(f"not an attach request: {error}") from None


def read_reply(data: bytes) -> AttachReply:
    """Raises AttachFailed and nothing else, whatever the bytes are."""
    try:
        return msgspec.msgpack.decode(data, type=AttachReply)
    except (*UNDECODABLE, BadConfig) as error:  # BadConfig: an impossible layout
        raise AttachFailed(f"not an attach reply: {error}") from None


def bind(address: str) -> socket.socket:
    """A listening attach socket.  "@name" is abstract: it leaves nothing behind.  A path does, when
    its owner is killed; the next owner takes it over if nobody listens there.  Raises PortInUse."""
    if not address.startswith("@"):
        _remove_stale(address)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        server.bind(_sockaddr(address))
    except OSError as error:
        server.close()
        raise PortInUse(
            f"attach socket {address}: {error.strerror}; is this role running already?"
        ) from None
    server.listen(128)
    server.setblocking(False)
    return server


def _remove_stale(path: str) -> None:
    """Unlink a socket whose owner is gone.  Anything else at that path stays."""
    if not Path(path).is_socket():  # connecting to a plain file is refused just the same
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError:
            pass  # `bind` says what is wrong


def request(
    address: str, ask: AttachRequest, *, timeout_s: float = 5.0
) -> tuple[AttachReply, list[int], socket.socket]:
    """Ask a running tree.  Returns the reply, the descriptors, and the connection to hold open.
    Raises AttachFailed."""
    try:
        client = _client(timeout_s)
    except OSError as error:
        raise AttachFailed(f"no socket to ask {address} with: {error.strerror}") from None
    try:
        client.connect(_sockaddr(address))
        _send(client, msgspec.msgpack.encode(ask))
        reply, fds = _read_answer(client)
    except (OSError, AttachFailed) as error:
        client.close()
        raise AttachFailed(f"no pdrt runtime answers at {address}: {error}") from None
    if reply.error:
        client.close()
        raise AttachFailed(f"{address}: {reply.error}")
    return reply, fds, client


class Asking:
    """A request that is under way, for callers that must not wait.  `poll` until it answers."""

    def __init__(
        self, address: str, ask: AttachRequest, *, timeout_s: float, clock: Clock = monotonic_ns
    ) -> None:
        self._address = address
        self._ask = msgspec.msgpack.encode(ask)
        self._clock = clock
        self._until_ns = clock() + to_ns(timeout_s)
        self._sent = False
        self._client = _client(0.0)

    def poll(self) -> tuple[AttachReply, list[int], socket.socket] | None:
        """What `request` returns, or None while there is no answer.  Raises AttachFailed."""
        try:
            if not self._sent:  # a full backlog is an EAGAIN
                self._client.connect(_sockaddr(self._address))
                _send(self._client, self._ask)
                self._sent = True
            reply, fds = _read_answer(self._client)
        except BlockingIOError:
            if self._clock() < self._until_ns:
                return None
            self.close()
            raise AttachFailed(f"{self._address} does not answer") from None
        except (OSError, AttachFailed) as error:
            self.close()
            raise AttachFailed(f"no pdrt runtime answers at {self._address}: {error}") from None
        if reply.error:
            self.close()
            raise AttachFailed(f"{self._address}: {reply.error}")
        return reply, fds, self._client

    def close(self) -> None:
        """Give up.  Not after an answer: the connection belongs to the caller then."""
        self._client.close()


def _client(timeout_s: float) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    client.settimeout(timeout_s)
    return client


def _send(client: socket.socket, ask: bytes) -> None:
    """Whoever turns us away may have hung up already: what it said first is still to be read."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        client.send(ask)


def _read_answer(client: socket.socket) -> tuple[AttachReply, list[int]]:
    """Raises OSError and AttachFailed; keeps no descriptor then."""
    try:
        data, fds, flags, _ = socket.recv_fds(client, REPLY_BYTES_MAX, 260)
    except ConnectionResetError:  # closed with our request unread; its answer stands behind that
        data, fds, flags, _ = socket.recv_fds(client, REPLY_BYTES_MAX, 260)
    try:
        if flags & socket.MSG_CTRUNC:  # some of them found no place here
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        for fd in fds:  # recv_fds takes flags and ignores them, MSG_CMSG_CLOEXEC too
            os.set_inheritable(fd, False)
        return read_reply(data), fds
    except (OSError, AttachFailed):
        for fd in fds:
            os.close(fd)
        raise


def _sockaddr(address: str) -> str:
    return "\0" + address[1:] if address.startswith("@") else address


class AttachService:
    """The server's half, driven by the supervisor's loop: `accept` and `ready` never block."""

    def __init__(
        self,
        server: socket.socket,
        *,
        regions: Sequence[int],
        worker_epoch: Callable[[int], int],
        answer_engine: Callable[[AttachRequest, int], tuple[AttachReply, list[int]]],
        engine_gone: Callable[[int], None],
        watch: Callable[[int, Callable[[], None]], None],
        unwatch: Callable[[int], None],
    ) -> None:
        """`worker_epoch(rank)`: the incarnation that lives now, 0 if none does.
        `answer_engine(request, pid)` grants a row (or raises AttachFailed); `engine_gone(row)`
        buries it; `watch(fd, callback)` and `unwatch(fd)` are the loop's."""
        self._server = server
        self._regions = regions
        self._worker_epoch = worker_epoch
        self._answer_engine = answer_engine
        self._engine_gone = engine_gone
        self._watch, self._unwatch = watch, unwatch
        self._clients: dict[int, socket.socket] = {}
        self._rows: dict[int, int] = {}
        self._peers: dict[int, tuple[int, int, int]] = {}
        self._mapped: Multiset[tuple[int, int, int]] = Multiset()  # instance digest, rank, epoch
        watch(server.fileno(), self.accept)

    def mapped(self, peer: int, rank: int, epoch: int) -> bool:
        """Does a process of that peer (digest of its instance) still map the region of a rank, as
        that incarnation of our worker offered it?"""
        return self._mapped[peer, rank, epoch] > 0

    def recall(self) -> None:
        """Hang up on whoever maps what a dead worker of ours offered.  It lets go then, and hangs
        up, too; only by that do we know that it has."""
        living = [self._worker_epoch(rank) for rank in range(len(self._regions))]
        for fd, (_, rank, epoch) in self._peers.items():
            if epoch != living[rank]:
                with contextlib.suppress(OSError):  # it is just going
                    self._clients[fd].shutdown(socket.SHUT_WR)

    def accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            client, _ = self._server.accept()
            uid = _PEERCRED.unpack(
                client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
            )[1]
            if uid != os.getuid():
                client.close()
                return
            if len(self._clients) >= CLIENTS_MAX and not self._drop_silent():
                full = AttachReply(error=f"{CLIENTS_MAX} connections are attached already")
                with client, contextlib.suppress(OSError):
                    client.setblocking(False)
                    client.send(msgspec.msgpack.encode(full))
                return
            client.setblocking(False)
            fd = client.fileno()
            self._clients[fd] = client
            self._watch(fd, lambda: self._ready(fd))

    def _drop_silent(self) -> bool:
        """Make room: the oldest of those that have not asked for anything goes."""
        for fd in self._clients:
            if fd not in self._rows and fd not in self._peers:
                self._drop(fd)
                return True
        return False

    def _ready(self, fd: int) -> None:
        client = self._clients[fd]
        try:
            data = client.recv(REQUEST_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or fd in self._rows or fd in self._peers:  # gone, or talking twice
            self._drop(fd)
            return
        pid = _PEERCRED.unpack(
            client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        )[0]
        reply, fds = self._answer(fd, data, pid)
        try:
            socket.send_fds(client, [msgspec.msgpack.encode(reply)], fds)
        except OSError:
            self._drop(fd)
            return
        if reply.error:
            self._drop(fd)

    def _answer(self, fd: int, data: bytes, pid: int) -> tuple[AttachReply, list[int]]:
        try:
            ask = read_request(data)
        except AttachFailed as error:
            return AttachReply(error=str(error)), []
        if ask.version != 1:
            return AttachReply(error=f"attach version {ask.version}; this runtime speaks 1"), []
        if ask.kind == "region":
            if ask.rank >= len(self._regions) or not ask.instance:
                return AttachReply(error=f"no region of rank {ask.rank} for {ask.instance!r}"), []
            if not ask.epoch or ask.epoch != self._worker_epoch(ask.rank):
                gone = f"the worker of rank {ask.rank} with epoch {ask.epoch} is gone"
                return AttachReply(error=gone), []
            self._peers[fd] = peer = (instance_digest(ask.instance), ask.rank, ask.epoch)
            self._mapped[peer] += 1
            return AttachReply(), [self._regions[ask.rank]]
        try:
            reply, fds = self._answer_engine(ask, pid)
        except AttachFailed as error:
            return AttachReply(error=str(error)), []
        self._rows[fd] = reply.row
        return reply, fds

    def _drop(self, fd: int) -> None:
        self._unwatch(fd)
        self._clients.pop(fd).close()
        if (peer := self._peers.pop(fd, None)) is not None:
            self._mapped[peer] -= 1
            if self._mapped[peer] <= 0:
                del self._mapped[peer]
        if (row := self._rows.pop(fd, None)) is not None:
            self._engine_gone(row)

    def close(self) -> None:
        for fd in list(self._clients):
            self._drop(fd)
        self._unwatch(self._server.fileno())
        self._server.close()
