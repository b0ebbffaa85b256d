"""EVERY MESSAGE, one union.  Frames carry a list of them (see `codec`).

Two circles.  *Peer* messages cross hosts: between decode's listener and prefill's listener, and
from prefill's worker to decode's listener.  *Local* messages stay inside one process tree.  Any
message may be lost, repeated or late; each docstring says who repairs that.  Tags are on the wire:
never reused, new fields go last with a default.

Version history
    1   first light; later Expect.landed, Landed.use, Landed.session, Destination.first and
        HelloReply.age_ms: 0 or "" means nothing
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

VERSION = 1
OLDEST = 1  # the oldest version we still talk to

# Bounds are part of the types: a number outside them is a malformed frame, not a surprise later on.
U8 = Annotated[int, Meta(ge=0, le=0xFF)]
U31 = Annotated[int, Meta(ge=0, le=0x7FFF_FFFF)]
U32 = Annotated[int, Meta(ge=0, le=0xFFFF_FFFF)]
U40 = Annotated[int, Meta(ge=0, le=0xFF_FFFF_FFFF)]
U63 = Annotated[int, Meta(ge=0, le=0x7FFF_FFFF_FFFF_FFFF)]
Slot = Annotated[int, Meta(ge=-1, le=0x7FFF_FFFF)]  # -1: not known
TEXT_MAX = 1024
Text = Annotated[str, Meta(max_length=TEXT_MAX)]
Offers = Annotated[dict[str, bytes], Meta(max_length=16)]  # transport name -> its metadata


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of every message: a positional msgpack array whose first entry is the tag."""


# --- peer: who are you ---------------------------------------------------------------------------


class Hello(Message, frozen=True, array_like=True, tag=1):
    """Decode -> prefill, first on a link: phase one of the handshake.  Repeated until answered."""

    version: U31
    oldest: U31
    instance: Text
    epoch: U31
    digest: bytes  # of the layout


class HelloReply(Message, frozen=True, array_like=True, tag=2):
    """Prefill -> decode.  `refusal` is 0 or a Reason; the layout is there so that the difference
    can be named.  Lost: the Hello is sent again."""

    version: U31
    oldest: U31
    instance: Text
    epoch: U31
    digest: bytes
    refusal: U8 = 0
    detail: Text = ""
    layout: bytes = b""  # msgpack of Layout, only with LAYOUT_MISMATCH
    age_ms: U31 = 0  # at least so long ago this session began


class Agent(msgspec.Struct, frozen=True, array_like=True):
    """How to reach one rank's region."""

    rank: U8
    epoch: U31  # incarnation of the worker; part of the agent's name
    pages_count: U31
    aux_rows: U31
    offers: Offers


class Introduction(Message, frozen=True, array_like=True, tag=3):
    """Phase two, decode -> prefill: where bytes may land.  Sent again until `Introduced`, and anew
    when a worker of ours restarted."""

    instance: Text
    epoch: U31
    control: Text  # host:port of the sender's control port, for `Landed`
    boot_id: Text
    agents: Annotated[list[Agent], Meta(max_length=256)]
    serial: U31  # grows with every new introduction of this listener


class Introduced(Message, frozen=True, array_like=True, tag=4):
    """Prefill -> decode: our workers are connected and warm for introduction `serial`."""

    instance: Text
    serial: U31
    transport: Text  # empty: no path between the two, see detail
    detail: Text = ""


class Heartbeat(Message, frozen=True, array_like=True, tag=5):
    """Both ways, at a steady beat.  `rooms` renews deadlines: decode lists room ids that still wait
    to send a destination; prefill lists (slot, generation) pairs of decode that it still serves."""

    instance: Text
    epoch: U31
    rooms: bytes = b""  # little-endian u64s


class Resync(Message, frozen=True, array_like=True, tag=6):
    """Either side to an unknown or restarted counterpart: say hello and send what is open again."""

    instance: Text
    epoch: U31


# --- peer: about a room --------------------------------------------------------------------------


