"""THE STATE MACHINE of a room, as one pure table.  No clock, no memory, no socket.

A room has a slot on each side.  Prefill's slot and decode's slot move by different events:

    prefill                                  decode
    Bootstrapping     its engine asked       Bootstrapping     its engine asked
        | PEER_KNOWN                             | PEER_KNOWN
    WaitingForInput   destination known      WaitingForInput   peer agreed
        | CHUNK_POSTED                           | DESTINATION_SENT
    Transferring      bytes may move         Transferring      bytes may land
        | LANDED                                 | LANDED
    Success           every byte in place    Success           every byte in place

From every open state FAULT leads to Failed, whoever raises it: compare-and-swap settles the race.
A verdict is final.  Quiet is a second fact: a Failed room whose bytes may still be moving is not
quiet until a fence says so, and its pages may not be reused before that.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, IntEnum, auto


class KVPoll(IntEnum):
    """State of a room.  Names and values are the engines' own, so that they compare equal."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4


class Role(IntEnum):
    """Which side of a room a process tree is."""

    PREFILL = 1
    DECODE = 2


class Event(IntEnum):
    PEER_KNOWN = 0  # prefill: a destination arrived; decode: the peer agreed to exchange KV
    CHUNK_POSTED = 1  # prefill: a write is about to be posted
    DESTINATION_SENT = 2  # decode: the pages are about to be told to the peer
    LANDED = 3  # every byte is in place, the aux row included
    FAULT = 4  # anything that ends the room; open to every observer


class Writer(Enum):
    """Who moves a room forward.  FAULT is open to everyone."""

    LISTENER = auto()
    WORKER = auto()
    ENGINE = auto()
    ANYONE = auto()


class Reason(IntEnum):
    """Why a room Failed.  Eight bits in the word; numbers are on the wire and never reused."""

    NONE = 0
    ABORTED = 1  # an engine or operator asked for it
    CLIENT_GONE = 2  # the HTTP client disconnected
    PEER_ABORTED = 3  # the other side gave the room up
    BOOTSTRAP_TIMEOUT = 4
    WAITING_TIMEOUT = 5
    TRANSFER_STALLED = 6
    PEER_LOST = 7  # no heartbeat from the peer
    PEER_RESTARTED = 8  # another instance answers at the peer's address
    PEER_REFUSED = 9  # the peer is at a limit or draining
    WORKER_DIED = 10  # the transfer worker that moved the bytes died
    ENGINE_DIED = 11  # the engine that opened the room died
    TRANSPORT_FAILED = 12
    BAD_DESTINATION = 13  # pages or aux row outside the pool
    LAYOUT_MISMATCH = 14
    CORRUPT_AUX = 15
    RANK_FAILED = 16
    WORKER_FENCED = 17  # the worker was restarted on purpose, to make other rooms quiet
    SHUTDOWN = 18


Move = tuple[KVPoll, Writer]

MOVES: dict[Role, dict[tuple[KVPoll, Event], Move]] = {
    Role.PREFILL: {
        (KVPoll.Bootstrapping, Event.PEER_KNOWN): (KVPoll.WaitingForInput, Writer.LISTENER),
        (KVPoll.Bootstrapping, Event.FAULT): (KVPoll.Failed, Writer.ANYONE),
        (KVPoll.WaitingForInput, Event.CHUNK_POSTED): (KVPoll.Transferring, Writer.WORKER),
        (KVPoll.WaitingForInput, Event.FAULT): (KVPoll.Failed, Writer.ANYONE),
        (KVPoll.Transferring, Event.CHUNK_POSTED): (KVPoll.Transferring, Writer.WORKER),
        (KVPoll.Transferring, Event.LANDED): (KVPoll.Success, Writer.WORKER),
        (KVPoll.Transferring, Event.FAULT): (KVPoll.Failed, Writer.ANYONE),
    },
    Role.DECODE: {
        (KVPoll.Bootstrapping, Event.PEER_KNOWN): (KVPoll.WaitingForInput, Writer.LISTENER),
        (KVPoll.Bootstrapping, Event.FAULT): (KVPoll.Failed, Writer.ANYONE),
        (KVPoll.WaitingForInput, Event.DESTINATION_SENT): (KVPoll.Transferring, Writer.ENGINE),
        (KVPoll.WaitingForInput, Event.FAULT): (KVPoll.Failed, Writer.ANYONE),
        (KVPoll.Transferring, Event.LANDED): (KVPoll.Success, Writer.LISTENER),
        (KVPoll.Transferring, Event.FAULT): (KVPoll.Failed, Writer.ANYONE),
    },
}

