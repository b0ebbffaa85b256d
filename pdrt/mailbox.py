"""The only file that knows ZMQ: doors (bound), links (connected), bounded queues, no blocking send.

A process has one mailbox.  A *door* is a ROUTER on a listening descriptor that the supervisor
owns, so that nobody is refused while this process restarts.  A *link* is a DEALER to somebody's
door.

`post` collects what a duty cycle has to say, `flush` sends one frame to each addressee.  A send
never blocks: when a queue is full the frame is dropped and counted, and every message that matters
is sent again by its sender until it is acknowledged (protocol/messages.py says by whom).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol, cast

import zmq

from pdrt.clock import MILLISECOND_NS
from pdrt.errors import ProtocolError
from pdrt.protocol import codec
from pdrt.protocol.codec import Malformed
from pdrt.protocol.counters import Counter
from pdrt.protocol.messages import AnyMessage

#: A link by name, or (door, routing id) of somebody who wrote to us.
Address = str | tuple[str, bytes]
Envelope = tuple[Address, AnyMessage]
Count = Callable[[Counter, int, int], None]

QUEUE_MAX = 1024  # frames waiting to one addressee
# Taken from one socket before the others have their turn: frames, and messages in them, for a turn
# must never last so long that this process looks hung.
FRAMES_A_TURN = 64
MESSAGES_A_TURN = 4096
HANDSHAKE_MS = 2000
# Between hosts a connection can die without a word (a firewall forgets it, a host is gone), and TCP
# alone goes on for a quarter of an hour.  ZMQ's own ping finds that out, and connects anew.
PING_MS, PONG_MS = 1000, 3000
LAZY_NS = 20 * MILLISECOND_NS  # far below the first repeat of what waits for an acknowledgement


class Postman(Protocol):
    """What an actor sees of its mailbox; the tests' fake is another one."""

    def post(self, to: Address, message: AnyMessage, *, lazy: bool = False) -> None: ...

    def link(self, name: str, endpoint: str, *, from_peer: bool = False) -> None: ...

    def unlink(self, name: str) -> None: ...