class Destination(Message, frozen=True, array_like=True, tag=10):
    """Decode -> prefill: where the KV of this room must land.  Sent again until
    `DestinationTaken`, the room's end, or its deadline.  `session` is the listener incarnation that
    this copy is for (`session_of`); another one drops it, since the room may be over by then.
    `first` is the one that was sent the first copy ("" if decode does not know)."""

    room: U63
    rank: U8
    slot: Slot  # decode's handle, echoed in everything prefill says of the room
    generation: U32
    instance: Text  # decode's
    agent_epoch: U31
    pages: bytes  # little-endian int32, one entry a page
    aux_index: U31
    session: Text = ""
    first: Text = ""


class DestinationTaken(Message, frozen=True, array_like=True, tag=11):
    """Prefill -> decode: acknowledges a Destination."""

    slot: Slot
    generation: U32
    instance: Text = ""  # decode's


class Expect(Message, frozen=True, array_like=True, tag=12):
    """Decode -> prefill: what of this room?  Sent when a room lingers, so that prefill's failure
    reaches decode before there is a destination, and so that a lost `Landed` is found.  Prefill
    answers with Abort or Landed if the room is over, and not at all while it goes on.  With
    `landed` it asks whether what a worker says may be believed: see Landed."""

    room: U63
    rank: U8
    slot: Slot
    generation: U32
    instance: Text
    sent: bool  # the destination has left; a prefill that does not know the room must say so
    session: Text = ""  # the first that was sent the destination; "" if none was yet
    landed: U40 = 0  # the use that a worker of prefill's says has landed


class Abort(Message, frozen=True, array_like=True, tag=13):
    """Either listener: this side gave the room up.  Sent again until `AbortTaken`; prefill sends it
    a second time with `quiet` once nothing of the room can land any more.  `slot` and `generation`
    are decode's handle (slot -1 if prefill never learned it).  `session` is always an incarnation
    of prefill's listener: from prefill the one that speaks, from decode the first that was sent the
    destination ("" if decode does not know)."""

    room: U63
    rank: U8
    slot: Slot
    generation: U32
    instance: Text  # decode's
    reason: U8
    quiet: bool = False
    session: Text = ""


class AbortTaken(Message, frozen=True, array_like=True, tag=14):
    """Acknowledges an Abort.  `quiet` from prefill: no byte of the room can land any more, says the
    listener incarnation `session`."""

    room: U63
    rank: U8
    slot: Slot
    generation: U32
    instance: Text
    quiet: bool
    session: Text = ""


class Landed(Message, frozen=True, array_like=True, tag=15):
    """Prefill's worker -> decode's listener: every byte and the aux row are in place.  Sent again
    until `NewsTaken` or the room's deadline.  `use` is the same for all ranks of prefill's room:
    decode takes no ranks of two uses of one id for a room.  Prefill's listener says it, too, with
    its session, if it is asked (`Expect`): then no other room of its has the destination, or will.
    If that was sent to several of its incarnations, decode believes only that."""

    room: U63
    rank: U8
    slot: Slot
    generation: U32
    length_bytes: U63
    chunks: U31
    instance: Text = ""  # decode's: another one may have its address by now
    use: U40 = 0  # prefill's name of this use of the room id; 0 of one that has no names
    session: Text = ""  # of prefill's listener, if that says it


class NewsTaken(Message, frozen=True, array_like=True, tag=17):
    """Decode's listener -> prefill's worker: acknowledges Landed.  Lost: it is sent again."""

    slot: Slot
    generation: U32
    instance: Text = ""  # as in the Landed


# --- local: engine, worker and listener of one tree ----------------------------------------------


class Opened(Message, frozen=True, array_like=True, tag=30):
    """Engine -> listener: a room was opened.  The table is the truth; this is a hint on prefill,
    and on decode it names the peer, so the receiver sends it again to a restarted listener."""

    room: U63
    rank: U8
    slot: Slot
    generation: U32
    peer: Text = ""  # decode: host:port of prefill's bootstrap port
    lead: Slot = -1  # decode: rank 0's handle, where it stands which use of the id has landed
    lead_generation: U32 = 0


class Ended(Message, frozen=True, array_like=True, tag=31):
    """Engine -> listener, worker <-> listener: this room has its verdict.  A hint: whoever gets it
    reads the table, and believes the message only where the slot was cleared already.  It names the
    room, and on decode the peer, for a listener that was not there while the room was open."""

    slot: Slot
    generation: U32
    failed: bool
    reason: U8 = 0
    untouched: bool = False  # no byte of it was ever posted
    room: U63 = 0
    rank: U8 = 0
    peer: Text = ""  # from decode's engine: host:port of prefill's bootstrap port


