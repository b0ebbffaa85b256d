"""Is anybody listening at a peer's port?

A supervisor holds its port for as long as it lives, whoever of its children is dead or frozen.  So
a connect that is refused says what silence cannot: the whole tree is gone.  Asked only about peers
that say nothing while rooms wait for them; a peer that takes the call has merely seen a stranger.
"""

from __future__ import annotations

import errno
import ipaddress
import random
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass

from pdrt.clock import MILLISECOND_NS
from pdrt.mail.names import Addresses, Resolve, resolve

EVERY_NS = 250 * MILLISECOND_NS
GONE_NS = 500 * MILLISECOND_NS  # refused for so long, and not by chance between two binds
CALLS_MAX = 64  # at once

#: Has nobody been listening at host:port for a while, at this time in ns?
Knock = Callable[[str, int], bool]


@dataclass(slots=True)
class _Call:
    """What is known of one peer's port."""

    began_ns: int
    connection: socket.socket | None = None  # while it is not known whether it is taken
    refused_ns: int = 0  # since when every call was refused
    gone: bool = False


class Knocks:
    """Calls ports without ever waiting.  Ask again and again: `knocks(peer, now_ns)`."""

    def __init__(self, resolve: Resolve = resolve) -> None:
        self._addresses = Addresses(random.Random(), resolve)
        self._calls: dict[str, _Call] = {}

    def __call__(self, peer: str, now_ns: int) -> bool:
        """Has nobody been listening at host:port for a while?  False as long as it is not known."""
        call = self._calls.get(peer)
        if call is None:
            self._forget_old(now_ns)
            if len(self._calls) >= CALLS_MAX:
                return False
            call = self._calls[peer] = _Call(0)
        if call.connection is not None:
            self._look(call, now_ns)
        for name, _, endpoint in self._addresses.take(now_ns):
            if name in self._calls:
                self._begin(self._calls[name], endpoint.removeprefix("tcp://"), now_ns)
        if call.connection is None and now_ns - call.began_ns >= EVERY_NS:
            if now_ns - call.began_ns > 4 * EVERY_NS:  # nobody asked meanwhile: begin anew
                call.refused_ns, call.gone = 0, False
            call.began_ns = now_ns
            if not self._addresses.want(peer, f"tcp://{peer}"):
                self._begin(call, peer, now_ns)
        return call.gone

    def close(self) -> None:
        for call in self._calls.values():
            self._hang_up(call)
        self._calls.clear()

    def _begin(self, call: _Call, place: str, now_ns: int) -> None:
        host, _, port = place.rpartition(":")
        try:
            address = ipaddress.ip_address(host.strip("[]"))
            family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
            call.connection = socket.socket(family, socket.SOCK_STREAM)
            call.connection.setblocking(False)
            code = call.connection.connect_ex((str(address), int(port)))
        except (
            OSError,
            ValueError,
            OverflowError,
        ):  # no address, or no descriptor: nothing is said
            self._hang_up(call)
            return
        if code not in (0, errno.EINPROGRESS):
            self._hear(call, code, now_ns)

    def _look(self, call: _Call, now_ns: int) -> None:
        assert call.connection is not None
        poller = select.poll()
        poller.register(call.connection, select.POLLOUT)
        if poller.poll(0):
            code = call.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            self._hear(call, code, now_ns)
        elif now_ns - call.began_ns > 4 * EVERY_NS:  # a black hole says nothing
            self._hear(call, 0, now_ns)

    def _hear(self, call: _Call, code: int, now_ns: int) -> None:
        self._hang_up(call)
        if code != errno.ECONNREFUSED:
            call.refused_ns, call.gone = 0, False
            return
        call.refused_ns = call.refused_ns or now_ns
        call.gone = now_ns - call.refused_ns >= GONE_NS

    def _forget_old(self, now_ns: int) -> None:
        for peer, call in list(self._calls.items()):
            if now_ns - call.began_ns > 8 * EVERY_NS:
                self._hang_up(call)
                self._addresses.drop(peer)
                del self._calls[peer]

    @staticmethod
    def _hang_up(call: _Call) -> None:
        if call.connection is not None:
            call.connection.close()
            call.connection = None