class Mailbox:
    """Doors and links of one process.  One thread uses it."""

    def __init__(self, identity: bytes, count: Count) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.BLOCKY, False)
        self._identity = identity
        self._count = count
        self._poller = zmq.Poller()
        self._doors: dict[str, zmq.Socket[bytes]] = {}
        self._links: dict[str, zmq.Socket[bytes]] = {}
        self._endpoints: dict[str, str] = {}
        #: Of each socket: its name, whether it is a door, whether peers are at its other end.
        self._names: dict[zmq.Socket[bytes], tuple[str, bool, bool]] = {}
        self._outgoing: dict[Address, list[AnyMessage]] = {}
        self._urgent: set[Address] = set()  # addressees of something that is not lazy
        self._lazy_ns = 0  # when lazy messages were sent last

    def open_door(self, name: str, endpoint: str, fd: int, *, from_peer: bool) -> None:
        """Serve a listening descriptor.  `from_peer`: only peer messages are let in."""
        socket = self._socket(zmq.ROUTER, from_peer=from_peer)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.ROUTER_HANDOVER, 1)
        socket.set(zmq.USE_FD, fd)
        if not from_peer:  # a Unix socket: nobody else of this machine has business here
            socket.set(zmq.IPC_FILTER_UID, os.getuid())
        socket.bind(endpoint)
        self._doors[name] = socket
        self._names[socket] = (name, True, from_peer)
        self._poller.register(socket, zmq.POLLIN)

    def link(self, name: str, endpoint: str, *, from_peer: bool = False) -> None:
        """Connect to a door.  Returns at once; frames wait in the bounded queue meanwhile.  The
        same name and endpoint again is no news; another endpoint replaces the link.  Raises
        ProtocolError on an endpoint that is none: peers name them."""
        if self._endpoints.get(name) == endpoint:
            return
        self.unlink(name)
        socket = self._socket(zmq.DEALER, from_peer=from_peer)
        socket.set(zmq.ROUTING_ID, self._identity)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            raise ProtocolError(Malformed.VALUE.name, f"{endpoint!r}: {error.strerror}") from None
        self._endpoints[name] = endpoint
        self._links[name] = socket
        self._names[socket] = (name, False, from_peer)
        self._poller.register(socket, zmq.POLLIN)

    def unlink(self, name: str) -> None:
        socket = self._links.pop(name, None)
        if socket is not None:
            self._poller.unregister(socket)
            del self._names[socket]
            self._outgoing.pop(name, None)
            del self._endpoints[name]
            socket.close(linger=0)

    def watch(self, fd: int) -> None:
        """Let `receive` also wake when this descriptor is readable; its owner reads it."""
        self._poller.register(fd, zmq.POLLIN)

    def post(self, to: Address, message: AnyMessage, *, lazy: bool = False) -> None:
        """Queue for the next `flush`.  `lazy`: it may wait for company, but not for long; an
        acknowledgement alone is not worth waking a process for."""
        if not lazy:
            self._urgent.add(to)
        waiting = self._outgoing.get(to)
        if waiting is None:
            self._outgoing[to] = [message]
        else:
            waiting.append(message)

    def flush(self, now_ns: int = 0) -> None:
        """Send what was posted, one frame an addressee.  Never blocks.  Lazy messages stay behind
        until there is something urgent for the same addressee or LAZY_NS have passed; without
        `now_ns` they stay."""
        if not self._outgoing:
            return
        outgoing = self._outgoing
        if now_ns - self._lazy_ns >= LAZY_NS:
            self._lazy_ns = now_ns
            self._outgoing = {}
        elif self._urgent:
            outgoing = {to: self._outgoing.pop(to) for to in self._urgent if to in self._outgoing}
        else:
            return
        self._urgent.clear()
        for to, messages in outgoing.items():
            for first in range(0, len(messages), codec.MESSAGES_MAX):
                self._send(to, messages[first : first + codec.MESSAGES_MAX])

    def _send(self, to: Address, messages: list[AnyMessage]) -> None:
        try:
            frame = codec.encode(messages)
        except ProtocolError:
            if len(messages) == 1:  # even alone: what a peer sent can be too big to be passed on
                self._count(Counter.SENDS_REFUSED, 1, 0)
                return
            half = len(messages) // 2
            self._send(to, messages[:half])
            self._send(to, messages[half:])
            return
        try:
            if isinstance(to, str):
                self._links[to].send(frame, zmq.NOBLOCK)
            else:
                door, routing_id = to
                self._doors[door].send_multipart((routing_id, frame), zmq.NOBLOCK)
        except KeyError:  # the link was closed while this waited
            self._count(Counter.SENDS_REFUSED, len(messages), 0)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._count(Counter.SENDS_REFUSED, len(messages), 0)
            if isinstance(to, str):
                self._mend(to)
        else:
            self._count(Counter.FRAMES_OUT, 1, 0)
            self._count(Counter.MESSAGES_OUT, len(messages), 0)

    def _mend(self, name: str) -> None:
        """A peer's link that takes nothing is full, or dead: ZMQ never again connects where it read
        nonsense once.  Dial anew; what was lost is sent again."""
        if self._names[self._links[name]][2]:
            endpoint = self._endpoints[name]
            self.unlink(name)
            self.link(name, endpoint, from_peer=True)

    def receive(self, timeout_ms: int) -> list[Envelope]:
        """What arrived, after waiting at most `timeout_ms` for something.  Malformed frames are
        counted by kind and dropped; nothing that arrives can raise."""
        envelopes: list[Envelope] = []
        for socket, _ in self._poller.poll(timeout_ms):
            if isinstance(socket, zmq.Socket):
                self._drain(socket, envelopes)
        return envelopes

    def _drain(self, socket: zmq.Socket[bytes], envelopes: list[Envelope]) -> None:
        name, is_door, from_peer = self._names[socket]
        enough = len(envelopes) + MESSAGES_A_TURN
        for _ in range(FRAMES_A_TURN):
            if len(envelopes) >= enough:
                return
            # Asking first is cheaper than an exception at the end of every turn.
            if not cast("int", socket.get(zmq.EVENTS)) & zmq.POLLIN:
                return
            parts = socket.recv_multipart(zmq.NOBLOCK)
            self._count(Counter.FRAMES_IN, 1, 0)
            if len(parts) != (2 if is_door else 1):
                self._count(Counter.MALFORMED, 1, Malformed.PARTS)
                continue
            try:
                messages = codec.decode(parts[-1], from_peer=from_peer)
            except ProtocolError as error:
                self._count(Counter.MALFORMED, 1, Malformed[error.kind])
                continue
            self._count(Counter.MESSAGES_IN, len(messages), 0)
            sender: Address = (name, parts[0]) if is_door else name
            envelopes.extend([(sender, message) for message in messages])

    def close(self) -> None:
        for socket in (*self._doors.values(), *self._links.values()):
            socket.close(linger=100)
        self._doors.clear()
        self._links.clear()
        self._context.term()

    def _socket(self, kind: int, *, from_peer: bool) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        if from_peer:
            socket.set(zmq.HEARTBEAT_IVL, PING_MS)
            socket.set(zmq.HEARTBEAT_TIMEOUT, PONG_MS)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, QUEUE_MAX)
        socket.set(zmq.RCVHWM, QUEUE_MAX)
        # Twice the limit still reaches us and is counted; beyond that ZMQ drops the connection.
        socket.set(zmq.MAXMSGSIZE, 2 * codec.FRAME_BYTES_MAX)
        socket.set(zmq.RECONNECT_IVL, 10)
        socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.set(zmq.IPV6, 1)
        return socket