class Declined(Message, frozen=True, array_like=True, tag=39):
    """Engine -> listener: this engine will not open its half of that room, so the peer's need not
    wait for it.  `generation` tells this rank of this room from all others that were declined; it
    is no slot's.  Lost: the peer's half runs out its own time."""

    room: U63
    rank: U8
    generation: U32
    reason: U8
    peer: Text = ""  # decode: host:port of prefill's bootstrap port


class Fenced(Message, frozen=True, array_like=True, tag=37):
    """Worker -> listener: this Failed room is fenced; the peer may be told that it is quiet.  Lost:
    the peer falls back on its own fence at the quiet bound."""

    slot: Slot
    generation: U32


class Deliver(Message, frozen=True, array_like=True, tag=38):
    """Listener -> worker: the destination of our room in `slot`.  Sent again every second until
    a chunk was posted, and at once to a restarted worker."""

    slot: Slot
    generation: U32
    destination: Destination


class Recall(Message, frozen=True, array_like=True, tag=40):
    """Listener -> prefill's worker: which use of the room id had this destination?  None gets it
    any more.  Lost: decode asks the listener again, or says again that it gave up."""

    slot: Slot  # decode's handle
    generation: U32
    instance: Text


class Recalled(Message, frozen=True, array_like=True, tag=41):
    """Prefill's worker -> listener: the answer to a Recall.  `use` is 0 if nobody had it, or if it
    was `taken` and the worker does not know any more by whom.  `since` is the incarnation of the
    listener under which the worker began; 0 if there was none before it.  `over`: of what it was
    given, nothing can land any more."""

    slot: Slot
    generation: U32
    instance: Text
    taken: bool
    use: U40 = 0
    since: U31 = 0
    over: bool = False


class Chunk(Message, frozen=True, array_like=True, tag=32):
    """Prefill's engine -> worker: these pages are ready.  Sent again to a restarted worker."""

    room: U63
    slot: Slot
    generation: U32
    index: U31  # 0, 1, 2, ... within the room
    start: U31  # position of the first page within the room
    pages: bytes  # little-endian int32
    last: bool
    aux_index: U31


class WorkerUp(Message, frozen=True, array_like=True, tag=33):
    """Worker -> listener: the region is registered; repeated with every beat."""

    rank: U8
    epoch: U31
    offers: Offers


class PeerUp(Message, frozen=True, array_like=True, tag=34):
    """Listener -> worker: connect to this peer's rank.  Sent again until `PeerWarm`."""

    instance: Text
    control: Text
    agent: Agent
    same_host: bool


class PeerWarm(Message, frozen=True, array_like=True, tag=35):
    """Worker -> listener: the path to that agent is open (`transport`) or refused (`detail`).  Said
    again every few seconds, since another listener may not know that peer; it answers PeerGone."""

    instance: Text
    rank: U8
    agent_epoch: U31
    transport: Text
    detail: Text = ""


class PeerGone(Message, frozen=True, array_like=True, tag=36):
    """Listener -> worker: forget this peer; its rooms have failed."""

    instance: Text


def detail_of(error: Exception) -> str:
    """What it says, cut to what a Text may have: it may quote a peer at length, and a frame with a
    longer one is malformed, whatever else is in it."""
    return str(error)[:TEXT_MAX]


def session_of(instance: str, epoch: int) -> str:
    """Names one incarnation of a tree's listener: what it remembers ends with it."""
    return f"{instance}#{epoch}"


AnyMessage = (
    Hello
    | HelloReply
    | Introduction
    | Introduced
    | Heartbeat
    | Resync
    | Destination
    | DestinationTaken
    | Expect
    | Abort
    | AbortTaken
    | Landed
    | NewsTaken
    | Opened
    | Ended
    | Declined
    | Deliver
    | Fenced
    | Recall
    | Recalled
    | Chunk
    | WorkerUp
    | PeerUp
    | PeerWarm
    | PeerGone
)

PEER_MESSAGES = (
    Hello,
    HelloReply,
    Introduction,
    Introduced,
    Heartbeat,
    Resync,
    Destination,
    DestinationTaken,
    Expect,
    Abort,
    AbortTaken,
    Landed,
    NewsTaken,
)
