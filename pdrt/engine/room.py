"""One room as an engine holds it: what KVSender and KVReceiver have in common.

A room has a slot for each rank this engine speaks for; its state is the lowest of them.  `poll`
makes no system call while the room is open.  The pages and the aux row of a room may be reused
when it has a verdict *and* is quiet; only then can it be cleared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdrt import failpoints
from pdrt.clock import SECOND_NS, Clock
from pdrt.errors import (
    Aborted,
    BadDestination,
    BootstrapTimeout,
    Closed,
    CorruptAux,
    IllegalMove,
    PeerLost,
    ProcessLost,
    RankFailed,
    RoomLayoutMismatch,
    TransferError,
    TransferStalled,
    TransportFailed,
    WaitingTimeout,
)
from pdrt.mail.mailbox import Postman
from pdrt.process_rows import Owner
from pdrt.protocol.messages import Ended
from pdrt.protocol.peers import TRANSPORT_CODES
from pdrt.protocol.states import TERMINAL, Event, KVPoll, Reason, agree
from pdrt.shm_status import Handle, StatusTable, transport_of

LISTENER = "listener"
AGAIN_MAX, AGAIN_NS = 1024, 5 * SECOND_NS  # ends that a new listener hears again
#: Of these the peer told us, or it is gone; of all others it knows by us alone.
FROM_PEER = frozenset(
    {Reason.PEER_ABORTED, Reason.PEER_REFUSED, Reason.PEER_LOST, Reason.PEER_RESTARTED}
)

#: What each reason is to an engine, and what it means in words.
FAILURES: dict[Reason, tuple[type[TransferError], str]] = {
    Reason.NONE: (TransferError, "failed without a reason; this is a bug"),
    Reason.ABORTED: (Aborted, "aborted on this side"),
    Reason.CLIENT_GONE: (Aborted, "the client disconnected"),
    Reason.PEER_ABORTED: (Aborted, "the peer gave the room up"),
    Reason.BOOTSTRAP_TIMEOUT: (BootstrapTimeout, "the peer's half of the room never appeared"),
    Reason.WAITING_TIMEOUT: (WaitingTimeout, "both halves were known, and nothing was sent"),
    Reason.TRANSFER_STALLED: (TransferStalled, "bytes stopped moving"),
    Reason.PEER_LOST: (PeerLost, "the peer is gone, or no longer knows the room"),
    Reason.PEER_RESTARTED: (PeerLost, "the peer was restarted"),
    Reason.PEER_REFUSED: (PeerLost, "the peer refused the room"),
    Reason.WORKER_DIED: (ProcessLost, "the transfer worker that moved the room died"),
    Reason.ENGINE_DIED: (ProcessLost, "the engine that opened the room died"),
    Reason.TRANSPORT_FAILED: (TransportFailed, "the transport lost a write or has no path"),
    Reason.BAD_DESTINATION: (
        BadDestination,
        "pages or aux row lie outside the pool, or are not as many as were sent",
    ),
    Reason.LAYOUT_MISMATCH: (RoomLayoutMismatch, "the two KV layouts differ (ours/theirs)"),
    Reason.CORRUPT_AUX: (CorruptAux, "the aux row belongs to another room"),
    Reason.RANK_FAILED: (RankFailed, "another rank of the room failed"),
    Reason.WORKER_FENCED: (ProcessLost, "the worker was restarted to make other rooms quiet"),
    Reason.SHUTDOWN: (Aborted, "this side is shutting down"),
}


@dataclass(frozen=True)
class RoomTimeline:
    """What happened to a room, for people.  Times in seconds; None for a state it never was in."""

    room: int
    state: str  # KVPoll's name
    reason: str  # Reason's name
    transport: str
    moved_bytes: int
    chunks: int
    bootstrapping_s: float | None
    waiting_s: float | None
    transferring_s: float | None


@dataclass(frozen=True)
class Desk:
    """What a room needs of its manager."""

    table: StatusTable
    mailbox: Postman
    clock: Clock
    instance: str
    flush: Callable[[], None]
    forget: Callable[[int], None]
    worker: Callable[[int], Owner]  # the worker that lives now, by rank
    resend_ns: int
    failed: deque[tuple[int, Ended]] = field(default_factory=lambda: deque(maxlen=AGAIN_MAX))

    def say_again(self, now_ns: int) -> None:
        """To a new listener: its predecessor may have died with what we had told it of rooms that
        failed here, before the peer knew.  Their slots may be cleared, so that the table does not
        tell any more."""
        for told_ns, ended in self.failed:
            if now_ns - told_ns < AGAIN_NS:
                self.mailbox.post(LISTENER, ended)


class KVRoom:
    """See the module.  Made by KVManager."""

    def __init__(self, room: int, handles: Sequence[Handle], desk: Desk, *, peer: str = "") -> None:
        """`peer`: on decode, prefill's "host:bootstrap_port"."""
        self.room = room
        self.peer = peer
        self._handles = tuple(handles)  # by rank
        self._desk = desk
        self._table = desk.table
        self._clock = desk.clock
        self._verdict: KVPoll | None = None
        self._reason = Reason.NONE
        self._detail = ""
        self._cleared = False

    def poll(self) -> KVPoll:
        """State of the room over all ranks.  Ends it if its deadline has passed.  Raises Closed."""
        if self._verdict is not None:
            return self._verdict
        now_ns = self._clock()
        poll = self._table.poll
        if len(self._handles) == 1:
            _, slot, generation = self._handles[0]
            state = poll(slot, generation, now_ns)
        else:
            polled = (poll(h.slot, h.generation, now_ns) for h in self._handles)
            states = [each for each in polled if each is not None]
            state = agree(states) if len(states) == len(self._handles) else None
        if state is None:
            raise Closed(f"room {self.room} was cleared, and not by this object")
        if state in TERMINAL:
            self._conclude(state, now_ns)
        return state

    def quiet(self) -> bool:
        """May the pages and the aux row be reused?  Only after a verdict."""
        if self._cleared:
            return True
        table = self._table
        return all(table.is_quiet(slot, generation) for _, slot, generation in self._handles)

    def abort(self, reason: Reason = Reason.ABORTED) -> None:
        """Give the room up; the peer is told.  Nothing happens after a verdict."""
        if self._verdict is None:
            self._fault(reason, self._clock())
            self.poll()

    def failure(self) -> TransferError | None:
        """Why the room Failed, as an error to raise; None if it did not."""
        if self.poll() is not KVPoll.Failed:
            return None
        error, words = FAILURES[self._reason]
        return error(self.room, f"{words}: {self._detail}" if self._detail else words)

    def clear(self) -> None:
        """Free the room's slots; its id may be used again.  Raises IllegalMove unless the room has
        a verdict and is quiet."""
        if self._cleared:
            return
        if self.poll() not in TERMINAL or not self.quiet():
            raise IllegalMove(
                f"room {self.room} is {self.poll().name} and not quiet; abort and wait"
            )
        for handle in self._handles:
            self._table.clear(handle.slot, handle.generation)
            failpoints.hit("engine.clear.after_slot")
        self._cleared = True
        self._desk.forget(self.room)

    def timeline(self) -> RoomTimeline:
        """Of the first rank.  Raises Closed after `clear`."""
        if self._cleared:
            raise Closed(f"room {self.room} was cleared")
        handle = self._handles[0]
        table = self._table
        entered = table.entered_ns(handle.slot)
        opened, waiting, moving = entered[1:4]
        verdict = entered[KVPoll.Success] or entered[KVPoll.Failed]
        ends = (waiting or verdict, moving or verdict, verdict)
        spans = [
            (end - begin) / 1e9 if begin and end else None
            for begin, end in zip((opened, waiting, moving), ends, strict=True)
        ]
        moved_bytes = sum(table.moved_bytes(h.slot, h.generation) for h in self._handles)
        chunks = table.taken(handle.slot, handle.generation)
        name = TRANSPORT_CODES[transport_of(table.path(*handle[1:]))]
        state = self.poll()
        return RoomTimeline(
            self.room, state.name, self._reason.name, name, moved_bytes, chunks, *spans
        )

    @property
    def queued(self) -> bool:
        """Is the next step this engine's own?  Then the room waits in its queue."""
        raise NotImplementedError

    def renew_queued(self, now_ns: int) -> None:
        """A room that waits for its own living engine is not late: the deadline is for an engine
        that is gone."""
        if self._verdict is None and self.queued:
            for h in self._handles:
                word = self._table.read(h.slot, h.generation)
                if word is not None and word.state is KVPoll.WaitingForInput:
                    self._table.renew_state(h.slot, h.generation, now_ns)

    def _fault(self, reason: Reason, now_ns: int) -> None:
        for h in self._handles:
            self._table.move(h.slot, h.generation, Event.FAULT, now_ns=now_ns, reason=reason)

    def _conclude(self, state: KVPoll, now_ns: int) -> None:
        """First sight of the verdict.  One rank's failure is everybody's; the listener is told,
        since it may have been this process that ended the room."""
        self._verdict = state
        if state is KVPoll.Success:
            return
        failpoints.hit("engine.verdict.before_ended")
        self._fault(Reason.RANK_FAILED, now_ns)
        for rank, h in enumerate(self._handles):
            word = self._table.read(h.slot, h.generation)
            if word is None or word.state is not KVPoll.Failed:
                continue
            if self._reason in (Reason.NONE, Reason.RANK_FAILED):
                self._reason, self._detail = word.reason, self._table.detail(h.slot)
            ended = Ended(
                h.slot,
                h.generation,
                failed=True,
                reason=word.reason,
                untouched=word.untouched,
                room=self.room,
                rank=rank,
                peer=self.peer,
            )
            self._desk.mailbox.post(LISTENER, ended)
            if word.reason not in FROM_PEER:
                self._desk.failed.append((now_ns, ended))
        self._desk.flush()
