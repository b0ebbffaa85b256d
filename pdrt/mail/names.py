"""Names of hosts to addresses, beside the loop.

A name server that does not answer keeps its caller for a minute, and ZMQ asks from the one thread
that serves all sockets: one bad name in one request, and every other peer is lost (law 11).  So a
link whose endpoint has a name waits here, and only for itself.
"""

from __future__ import annotations

import ipaddress
import random
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from pdrt.clock import MILLISECOND_NS, SECOND_NS

#: An address of that name.  Raises OSError or UnicodeError if there is none.
Resolve = Callable[[str], str]

LOOKUPS_MAX = 64  # threads at once; beyond that a name waits for its turn
PAUSE_NS, PAUSE_MAX_NS = SECOND_NS, 30 * SECOND_NS  # a name without an address is asked for again
LOOK_NS = 5 * MILLISECOND_NS
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}\Z")
PORT = re.compile(r"[0-9]{1,5}\Z")


def split(endpoint: str) -> tuple[str, int] | None:
    """Name and port of "tcp://name:port".  None if there is nothing to look up, be it because the
    host is an address or because the endpoint is nonsense."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    tcp = endpoint.startswith("tcp://")
    if not tcp or not PORT.match(port) or not 0 < int(port) < 65536 or not NAME.match(host):
        return None
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host, int(port)
    return None


def resolve(host: str) -> str:
    """The address that this host's resolver puts first."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(found[0][4][0])


@dataclass(slots=True)
class _Lookup:
    endpoint: str  # as it was given
    host: str
    port: int
    due_ns: int = 0  # when to ask
    pause_ns: int = PAUSE_NS
    asking: bool = False
    answer: str | None = None  # "" if there is no such name


class Addresses:
    """Endpoints, by the name of their link, whose address is not known yet."""

    def __init__(self, rng: random.Random, resolve: Resolve = resolve) -> None:
        self._random = rng
        self._resolve = resolve
        self._waiting: dict[str, _Lookup] = {}
        self._looked_ns = 0
        self._free = threading.Semaphore(LOOKUPS_MAX)

    def __contains__(self, link: object) -> bool:
        return link in self._waiting

    def want(self, link: str, endpoint: str) -> bool:
        """Is there a name to look up?  Then `take` returns it in time."""
        known = self._waiting.get(link)
        if known is not None and known.endpoint == endpoint:
            return True
        self._waiting.pop(link, None)
        parts = split(endpoint)
        if parts is None:
            return False
        self._waiting[link] = lookup = _Lookup(endpoint, *parts)
        self._ask(lookup)
        return True

    def drop(self, link: str) -> None:
        self._waiting.pop(link, None)

    def take(self, now_ns: int) -> list[tuple[str, str, str]]:
        """Those whose address has come: link, endpoint as it was given, endpoint to connect to."""
        if not self._waiting or now_ns - self._looked_ns < LOOK_NS:
            return []
        self._looked_ns = now_ns
        found = []
        for link, lookup in list(self._waiting.items()):
            if lookup.answer:
                del self._waiting[link]
                host = f"[{lookup.answer}]" if ":" in lookup.answer else lookup.answer
                found.append((link, lookup.endpoint, f"tcp://{host}:{lookup.port}"))
            elif lookup.answer is not None:
                lookup.answer = None
                lookup.due_ns = now_ns + int(lookup.pause_ns * self._random.uniform(0.5, 1))
                lookup.pause_ns = min(2 * lookup.pause_ns, PAUSE_MAX_NS)
            elif not lookup.asking and now_ns >= lookup.due_ns:
                self._ask(lookup)
        return found

    def _ask(self, lookup: _Lookup) -> None:
        if not self._free.acquire(blocking=False):
            return
        lookup.asking = True
        try:
            threading.Thread(target=self._run, args=(lookup,), name="lookup", daemon=True).start()
        except RuntimeError:  # the system has no thread for us now
            lookup.asking = False
            self._free.release()

    def _run(self, lookup: _Lookup) -> None:
        answer = ""
        try:
            answer = self._resolve(lookup.host)
        except (OSError, UnicodeError):
            pass
        finally:
            lookup.asking = False
            lookup.answer = answer
            self._free.release()
