"""Prefill's half of a request with a room.

    sender -> WaitingForInput -> pages, aux row, init -> chunk, send, chunk, send ... -> Success

Pages are taken only once the destination is known.  Taken earlier, two engines could hold pages
for rooms whose other halves wait for pages, each on the other, until a deadline broke the knot.
"""

from __future__ import annotations

import numpy as np

from pdrt.errors import AuxFull, TransferError
from pdrt.memory.aux import AuxRow
from pdrt.memory.pages import PageAllocator
from pdrt.protocol.layout import Layout
from pdrt.protocol.states import KVPoll
from pdrt.serving.active import ActiveRequest, Phase
from pdrt.serving.holdings import Holdings
from pdrt.serving.rooms import Manager, Sender
from pdrt.serving.sampling import Choice
from pdrt.serving.types import Rendezvous


class PrefillSide:
    def __init__(
        self,
        manager: Manager,
        layout: Layout,
        allocator: PageAllocator,
        holdings: Holdings,
        *,
        checksum: bool,
    ) -> None:
        """`checksum`: send a digest of the KV with the aux row, for decode to compare."""
        self._checksum = checksum
        self._manager = manager
        self._layout = layout
        self._allocator = allocator
        self._holdings = holdings
        self._senders: dict[ActiveRequest, Sender] = {}
        self._pages_sent: dict[ActiveRequest, int] = {}
        self._first: dict[ActiveRequest, Choice] = {}

    def open(self, active: ActiveRequest) -> None:
        rendezvous = active.request.rendezvous
        assert rendezvous is not None
        active.room = self._senders[active] = self._manager.sender(rendezvous.room)
        active.output_tokens_max = 1  # the others are decode's

    def decline(self, rendezvous: Rendezvous) -> None:
        self._manager.decline(rendezvous.room)

    def follow(self, active: ActiveRequest) -> None:
        sender = self._senders[active]
        state = sender.poll()
        if state is KVPoll.Failed:
            active.note_room()
            active.fail(sender.failure() or TransferError(sender.room, "failed"))
        elif active.phase is Phase.MEETING and state is KVPoll.WaitingForInput:
            active.phase = Phase.WAITING
        elif active.phase is Phase.SENDING and state is KVPoll.Success:
            active.note_room()
            active.accept(self._first[active])

    def admit(self, active: ActiveRequest) -> None:
        pages = self._allocator.allocate(self._layout.pages_for(active.prompt_count))
        try:
            active.aux_index = self._manager.aux.reserve()
        except AuxFull:
            self._allocator.free(pages)
            raise
        active.pages = pages
        self._pages_sent[active] = 0
        self._senders[active].init(len(pages), active.aux_index)
        active.phase = Phase.PREFILL

    def computed(self, active: ActiveRequest, choice: Choice | None) -> None:
        """Send the pages that are complete; with the first token the rest and the aux row."""
        sender, sent = self._senders[active], self._pages_sent[active]
        if choice is None:
            complete = active.computed_tokens // self._layout.page_size
            if complete > sent:
                sender.send(active.pages[sent:complete], last=False)
                self._pages_sent[active] = complete
            return
        assert active.aux_index is not None
        self._first[active] = choice
        digest = self._manager.digest(active.pages) if self._checksum else 0
        self._manager.aux.write(active.aux_index, _aux_row(sender.room, active, choice, digest))
        sender.send(active.pages[sent:], last=True)
        active.phase = Phase.SENDING

    def release(self, active: ActiveRequest) -> None:
        sender = self._senders.pop(active, None)
        self._pages_sent.pop(active, None)
        self._first.pop(active, None)
        if sender is not None:
            self._holdings.take(sender, active.pages, active.aux_index)
        active.pages, active.aux_index, active.room = np.empty(0, dtype=np.int32), None, None


def _aux_row(room: int, active: ActiveRequest, choice: Choice, digest: int) -> AuxRow:
    count, logprob = active.prompt_count, choice.logprob
    if logprob is None:
        return AuxRow(room, choice.token_id, prompt_tokens=count, digest=digest)
    return AuxRow(room, choice.token_id, logprob.logprob, count, logprob.top, digest)
