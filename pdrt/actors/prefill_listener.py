"""PrefillListener: prefill's half of the bootstrap.  Decodes introduce themselves here, send their
destinations, and hear of rooms that failed.

It owns no room: what it knows of rooms it reads from the table, and what it knows of decodes they
repeat when asked (`Resync`).  So killing it costs nothing but the time to start another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from pdrt.actors.decodes import Decode, Decodes, worker_link
from pdrt.clock import MILLISECOND_NS, to_ns
from pdrt.config import Timeouts
from pdrt.mailbox import Address, Postman
from pdrt.protocol.counters import Counter
from pdrt.protocol.layout import Layout
from pdrt.protocol.messages import (
    Abort,
    AbortTaken,
    AnyMessage,
    Deliver,
    Destination,
    DestinationTaken,
    Ended,
    Expect,
    Fenced,
    Heartbeat,
    Hello,
    Introduction,
    Landed,
    Opened,
    PeerWarm,
    WorkerUp,
)
from pdrt.protocol.peers import instance_digest, transport_code
from pdrt.protocol.states import OPEN, TERMINAL, Event, KVPoll, Reason
from pdrt.shm_status import STATE_MASK, Handle, StatusTable

SCAN_NS = 20 * MILLISECOND_NS
MEMORY_MAX = 65536  # early destinations, tombstones and past successes, each

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class Room:
    """What is known of one rank of a room of our table."""

    handle: Handle
    rank: int
    instance: str = ""  # of the decode that waits for it
    slot: int = -1  # decode's handle
    generation: int = 0
    destination: Destination | None = None
    failed: bool = False
    fenced: bool = False  # our worker says that nothing can land at decode any more
    reason: Reason = Reason.NONE
    told_quiet: bool = False
    abort_due_ns: int = 0  # 0: no abort waits for its acknowledgement
    abort_until_ns: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return self.handle.room, self.rank


class PrefillListener:
    def __init__(
        self,
        *,
        instance: str,
        boot_id: str,
        layout: Layout,
        table: StatusTable,
        mailbox: Postman,
        timeouts: Timeouts,
        wake: Callable[[int], None],
    ) -> None:
        """The mailbox has a link to every worker (`worker_link`).  `wake(row)` nudges an engine."""
        self._instance = instance
        self._layout = layout
        self._table = table
        self._mailbox = mailbox
        self._timeouts = timeouts
        self._wake = wake
        self._decodes = Decodes(
            instance=instance,
            boot_id=boot_id,
            layout=layout,
            table=table,
            mailbox=mailbox,
            timeouts=timeouts,
        )
        self._rooms: dict[int, Room] = {}  # by slot
        self._by_id: dict[tuple[int, int], Room] = {}  # (room, rank), while they have no verdict
        self._failing: dict[Handle, Room] = {}  # failed, and decode has yet to know all of it
        self._early: OrderedDict[tuple[int, int], Destination] = OrderedDict()
        self._tombstones: OrderedDict[tuple[int, int], Abort] = OrderedDict()
        self._successes: OrderedDict[tuple[str, int, int], Landed] = OrderedDict()
        self._scanned_ns = 0

    # --- messages --------------------------------------------------------------------------------

    def handle(self, sender: Address, message: AnyMessage, now_ns: int) -> None:
        match message:
            case Destination():
                self._on_destination(sender, message, now_ns)
            case Opened():
                handle = Handle(message.room, message.slot, message.generation)
                self._adopt(handle, message.rank, now_ns)
            case Ended():
                self._on_ended(message, now_ns)
            case Fenced():
                self._on_fenced(message, now_ns)
            case Heartbeat():
                self._on_heartbeat(sender, message, now_ns)
            case Abort():
                self._on_abort(sender, message, now_ns)
            case AbortTaken():
                self._on_abort_taken(message)
            case Expect():
                self._on_expect(sender, message)
            case Hello():
                self._decodes.hello(sender, message, now_ns)
            case Introduction():
                self._decodes.introduce(sender, message, now_ns)
            case PeerWarm():
                self._decodes.warmed(message)
            case WorkerUp():
                if self._decodes.worker_up(message.rank, message.epoch):
                    for room in self._rooms.values():
                        if room.rank == message.rank:
                            self._deliver(room)
            case _:
                self._table.count(Counter.LATE)

    def _on_heartbeat(self, sender: Address, beat: Heartbeat, now_ns: int) -> None:
        if self._decodes.beat(sender, beat.instance, beat.epoch, now_ns) is None:
            return
        waiting = np.frombuffer(beat.rooms[: len(beat.rooms) // 8 * 8], dtype="<u8")
        for room_id in waiting.tolist():
            for rank in range(self._layout.ranks):
                room = self._by_id.get((room_id, rank))
                if room is not None and room.destination is None:
                    self._table.renew_state(room.handle.slot, room.handle.generation, now_ns)
        served = [
            (room.slot, room.generation)
            for room in self._by_id.values()
            if room.instance == beat.instance and room.destination is not None
        ]
        rooms = np.array(served, dtype="<u8").tobytes()
        epoch = self._table.me.incarnation
        self._mailbox.post(sender, Heartbeat(self._instance, epoch, rooms))

    # --- a room and its destination meet ---------------------------------------------------------

    def _adopt(self, handle: Handle, rank: int, now_ns: int) -> None:
        """Take note of a room that is open in the table."""
        known = self._rooms.get(handle.slot)
        if known is not None:
            if known.handle == handle:
                return
            self._look(known, now_ns)
        word = self._table.read(handle.slot, handle.generation)
        if word is None or word.state not in OPEN or rank >= self._layout.ranks:
            return
        room = self._rooms[handle.slot] = self._by_id[handle.room, rank] = Room(handle, rank)
        early = self._early.pop(room.key, None)
        tombstone = self._tombstones.pop(room.key, None)
        if early is not None:
            self._match(room, early, now_ns)
        elif tombstone is not None and tombstone.instance:
            self._fault(room, Reason.PEER_ABORTED, now_ns)

    def _on_destination(self, sender: Address, destination: Destination, now_ns: int) -> None:
        decode = self._decodes.get(destination.instance)
        if decode is None:
            self._decodes.resync(sender)
            return
        key = (destination.room, destination.rank)
        room = self._by_id.get(key)
        reason = self._refusal(destination, decode)
        if room is None and reason is Reason.NONE:
            if self._past(sender, destination):
                return
            if len(self._early) >= MEMORY_MAX:
                reason = Reason.PEER_REFUSED
        if reason is not Reason.NONE:
            if room is not None and room.destination is None:
                self._fault(room, reason, now_ns)
            self._mailbox.post(sender, self._abort_for(destination, reason, quiet=True))
            return
        if room is None:
            self._early[key] = destination
        else:
            self._match(room, destination, now_ns)
        taken = DestinationTaken(destination.slot, destination.generation)
        self._mailbox.post(sender, taken)

    @staticmethod
    def _refusal(destination: Destination, decode: Decode) -> Reason:
        """Pages or aux row that the decode's own introduction does not have?"""
        agent = decode.agent(destination.rank)
        if agent is None or len(destination.pages) % 4 or destination.aux_index >= agent.aux_rows:
            return Reason.BAD_DESTINATION
        pages = np.frombuffer(destination.pages, dtype="<i4")
        if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < agent.pages_count:
            return Reason.BAD_DESTINATION
        return Reason.NONE

    @staticmethod
    def _abort_for(asked: Destination | Expect, reason: int, *, quiet: bool) -> Abort:
        return Abort(
            asked.room, asked.rank, asked.slot, asked.generation, asked.instance, reason, quiet
        )

    def _match(self, room: Room, destination: Destination, now_ns: int) -> None:
        if room.destination is not None:
            return
        handle = room.handle
        decode = self._decodes.get(destination.instance)
        room.destination, room.instance = destination, destination.instance
        room.slot, room.generation = destination.slot, destination.generation
        self._table.set_path(
            handle.slot,
            transport_code(decode.transport(destination.rank) if decode is not None else ""),
            instance_digest(destination.instance),
        )
        if self._table.move(handle.slot, handle.generation, Event.PEER_KNOWN, now_ns=now_ns):
            self._deliver(room)
            self._wake(self._table.opener_row(handle.slot))
        else:
            self._look(room, now_ns)

    def _deliver(self, room: Room) -> None:
        if room.destination is not None and not room.failed:
            handle = room.handle
            deliver = Deliver(handle.slot, handle.generation, room.destination)
            self._mailbox.post(worker_link(room.rank), deliver)

    # --- decode asks, decode gives up ------------------------------------------------------------

    def _past(self, sender: Address, asked: Destination | Expect) -> bool:
        """Answer for a room that is over here.  False if nothing is remembered of it."""
        key = (asked.room, asked.rank)
        landed = self._successes.get((asked.instance, asked.slot, asked.generation))
        if landed is not None:
            self._mailbox.post(sender, landed)
            return True
        tombstone = self._tombstones.get(key)
        if tombstone is None:
            return False
        theirs = tombstone.slot, tombstone.generation
        if tombstone.instance == asked.instance and theirs != (asked.slot, asked.generation):
            del self._tombstones[key]  # decode gave that one up and uses the id again
            return False
        self._mailbox.post(sender, self._abort_for(asked, tombstone.reason, quiet=True))
        return True

    def _on_expect(self, sender: Address, expect: Expect) -> None:
        key = (expect.room, expect.rank)
        room = self._by_id.get(key)
        if room is not None:
            if not room.instance:
                room.instance = expect.instance
                room.slot, room.generation = expect.slot, expect.generation
            return
        mine = expect.slot, expect.generation, expect.instance
        if self._past(sender, expect) or not expect.sent or key in self._early:
            return
        if not any((r.slot, r.generation, r.instance) == mine for r in self._failing.values()):
            # We took its destination once and do not know the room: it is over, how is forgotten.
            self._mailbox.post(sender, self._abort_for(expect, Reason.PEER_LOST, quiet=False))

    def _on_abort(self, sender: Address, abort: Abort, now_ns: int) -> None:
        self._table.count(Counter.ABORTS_TAKEN)
        key = (abort.room, abort.rank)
        early = self._early.get(key)
        if early is not None and early.instance == abort.instance:
            del self._early[key]
        room = self._by_id.get(key)
        quiet = True
        if room is not None and (room.destination is None or room.generation == abort.generation):
            room.instance = abort.instance
            room.slot, room.generation = abort.slot, abort.generation
            self._fault(room, Reason.PEER_ABORTED, now_ns, tell=False)
            quiet = room.told_quiet
        elif failing := [r for r in self._failing.values() if r.key == key]:
            quiet = all(self._is_quiet(r) for r in failing)
        elif (abort.instance, abort.slot, abort.generation) not in self._successes:
            self._remember(self._tombstones, key, abort)
        self._mailbox.post(
            sender,
            AbortTaken(*key, abort.slot, abort.generation, abort.instance, quiet),
        )

    # --- a room ends -----------------------------------------------------------------------------

    def _fault(self, room: Room, reason: Reason, now_ns: int, *, tell: bool = True) -> None:
        """End a room; the peer is told unless it was the one who said so."""
        handle = room.handle
        if self._table.move(
            handle.slot, handle.generation, Event.FAULT, now_ns=now_ns, reason=reason
        ):
            self._wake(self._table.opener_row(handle.slot))
        self._look(room, now_ns, tell=tell)

    def _on_ended(self, ended: Ended, now_ns: int) -> None:
        room = self._rooms.get(ended.slot)
        if room is None or room.handle.generation != ended.generation:
            return
        if self._table.read(ended.slot, ended.generation) is not None:
            self._look(room, now_ns)
        elif ended.failed:  # cleared already
            room.fenced |= ended.untouched
            self._fail(room, Reason(ended.reason), now_ns)
        else:
            self._succeed(room)

    def _on_fenced(self, fenced: Fenced, now_ns: int) -> None:
        for room in [*self._failing.values(), *filter(None, [self._rooms.get(fenced.slot)])]:
            if (room.handle.slot, room.handle.generation) == (fenced.slot, fenced.generation):
                room.fenced = True
                self._look(room, now_ns)
                if room.failed and not room.told_quiet:
                    self._tell(room, now_ns)

    def _look(self, room: Room, now_ns: int, *, tell: bool = True) -> None:
        """Read the truth about a room."""
        word = self._table.read(room.handle.slot, room.handle.generation)
        if word is None:
            # Cleared, so it was quiet; the message that says how it ended is on its way, or lost
            # with the listener before us, and then decode will ask.
            self._leave(room)
        elif word.state is KVPoll.Success:
            self._succeed(room)
        elif word.state is KVPoll.Failed and not room.failed:
            self._fail(room, word.reason, now_ns, tell=tell)

    def _succeed(self, room: Room) -> None:
        self._leave(room)
        if room.destination is not None:
            handle, destination = room.handle, room.destination
            moved_bytes = self._table.moved_bytes(handle.slot, handle.generation)
            key = (destination.instance, destination.slot, destination.generation)
            landed = Landed(
                handle.room, room.rank, destination.slot, destination.generation, moved_bytes, 0
            )
            self._remember(self._successes, key, landed)

    def _fail(self, room: Room, reason: Reason, now_ns: int, *, tell: bool = True) -> None:
        room.failed, room.reason = True, reason
        room.fenced |= self._is_quiet(room)
        handle = room.handle
        self._leave(room)
        if not room.fenced:
            ended = Ended(handle.slot, handle.generation, failed=True, reason=reason)
            self._mailbox.post(worker_link(room.rank), ended)
        if not room.instance:  # no decode has asked for it yet; one will
            tombstone = Abort(*room.key, -1, 0, "", reason, quiet=True)
            self._remember(self._tombstones, room.key, tombstone)
            return
        room.abort_until_ns = now_ns + to_ns(self._timeouts.quiet_s)
        self._failing[handle] = room
        if tell:
            self._tell(room, now_ns)
        elif room.fenced:
            room.told_quiet = True
            del self._failing[handle]

    def _is_quiet(self, room: Room) -> bool:
        """May decode be told that nothing can land any more?  The table's quiet is about our pages;
        it also follows our worker's death, which is no fence for decode's."""
        if room.destination is None or room.fenced:
            return True
        handle = room.handle
        word = self._table.read(handle.slot, handle.generation)
        if word is None or word.state is not KVPoll.Failed:
            return False
        return self._table.entered_ns(handle.slot)[KVPoll.Transferring] == 0

    def _tell(self, room: Room, now_ns: int) -> None:
        """Tell decode that the room failed; repeated until it says that it knows."""
        decode = self._decodes.get(room.instance)
        if decode is None:
            self._failing.pop(room.handle, None)
            return
        room.told_quiet = room.fenced
        room.abort_due_ns = now_ns + to_ns(self._timeouts.resend_s)
        self._table.count(Counter.ABORTS_SENT)
        self._mailbox.post(
            decode.address,
            Abort(
                *room.key, room.slot, room.generation, room.instance, room.reason, room.told_quiet
            ),
        )

    def _on_abort_taken(self, taken: AbortTaken) -> None:
        for room in list(self._failing.values()):
            mine = room.slot, room.generation, room.instance
            if mine == (taken.slot, taken.generation, taken.instance):
                room.abort_due_ns = 0
                if taken.quiet and room.told_quiet:
                    del self._failing[room.handle]

    def _leave(self, room: Room) -> None:
        """The room has its verdict: it is no longer among the open ones."""
        if self._rooms.get(room.handle.slot) is room:
            del self._rooms[room.handle.slot]
        if self._by_id.get(room.key) is room:
            del self._by_id[room.key]

    @staticmethod
    def _remember(memory: OrderedDict[K, V], key: K, value: V) -> None:
        memory[key] = value
        if len(memory) > MEMORY_MAX:
            memory.popitem(last=False)

    # --- time ------------------------------------------------------------------------------------

    def tick(self, now_ns: int) -> int:
        if now_ns - self._scanned_ns >= SCAN_NS:
            self._scanned_ns = now_ns
            self._scan(now_ns)
            self._repeat(now_ns)
            for decode in self._decodes.take_lost(now_ns):
                for room in [r for r in self._rooms.values() if r.instance == decode.instance]:
                    self._fault(room, Reason.PEER_LOST, now_ns)
                for key in [k for k, d in self._early.items() if d.instance == decode.instance]:
                    del self._early[key]
        return 20

    def _scan(self, now_ns: int) -> None:
        """Hints may be lost; the table is the truth."""
        slots = self._table.live_slots()
        live = set()
        for slot, row in zip(slots.tolist(), self._table.rows(slots).tolist(), strict=True):
            live.add(slot)
            generation, state = row[0] >> 32, row[0] & STATE_MASK
            known = self._rooms.get(slot)
            if known is None or known.handle.generation != generation:
                self._adopt(Handle(row[1], slot, generation), row[5] >> 40, now_ns)
            elif state in TERMINAL:
                self._look(known, now_ns)
        for room in [r for slot, r in self._rooms.items() if slot not in live]:
            self._look(room, now_ns)

    def _repeat(self, now_ns: int) -> None:
        for room in list(self._failing.values()):
            if now_ns >= room.abort_until_ns:
                del self._failing[room.handle]
            elif room.abort_due_ns and now_ns >= room.abort_due_ns:
                self._table.count(Counter.RESENDS)
                self._tell(room, now_ns)