TERMINAL = frozenset({KVPoll.Failed, KVPoll.Success})
OPEN = frozenset(KVPoll) - TERMINAL

#: The deadline of each open state, by its name in `config.Timeouts`, and what it means that it has
#: passed.  A state without an entry has no deadline, which law 2 forbids: nothing imports then.
TIMEOUT_OF: dict[KVPoll, str] = {
    KVPoll.Bootstrapping: "bootstrap_s",
    KVPoll.WaitingForInput: "waiting_s",
    KVPoll.Transferring: "stall_s",
}
ON_EXPIRY: dict[KVPoll, Reason] = {
    KVPoll.Bootstrapping: Reason.BOOTSTRAP_TIMEOUT,
    KVPoll.WaitingForInput: Reason.WAITING_TIMEOUT,
    KVPoll.Transferring: Reason.TRANSFER_STALLED,
}

assert TIMEOUT_OF.keys() == ON_EXPIRY.keys() == OPEN, "an open state without a deadline"

#: What moves a deadline.  A room that only waits is renewed for `queue_s` in all.
RENEWED_BY: dict[Role, dict[KVPoll, str]] = {
    Role.PREFILL: {
        KVPoll.Bootstrapping: "beats of a decode that waits too, to queue_s",
        KVPoll.WaitingForInput: "its engine, while it queues it, to queue_s",
        KVPoll.Transferring: "each chunk that is posted or has landed",
    },
    Role.DECODE: {
        KVPoll.Bootstrapping: "nothing",
        KVPoll.WaitingForInput: "its engine, while it queues it, to queue_s",
        KVPoll.Transferring: "beats of a prefill whose half is open",
    },
}

#: Who ends a room whose deadline has passed.  Each does so alone, whoever else is dead or frozen.
ENFORCERS: dict[Role, tuple[str, ...]] = {
    Role.PREFILL: ("engine", "listener", "janitor"),
    Role.DECODE: ("engine", "listener", "janitor"),
}

#: A Failed room that is not quiet: who makes it so, and who has it done by force after `quiet_s`.
FENCER: dict[Role, str] = {
    Role.PREFILL: "WORKER, by a fence",
    Role.DECODE: "peer's WORKER, by a fence",
}
FORCED_BY = "janitor"


def step(role: Role, state: KVPoll, event: Event) -> KVPoll | None:
    """The next state, or None if the room has its verdict or the event does not apply.

    None is normal: late and repeated news must change nothing (law 1).
    """
    move = MOVES[role].get((state, event))
    return None if move is None else move[0]


def quiet_at(state: KVPoll, after: KVPoll) -> bool:
    """Is a room quiet the moment it moves from `state` to the verdict `after`?

    Before Transferring no byte was ever allowed to move: both sides announce the first byte by
    the move to Transferring, made before it.  At Success the last byte is in place.
    """
    return after is KVPoll.Success or (after is KVPoll.Failed and state < KVPoll.Transferring)


def told_by_peer(number: int) -> Reason:
    """What a peer's reason means on this side: what its client or operator chose is an abort by the
    peer, that it is leaving a refusal; its faults keep their name, and a number of a later version
    is an abort too."""
    if number == Reason.SHUTDOWN:
        return Reason.PEER_REFUSED
    own = (Reason.NONE, Reason.ABORTED, Reason.CLIENT_GONE)
    known = number in Reason._value2member_map_
    return Reason(number) if known and number not in own else Reason.PEER_ABORTED


def agree(states: Iterable[KVPoll]) -> KVPoll:
    """What several ranks make of one room: the lowest.  Failed is lowest of all, so one rank's
    failure is everybody's, and Success needs every rank."""
    return min(states)
