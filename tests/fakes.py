"""Fakes of pdrt's inner borders: a pair of managers that move KV between two pools in one process.

`FakePair` plays runtime and transport.  Nothing happens by itself: each `pump` moves every room by
at most one step, so a test decides, or a seeded random number does, how far a transfer got when an
abort arrives.  It also watches the law that a verdict is not permission to reuse memory: bytes of
an aborted room go on landing for a few pumps, and landing in a page that was freed is an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pdrt.engine.room import FAILURES
from pdrt.errors import IllegalMove, RoomInUse, TableFull, TransferError
from pdrt.memory.aux import AuxRows
from pdrt.memory.digest import kv_digest
from pdrt.memory.pages import Pages
from pdrt.protocol.layout import AUX_ROW_BYTES, Layout, RegionMap
from pdrt.protocol.states import TERMINAL, KVPoll, Reason

QUIET_AFTER_PUMPS = 3


@dataclass(eq=False)
class FakeRoom:
    """One side of a room: sender and receiver in one, since each uses its own half only."""

    manager: FakeManager
    room: int
    state: KVPoll = KVPoll.Bootstrapping
    reason: Reason = Reason.NONE
    pumps_until_quiet: int = 0
    announced: bool = False  # decode: init was called
    pages: Pages | None = None  # decode: where the KV must land; prefill: all it sent
    aux_index: int = -1
    pages_count: int = 0
    chunks: list[tuple[Pages, bool]] = field(default_factory=list)  # sent, not landed
    chunks_count: int = 0

    def init(self, pages_count: int = 0, aux_index: int = -1) -> None:
        self.announced = True
        self.pages_count, self.aux_index = pages_count, aux_index

    def send(self, pages: Pages, last: bool) -> None:
        if self.state in TERMINAL:
            return
        assert self.state in (KVPoll.WaitingForInput, KVPoll.Transferring), self.state
        assert len(pages) > 0, "a chunk has pages"
        self.chunks.append((pages.copy(), last))
        self.chunks_count += 1

    def send_metadata(self, pages: Pages, aux_index: int) -> None:
        if self.state in TERMINAL:
            return
        assert self.state is KVPoll.WaitingForInput, self.state
        self.pages, self.aux_index = pages.copy(), aux_index
        self.state = KVPoll.Transferring

    def poll(self) -> KVPoll:
        return self.state

    def quiet(self) -> bool:
        return self.state in TERMINAL and self.pumps_until_quiet == 0

    def abort(self, reason: Reason = Reason.ABORTED) -> None:
        self.fault(reason)

    def fault(self, reason: Reason) -> None:
        if self.state in TERMINAL:
            return
        moving = self.state is KVPoll.Transferring
        self.state, self.reason = KVPoll.Failed, reason
        self.pumps_until_quiet = QUIET_AFTER_PUMPS if moving else 0

    def failure(self) -> TransferError | None:
        error, _ = FAILURES[self.reason]
        return error(self.room, self.reason.name) if self.state is KVPoll.Failed else None

    def clear(self) -> None:
        if not self.quiet():
            raise IllegalMove(f"room {self.room} is not quiet")
        if self.state is KVPoll.Failed:
            self.manager.given_up.add(self.room)
        del self.manager.rooms[self.room]

    def timeline(self) -> dict[str, object]:
        return {"room": self.room, "reason": self.reason.name, "chunks": self.chunks_count}


class FakeManager:
    """One engine's view: its pools, its aux rows, its rooms."""

    def __init__(self, layout: Layout, pages_count: int, aux_rows: int = 64) -> None:
        self.layout = layout
        self.maps = tuple(
            RegionMap(layout=layout, rank=rank, pages_count=pages_count, aux_rows=aux_rows)
            for rank in range(layout.ranks)
        )
        self.regions = [memoryview(bytearray(each.length_bytes)) for each in self.maps]
        self.aux = AuxRows(self.regions, self.maps)
        self.rooms: dict[int, FakeRoom] = {}
        self.given_up: set[int] = set()  # the peer is told, even if its half comes later
        self.declined: set[int] = set()  # likewise
        self.rooms_max = 1 << 16
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.on_tick: Callable[[], None] = lambda: None

    def kv(self, rank: int) -> memoryview:
        return self.regions[rank][: self.maps[rank].aux_offset]

    def page(self, rank: int, page: int) -> memoryview:
        page_bytes = self.maps[rank].page_bytes
        return self.regions[rank][page * page_bytes : (page + 1) * page_bytes]

    def aux_row(self, rank: int, index: int) -> memoryview:
        start = self.maps[rank].aux_offset + index * AUX_ROW_BYTES
        return self.regions[rank][start : start + AUX_ROW_BYTES]

    def sender(self, room: int) -> FakeRoom:
        return self._open(room)

    def receiver(self, room: int, peer: str) -> FakeRoom:
        return self._open(room)

    def decline(self, room: int, peer: str = "") -> None:
        if room not in self.rooms:
            self.declined.add(room)

    def digest(self, pages: NDArray[np.int32]) -> int:
        return kv_digest(self.regions, self.maps, pages)

    def tick(self) -> None:
        self.on_tick()

    def close(self) -> None:
        os.close(self.wake_fd)

    def _open(self, room: int) -> FakeRoom:
        if room in self.rooms:
            raise RoomInUse(room)
        if len(self.rooms) >= self.rooms_max:
            raise TableFull("no slot is free")
        self.rooms[room] = FakeRoom(self, room)
        return self.rooms[room]


