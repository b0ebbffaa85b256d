"""PrefillListener: prefill's half of the bootstrap.  Decodes introduce themselves here, send their
destinations, and hear of rooms that failed.

It owns no room: what it knows of rooms it reads from the table, and what it knows of decodes they
repeat when asked (`Resync`).  So killing it costs nothing but the time to start another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pdrt import failpoints
from pdrt.actors.base import BUSY_MS, IDLE_MS, Beating
from pdrt.actors.decodes import Decodes, worker_link
from pdrt.actors.past import NOBODY, Past, Room, Seen, Theirs, theirs_of
from pdrt.actors.prefill_failing import Failing
from pdrt.actors.vouching import Vouching
from pdrt.clock import MILLISECOND_NS, to_ns
from pdrt.config import Timeouts
from pdrt.mail.knock import Knock
from pdrt.mail.mailbox import Address, Postman
from pdrt.protocol.counters import Counter
from pdrt.protocol.layout import Layout
from pdrt.protocol.messages import (
    Abort,
    AbortTaken,
    AnyMessage,
    Declined,
    Deliver,
    Destination,
    DestinationTaken,
    Ended,
    Expect,
    Fenced,
    Heartbeat,
    Hello,
    Introduction,
    Opened,
    PeerWarm,
    Recalled,
    WorkerUp,
    session_of,
)
from pdrt.protocol.peers import instance_digest, transport_code
from pdrt.protocol.states import OPEN, TERMINAL, Event, KVPoll, Reason, told_by_peer
from pdrt.shm_status import STATE_MASK, Handle, StatusTable, peer_of, transport_of

SCAN_NS = 20 * MILLISECOND_NS
DELIVER_NS = 1000 * MILLISECOND_NS
SHM = transport_code("shm")


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
        nobody_listens: Knock,
        beating: Beating,
    ) -> None:
        """The mailbox has a link to every worker (`worker_link`).  `wake(row)` nudges an engine."""
        self._layout = layout
        self._table = table
        self._mailbox = mailbox
        self._wake = wake
        self._decodes = Decodes(
            instance=instance,
            boot_id=boot_id,
            layout=layout,
            table=table,
            mailbox=mailbox,
            timeouts=timeouts,
            nobody_listens=nobody_listens,
            beating=beating,
        )
        self._beating = beating
        self._rooms: dict[int, Room] = {}  # by slot
        self._by_id: dict[tuple[int, int], Room] = {}  # (room, rank), while they have no verdict
        self._seen = Seen()
        self._session = session_of(instance, table.me.incarnation)
        forgot = partial(table.count, Counter.FORGOTTEN)
        self._past = Past(self._session, to_ns(timeouts.bootstrap_s), forgot=forgot)
        self._failing = Failing(table, mailbox, timeouts, self._decodes, self._past, beating)
        self._vouching = Vouching(
            self._session, layout.ranks, mailbox, self._decodes, self._past, self._by_id
        )
        self._scanned_ns = 0  # 0: never, so rooms may be open or failed that we have not seen

    # --- messages --------------------------------------------------------------------------------

    def handle(self, sender: Address, message: AnyMessage, now_ns: int) -> None:
        if not self._scanned_ns:
            self._scan(now_ns)  # no answer before we know what our predecessor left
        match message:
            case Destination():
                self._on_destination(sender, message, now_ns)
                self._vouching.doubt(message)
            case Opened():
                handle = Handle(message.room, message.slot, message.generation)
                self._adopt(handle, message.rank, now_ns)
            case Ended():
                self._on_ended(message, now_ns)
            case Declined() if (message.room, message.rank) not in self._by_id:
                self._failing.decline(message, now_ns)
            case Fenced():
                self._on_fenced(message, now_ns)
            case Heartbeat():
                self._on_heartbeat(sender, message, now_ns)
            case Abort():
                self._on_abort(sender, message, now_ns)
                self._vouching.doubt(message)
            case AbortTaken():
                self._failing.taken(message)
            case Expect():
                self._on_expect(sender, message, now_ns)
                self._vouching.doubt(message)
            case Recalled():
                self._vouching.recalled(message)
            case Hello():
                self._decodes.hello(sender, message, now_ns)
            case Introduction():
                self._decodes.introduce(sender, message, now_ns)
            case PeerWarm():
                self._decodes.warmed(message, now_ns)
            case WorkerUp():
                if self._decodes.worker_up(message.rank, message.epoch):
                    for room in self._beating(self._rooms.values()):
                        if room.rank == message.rank:
                            self._deliver(room, now_ns)
            case _:
                self._table.count(Counter.LATE)

    def _on_heartbeat(self, sender: Address, beat: Heartbeat, now_ns: int) -> None:
        waiting = self._decodes.beat(sender, beat, now_ns)
        if waiting is None:
            return
        for room_id in self._beating(waiting):
            for rank in range(self._layout.ranks):
                room = self._by_id.get((room_id, rank))
                if room is not None and room.destination is None and room.is_for(beat.instance):
                    self._decodes.missing.claim(room, now_ns)
                    self._table.renew_state(room.handle.slot, room.handle.generation, now_ns)
        rooms = self._beating(self._by_id.values())
        served = [r for r in rooms if r.destination is not None and r.theirs[0] == beat.instance]
        self._decodes.beat_back(sender, served)

    # --- a room and its destination meet ---------------------------------------------------------

    def _adopt(self, handle: Handle, rank: int, now_ns: int) -> None:
        """Take note of a room of the table."""
        known = self._rooms.get(handle.slot)
        if known is not None:
            if known.handle == handle:
                return
            self._look(known, now_ns)
        word = self._table.read(handle.slot, handle.generation)
        if word is None or rank >= self._layout.ranks:
            return
        over = word.state not in OPEN
        if over and (word.state is not KVPoll.Failed or self._scanned_ns):
            return  # failed since our first scan: whoever ended it says so, or decode asks
        self._seen.note(*handle[1:])
        path = self._table.path(*handle[1:])
        room = Room(handle, rank, self._table.use(*handle[1:]), now_ns)
        room.by_shm = transport_of(path) == SHM
        if word.state is not KVPoll.Bootstrapping:  # else a predecessor died before it gave it away
            room.decode, room.given = peer_of(path), True
        if over:
            self._fail(room, word.reason, now_ns)
            return
        self._rooms[handle.slot] = self._by_id[room.key] = room
        past = self._past
        past.unclaimed.pop(room.key, None)
        asked, early = past.take_questions(room.key)
        if asked is not None:
            self._claim(room, theirs_of(asked), now_ns)
        if early is not None:
            self._match(room, early, now_ns)
        elif (given_up := past.take_given_up(room.key, now_ns)) is not None:
            room.theirs, room.doubted = given_up.theirs, not given_up.quiet
            self._fault(room, given_up.reason, now_ns, tell=False)

    def _on_destination(self, sender: Address, destination: Destination, now_ns: int) -> None:
        decode = self._decodes.get(destination.instance)
        if decode is None or destination.session != self._session:
            # For a predecessor of ours.  If the room is still open, decode sends it again for us.
            self._decodes.resync(sender)
            return
        if self._failing.answer(sender, destination, now_ns):
            return
        key = (destination.room, destination.rank)
        room = self._by_id.get(key)
        reason, theirs = decode.refusal(destination), theirs_of(destination)
        if self._past.refuses(room, destination):
            reason = Reason.PEER_REFUSED
        if reason is not Reason.NONE:
            if room is not None and room.destination is None and room.is_for(theirs[0]):
                room.theirs = theirs
                self._fault(room, reason, now_ns, tell=False)
            self._mailbox.post(sender, self._past.refuse(destination, reason))
            return
        if room is None:
            self._past.keep_early(key, destination, now_ns)
        else:
            self._match(room, destination, now_ns)
        failpoints.hit("prefill.destination.before_taken")
        taken = DestinationTaken(destination.slot, destination.generation, destination.instance)
        self._mailbox.post(sender, taken, lazy=True)

    def _match(self, room: Room, destination: Destination, now_ns: int) -> None:
        if room.destination is not None:
            return
        handle = room.handle
        decode, theirs = self._decodes.get(destination.instance), theirs_of(destination)
        if not self._past.taken.take(destination, handle, room.use):
            self._past.remember(self._past.over, theirs, self._past.lost(room.key, theirs))
            return  # a late copy, its room is long over
        self._claim(room, theirs, now_ns)
        code = transport_code(decode.transport(destination.rank) if decode is not None else "")
        room.by_shm = code == SHM
        room.decode = instance_digest(destination.instance)
        self._table.set_path(*handle[1:], code, room.decode)
        failpoints.hit("prefill.match.before_move")
        if self._table.move(handle.slot, handle.generation, Event.PEER_KNOWN, now_ns=now_ns):
            room.matched = True
            self._wake(self._table.opener_row(handle.slot))
        room.destination = destination  # after the move: a message dropped midway comes again
        # Known already: to a listener before us, whose Deliver may have died with it.
        if self._table.state(handle.slot, handle.generation) in OPEN:
            self._deliver(room, now_ns)
        else:
            self._look(room, now_ns)

    def _claim(self, room: Room, theirs: Theirs, now_ns: int) -> None:
        room.theirs = theirs
        self._decodes.missing.claim(room, now_ns)

    def _deliver(self, room: Room, now_ns: int) -> None:
        """Tell the worker; again now and then, until a chunk was posted."""
        if room.destination is not None and not room.failed:
            room.deliver_ns, room.given = now_ns + DELIVER_NS, True
            failpoints.hit("prefill.match.before_deliver")
            self._mailbox.post(worker_link(room.rank), Deliver(*room.handle[1:], room.destination))

    # --- decode asks, decode gives up ------------------------------------------------------------

    def _on_expect(self, sender: Address, expect: Expect, now_ns: int) -> None:
        key, theirs = (expect.room, expect.rank), theirs_of(expect)
        room = self._by_id.get(key)
        if expect.landed:
            self._vouching.ask(sender, expect)
            return
        if self._failing.answer(sender, expect, now_ns):
            return
        if room is not None and room.destination is None and room.is_for(expect.instance):
            room.doubted |= self._past.doubts(expect, room)
            self._claim(room, theirs, now_ns)
            return
        destination = self._past.early.get(key) if room is None else room.destination
        if destination is not None and theirs_of(destination) == theirs:
            if room is None:
                self._past.keep_early(key, destination, now_ns)
            return
        if expect.sent:
            # We took its destination once and do not know the room: it is over, how is forgotten.
            self._mailbox.post(sender, self._past.lost(key, theirs))
        elif room is None:
            self._past.remember(self._past.asked, key, expect)

    def _on_abort(self, sender: Address, abort: Abort, now_ns: int) -> None:
        self._table.count(Counter.ABORTS_TAKEN)
        past, key, theirs = self._past, (abort.room, abort.rank), theirs_of(abort)
        past.forget_questions(key, theirs)
        room = self._by_id.get(key)
        if theirs in past.over:
            pass  # a repeat, or our own room had ended before
        elif room is not None and room.theirs in (NOBODY, theirs) and room.is_for(theirs[0]):
            room.doubted |= room.theirs == NOBODY and past.doubts(abort, room)
            room.theirs = theirs
            self._fault(room, told_by_peer(abort.reason), now_ns, tell=False)
        elif (failed := past.take_unclaimed(abort, now_ns)) is not None:
            failed.theirs, failed.doubted = theirs, past.doubts(abort, failed)
            self._failing.claim(failed, now_ns, tell=False)
        else:
            past.give_up(key, abort, now_ns, opened=room is not None)
        self._mailbox.post(sender, past.taken_of(key, theirs))

    # --- a room ends -----------------------------------------------------------------------------

    def _fault(self, room: Room, reason: Reason, now_ns: int, *, tell: bool = True) -> None:
        """End a room; the peer is told unless it was the one who said so."""
        if self._table.move(*room.handle[1:], Event.FAULT, now_ns=now_ns, reason=reason):
            self._wake(self._table.opener_row(room.handle.slot))
        self._look(room, now_ns, tell=tell)

    def _on_ended(self, ended: Ended, now_ns: int) -> None:
        room = self._rooms.get(ended.slot)
        if room is None or room.handle.generation != ended.generation:
            room = self._past.vanished.pop(ended.slot, ended.generation)
        if room is None:
            self._on_unseen(ended, now_ns)
        elif ended.failed:  # it need not be in the table any more, or not for long
            room.fenced |= ended.untouched
            self._fail(room, Reason(ended.reason), now_ns)
        else:
            self._succeed(room)

    def _on_fenced(self, fenced: Fenced, now_ns: int) -> None:
        room = self._rooms.get(fenced.slot)
        if room is not None and room.handle.generation == fenced.generation:
            room.fenced = True
            self._look(room, now_ns)
        elif (room := self._past.vanished.get(fenced.slot, fenced.generation)) is not None:
            room.fenced = True
        else:
            self._failing.fenced(fenced, now_ns)

    def _on_unseen(self, ended: Ended, now_ns: int) -> None:
        """A room was opened and failed without our seeing it open: perhaps there was no listener.
        The decode that waits for it, or will, is told all the same; unless the id means another
        room by now, which is what a decode asks for."""
        possible = ended.failed and ended.slot < self._table.rooms_max
        if possible and self._seen.is_news(ended.slot, ended.generation):
            if (ended.room, ended.rank) not in self._by_id:
                self._failing.end_unseen(ended, now_ns)

    def _look(self, room: Room, now_ns: int, *, tell: bool = True) -> None:
        """Read the truth about a room."""
        word = self._table.read(room.handle.slot, room.handle.generation)
        if word is None:
            self._leave(room)
            self._past.vanished.add(room, now_ns)
        elif word.state is KVPoll.Success:
            self._succeed(room)
        elif word.state is KVPoll.Failed and not room.failed:
            self._fail(room, word.reason, now_ns, tell=tell)

    def _succeed(self, room: Room) -> None:
        self._leave(room)
        if room.matched:
            self._past.succeed(room, self._table.moved_bytes(*room.handle[1:]))

    def _fail(self, room: Room, reason: Reason, now_ns: int, *, tell: bool = True) -> None:
        self._leave(room)
        self._failing.fail(room, reason, now_ns, tell=tell)

    def _leave(self, room: Room) -> None:
        """The room has its verdict: it is no longer among the open ones."""
        if self._rooms.get(room.handle.slot) is room:
            del self._rooms[room.handle.slot]
        if self._by_id.get(room.key) is room:
            del self._by_id[room.key]

    # --- time ------------------------------------------------------------------------------------

    def tick(self, now_ns: int) -> int:
        if now_ns - self._scanned_ns >= SCAN_NS:
            self._scan(now_ns)
            self._past.drop_unasked(now_ns, self._beating)
            for room in self._beating(self._past.vanished.take_silent(now_ns)):
                if room.theirs == NOBODY:  # who says late how it ended is still to be heard
                    self._seen.miss(*room.handle[1:])
                self._past.lose(room)
            self._failing.repeat(now_ns)
            self._mourn(now_ns)
        return BUSY_MS if self._rooms or self._failing or self._past.vanished else IDLE_MS

    def _mourn(self, now_ns: int) -> None:
        """End the rooms of decodes that are gone."""
        if lost := self._decodes.take_lost(now_ns, waited_for=bool(self._rooms)):
            theirs = [r for r in self._beating(self._rooms.values()) if r.theirs[0] in lost]
            for room in self._beating(theirs):
                self._fault(room, lost[room.theirs[0]], now_ns)
            self._past.forget_decodes(lost, self._beating)
        for room in self._beating(self._decodes.unwanted(self._rooms.values(), now_ns)):
            self._fault(room, Reason.PEER_LOST, now_ns)

    def _scan(self, now_ns: int) -> None:
        """Hints may be lost, and engines and the janitor be gone; the table is the truth."""
        slots = self._table.end_late(now_ns, self._beating)
        rows, live = self._table.rows(slots), slots.tolist()
        cells = (rows[:, cell].tolist() for cell in (0, 1, 5))
        for slot, word, room_id, opener in self._beating(zip(live, *cells, strict=True)):
            known = self._rooms.get(slot)
            if known is None or known.handle.generation != word >> 32:
                self._adopt(Handle(room_id, slot, word >> 32), opener >> 40, now_ns)
            elif word & STATE_MASK in TERMINAL:
                self._look(known, now_ns)
            elif word & STATE_MASK == KVPoll.WaitingForInput and now_ns >= known.deliver_ns:
                self._deliver(known, now_ns)
        for slot in self._beating(self._rooms.keys() - set(live)):
            self._look(self._rooms[slot], now_ns)
        self._scanned_ns = now_ns
