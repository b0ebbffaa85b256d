"""The only file that knows ZMQ: doors (bound), links (connected), bounded queues, no blocking send.

A process has one mailbox.  A *door* is a ROUTER on a listening descriptor that the supervisor
owns, so that nobody is refused while this process restarts.  A *link* is a DEALER to somebody's
door.

`post` collects what a duty cycle has to say, `flush` sends one frame to each addressee.  A send
never blocks: when a queue is full the frame is dropped and counted, and every message that matters
is sent again by its sender until it is acknowledged (protocol/messages.py says by whom).
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import zmq

from pdrt.clock import MILLISECOND_NS, monotonic_ns
from pdrt.errors import NoDescriptors, ProtocolError
from pdrt.mail.doorkeeper import HANDSHAKE_MS, Doorkeeper
from pdrt.mail.names import Addresses, Resolve, resolve
from pdrt.mail.silence import Silence
from pdrt.mail.waiter import Waiter, has_something
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
CONNECT_MS = 2000  # the kernel alone repeats a lost SYN ever more rarely, for two minutes
SOCKETS_MAX = 8192  # of one process; ZMQ's own bound is 1,023
DESCRIPTORS_MIN = 8  # for ZMQ's threads and a first socket
# What the kernel finds dead by itself: seconds idle, between probes; probes.  See also `silence`.
KEEPALIVE_IDLE_S, KEEPALIVE_S, KEEPALIVE_COUNT, UNACKNOWLEDGED_MS = 5, 2, 3, 10_000
# ZMQ doubles its pause from the first to the last and adds no chance of its own, so each link draws
# both: a hundred peers of one that was restarted do not come back in step.
RECONNECT_MS, RECONNECT_MAX_MS = (10, 20), (500, 1000)
MEND_MS = (1000, 2000)  # a link that takes nothing is not dialled anew more often
HELD_MAX = 16  # messages that wait for an address
LAZY_MS = 20  # far below the first repeat of what waits for an acknowledgement
LAZY_NS = LAZY_MS * MILLISECOND_NS
NOBLOCK, SNDMORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)  # arithmetic with ZMQ's enums is slow


class Postman(Protocol):
    """What an actor sees of its mailbox; the tests' fake is another one."""

    def post(self, to: Address, message: AnyMessage, *, lazy: bool = False) -> None: ...

    def link(self, name: str, endpoint: str, *, from_peer: bool = False) -> None: ...

    def unlink(self, name: str) -> None: ...


