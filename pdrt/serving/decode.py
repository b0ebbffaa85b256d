"""Decode's half of a request with a room.

    receiver, init -> WaitingForInput -> pages, aux row, send_metadata -> Success -> decode on

Pages for prompt and answer are reserved together: once its KV has landed, a request never waits
for memory again, so a full pool delays the start of requests and wedges none.

A fault that ends the room before its KV is here ends the request with a typed error, or under
`--on-transfer-failure recompute` has its prompt computed here.  What somebody decided (an abort, on
either side) is no fault.  Nothing has been sent to the client by then, and sampling begins anew, so
the answer is the one that a single process gives.
"""

from __future__ import annotations

import logging

import numpy as np

from pdrt.errors import (
    Aborted,
    AuxFull,
    BadRequest,
    CorruptAux,
    PdrtError,
    TableFull,
    TransferError,
)
from pdrt.memory.aux import AuxRow
from pdrt.memory.pages import PageAllocator
from pdrt.protocol.layout import Layout
from pdrt.protocol.states import KVPoll
from pdrt.serving.active import ActiveRequest, Phase
from pdrt.serving.alone import AloneSide
from pdrt.serving.holdings import Holdings
from pdrt.serving.rooms import Manager, Receiver
from pdrt.serving.sampling import Choice
from pdrt.serving.types import Rendezvous, TokenLogprob

log = logging.getLogger(__name__)


class DecodeSide:
    def __init__(
        self,
        manager: Manager,
        layout: Layout,
        allocator: PageAllocator,
        holdings: Holdings,
        *,
        default_peer_port: int,
        instead: AloneSide | None,
    ) -> None:
        """`instead`: where requests go on whose rooms are lost; None: they fail."""
        self._instead = instead
        self._manager = manager
        self._layout = layout
        self._allocator = allocator
        self._holdings = holdings
        self._default_peer_port = default_peer_port
        self._receivers: dict[ActiveRequest, Receiver] = {}

    def open(self, active: ActiveRequest) -> None:
        rendezvous = active.request.rendezvous
        assert rendezvous is not None
        peer = peer_address(rendezvous, self._default_peer_port)
        try:
            receiver = self._manager.receiver(rendezvous.room, peer)
        except TableFull as error:
            if self._instead is None:
                raise
            self.decline(rendezvous)
            self._lose(active, error)
            return
        active.room = self._receivers[active] = receiver
        receiver.init()

    def decline(self, rendezvous: Rendezvous) -> None:
        if rendezvous.host:
            peer = peer_address(rendezvous, self._default_peer_port)
            self._manager.decline(rendezvous.room, peer)

    def follow(self, active: ActiveRequest) -> None:
        receiver = self._receivers.get(active)
        if receiver is None:  # its KV landed; the room is over
            return
        state = receiver.poll()
        if state is KVPoll.Failed:
            active.note_room()
            self._lose(active, receiver.failure() or TransferError(receiver.room, "failed"))
        elif active.phase is Phase.MEETING and state is KVPoll.WaitingForInput:
            active.phase = Phase.WAITING
        elif active.phase is Phase.LANDING and state is KVPoll.Success:
            self._landed(active, receiver)

    def admit(self, active: ActiveRequest) -> None:
        pages = self._allocator.allocate(self._layout.pages_for(active.kv_tokens_max))
        try:
            active.aux_index = self._manager.aux.reserve()
        except AuxFull:
            self._allocator.free(pages)
            raise
        active.pages = pages
        landing = pages[: self._layout.pages_for(active.prompt_count)]
        self._receivers[active].send_metadata(landing, active.aux_index)
        active.phase = Phase.LANDING

    def computed(self, active: ActiveRequest, choice: Choice | None) -> None:
        raise AssertionError("the prompt of a request with a room is computed by its peer")

    def release(self, active: ActiveRequest) -> None:
        receiver = self._receivers.pop(active, None)
        if receiver is None:
            self._allocator.free(active.pages)
        else:
            self._holdings.take(receiver, active.pages, active.aux_index)
        active.pages, active.aux_index, active.room = np.empty(0, dtype=np.int32), None, None

    def _landed(self, active: ActiveRequest, receiver: Receiver) -> None:
        assert active.aux_index is not None
        active.note_room()
        try:
            row = self._manager.aux.read(active.aux_index, receiver.room)
            self._check_digest(row, active)
        except CorruptAux as error:
            # The KV beside a foreign row is foreign too.  The verdict stands; the KV is not used.
            self._lose(active, error)
            return
        # Success is quiet: the pages are the request's own from here, and the slot is free.
        del self._receivers[active]
        none = np.empty(0, dtype=np.int32)
        self._holdings.take(receiver, none, active.aux_index)
        active.room, active.aux_index = None, None
        active.computed_tokens = active.prompt_count
        active.phase = Phase.DECODING
        active.accept(_first_choice(row, active.request.sampling.logprobs))

    def _lose(self, active: ActiveRequest, error: PdrtError) -> None:
        """Its KV will not come."""
        if self._instead is None or isinstance(error, Aborted):
            active.fail(error)
            return
        log.warning("rid=%s recomputed code=%s detail=%r", active.request.rid, error.code, error)
        self.release(active)
        self._instead.take_over(active)

    def _check_digest(self, row: AuxRow, active: ActiveRequest) -> None:
        """Raises CorruptAux if prefill sent a digest and the KV here has another."""
        landed = active.pages[: self._layout.pages_for(active.prompt_count)]
        if row.digest and row.digest != self._manager.digest(landed):
            raise CorruptAux(row.room, "the KV that landed is not the KV that was sent")


def peer_address(rendezvous: Rendezvous, default_port: int) -> str:
    """host:port of the prefill side's bootstrap port.  Raises BadRequest without a host."""
    if not rendezvous.host:
        raise BadRequest("bootstrap_room without bootstrap_host: decode cannot find its prefill")
    host = f"[{rendezvous.host}]" if ":" in rendezvous.host else rendezvous.host
    return f"{host}:{rendezvous.port or default_port}"


def _first_choice(row: AuxRow, alternatives: int | None) -> Choice:
    if alternatives is None:
        return Choice(row.first_token)
    logprob = TokenLogprob(row.first_token, row.logprob, row.top[:alternatives])
    return Choice(row.first_token, logprob)
