"""A request without a room: prefill and decode in this process.

It is what disaggregated output is compared with, and what health probes run.  Under
`--on-transfer-failure recompute` it is also where a request goes on whose room is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdrt.serving.active import ActiveRequest, Phase

if TYPE_CHECKING:
    from pdrt.memory.pages import PageAllocator
    from pdrt.protocol.layout import Layout
    from pdrt.serving.sampling import Choice
    from pdrt.serving.types import Rendezvous


class AloneSide:
    """Pages for prompt and answer are reserved together, so a running request never runs out."""

    def __init__(self, layout: Layout, allocator: PageAllocator) -> None:
        self._layout = layout
        self._allocator = allocator
        self.recomputed_count = 0

    def take_over(self, active: ActiveRequest) -> None:
        """Compute here, from its first token on, what a peer should have sent.  The request holds
        nothing any more: what its room held stays in quarantine, and it waits for pages of its own
        like any other, in order of arrival."""
        self.recomputed_count += 1
        active.meta["recomputed"] = True
        active.side = self
        self.open(active)

    def open(self, active: ActiveRequest) -> None:
        active.phase = Phase.WAITING

    def decline(self, rendezvous: Rendezvous) -> None:
        pass

    def follow(self, active: ActiveRequest) -> None:
        pass

    def admit(self, active: ActiveRequest) -> None:
        active.pages = self._allocator.allocate(self._layout.pages_for(active.kv_tokens_max))
        active.phase = Phase.PREFILL

    def computed(self, active: ActiveRequest, choice: Choice | None) -> None:
        if choice is not None:
            active.phase = Phase.DECODING
            active.accept(choice)

    def release(self, active: ActiveRequest) -> None:
        self._allocator.free(active.pages)
        active.pages = np.empty(0, dtype=np.int32)
