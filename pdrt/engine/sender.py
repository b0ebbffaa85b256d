"""KVSender: prefill's half of a room, as its engine drives it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from pdrt import failpoints
from pdrt.engine.room import Desk, KVRoom
from pdrt.errors import IllegalMove
from pdrt.protocol.messages import Chunk
from pdrt.protocol.states import TERMINAL
from pdrt.shm_status import Handle


class KVSender(KVRoom):
    """init, then send each chunk in order, the last one with `last`; poll until the verdict."""

    def __init__(self, room: int, handles: Sequence[Handle], desk: Desk) -> None:
        super().__init__(room, handles, desk)
        self._pages_count = self._sent_pages = self._aux_index = 0
        self._sent: list[Chunk] = []  # with rank 0's handle; for workers that lost them
        self._complete = False
        self._resent_ns = self._pause_ns = 0

    def init(self, pages_count: int, aux_index: int) -> None:
        """How many pages the room will send in all, and which aux row goes with the last chunk."""
        self._pages_count = pages_count
        self._aux_index = aux_index

    def send(self, pages: NDArray[np.int32], last: bool = False) -> None:
        """Hand over a chunk: its pages are final.  With `last` the aux row must be written.  Never
        blocks.  Raises IllegalMove after the last chunk or beyond `pages_count`."""
        if self._complete:
            raise IllegalMove(f"room {self.room}: the last chunk was sent already")
        if self._sent_pages + len(pages) > self._pages_count:
            raise IllegalMove(
                f"room {self.room}: {self._sent_pages + len(pages)} pages, "
                f"announced {self._pages_count}"
            )
        if self.poll() in TERMINAL:
            return
        handle = self._handles[0]
        chunk = Chunk(
            self.room,
            handle.slot,
            handle.generation,
            len(self._sent),
            self._sent_pages,
            np.ascontiguousarray(pages, dtype="<i4").tobytes(),
            last,
            self._aux_index,
        )
        self._sent.append(chunk)
        self._sent_pages += len(pages)
        self._complete = last
        self._resent_ns = self._clock()
        failpoints.hit("engine.send.before_post")
        self._post_from(len(self._sent) - 1)
        self._desk.flush()

    @property
    def queued(self) -> bool:
        return not self._sent

    def _post_from(self, first: int, rank: int | None = None) -> None:
        for r, handle in enumerate(self._handles):
            if rank not in (None, r):
                continue
            _, slot, generation = handle
            for chunk in self._sent[first:]:
                mine = chunk if r == 0 else replace(chunk, slot=slot, generation=generation)
                self._desk.mailbox.post(f"worker{r}", mine)

    def resend(self, now_ns: int, *, rank: int | None) -> bool:
        """Send again what a worker has not acknowledged: at once to `rank` if it was restarted,
        else after a pause that doubles.  True if something was sent."""
        if self._verdict is not None or not self._sent:
            return False
        if rank is not None:
            self._post_from(0, rank)
            return True
        pause_ns = self._desk.resend_ns
        self._pause_ns = self._pause_ns or pause_ns
        if now_ns - self._resent_ns < self._pause_ns:
            return False
        self._resent_ns = now_ns
        self._pause_ns = min(2 * self._pause_ns, 10 * pause_ns)
        sent = False
        for r, handle in enumerate(self._handles):
            taken = self._table.taken(handle.slot, handle.generation)
            if taken < len(self._sent):
                self._post_from(taken, r)
                sent = True
        return sent
