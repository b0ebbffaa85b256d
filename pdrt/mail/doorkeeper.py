"""Who comes through a door that anybody may knock at: how many at once, how many strangers, and
whether what they say comes to an end.

A connection holds a descriptor from the moment it is accepted.  ZMQ ends one that does not finish
its handshake in time, the kernel one whose host does not answer, and neither has a bound on their
number.  Nor has ZMQ one on the frames of a message whose last frame is still to come; nobody but
the kernel can say how much that is.
"""

from __future__ import annotations

import itertools
import os
import resource
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import cast

import zmq

from pdrt.clock import MILLISECOND_NS, monotonic_ns
from pdrt.protocol.codec import Malformed
from pdrt.protocol.counters import Counter

HANDSHAKE_MS = 2000
PROBE_NS = 1000 * MILLISECOND_NS
EVENTS_A_TURN = 1024
CONNECTIONS_MAX = 8192  # through one door, and at most half of the descriptors we may have
# Received on a connection without one whole message: more than the largest frame and every buffer
# on the way can hold.
UNFINISHED_BYTES_MAX = 64 << 20
LOOKS_A_TURN = 64  # at connections, in turn
RECEIVED_AT = 128  # of `tcpi_bytes_received` in the kernel's struct tcp_info
SRCFD = int(zmq.SRCFD)
Count = Callable[[Counter, int, int], None]


class Doorkeeper:
    """Reads the monitor of one door."""

    EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
    EVENT = struct.Struct("=HI")  # what happened, and the descriptor it happened to
    # By then a connection that is still there has finished its handshake.
    DECIDED_NS = 2 * HANDSHAKE_MS * MILLISECOND_NS

    def __init__(
        self,
        events: zmq.Socket[bytes],
        address: str,
        count: Count,
        is_drained: Callable[[], bool],
    ) -> None:
        """`events` is to be connected to the monitor at `address`.  `is_drained()`: has every whole
        message been taken in that came through the door?"""
        events.set(zmq.RCVHWM, 0)  # ZMQ's thread waits on a full queue, and everybody for it
        events.connect(address)
        self.events = events
        self._count, self._is_drained = count, is_drained
        self._probed_ns = 0
        self._connections_max = connections_max()
        self._accepted_ns: dict[int, int] = {}  # of each open connection, by descriptor
        self._strangers_count = 0  # came, less those whose handshake succeeded
        self._told_count = 0
        self._heard: set[int] = set()  # connections that said something whole, since last looked at
        self._marks: dict[int, int] = {}  # bytes that each had received by then
        self._turns: deque[int] = deque()

    def heard(self, message: zmq.Frame) -> None:
        """A whole message was taken in."""
        self._heard.add(message.get(SRCFD))

    def attend(self) -> None:
        """Take in what happened.  Costs next to nothing while nothing does."""
        now_ns = monotonic_ns()
        if now_ns - self._probed_ns >= PROBE_NS:
            self._probed_ns = now_ns
            self._probe()
        for _ in range(EVENTS_A_TURN):
            if not cast("int", self.events.get(zmq.EVENTS)) & zmq.POLLIN:
                break
            event, fd = self.EVENT.unpack(self.events.recv_multipart(zmq.NOBLOCK)[0])
            if event == zmq.EVENT_ACCEPTED:
                self._accept(fd, now_ns)
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._strangers_count -= 1
            else:
                self._accepted_ns.pop(fd, None)
        if self._strangers_count > self._told_count:
            self._tell_strangers(now_ns)
        if self._accepted_ns:
            self._look_for_endless()

    def _probe(self) -> None:
        """ZMQ tries to accept again and again, and would say so each time: a flood."""
        try:
            os.close(os.eventfd(0))
        except OSError:
            self._count(Counter.SHORTAGES, 1, 0)

    def _accept(self, fd: int, now_ns: int) -> None:
        self._strangers_count += 1
        self._accepted_ns.pop(fd, None)  # insertion order is order of age
        self._accepted_ns[fd] = now_ns
        if len(self._accepted_ns) > self._connections_max:
            self._count(Counter.CONNECTIONS_REFUSED, 1, 0)
            hang_up(fd)

    def _tell_strangers(self, now_ns: int) -> None:
        """Which connection a handshake belongs to is not said.  So those that may still finish
        theirs are left out until they have, or are gone."""
        youngest = reversed(self._accepted_ns.values())
        young = itertools.takewhile(lambda ns: now_ns - ns < self.DECIDED_NS, youngest)
        gone = self._strangers_count - sum(1 for _ in young) - self._told_count
        if gone > 0:
            self._told_count += gone
            self._count(Counter.STRANGERS, gone, 0)

    def _look_for_endless(self) -> None:
        """End connections on which a message goes on and on."""
        for _ in range(min(LOOKS_A_TURN, len(self._accepted_ns))):
            if not self._turns:
                self._turns.extend(self._accepted_ns)
                self._marks = {fd: n for fd, n in self._marks.items() if fd in self._accepted_ns}
            fd = self._turns.popleft()
            received = received_bytes(fd)
            mark = self._marks.get(fd)
            if mark is None or fd in self._heard or received < mark:
                self._marks[fd] = received
                self._heard.discard(fd)
            elif received - mark > UNFINISHED_BYTES_MAX and self._is_drained():
                self._count(Counter.MALFORMED, 1, Malformed.PARTS)
                self._marks[fd] = received
                hang_up(fd)


def connections_max() -> int:
    """How many connections a door of this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    return CONNECTIONS_MAX if unlimited else max(1, min(CONNECTIONS_MAX, soft // 2))


def received_bytes(fd: int) -> int:
    """How much a TCP connection has brought so far; 0 if it is none, or the kernel does not say."""
    try:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fd)
    except OSError:
        return 0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED_AT + 8)
    except OSError:
        return 0
    finally:
        connection.detach()
    return int.from_bytes(info[RECEIVED_AT:], "little")


def hang_up(fd: int) -> None:
    """End a connection that ZMQ owns; ZMQ then closes it.  Should it have done so meanwhile and the
    number be another connection's by now, that one is made anew by its owner."""
    try:
        connection = socket.socket(fileno=fd)
    except OSError:
        return
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    finally:
        connection.detach()
