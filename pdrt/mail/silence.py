"""Links that were written to and have not answered since.

Between hosts a connection can die without a word: a firewall forgets it, a host is gone.  What is
said on a link to a peer is answered sooner or later, if only by a heartbeat, so one that stays
silent is dialled anew.  ZMQ has a ping for that, and cannot be trusted with it: its timer aborts
the process if it fires after a connection whose input waits was reset (4.3.5), and any peer can
bring that about.
"""

from __future__ import annotations

import random

from pdrt.clock import MILLISECOND_NS

SILENT_MS = (2500, 4000)  # each time another, so that no two dial in step
LOOK_NS = 100 * MILLISECOND_NS


class Silence:
    def __init__(self, rng: random.Random) -> None:
        self._random = rng
        self._due_ns: dict[str, int] = {}  # by link: answered by then, or dialled anew
        self._looked_ns = 0

    def wrote(self, link: str, now_ns: int) -> None:
        if link not in self._due_ns:
            self._due_ns[link] = now_ns + self._random.randint(*SILENT_MS) * MILLISECOND_NS

    def heard(self, link: str) -> None:
        self._due_ns.pop(link, None)

    def take(self, now_ns: int) -> list[str]:
        """Those that have been silent for too long, once."""
        if not self._due_ns or now_ns - self._looked_ns < LOOK_NS:
            return []
        self._looked_ns = now_ns
        late = [link for link, due_ns in self._due_ns.items() if now_ns >= due_ns]
        for link in late:
            del self._due_ns[link]
        return late
