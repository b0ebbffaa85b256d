"""TransferWorker: owns the region of one rank and moves its bytes.

Prefill's worker takes chunks from its engine and destinations from its listener, writes, and gives
the verdict.  Decode's worker only keeps its region reachable.  A room's life here:

    Chunk, Destination (any order) -> write ... write (last, with the aux row) -> all DONE ->
    Success, then `Landed` to decode's listener until it answers

    Failed by anybody -> release, fence -> quiet, then `Fenced` to our listener

A write is posted only after the room was moved to Transferring, so a room that failed before that
move is quiet at once and stays untouched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial

from msgspec.structs import replace

from pdrt import failpoints
from pdrt.actors.base import BUSY_MS, IDLE_MS, Beating, Throttle
from pdrt.actors.moving import Room
from pdrt.actors.news import News
from pdrt.actors.paths import LISTENER, Path, Paths, tables
from pdrt.actors.taken import Taken
from pdrt.clock import MILLISECOND_NS, Clock
from pdrt.config import Timeouts
from pdrt.errors import QueueFull
from pdrt.mail.mailbox import Address, Postman
from pdrt.protocol.codec import Malformed
from pdrt.protocol.counters import Counter
from pdrt.protocol.layout import RegionMap
from pdrt.protocol.messages import (
    AnyMessage,
    Chunk,
    Deliver,
    Ended,
    Fenced,
    NewsTaken,
    PeerGone,
    PeerUp,
    Recall,
    WorkerUp,
    detail_of,
)
from pdrt.protocol.states import OPEN, Event, KVPoll, Reason
from pdrt.shm_status import Handle, StatusTable
from pdrt.transports.base import TransferState, Transport, TransportError

SPINS = 200  # polls without sleep after a room's last progress; then a millisecond at a time
# In one call of a transport, which may copy it all before it returns: far below what would make us
# look hung.  Progress is seen, and renews the deadline, piece by piece.
WRITE_BYTES_MAX = 8 << 20
WRITES_A_BEAT = 8  # a look at a room may be a write of so many
CHECK_NS = 20 * MILLISECOND_NS
ANNOUNCE_NS = 250 * MILLISECOND_NS
REFUSED = TransportError, QueueFull

log = logging.getLogger("pdrt.worker")


class TransferWorker:
    def __init__(
        self,
        *,
        region: RegionMap,
        transports: Mapping[str, tuple[Transport, bytes]],
        preferred: str,
        table: StatusTable,
        mailbox: Postman,
        timeouts: Timeouts,
        clock: Clock,
        wake: Callable[[int], None],
        listener_row: int,
        beating: Beating,
    ) -> None:
        """`transports`: name -> (opened transport, its metadata).  `wake(row)` nudges an engine.
        The mailbox has a link named "listener", whose process has `listener_row`."""
        self._listener_row = listener_row
        self._beating = beating
        self._listener = 0  # incarnation that was told last that we are up
        # Under which we began; 0: there was no worker before us.  None: no listener was there yet.
        began = table.incarnation(listener_row) or None
        self._since = 0 if table.me.incarnation == 1 else began
        self._region = region
        self._write_pages_max = max(1, WRITE_BYTES_MAX // region.page_bytes)
        self._clock = clock  # a write may copy for long before it returns
        self._transports = {name: transport for name, (transport, _) in transports.items()}
        self._offers = {name: metadata for name, (_, metadata) in transports.items()}
        self._table = table
        self._mailbox = mailbox
        self._wake = wake
        self._local = {
            name: transport.prepare(None, tables(region, region.pages_count, region.aux_rows))
            for name, transport in self._transports.items()
        }
        self._paths = Paths(
            region=region, transports=self._transports, preferred=preferred, mailbox=mailbox
        )
        self._news = News(table, mailbox, timeouts, beating)
        self._taken = Taken(partial(table.count, Counter.FORGOTTEN))
        self._rooms: dict[int, Room] = {}  # by slot
        self._active: dict[int, Room] = {}  # those with something in flight, or ending
        self._announced_ns = self._checked_ns = 0
        self._may_log = Throttle()

    # --- messages --------------------------------------------------------------------------------

    def handle(self, sender: Address, message: AnyMessage, now_ns: int) -> None:
        match message:
            case Chunk():
                self._on_chunk(message, now_ns)
            case Deliver():
                self._on_deliver(message, now_ns)
            case NewsTaken():
                self._news.taken(sender, message)
            case Recall():
                self._on_recall(message)
            case Ended():
                room = self._rooms.get(message.slot)
                if room is not None and room.handle.generation == message.generation:
                    self._check(room, now_ns)
            case PeerUp():
                self._lose(self._paths.up(message), now_ns)
            case PeerGone():
                self._lose(self._paths.gone(message.instance), now_ns)
            case _:
                self._table.count(Counter.LATE)

    def _room(self, room: int, slot: int, generation: int) -> Room | None:
        """Our record of an open room, made on first mention; None if the room is over.

        So is one that our dead predecessor moved: its bytes may still land, and nobody who begins
        anew could say when they have.  The sweep ends it."""
        known = self._rooms.get(slot)
        if known is not None and known.handle.generation == generation:
            return known
        word = self._table.read(slot, generation)
        moving = word is not None and word.state is KVPoll.Transferring
        if word is None or word.state not in OPEN or (moving and word.owner != self._table.me):
            self._table.count(Counter.LATE)
            return None
        # A live newer generation in the slot proves the older room quiet and cleared.
        self._active.pop(slot, None)
        use = self._table.use(slot, generation)
        self._rooms[slot] = fresh = Room(Handle(room, slot, generation), use)
        return fresh

    def _on_chunk(self, chunk: Chunk, now_ns: int) -> None:
        room = self._room(chunk.room, chunk.slot, chunk.generation)
        if room is None:
            return
        if chunk.index == room.next_index and not room.ending:
            room.chunks.append(chunk)
            room.next_index += 1
        failpoints.hit("worker.chunk.before_taken")
        # An older index is a repeat, a newer one follows a lost one: either way, say what we have.
        self._table.set_taken(chunk.slot, chunk.generation, room.next_index)
        self._post(room, now_ns)

    def _on_deliver(self, deliver: Deliver, now_ns: int) -> None:
        destination = deliver.destination
        room = self._room(destination.room, deliver.slot, deliver.generation)
        if room is None:
            return
        if not self._taken.take(destination, room.handle, room.use):
            self._fault(room, Reason.PEER_LOST, now_ns)
            return
        if room.destination is not None:
            # Sent again, perhaps by another listener; bytes of one room go to one place.
            before = room.destination
            if before != replace(destination, session=before.session, first=before.first):
                self._fault(room, Reason.PEER_LOST, now_ns)
            return
        room.destination = destination
        failpoints.hit("worker.deliver.before_post")
        self._post(room, now_ns)

    def _on_recall(self, recall: Recall) -> None:
        if self._since is None:
            self._since = self._table.incarnation(self._listener_row) or None
        if self._since is not None:
            self._mailbox.post(LISTENER, self._taken.recall(recall, self._since))

    # --- peers -----------------------------------------------------------------------------------

    def _lose(self, path: Path | None, now_ns: int) -> None:
        """The agent is gone or was replaced: its rooms fail."""
        if path is not None:
            lost = [r for r in self._beating(self._rooms.values()) if r.path is path]
            for room in self._beating(lost):
                self._fault(room, Reason.PEER_LOST, now_ns)

    # --- writing ---------------------------------------------------------------------------------

    def _post(self, room: Room, now_ns: int) -> None:
        """Post every chunk that can go now: its destination is known and the peer is warm."""
        destination = room.destination
        if destination is None or not room.chunks or room.ending:
            return
        path = self._paths.get(destination.instance)
        if path is None or path.agent.epoch != destination.agent_epoch or not path.reported:
            return  # not introduced yet; the room's deadline bounds the wait
        if path.transport is None:
            self._fault(room, Reason.TRANSPORT_FAILED, now_ns)
            return
        room.path = path
        handle, me = room.handle, self._table.me
        self._active[handle.slot] = room
        room.still_turns = 0
        while room.chunks:
            chunk = room.chunks[0]
            end, room_end = chunk.start + len(chunk.pages) // 4, len(destination.pages) // 4
            if end > room_end or (chunk.last and end < room_end):  # no page may keep old bytes
                self._fault(room, Reason.BAD_DESTINATION, now_ns)
                return
            if not self._table.move(*handle[1:], Event.CHUNK_POSTED, now_ns=now_ns, owner=me):
                self._check(room, now_ns)
                return
            try:
                room.queue(chunk, self._region, self._write_pages_max)
            except Exception as error:
                self._give_up(room, error, now_ns)
                return
            del room.chunks[0]  # now: whatever goes wrong above, Success must not come without it
        failpoints.hit("worker.post.after_move")
        self._advance(room, now_ns)

    def _write(self, room: Room, path: Path, transport: Transport, now_ns: int) -> None:
        """Post the next piece.  One in a turn, so that others need not wait for all of them."""
        piece = room.pieces.popleft()
        try:
            local = self._local[transport.name]
            posted = transport.write(path.name, local, piece.local, path.remote, piece.remote)
        except Exception as error:
            # If it was refused, nothing was posted; what nobody foresaw may have moved bytes.
            room.broken = not isinstance(error, REFUSED)
            self._give_up(room, error, now_ns)
            return
        room.inflight.append((posted, piece.length_bytes))
        room.broken = True  # unless we get to the end
        failpoints.hit("worker.write.after_post")
        room.broken = False

    def _give_up(self, room: Room, error: Exception, now_ns: int) -> None:
        """Its bytes cannot go.  Whatever the cause, peers' numbers among them: a room that stayed
        would be tried again in `tick`, where what raises ends us and all that we move (law 8)."""
        if not isinstance(error, REFUSED):
            self._table.count(Counter.MALFORMED, 1, Malformed.VALUE)
        if self._may_log(now_ns):
            log.warning("room=%d write refused: %r", room.handle.room, error)
        self._table.set_detail(room.handle.slot, detail_of(error))
        self._fault(room, Reason.TRANSPORT_FAILED, now_ns)

    def _advance(self, room: Room, now_ns: int) -> bool:
        """Post what comes next, see what has landed; give the verdict when all has.  True if
        something moved."""
        assert room.path is not None
        assert room.path.transport is not None
        transport, handle = room.path.transport, room.handle
        moved = bool(room.pieces) and not room.broken
        if moved:
            self._write(room, room.path, transport, now_ns)
            if room.ending:
                return True
        landed = room.follow_writes(transport)
        if room.broken:
            self._fault(room, Reason.TRANSPORT_FAILED, now_ns)
        elif landed:
            self._table.set_moved(handle.slot, handle.generation, room.moved_bytes)
            if room.inflight or room.pieces or not room.last_queued:
                self._table.renew_state(handle.slot, handle.generation, now_ns)
        if not room.inflight and not room.pieces and not room.ending:
            self._active.pop(handle.slot, None)
            if room.last_queued:
                self._conclude(room, now_ns)
        return moved or landed

    def _conclude(self, room: Room, now_ns: int) -> None:
        handle, path = room.handle, room.path
        assert path is not None
        failpoints.hit("worker.landed.before_verdict")
        landed_ns = self._clock()
        if not self._table.move(handle.slot, handle.generation, Event.LANDED, now_ns=landed_ns):
            self._check(room, now_ns)
            return
        failpoints.hit("worker.verdict.before_news")
        del self._rooms[handle.slot]
        self._table.count(Counter.BYTES_MOVED, room.moved_bytes)
        self._table.count(Counter.CHUNKS_MOVED, room.chunks_moved)
        self._news.tell(path.link, room.landed(), now_ns)
        self._tell_end(room, failed=False)

    # --- ending ----------------------------------------------------------------------------------

    def _fault(self, room: Room, reason: Reason, now_ns: int) -> None:
        handle = room.handle
        if self._table.move(*handle[1:], Event.FAULT, now_ns=now_ns, reason=reason):
            failpoints.hit("worker.fault.before_tell")
            self._tell_end(room, failed=True, reason=reason)
        self._check(room, now_ns)

    def _tell_end(self, room: Room, *, failed: bool, reason: Reason = Reason.NONE) -> None:
        id_, slot, generation = room.handle
        ended = Ended(slot, generation, failed, reason, room=id_, rank=self._region.rank)
        self._mailbox.post(LISTENER, ended, lazy=not failed)
        self._wake(self._table.opener_row(slot))

    def _check(self, room: Room, now_ns: int) -> None:
        """Has somebody ended the room?  Then make it quiet."""
        handle = room.handle
        if room.ending or self._rooms.get(handle.slot) is not room:
            return
        if self._table.poll(handle.slot, handle.generation, now_ns) in OPEN:
            return
        word = self._table.read(handle.slot, handle.generation)
        room.ending = True
        room.chunks.clear()
        room.pieces.clear()
        if word is None or word.quiet or word.state is KVPoll.Success:
            self._drop(room)
        elif not room.inflight and not room.broken:
            self._settle(room, fenced=True)
        else:
            self._active[handle.slot] = room
            self._start_fence(room)

    def _start_fence(self, room: Room) -> None:
        assert room.path is not None
        assert room.path.transport is not None
        try:
            room.fence = room.path.transport.fence(room.path.name)
            failpoints.hit("worker.fence.posted")
            self._table.count(Counter.FENCES)
        except REFUSED:
            room.fence = None  # the path is gone: wait for the writes themselves to end

    def _quieten(self, room: Room) -> bool:
        """Follow the fence of an ending room.  True when it is over."""
        assert room.path is not None
        assert room.path.transport is not None
        fence = room.follow_fence(room.path.transport)
        if fence is TransferState.PENDING:
            return False
        # Without one, what landed at the peer stays unknown: it is not told that the room is quiet.
        self._settle(room, fenced=fence is TransferState.DONE)
        return True

    def _settle(self, room: Room, *, fenced: bool) -> None:
        handle = room.handle
        failpoints.hit("worker.fence.before_quiet")
        self._table.set_quiet(handle.slot, handle.generation)
        failpoints.hit("worker.fence.before_fenced")
        if fenced:
            self._taken.end(room.destination)
            self._mailbox.post(LISTENER, Fenced(handle.slot, handle.generation))
        self._wake(self._table.opener_row(handle.slot))
        self._drop(room)

    def _drop(self, room: Room) -> None:
        slot = room.handle.slot
        self._active.pop(slot, None)
        if self._rooms.get(slot) is room:
            del self._rooms[slot]

    # --- time ------------------------------------------------------------------------------------

    def tick(self, now_ns: int) -> int:
        for room in self._beating(list(self._active.values())):
            moved = self._quieten(room) if room.ending else self._advance(room, now_ns)
            room.still_turns = 0 if moved else room.still_turns + 1
        if opened := {path.instance for path in self._paths.take_open()}:
            for room in self._beating(list(self._rooms.values())):
                if room.destination is not None and room.destination.instance in opened:
                    self._post(room, now_ns)
        for transport in self._transports.values():
            transport.progress()
        if now_ns - self._checked_ns >= CHECK_NS:
            self._checked_ns = now_ns
            for room in self._beating(list(self._rooms.values())):
                self._check(room, now_ns)
                self._post(room, now_ns)  # if the message that made it possible was dropped midway
            self._news.repeat(now_ns)
            self._paths.let_go({room.path for room in self._beating(self._active.values())}, now_ns)
        listener = self._table.incarnation(self._listener_row)
        if now_ns - self._announced_ns >= ANNOUNCE_NS or listener not in (0, self._listener):
            self._announced_ns, self._listener = now_ns, listener or self._listener
            up = WorkerUp(self._region.rank, self._table.me.incarnation, self._offers)
            self._mailbox.post(LISTENER, up)
        if not self._active and not self._paths.connecting:
            return BUSY_MS if self._rooms or self._news else IDLE_MS
        active = self._beating(self._active.values())
        return 0 if any(room.still_turns < SPINS for room in active) else 1

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()
