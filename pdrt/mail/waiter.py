"""Waits until one of several ZMQ sockets may have something.

ZMQ's own poller asks every socket twice a call, at two system calls each.  Here only those are
asked whose descriptor is readable, and those that were used since they last said that they are
empty: any call on a socket may swallow what its descriptor was about to say.
"""

from __future__ import annotations

import select
from typing import cast

import zmq

EVENTS, POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)  # arithmetic with ZMQ's enums is slow


class Waiter:
    """See the module.  One thread uses it."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._sockets: dict[int, zmq.Socket[bytes]] = {}  # by descriptor
        self._used: set[zmq.Socket[bytes]] = set()

    def add(self, socket: zmq.Socket[bytes]) -> None:
        fd = cast("int", socket.get(zmq.FD))
        self._sockets[fd] = socket
        self._used.add(socket)
        self._poll.register(fd, select.POLLIN)

    def remove(self, socket: zmq.Socket[bytes]) -> None:
        fd = cast("int", socket.get(zmq.FD))
        del self._sockets[fd]
        self._used.discard(socket)
        self._poll.unregister(fd)

    def watch(self, fd: int) -> None:
        self._poll.register(fd, select.POLLIN)

    def used(self, socket: zmq.Socket[bytes]) -> None:
        self._used.add(socket)

    def wait(self, timeout_ms: int) -> list[zmq.Socket[bytes]]:
        """Those that have something, after waiting at most `timeout_ms`.  Each is to be read until
        it is empty, or named to `used`."""
        ready = {socket for socket in self._used if has_something(socket)}
        self._used.clear()
        news = self._poll.poll(0 if ready else timeout_ms)
        asked = [self._sockets[fd] for fd, _ in news if fd in self._sockets]
        if not news and not ready:  # nobody is in a hurry: mend whatever may have been missed
            asked = list(self._sockets.values())
        return [*ready, *(s for s in asked if s not in ready and has_something(s))]


def has_something(socket: zmq.Socket[bytes]) -> bool:
    return cast("int", socket.get(EVENTS)) & POLLIN != 0
