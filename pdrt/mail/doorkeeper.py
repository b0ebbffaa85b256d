"""Who comes through a door that anybody may knock at: how many at once, and how many strangers.

A connection holds a descriptor from the moment it is accepted.  ZMQ ends one that does not finish
its handshake in time or that does not answer pings, and has no bound on their number.
"""

from __future__ import annotations

import itertools
import os
import resource
import socket
import struct
from collections.abc import Callable
from typing import cast

import zmq

from pdrt.clock import MILLISECOND_NS, monotonic_ns

HANDSHAKE_MS = 2000
PROBE_NS = 1000 * MILLISECOND_NS
EVENTS_A_TURN = 1024
CONNECTIONS_MAX = 8192  # through one door, and at most half of the descriptors we may have


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
        came: Callable[[int], None],
        refused: Callable[[], None],
        short: Callable[[], None],
    ) -> None:
        """`events` is to be connected to the monitor at `address`.  `came(n)`: so many strangers
        more; `refused()`: a connection was ended for want of a place; `short()`: nobody can be let
        in, for want of a descriptor."""
        events.set(zmq.RCVHWM, 0)  # ZMQ's thread waits on a full queue, and everybody for it
        events.connect(address)
        self.events = events
        self._came, self._refused, self._short = came, refused, short
        self._probed_ns = 0
        self._connections_max = connections_max()
        self._accepted_ns: dict[int, int] = {}  # of each open connection, by descriptor
        self._strangers_count = 0  # came, less those whose handshake succeeded
        self._told_count = 0

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

    def _probe(self) -> None:
        """ZMQ tries to accept again and again, and would say so each time: a flood."""
        try:
            os.close(os.eventfd(0))
        except OSError:
            self._short()

    def _accept(self, fd: int, now_ns: int) -> None:
        self._strangers_count += 1
        self._accepted_ns.pop(fd, None)  # insertion order is order of age
        self._accepted_ns[fd] = now_ns
        if len(self._accepted_ns) > self._connections_max:
            self._refused()
            hang_up(fd)

    def _tell_strangers(self, now_ns: int) -> None:
        """Which connection a handshake belongs to is not said.  So those that may still finish
        theirs are left out until they have, or are gone."""
        youngest = reversed(self._accepted_ns.values())
        young = itertools.takewhile(lambda ns: now_ns - ns < self.DECIDED_NS, youngest)
        gone = self._strangers_count - sum(1 for _ in young) - self._told_count
        if gone > 0:
            self._told_count += gone
            self._came(gone)


def connections_max() -> int:
    """How many connections a door of this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    return CONNECTIONS_MAX if unlimited else max(1, min(CONNECTIONS_MAX, soft // 2))


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
