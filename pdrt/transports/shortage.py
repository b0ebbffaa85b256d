"""Were there descriptors all along?  For a fabric that does not survive a shortage.

UCX closes the door that peers connect to when it cannot accept for want of a descriptor, and never
opens it again: no new peer reaches that agent any more, and nothing says so.  So once a shortage is
over the worker ends, and another one opens another door.
"""

from __future__ import annotations

import os

from pdrt.clock import SECOND_NS, Clock, monotonic_ns
from pdrt.transports.base import TransportError

LOOK_NS = SECOND_NS  # from one look to the next


class Shortage:
    def __init__(self, clock: Clock = monotonic_ns) -> None:
        self._clock = clock
        self._looked_ns = 0
        self._short = False

    def check(self) -> None:
        """Call it often.  Raises TransportError once a shortage was there and is over."""
        now_ns = self._clock()
        if now_ns - self._looked_ns < LOOK_NS:
            return
        self._looked_ns = now_ns
        try:
            os.close(os.eventfd(0))
        except OSError:
            self._short = True
            return
        if self._short:
            raise TransportError("descriptors ran out, and UCX may have closed its door")
