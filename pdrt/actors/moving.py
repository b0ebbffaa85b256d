"""A room as its transfer worker knows it, from the first message about it until it is over."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pdrt.actors.paths import Path
from pdrt.protocol.layout import AUX_ROW_BYTES, RegionMap
from pdrt.protocol.messages import Chunk, Destination, Landed
from pdrt.shm_status import Handle
from pdrt.transports.base import Indices, TransferState, Transport

_page = struct.Struct("<i").pack  # as it stands in a message's pages


class Piece(NamedTuple):
    """What one write moves: items of ours, and where each goes."""

    local: Indices
    remote: Indices
    length_bytes: int


@dataclass(slots=True)
class Room:
    handle: Handle
    use: int  # of the room id, see Landed
    chunks: list[Chunk] = field(default_factory=list)  # taken, not yet posted
    next_index: int = 0
    destination: Destination | None = None
    path: Path | None = None  # since the first write
    pieces: deque[Piece] = field(default_factory=deque)  # of chunks taken up, still to be posted
    inflight: list[tuple[int, int]] = field(default_factory=list)  # (transport handle, bytes)
    last_queued: bool = False  # the pieces of the last chunk are among them, or were
    moved_bytes: int = 0
    chunks_moved: int = 0  # counted when queued; read when all have landed
    fence: int | None = None
    still_turns: int = 0  # of the worker, in which nothing of this room moved
    ending: bool = False
    broken: bool = False  # a write FAILED: what of it landed, only a fence can settle

    def queue(self, chunk: Chunk, region: RegionMap, pages_max: int) -> None:
        """Cut a chunk into pieces of at most so many pages, to be posted in this order.  The aux
        row goes with the last one.  Path and destination are known.  If cutting fails, nothing was
        queued: a room with half of its pieces would succeed without the others."""
        assert self.destination is not None
        assert self.path is not None
        local_pages, destination = chunk.pages, self.destination
        remote_pages = destination.pages[4 * chunk.start :][: len(local_pages)]
        length_bytes = len(local_pages) // 4 * region.page_bytes
        if chunk.last:
            local_pages += _page(region.pages_count + chunk.aux_index)
            remote_pages += _page(self.path.agent.pages_count + destination.aux_index)
            length_bytes += AUX_ROW_BYTES
        local = np.frombuffer(local_pages, dtype="<i4")
        remote = np.frombuffer(remote_pages, dtype="<i4")
        pieces = []
        for first in range(0, max(len(local), 1), pages_max):
            end = first + pages_max
            piece_bytes = min(length_bytes, pages_max * region.page_bytes)
            length_bytes -= piece_bytes
            pieces.append(Piece(local[first:end], remote[first:end], piece_bytes))
        self.pieces.extend(pieces)
        self.chunks_moved += 1
        self.last_queued |= chunk.last

    def follow_writes(self, transport: Transport) -> bool:
        """Give back the writes that have ended.  True if one has."""
        pending: list[tuple[int, int]] = []
        for posted, length_bytes in self.inflight:
            state = transport.poll(posted)
            if state is TransferState.PENDING:
                pending.append((posted, length_bytes))
                continue
            transport.release(posted)
            if state is TransferState.DONE:
                self.moved_bytes += length_bytes
            else:
                self.broken = True
        ended = len(pending) != len(self.inflight)
        self.inflight = pending
        return ended

    def follow_fence(self, transport: Transport) -> TransferState:
        """PENDING while something may still move; then everything is given back."""
        fence = TransferState.FAILED if self.fence is None else transport.poll(self.fence)
        if fence is TransferState.FAILED:
            # No fence is to be had.  Our pages are free once every write has ended.
            states = [transport.poll(posted) for posted, _ in self.inflight]
            if TransferState.PENDING in states:
                return TransferState.PENDING
        if fence is not TransferState.PENDING:
            for posted, _ in self.inflight:
                transport.release(posted)
            if self.fence is not None:
                transport.release(self.fence)
            self.inflight = []
        return fence

    def landed(self) -> Landed:
        """What decode hears once all of it is in place."""
        to = self.destination
        assert to is not None
        whose = to.room, to.rank, to.slot, to.generation
        return Landed(*whose, self.moved_bytes, self.chunks_moved, to.instance, self.use)