class Mailbox:
    """Doors and links of one process.  One thread uses it."""

    def __init__(self, identity: bytes, count: Count, *, resolve: Resolve = resolve) -> None:
        """Two of another identity never wait equally long before they dial again.  Raises
        NoDescriptors."""
        _afford(DESCRIPTORS_MIN)
        self._random = random.Random(identity)
        self._addresses = Addresses(self._random, resolve)
        self._silence = Silence(self._random)
        self._context = zmq.Context()
        self._context.set(zmq.BLOCKY, False)
        self._identity = identity
        self._count = count
        self._context.set(zmq.MAX_SOCKETS, SOCKETS_MAX)
        self._waiter = Waiter()
        self._doors: dict[str, zmq.Socket[bytes]] = {}
        self._links: dict[str, zmq.Socket[bytes]] = {}
        self._endpoints: dict[str, str] = {}
        self._mend_ns: dict[str, int] = {}  # links: not to be dialled anew before this
        self._lost: dict[str, str] = {}  # links to be made again, for which there was no descriptor
        self._keepers: dict[zmq.Socket[bytes], Doorkeeper] = {}  # by door
        #: Of each socket: its name, whether it is a door, whether peers are at its other end.
        self._names: dict[zmq.Socket[bytes], tuple[str, bool, bool]] = {}
        self._outgoing: dict[Address, list[AnyMessage]] = {}
        self._urgent: set[Address] = set()  # addressees of something that is not lazy
        self._lazy_ns = self._attended_ns = 0  # lazy messages sent, doorkeepers asked last
        self._together = False

    def open_door(self, name: str, endpoint: str, fd: int, *, from_peer: bool) -> None:
        """Serve a listening descriptor.  `from_peer`: only peer messages are let in."""
        socket = self._socket(zmq.ROUTER, from_peer=from_peer)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.set(zmq.ROUTER_HANDOVER, 1)
        socket.set(zmq.USE_FD, fd)
        if from_peer:
            # With a domain ZMQ takes nobody who does not speak its third version.  Without one, any
            # text is the greeting of its first, and keeps its descriptor until it hangs up.
            socket.set(zmq.ZAP_DOMAIN, b"pdrt")
            address = f"inproc://{name}-{id(self)}"
            socket.monitor(address, Doorkeeper.EVENTS)
            events = self._new(zmq.PAIR)
            keeper = Doorkeeper(events, address, self._count, partial(self._is_drained, socket))
            self._keepers[socket] = keeper
            self._waiter.add(keeper.events)
        else:  # a Unix socket: nobody else of this machine has business here
            socket.set(zmq.IPC_FILTER_UID, os.getuid())
        socket.bind(endpoint)
        self._doors[name] = socket
        self._names[socket] = (name, True, from_peer)
        self._waiter.add(socket)

    def link(self, name: str, endpoint: str, *, from_peer: bool = False) -> None:
        """Connect to a door.  Returns at once; frames wait in the bounded queue meanwhile.  The
        same name and endpoint again is no news; another endpoint replaces the link.  Raises
        ProtocolError on an endpoint that is none: peers name them; NoDescriptors."""
        if self._endpoints.get(name) == endpoint:
            return
        if from_peer and self._addresses.want(name, endpoint):
            self._unlink(name)
            return  # connected by `receive`, once the address is known
        self.unlink(name)
        self._connect(name, endpoint, endpoint, from_peer=from_peer)

    def _connect(self, name: str, endpoint: str, place: str, *, from_peer: bool) -> None:
        socket = self._socket(zmq.DEALER, from_peer=from_peer)
        if not from_peer:
            # To a peer each connection has a name of its own: one that takes another's place leaves
            # that one neither read nor closed, and a worker has two to a decode that restarted.
            socket.set(zmq.ROUTING_ID, self._identity)
        try:
            socket.connect(place)
        except zmq.ZMQError as error:
            socket.close()
            raise ProtocolError(Malformed.VALUE.name, f"{endpoint!r}: {error.strerror}") from None
        self._endpoints[name] = endpoint
        self._links[name] = socket
        self._names[socket] = (name, False, from_peer)
        self._waiter.add(socket)

    def unlink(self, name: str) -> None:
        self._addresses.drop(name)
        self._unlink(name)

    def _unlink(self, name: str) -> None:
        self._lost.pop(name, None)
        self._mend_ns.pop(name, None)
        self._silence.heard(name)
        socket = self._links.pop(name, None)
        if socket is not None:
            self._waiter.remove(socket)
            del self._names[socket]
            self._outgoing.pop(name, None)
            del self._endpoints[name]
            socket.close(linger=0)

    def _is_drained(self, door: zmq.Socket[bytes]) -> bool:
        self._waiter.used(door)
        return not has_something(door)

    def watch(self, fd: int) -> None:
        """Let `receive` also wake when this descriptor is readable; its owner reads it."""
        self._waiter.watch(fd)

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
        if self._together or not self._outgoing:
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

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """`flush` waits for the end of this block."""
        self._together = True
        try:
            yield
        finally:
            self._together = False
            self.flush()

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
            socket = self._links[to] if isinstance(to, str) else self._doors[to[0]]
            self._waiter.used(socket)  # by a send that fails, too
            if not isinstance(to, str):
                socket.send(to[1], NOBLOCK | SNDMORE)
            socket.send(frame, NOBLOCK)
        except KeyError:  # the link was closed while this waited, or is yet to be made
            if to in self._addresses and self._hold(to, messages):
                return
            self._count(Counter.SENDS_REFUSED, len(messages), 0)
            if isinstance(to, str) and to in self._lost:
                self._relink(to, self._lost[to])
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._count(Counter.SENDS_REFUSED, len(messages), 0)
            if isinstance(to, str):
                self._mend(to)
        else:
            if isinstance(to, str) and self._names[socket][2]:
                self._silence.wrote(to, monotonic_ns())
            self._count(Counter.FRAMES_OUT, 1, 0)
            self._count(Counter.MESSAGES_OUT, len(messages), 0)

    def _mend(self, name: str) -> None:
        """A peer's link that takes nothing is full, or dead: ZMQ never again connects where it read
        nonsense once.  Dial anew; what was lost is sent again."""
        now_ns = monotonic_ns()
        if self._names[self._links[name]][2] and now_ns >= self._mend_ns.get(name, 0):
            endpoint = self._endpoints[name]
            self.unlink(name)
            self._relink(name, endpoint)
            self._mend_ns[name] = now_ns + self._random.randint(*MEND_MS) * MILLISECOND_NS

    def _hold(self, to: Address, messages: list[AnyMessage]) -> bool:
        """Its address is looked up: keep what there is room for."""
        held = self._outgoing.setdefault(to, [])
        if len(held) + len(messages) > HELD_MAX:
            return False
        held += messages
        return True

    def _relink(self, name: str, endpoint: str, place: str = "") -> None:
        """Without a descriptor it is tried again with the next frame: ZMQ gives the old ones back
        in its own time."""
        try:
            if place:
                self._connect(name, endpoint, place, from_peer=True)
            else:
                self.link(name, endpoint, from_peer=True)
        except NoDescriptors:
            self._lost[name] = endpoint

    def receive(self, timeout_ms: int) -> list[Envelope]:
        """What arrived, after waiting at most `timeout_ms` for something.  Malformed frames are
        counted by kind and dropped; nothing that arrives can raise."""
        envelopes: list[Envelope] = []
        now_ns = monotonic_ns()
        self._renew_links(now_ns)
        if self._outgoing:  # something lazy, which must not wait for longer than that
            timeout_ms = min(timeout_ms, LAZY_MS)
        for socket in self._waiter.wait(timeout_ms):
            if socket in self._names:
                self._drain(socket, envelopes)
            else:
                self._attended_ns = 0  # somebody is at a door
        if now_ns - self._attended_ns >= LAZY_NS:  # some of it is only a matter of time
            self._attended_ns = now_ns
            for keeper in self._keepers.values():
                keeper.attend()
        return envelopes

    def _renew_links(self, now_ns: int) -> None:
        for name in self._silence.take(now_ns):
            self._mend(name)
        for name, endpoint, place in self._addresses.take(now_ns):
            self._relink(name, endpoint, place)

    def _drain(self, socket: zmq.Socket[bytes], envelopes: list[Envelope]) -> None:
        """Take what a readable socket has, up to its turn's limits."""
        name, is_door, from_peer = self._names[socket]
        enough = len(envelopes) + MESSAGES_A_TURN
        sender: Address = name
        keeper = self._keepers.get(socket)
        if not is_door:
            self._silence.heard(name)
        for _ in range(FRAMES_A_TURN):
            try:
                if is_door:
                    sender = name, socket.recv(NOBLOCK)
                frame = socket.recv(NOBLOCK, copy=False)
            except zmq.Again:  # whoever sent it has just connected anew
                return
            self._count(Counter.FRAMES_IN, 1, 0)
            parts = 1
            while frame.more:
                parts, frame = parts + 1, socket.recv(NOBLOCK, copy=False)
            if keeper is not None:
                keeper.heard(frame)
            if parts > 1:
                self._count(Counter.MALFORMED, 1, Malformed.PARTS)
            else:
                self._open(frame.buffer, sender, from_peer, envelopes)
            # Asking is cheaper than an exception at the end of every turn.
            if not has_something(socket):
                return
            if len(envelopes) >= enough:
                break
        self._waiter.used(socket)

    def _open(
        self, frame: memoryview, sender: Address, from_peer: bool, envelopes: list[Envelope]
    ) -> None:
        try:
            messages = codec.decode(frame, from_peer=from_peer)
        except ProtocolError as error:
            self._count(Counter.MALFORMED, 1, Malformed[error.kind])
            return
        self._count(Counter.MESSAGES_IN, len(messages), 0)
        envelopes.extend([(sender, message) for message in messages])

    def close(self) -> None:
        for door in self._doors.values():
            door.disable_monitor()  # before its reader goes: ZMQ would wait for it
        for keeper in self._keepers.values():
            keeper.events.close()
        for socket in (*self._doors.values(), *self._links.values()):
            socket.close(linger=100)
        self._doors.clear()
        self._links.clear()
        self._context.term()

    def _socket(self, kind: int, *, from_peer: bool) -> zmq.Socket[bytes]:
        socket = self._new(kind)
        if from_peer:
            socket.set(zmq.TCP_KEEPALIVE, 1)
            socket.set(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
            socket.set(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
            socket.set(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_COUNT)
            socket.set(zmq.TCP_MAXRT, UNACKNOWLEDGED_MS)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, QUEUE_MAX)
        socket.set(zmq.RCVHWM, QUEUE_MAX)
        # Twice the limit still reaches us and is counted; beyond that ZMQ drops the connection.
        socket.set(zmq.MAXMSGSIZE, 2 * codec.FRAME_BYTES_MAX)
        socket.set(zmq.RECONNECT_IVL, self._random.randint(*RECONNECT_MS))
        socket.set(zmq.RECONNECT_IVL_MAX, self._random.randint(*RECONNECT_MAX_MS))
        socket.set(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.set(zmq.IPV6, 1)
        return socket

    def _new(self, kind: int) -> zmq.Socket[bytes]:
        """Raises NoDescriptors."""
        try:
            return self._context.socket(kind)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise NoDescriptors(f"no descriptor is left: {error.strerror}") from None


def _afford(count: int) -> None:
    """Raise NoDescriptors unless so many can be had.  ZMQ ends the process, which may be somebody
    else's engine, if it finds none for its threads."""
    fds: list[int] = []
    try:
        fds.extend(os.eventfd(0) for _ in range(count))
    except OSError as error:
        raise NoDescriptors(f"no descriptor is left: {error.strerror}") from None
    finally:
        for fd in fds:
            os.close(fd)
