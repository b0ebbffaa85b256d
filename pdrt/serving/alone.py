"""A request without a room: prefill and decode in this process.

It is what disaggregated output is compared with, and what health probes run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdrt.serving.active import ActiveRequest, Phase

if TYPE_CHECKING:
    from pdrt.memory.pages import PageAllocator
    from pdrt.protocol.layout import Layout
    from pdrt.serving.sampling import Choice


class AloneSide:
    """Pages for prompt and answer are reserved together, so a running request never runs out."""

    def __init__(self, layout: Layout, allocator: PageAllocator) -> None:
        self._layout = layout
        self._allocator = allocator

    def open(self, active: ActiveRequest) -> None:
        active.phase = Phase.WAITING

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
