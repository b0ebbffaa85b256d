"""WHAT AN ENGINE CALLS.  KVManager attaches to a running pdrt and makes senders and receivers.

    manager = KVManager.attach("@pdrt-prefill-8998", name="my-engine")
    sender = manager.sender(room); sender.init(pages, aux); sender.send(...); sender.poll()

Built-in and foreign engines attach the same way: a Unix socket hands over the status table, the
pools and a wake-up eventfd.  One thread uses a manager.  Call `tick` once a loop iteration: it
beats for the engine and sends again what a restarted process of ours has lost.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import secrets
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray

from pdrt import attach as attaching
from pdrt.attach import AttachReply, AttachRequest
from pdrt.clock import MILLISECOND_NS, Clock, monotonic_ns, to_ns
from pdrt.engine.receiver import KVReceiver
from pdrt.engine.room import LISTENER, Desk, KVRoom
from pdrt.engine.sender import KVSender
from pdrt.errors import AttachFailed, BadRequest, NoDescriptors, RoomInUse
from pdrt.mail.mailbox import Mailbox
from pdrt.memory.aux import AuxRows
from pdrt.memory.digest import kv_digest
from pdrt.process_rows import INCARNATION_MASK, Owner
from pdrt.protocol.counters import Counter
from pdrt.protocol.layout import Layout, RegionMap
from pdrt.protocol.messages import Declined, Opened
from pdrt.protocol.states import Reason, Role
from pdrt.shm_status import Handle, StatusTable

ROOM_MAX = (1 << 63) - 1
PEER_CHARS_MAX = 300  # a host name has 253 at most
UPKEEP_NS = 20 * MILLISECOND_NS
RENEW_NS = 1000 * MILLISECOND_NS


def is_place(peer: str) -> bool:
    """Is it host:port, and short enough for a message?"""
    host, _, port = peer.rpartition(":")
    short = len(peer) <= PEER_CHARS_MAX
    return bool(host) and short and port.isdecimal() and 0 < int(port) < 65536


class KVManager:
    """See the module.  Made by `attach`."""

    def __init__(
        self,
        reply: AttachReply,
        fds: list[int],
        connection: socket.socket,
        clock: Clock,
    ) -> None:
        self._connection = connection  # our life line: the runtime buries us when it closes
        self._clock = clock
        table_fd, *region_fds, self.wake_fd = fds
        self.instance = reply.instance
        self.maps: tuple[RegionMap, ...] = reply.maps
        self.table = StatusTable(table_fd, Owner(reply.row, reply.incarnation))
        self._maps_mmap = [
            mmap.mmap(fd, m.length_bytes) for fd, m in zip(region_fds, self.maps, strict=True)
        ]
        for fd in (table_fd, *region_fds):
            os.close(fd)
        del fds[:-1]
        self._regions = [memoryview(region) for region in self._maps_mmap]
        self.aux = AuxRows(self._regions, self.maps)
        identity = f"{reply.instance}-e{reply.row}.{reply.incarnation}".encode()
        self._mailbox = Mailbox(identity, self.table.count)
        try:
            self._mailbox.link(LISTENER, reply.listener)
            for rank, endpoint in enumerate(reply.workers):
                self._mailbox.link(f"worker{rank}", endpoint)
        except NoDescriptors:
            self._mailbox.close()
            raise
        self._listener_row = reply.listener_row
        self._worker_rows = reply.worker_rows
        self._rooms: dict[int, KVRoom] = {}
        self._seen_listener = self.table.incarnation(self._listener_row)
        self._seen_workers = [self.table.incarnation(row) for row in self._worker_rows]
        self._names = random.Random(secrets.randbits(64))  # of uses of room ids
        self._upkeep_ns = self._renewed_ns = 0
        self._desk = Desk(
            self.table,
            self._mailbox,
            clock,
            self.instance,
            self._mailbox.flush,
            self._forget,
            self._worker,
            to_ns(reply.resend_s),
        )

    @classmethod
    def attach(cls, address: str, *, name: str, clock: Clock = monotonic_ns) -> KVManager:
        """Attach to the runtime at a Unix socket ("@..." is abstract).  Raises AttachFailed."""
        request = AttachRequest(kind="engine", name=name)
        reply, fds, connection = attaching.request(address, request)
        try:
            return cls(reply, fds, connection, clock)
        except (OSError, ValueError, NoDescriptors) as error:  # no room to map what we were given
            connection.close()
            for fd in fds:  # that are not mapped and closed already
                os.close(fd)
            raise AttachFailed(f"{address}: {error}") from error

    @property
    def role(self) -> Role:
        return self.table.role

    @property
    def layout(self) -> Layout:
        return self.maps[0].layout

    @property
    def actor_rows(self) -> dict[str, int]:
        """Rows of the processes this engine depends on, by name."""
        workers = {f"worker{rank}": row for rank, row in enumerate(self._worker_rows)}
        return {"listener": self._listener_row, **workers}

    def kv(self, rank: int) -> memoryview:
        """The pages of a rank: pages_count * page_bytes writable bytes that its worker maps too."""
        return self._regions[rank][: self.maps[rank].aux_offset]

    def digest(self, pages: NDArray[np.int32]) -> int:
        """Of the KV in these pages, over all ranks; for AuxRow.digest."""
        return kv_digest(self._regions, self.maps, pages)

    def sender(self, room: int) -> KVSender:
        """Prefill's half of a room.  Raises RoomInUse, TableFull, BadRequest."""
        handles = self._open(room)
        sender = KVSender(room, handles, self._desk)
        self._rooms[room] = sender
        for rank, handle in enumerate(handles):
            self._mailbox.post(LISTENER, Opened(room, rank, handle.slot, handle.generation))
        return sender  # Opened leaves with the first chunk or the next tick

    def receiver(self, room: int, peer: str) -> KVReceiver:
        """Decode's half of a room; `peer` is prefill's "host:bootstrap_port".  Raises RoomInUse,
        TableFull, BadRequest."""
        if not is_place(peer):
            raise BadRequest(f"bootstrap address {peer[:PEER_CHARS_MAX]!r} is not host:port")
        handles = self._open(room)
        self._rooms[room] = receiver = KVReceiver(room, handles, self._desk, peer)
        return receiver

    def decline(self, room: int, peer: str = "") -> None:
        """Say that nobody here will open this room, so that the peer's half need not wait for it;
        `peer` as for `receiver`.  Nothing happens while the room is open here."""
        unknown = self.role is Role.DECODE and not is_place(peer)
        if room in self._rooms or unknown or not 0 <= room <= ROOM_MAX:
            return
        for rank in range(self.layout.ranks):
            generation = secrets.randbits(32)  # stands for the handle that there is not
            declined = Declined(room, rank, generation, Reason.PEER_REFUSED, peer)
            self._mailbox.post(LISTENER, declined)
        self._mailbox.flush()

    def _open(self, room: int) -> list[Handle]:
        if not 0 <= room <= ROOM_MAX:
            raise BadRequest(f"room {room} is not an integer from 0 to 2**63 - 1")
        if room in self._rooms:
            raise RoomInUse(room)
        now_ns = self._clock()
        use = self._names.getrandbits(40) or 1 if self.role is Role.PREFILL else 0
        with contextlib.ExitStack() as undo:
            handles = []
            for rank in range(self.layout.ranks):
                handle = self.table.open(room, rank, now_ns=now_ns, use=use)
                undo.callback(self._unopen, handle)
                handles.append(handle)
            undo.pop_all()
        return handles

    def _unopen(self, handle: Handle) -> None:
        self.table.discard(handle.slot, handle.generation)

    def _forget(self, room: int) -> None:
        self._rooms.pop(room, None)

    def _worker(self, rank: int) -> Owner:
        row = self._worker_rows[rank]
        return Owner(row, self.table.incarnation(row))

    def together(self) -> AbstractContextManager[None]:
        """What the rooms touched in this block have to say leaves at its end, in one frame an
        addressee: for a loop that serves many rooms in one go."""
        return self._mailbox.together()

    def tick(self) -> None:
        """Once a loop iteration.  Cheap: does its work every 20 ms."""
        now_ns = self._clock()
        self._mailbox.flush(now_ns)
        if now_ns - self._upkeep_ns < UPKEEP_NS:
            return
        self._upkeep_ns = now_ns
        self.table.beat(now_ns)
        self._drain_wake()
        listener = self.table.incarnation(self._listener_row)
        # Incarnation 0 is a dead process whose successor is not there yet.
        new_listener = listener not in (0, self._seen_listener)
        self._seen_listener = listener or self._seen_listener
        new_workers = []
        for rank, row in enumerate(self._worker_rows):
            incarnation = self.table.incarnation(row)
            if incarnation not in (0, self._seen_workers[rank]):
                self._seen_workers[rank] = incarnation
                new_workers.append(rank)
        renew = now_ns - self._renewed_ns >= RENEW_NS
        if renew:
            self._renewed_ns = now_ns
        if new_listener:
            self._desk.say_again(now_ns)
        for room in list(self._rooms.values()):
            if renew:
                room.renew_queued(now_ns)
            if isinstance(room, KVReceiver):
                sent = room.resend(now_ns, restarted=new_listener)
            else:
                assert isinstance(room, KVSender)
                sent = sum(room.resend(now_ns, rank=rank) for rank in new_workers) > 0
                sent |= room.resend(now_ns, rank=None)
            if sent:
                self.table.count(Counter.RESENDS)
        self._mailbox.receive(0)  # nothing is addressed to us; keeps the pipes from filling
        self._mailbox.flush(now_ns)

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)

    def wait_quiet(self, timeout_s: float, *, pause: Callable[[float], object]) -> bool:
        """At engine start: wait until the rooms of a dead predecessor in our row are cleared, since
        bytes may still land in their pages.  False if some are left after `timeout_s`."""
        deadline_ns = self._clock() + to_ns(timeout_s)
        mine = self.table.me.incarnation & INCARNATION_MASK
        while self.table.slots_opened_by(self.table.me.row, but=mine):
            if self._clock() > deadline_ns:
                return False
            self.table.beat(self._clock())
            pause(0.01)
        return True

    def close(self) -> None:
        """Abort what is open and let go of the runtime."""
        for room in list(self._rooms.values()):
            room.abort()
        self._mailbox.flush()
        self._mailbox.close()
        self.table.close()
        del self.aux
        for region in self._regions:
            with contextlib.suppress(BufferError):  # the engine still holds a view of it
                region.release()
        for mapped in self._maps_mmap:
            with contextlib.suppress(BufferError):
                mapped.close()
        os.close(self.wake_fd)
        self._connection.close()
