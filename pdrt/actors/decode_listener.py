"""DecodeListener: decode's half of the bootstrap.  It dials the prefills that receivers name, tells
them where bytes may land, and gives the verdict when they have.

It owns no room.  A restarted one learns the rooms from its engine (receivers repeat themselves to a
new listener) and reads their state from the table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import numpy as np

from pdrt import failpoints
from pdrt.actors.base import BUSY_MS, CONTROL_DOOR, IDLE_MS, Beating
from pdrt.actors.decode_failing import PAUSE_MAX_NS, Failing, Room
from pdrt.actors.landing import Landing
from pdrt.actors.past import Seen
from pdrt.actors.prefills import Prefill, Prefills
from pdrt.clock import MILLISECOND_NS, to_ns
from pdrt.config import Timeouts
from pdrt.mail.knock import Knock
from pdrt.mail.mailbox import Address, Postman
from pdrt.protocol.counters import Counter
from pdrt.protocol.layout import Layout, RegionMap
from pdrt.protocol.messages import (
    Abort,
    AbortTaken,
    AnyMessage,
    Declined,
    Destination,
    DestinationTaken,
    Ended,
    Expect,
    Heartbeat,
    HelloReply,
    Introduced,
    Landed,
    NewsTaken,
    Opened,
    Resync,
    WorkerUp,
)
from pdrt.protocol.peers import instance_digest, transport_code
from pdrt.protocol.states import OPEN, TERMINAL, Event, KVPoll, Reason, told_by_peer
from pdrt.shm_status import STATE_MASK, Handle, StatusTable

SCAN_NS = 20 * MILLISECOND_NS
EXPECT_AFTER_NS = 40 * MILLISECOND_NS  # a room that waits longer than this is mentioned to prefill

log = logging.getLogger("pdrt.listener")


class DecodeListener:
    def __init__(
        self,
        *,
        instance: str,
        boot_id: str,
        control: str,
        layout: Layout,
        maps: tuple[RegionMap, ...],
        table: StatusTable,
        mailbox: Postman,
        timeouts: Timeouts,
        wake: Callable[[int], None],
        nobody_listens: Knock,
        beating: Beating,
    ) -> None:
        """`control` is the host:port that prefill's workers send `Landed` to."""
        self._instance = instance
        self._table = table
        self._mailbox = mailbox
        self._timeouts = timeouts
        self._wake = wake
        self._beating = beating
        self._prefills = Prefills(
            instance=instance,
            boot_id=boot_id,
            control=control,
            layout=layout,
            maps=maps,
            table=table,
            mailbox=mailbox,
            timeouts=timeouts,
            nobody_listens=nobody_listens,
        )
        self._rooms: dict[int, Room] = {}  # by slot
        self._seen = Seen()
        self._failing = Failing(instance, table, mailbox, timeouts, self._prefills, wake, beating)
        self._landing = Landing(instance, table, self._failing, wake)
        self._scanned_ns = self._beaten_ns = 0

    # --- messages --------------------------------------------------------------------------------

    def handle(self, sender: Address, message: AnyMessage, now_ns: int) -> None:
        match message:
            case Opened():
                self._on_opened(message, now_ns)
            case Destination() if sender[0] != CONTROL_DOOR:  # our engine's to say, no peer's
                self._on_destination(message, now_ns)
            case Landed():
                self._on_landed(sender, message, now_ns)
            case DestinationTaken():
                self._on_destination_taken(sender, message, now_ns)
            case Abort():
                self._on_abort(sender, message, now_ns)
            case AbortTaken():
                if message.instance == self._instance:
                    self._failing.taken(sender, message, now_ns)
            case Ended():
                self._on_ended(message, now_ns)
            case Declined():
                self._failing.decline(message, now_ns)
            case WorkerUp():
                self._prefills.worker_up(message, now_ns)
            case HelloReply() | Introduced() | Resync() | Heartbeat():
                self._on_prefill(sender, message, now_ns)
            case _:
                self._table.count(Counter.LATE)

    def _find(self, slot: int, generation: int) -> Room | None:
        room = self._rooms.get(slot)
        return room if room is not None and room.handle.generation == generation else None

    # --- prefills --------------------------------------------------------------------------------

    def _on_prefill(
        self, sender: Address, message: HelloReply | Introduced | Resync | Heartbeat, now_ns: int
    ) -> None:
        prefill = self._prefills.by_link(sender)
        if prefill is None:
            self._table.count(Counter.LATE)
            return
        match message:
            case HelloReply():
                before = prefill.instance
                self._prefills.on_hello_reply(prefill, message, now_ns)
                if before and prefill.instance != before:
                    # The new one knows nothing of them, and cannot say what is quiet.
                    self._fault_all(prefill, Reason.PEER_RESTARTED, now_ns)
                for orphan in self._failing.meet(prefill, self._rooms_of(prefill), now_ns):
                    self._fault(orphan, Reason.PEER_RESTARTED, now_ns, tell=False)
                if prefill.refusal is not Reason.NONE:
                    self._fault_all(prefill, prefill.refusal, now_ns)
            case Introduced():
                if self._prefills.on_introduced(prefill, message, now_ns):
                    self._on_ready(prefill, now_ns)
                elif prefill.refusal is not Reason.NONE:
                    self._fault_all(prefill, prefill.refusal, now_ns)
            case Resync():
                self._prefills.on_resync(prefill, message, now_ns)
            case Heartbeat():
                self._prefills.on_beat(prefill, message, now_ns)
                self._renew(sender, message, now_ns)

    def _renew(self, sender: Address, beat: Heartbeat, now_ns: int) -> None:
        """Prefill still serves these rooms: their wait is for its queue, not for a ghost."""
        pairs = np.frombuffer(beat.rooms[: len(beat.rooms) // 16 * 16], dtype="<u8").reshape(-1, 2)
        slots, generations = pairs[: self._table.rooms_max].T.tolist()  # many times as fast
        for slot, generation in self._beating(zip(slots, generations, strict=True)):
            room = self._find(slot, generation)
            if room is not None:
                room.due_ns = now_ns + PAUSE_MAX_NS
                self._table.renew_state(slot, generation, now_ns)
            else:
                self._failing.disown(sender, slot, generation)

    def _on_ready(self, prefill: Prefill, now_ns: int) -> None:
        for room in self._beating(self._rooms_of(prefill)):
            room.taken = False
            room.due_ns, room.pause_ns = now_ns, 0  # a new listener has yet to hear of it
            self._peer_known(room, prefill, now_ns)
            self._send_destination(room, now_ns)
        in_use = {room.handle.room for room in self._beating(self._rooms.values())}
        self._failing.adopt(prefill, now_ns, in_use)

    def _fault_all(self, prefill: Prefill, reason: Reason, now_ns: int) -> None:
        if replaced := reason is Reason.PEER_RESTARTED:
            self._failing.forget(prefill.peer)
        for room in self._beating(self._rooms_of(prefill)):
            if reason is prefill.refusal:
                self._table.set_detail(room.handle.slot, prefill.detail)
            self._fault(room, reason, now_ns, tell=not replaced)

    def _rooms_of(self, prefill: Prefill) -> list[Room]:
        return [r for r in self._beating(self._rooms.values()) if r.peer == prefill.peer]

    # --- rooms -----------------------------------------------------------------------------------

    def _on_opened(self, opened: Opened, now_ns: int) -> None:
        handle = Handle(opened.room, opened.slot, opened.generation)
        if self._find(opened.slot, opened.generation) is not None:
            return
        state = self._table.state(opened.slot, opened.generation)
        if state is None or state not in OPEN:
            return
        if (older := self._rooms.get(opened.slot)) is not None:
            self._look(older, now_ns)
        self._seen.note(opened.slot, opened.generation)
        whole = state < KVPoll.Transferring
        lead = opened.lead, opened.lead_generation
        room = self._rooms[opened.slot] = Room(handle, opened.rank, opened.peer, lead, whole)
        room.due_ns = now_ns + EXPECT_AFTER_NS
        prefill = self._prefills.dial(opened.peer, now_ns)
        self._failing.inherit(room, prefill)
        if prefill.refusal is not Reason.NONE:
            self._table.set_detail(room.handle.slot, prefill.detail)
            self._fault(room, prefill.refusal, now_ns)
        elif self._failing.is_orphan(handle, prefill):
            self._fault(room, Reason.PEER_RESTARTED, now_ns, tell=False)
        elif prefill.ready:
            self._peer_known(room, prefill, now_ns)

    def _peer_known(self, room: Room, prefill: Prefill, now_ns: int) -> None:
        handle = room.handle
        if self._table.state(handle.slot, handle.generation) is not KVPoll.Bootstrapping:
            return
        code = transport_code(prefill.transport)
        self._table.set_path(*handle[1:], code, instance_digest(prefill.instance))
        failpoints.hit("decode.peer_known.before_move")
        if self._table.move(handle.slot, handle.generation, Event.PEER_KNOWN, now_ns=now_ns):
            self._wake(self._table.opener_row(handle.slot))

    def _on_destination(self, destination: Destination, now_ns: int) -> None:
        room = self._find(destination.slot, destination.generation)
        if room is None:
            self._table.count(Counter.LATE)  # the engine says Opened first, and again if we are new
            return
        if room.destination is None:
            room.destination = destination
            failpoints.hit("decode.destination.before_post")
            self._send_destination(room, now_ns)

    def _send_destination(self, room: Room, now_ns: int) -> None:
        prefill = self._prefills.get(room.peer)
        if room.destination is None or room.failed or prefill is None or not prefill.ready:
            return
        if room.landed is not None:
            return  # its bytes are there; nobody else is to send them
        room.pause_ns = to_ns(self._timeouts.resend_s)
        room.due_ns = now_ns + room.pause_ns
        self._post_destination(room, room.destination, prefill)

    def _post_destination(self, room: Room, destination: Destination, prefill: Prefill) -> None:
        """Only while the room is open: after that, only a fence may follow."""
        if self._table.state(*room.handle[1:]) is not KVPoll.Transferring:
            return
        room.session = room.session or prefill.session
        room.shared |= room.session != prefill.session
        copy = msgspec.structs.replace(destination, session=prefill.session, first=room.first)
        self._mailbox.post(prefill.link, copy)

    def _on_destination_taken(self, sender: Address, taken: DestinationTaken, now_ns: int) -> None:
        if taken.instance != self._instance:
            return
        room = self._find(taken.slot, taken.generation)
        if room is not None:
            room.taken = True
            room.due_ns = now_ns + PAUSE_MAX_NS
            failpoints.hit("decode.taken.before_mark")
            self._table.set_taken(taken.slot, taken.generation, 1)
        else:
            self._failing.disown(sender, taken.slot, taken.generation)

    def _on_landed(self, sender: Address, landed: Landed, now_ns: int) -> None:
        handle = Handle(landed.room, landed.slot, landed.generation)
        room = self._find(*handle[1:])
        prefill = self._prefills.by_link(sender)
        confirmed = prefill is not None and landed.session == prefill.session
        if self._landing.take(landed, room, now_ns, confirmed=confirmed):
            self._mailbox.post(sender, NewsTaken(*handle[1:], landed.instance), lazy=True)
        elif asked := room or self._failing.find(handle):
            self._ask(asked)
        if room is not None:
            self._look(room, now_ns)

    def _on_abort(self, sender: Address, abort: Abort, now_ns: int) -> None:
        """Prefill gave the room up.  The table knows it even if a restart made us forget it."""
        self._table.count(Counter.ABORTS_TAKEN)
        if abort.instance != self._instance:
            return
        slot, generation = abort.slot, abort.generation
        reason = told_by_peer(abort.reason)
        if self._table.move(slot, generation, Event.FAULT, now_ns=now_ns, reason=reason):
            self._wake(self._table.opener_row(slot))
        self._failing.hear(sender, abort)
        room = self._find(slot, generation)
        if room is not None:
            self._look(room, now_ns, tell=False)
        failpoints.hit("decode.abort.before_answer")
        whose = abort.room, abort.rank, abort.slot, abort.generation, abort.instance
        self._mailbox.post(sender, AbortTaken(*whose, abort.quiet))

    # --- a room ends -----------------------------------------------------------------------------

    def _fault(self, room: Room, reason: Reason, now_ns: int, *, tell: bool = True) -> None:
        if self._table.move(*room.handle[1:], Event.FAULT, now_ns=now_ns, reason=reason):
            self._wake(self._table.opener_row(room.handle.slot))
        self._look(room, now_ns, tell=tell)

    def _on_ended(self, ended: Ended, now_ns: int) -> None:
        room = self._find(ended.slot, ended.generation)
        if room is None:
            self._on_unseen(ended, now_ns)
        elif ended.failed:  # it need not be in the table any more, or not for long
            self._fail(room, Reason(ended.reason), now_ns, tell=True)
        else:
            self._leave(room)

    def _on_unseen(self, ended: Ended, now_ns: int) -> None:
        """A room failed that we never saw open: perhaps there was no listener then.  Its prefill is
        told all the same, if the engine names it; else it has only its own deadline."""
        possible = ended.failed and ended.peer and ended.slot < self._table.rooms_max
        if not possible or not self._seen.is_news(ended.slot, ended.generation):
            return
        self._prefills.dial(ended.peer, now_ns)
        room = Room(Handle(ended.room, ended.slot, ended.generation), ended.rank, ended.peer)
        self._fail(room, Reason(ended.reason), now_ns, tell=True)

    def _look(self, room: Room, now_ns: int, *, tell: bool = True) -> None:
        word = self._table.read(room.handle.slot, room.handle.generation)
        if word is None:  # cleared before we saw how it ended: `Ended` says so, if it failed
            self._seen.miss(*room.handle[1:])
            self._leave(room)
        elif word.state is KVPoll.Success:
            self._leave(room)
        elif word.state is KVPoll.Failed:
            self._fail(room, word.reason, now_ns, tell=tell)

    def _fail(self, room: Room, reason: Reason, now_ns: int, *, tell: bool) -> None:
        self._leave(room)
        self._failing.fail(room, reason, now_ns, tell=tell)

    def _leave(self, room: Room) -> None:
        if self._rooms.get(room.handle.slot) is room:
            del self._rooms[room.handle.slot]

    # --- time ------------------------------------------------------------------------------------

    def tick(self, now_ns: int) -> int:
        if now_ns - self._scanned_ns < SCAN_NS:
            return BUSY_MS
        self._scanned_ns = now_ns
        self._scan(now_ns)
        self._repeat(now_ns)
        self._failing.repeat(now_ns)
        used = {room.peer for room in self._beating(self._rooms.values())}
        for prefill in self._prefills.take_lost(now_ns, used):
            self._fault_all(prefill, Reason.PEER_LOST, now_ns)
        if now_ns - self._beaten_ns >= to_ns(self._timeouts.beat_s):
            self._beaten_ns = now_ns
            self._beat()
        self._prefills.tick(now_ns, used)
        return BUSY_MS if self._rooms or self._failing else IDLE_MS

    def _beat(self) -> None:
        waiting: dict[str, set[int]] = {p.peer: set() for p in self._prefills.ready()}
        for room in self._beating(self._rooms.values()):
            if room.destination is None and room.peer in waiting:
                waiting[room.peer].add(room.handle.room)
        for prefill in self._prefills.ready():
            rooms = np.array(sorted(waiting[prefill.peer]), dtype="<u8").tobytes()
            epoch = self._table.me.incarnation
            self._mailbox.post(prefill.link, Heartbeat(self._instance, epoch, rooms))

    def _scan(self, now_ns: int) -> None:
        """Hints may be lost, and engines and the janitor be gone; the table is the truth."""
        slots = self._table.end_late(now_ns, self._beating)
        words = dict(zip(slots.tolist(), self._table.words[slots].tolist(), strict=True))
        for slot, room in self._beating(list(self._rooms.items())):
            word = words.get(slot, 0)
            if word >> 32 != room.handle.generation or word & STATE_MASK in TERMINAL:
                self._look(room, now_ns)

    def _repeat(self, now_ns: int) -> None:
        for room in self._beating(self._rooms.values()):
            if now_ns < room.due_ns:
                continue
            prefill = self._prefills.get(room.peer)
            if prefill is None or not prefill.ready:
                continue
            room.pause_ns = min(max(2 * room.pause_ns, EXPECT_AFTER_NS), PAUSE_MAX_NS)
            room.due_ns = now_ns + room.pause_ns
            self._peer_known(room, prefill, now_ns)  # should what said so have been dropped midway
            if room.destination is not None and not room.taken and room.landed is None:
                self._table.count(Counter.RESENDS)
                self._post_destination(room, room.destination, prefill)
                continue
            self._ask(room)

    def _ask(self, room: Room) -> None:
        """What of it?  Or, if it has landed: may that be believed?"""
        prefill = self._prefills.get(room.peer)
        if prefill is not None and prefill.ready:
            whose = room.handle.room, room.rank, *room.handle[1:], self._instance
            landed = room.landed.use if room.landed is not None else 0
            self._mailbox.post(prefill.link, Expect(*whose, room.taken, room.first, landed))