class FakePair:
    """A prefill and a decode manager, and everything between them."""

    def __init__(self, layout: Layout, pages_count: int, aux_rows: int = 64) -> None:
        self.prefill = FakeManager(layout, pages_count, aux_rows)
        self.decode = FakeManager(layout, pages_count, aux_rows)
        self.page_in_use: Callable[[int], bool] = lambda page: True  # of decode's pool
        self.landed_count = 0
        self.digests_differ = 0

    def pump(self) -> None:
        """Move every room by at most one step."""
        for number in {*self.prefill.rooms, *self.decode.rooms}:
            ours, theirs = self.prefill.rooms.get(number), self.decode.rooms.get(number)
            if theirs is not None and theirs.state is KVPoll.Bootstrapping and theirs.announced:
                theirs.state = KVPoll.WaitingForInput
            if ours is not None and theirs is not None:
                self._move(ours, theirs)
            elif ours is not None and number in self.decode.given_up:
                ours.fault(Reason.PEER_ABORTED)
            elif theirs is not None and number in self.prefill.given_up:
                theirs.fault(Reason.PEER_ABORTED)
            elif ours is not None and number in self.decode.declined:
                ours.fault(Reason.PEER_REFUSED)
            elif theirs is not None and number in self.prefill.declined:
                theirs.fault(Reason.PEER_REFUSED)
            if theirs is not None and theirs.state is KVPoll.Failed:
                self._land_late(theirs)
            for room in (ours, theirs):
                if room is not None and room.state is KVPoll.Failed:
                    room.pumps_until_quiet = max(0, room.pumps_until_quiet - 1)

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()

    def _move(self, ours: FakeRoom, theirs: FakeRoom) -> None:
        if KVPoll.Failed in (ours.state, theirs.state):
            ours.fault(Reason.PEER_ABORTED)
            theirs.fault(Reason.PEER_ABORTED)
        elif ours.state is KVPoll.Bootstrapping and theirs.state is KVPoll.Transferring:
            ours.state = KVPoll.WaitingForInput
        elif ours.chunks:
            ours.state = KVPoll.Transferring
            self._land(ours, theirs)

    def _land(self, ours: FakeRoom, theirs: FakeRoom) -> None:
        pages, last = ours.chunks.pop(0)
        assert theirs.pages is not None
        first = 0 if ours.pages is None else len(ours.pages)
        targets = theirs.pages[first : first + len(pages)]
        assert len(targets) == len(pages), "prefill sends more pages than decode gave"
        ours.pages = pages if ours.pages is None else np.concatenate([ours.pages, pages])
        for rank in range(self.prefill.layout.ranks):
            for source, target in zip(pages.tolist(), targets.tolist(), strict=True):
                assert self.page_in_use(target), f"bytes land in page {target}, which is free"
                self.decode.page(rank, target)[:] = self.prefill.page(rank, source)
            if last:
                row = self.prefill.aux_row(rank, ours.aux_index)
                self.decode.aux_row(rank, theirs.aux_index)[:] = row
        if last:
            assert len(ours.pages) == len(theirs.pages) == ours.pages_count
            self.landed_count += 1
            self._compare(ours, theirs)
            ours.state = theirs.state = KVPoll.Success

    def _land_late(self, theirs: FakeRoom) -> None:
        """Until a room is quiet its bytes may still land: here, in every page, and all ones, which
        nobody can take for KV."""
        if theirs.pages is None or theirs.pumps_until_quiet == 0:
            return
        for rank in range(self.decode.layout.ranks):
            for target in theirs.pages.tolist():
                assert self.page_in_use(target), f"bytes land in page {target}, which is free"
                page = self.decode.page(rank, target)
                page[:] = b"\xff" * len(page)

    def _compare(self, ours: FakeRoom, theirs: FakeRoom) -> None:
        assert ours.pages is not None
        assert theirs.pages is not None
        for rank in range(self.prefill.layout.ranks):
            for source, target in zip(ours.pages.tolist(), theirs.pages.tolist(), strict=True):
                if self.prefill.page(rank, source) != self.decode.page(rank, target):
                    self.digests_differ += 1
