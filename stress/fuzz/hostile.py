"""Messages that are right by their type and wrong by what they say: those of a buggy peer.

What may be named.  Nobody proves who he is at a control port (F125), so whoever names a room
*exactly* may end it: on prefill that takes its id, on decode the instance, slot and generation.
Whoever claims to be a known decode, by its instance or its control address, may end its rooms.
None of that happens here to rooms that must succeed.  Instead

* *victims*, rooms that were opened for it, are named exactly; they may fail, and must end;
* of all other rooms, what is guessed from /rooms: ids next to theirs, slots and generations that
  they have, with another instance; the right instance with generations that are over.

A local door serves processes of its own user, which are trusted: they could as well trace us.  What
is said there names rooms, ranks and instances that do not exist, and nothing else.  So a mutant of
such a message is said only if it is no message any more: one changed number, and it is our worker
that has come back with another memory, or an open room that is given other pages.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace as replace_struct

from pdrt.errors import ProtocolError
from pdrt.protocol import codec
from pdrt.protocol.messages import (
    PEER_MESSAGES,
    Agent,
    AnyMessage,
    Destination,
    Heartbeat,
    Hello,
    Introduction,
    Message,
    PeerUp,
    session_of,
)
from pdrt.protocol.states import Reason
from pdrt.transports.metadata import FakeMetadata, ShmMetadata
from stress.fuzz.decoders import MESSAGES
from stress.fuzz.mutate import NUMBERS, Mutator

VICTIM = 1 << 62  # ids from here on may be named exactly
HOSTS = (
    *("127.0.0.1:1", "127.0.0.1:9", "localhost:1", "nowhere.invalid:1", "[::1]:1", ""),
    "x" * 1024,
)
MESSAGES_A_FRAME = (*(1,) * 10, 2, 5, 20)
COPIES = (*(10,) * 30, codec.MESSAGES_MAX, codec.MESSAGES_MAX + 1)  # each is an actor's work
DEAR = (Introduction, PeerUp)  # each opens and closes connections
LARGE_BYTES = 64 << 10
INSTANCES = 200  # of decodes that do not exist, at once


@cache
def fields_of(kind: type[Message]) -> list[tuple[str, bool]]:
    """Names, and whether each is true or false."""
    return [(field.name, field.type is bool) for field in msgspec.structs.fields(kind)]


@cache
def hostile_instances() -> list[str]:
    return [f"hostile-{number}" for number in range(INSTANCES)]


class Known(msgspec.Struct, frozen=True):
    """What can be found out about one tree: its /rooms, /info and HelloReply."""

    role: str
    instance: str
    epoch: int  # of its listener
    rooms: list[dict[str, Any]] = msgspec.field(default_factory=list)


@dataclass
class Names:
    """Values for the fields of messages, by their names."""

    rng: random.Random
    target: Known
    digest: bytes  # of the layout of both trees
    boot_id: str
    answering: str  # attach address of one that answers nonsense
    mine: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mine = self.rng.choices(hostile_instances(), k=4)
        self._victims = [r for r in self.target.rooms if r["room"] >= VICTIM]
        self._others = [r for r in self.target.rooms if r["room"] < VICTIM]

    def mixable(self) -> Names:
        """Names that may be put together in any way: none of them is exact but victims' ids."""
        rooms = [dict(room, slot=room["slot"], generation=0) for room in self._victims]
        return replace(self, target=replace_struct(self.target, instance="nobody", rooms=rooms))

    def room(self) -> int:
        """Never that of a room that must succeed."""
        rng = self.rng
        if self._victims and rng.random() < 0.4:
            return int(rng.choice(self._victims)["room"])
        if self._others and rng.random() < 0.3:
            return int(rng.choice(self._others)["room"]) ^ 1 << rng.randrange(62)
        return rng.choice((rng.getrandbits(62), rng.randrange(100), 2**63 - 1, VICTIM))

    def handle(self) -> tuple[str, int, int]:
        """Instance, slot and generation: see the module."""
        rng, rooms = self.rng, self.target.rooms
        if self._victims and rng.random() < 0.3:
            victim = rng.choice(self._victims)
            return self.target.instance, victim["slot"], victim["generation"]
        if rooms and rng.random() < 0.6:
            room = rng.choice(rooms)
            if rng.random() < 0.5:
                over = max(0, room["generation"] - 2 * rng.randrange(1, 4))
                return self.target.instance, room["slot"], over
            return self.instance(), room["slot"], room["generation"]
        slot = rng.choice((-1, 0, 1, 65535, 65536, 2**31 - 1, rng.randrange(64)))
        return self.instance(), slot, rng.choice((0, 1, 2, 3, 2**32 - 1, rng.getrandbits(32)))

    def instance(self) -> str:
        """Of nobody, or of a prefill: nothing of ours is addressed to that."""
        return self.rng.choice((*self.mine, *self.mine, "", "0" * 16, "é\0", "i" * 1024))

    def pages(self) -> bytes:
        rng = self.rng
        count = rng.choice((0, 1, 2, 16, 300, 5000))
        low, high = rng.choice(((0, 4), (0, 256), (-1, 1), (-(2**31), 2**31 - 1)))
        data = np.random.default_rng(rng.getrandbits(32)).integers(low, high, count, np.int32)
        return data.tobytes()[: 4 * count - rng.choice((0, 0, 0, 1, 3))]

    def beat_rooms(self) -> bytes:
        """Any room may be renewed: its heartbeat says that somebody waits for it."""
        ids = [self.room() for _ in range(8)] * self.rng.choice((0, 1, 6, 400))
        return np.array(ids, "<u8").tobytes() + bytes(self.rng.choice((0, 0, 1, 7)))

    def offers(self) -> dict[str, bytes]:
        """Mostly of memory that somebody is to be asked for who answers nonsense."""
        rng, metadata = self.rng, msgspec.msgpack.encode
        shm = ShmMetadata(
            agent=rng.choice(("", "a", "x" * 1000)),
            boot_id=rng.choice((*(self.boot_id,) * 8, "another", "")),
            address=rng.choice((*(self.answering,) * 12, "@pdrt-nobody", "/dev/null", "")),
            key=rng.choice((*("0#1",) * 12, "#", "-1#0", "1#" + "9" * 40, "")),
            region_bytes=rng.choice((4096, *NUMBERS)),
        )
        if rng.random() < 0.9:
            return {"shm": metadata(shm)}
        values = (metadata(shm), b"", b"\x91" * 3000, metadata(FakeMetadata("x")))
        names = ("shm", "fake", "", "n" * 100)  # forged NIXL metadata: see docs/security.md
        return {rng.choice(names): rng.choice(values) for _ in range(rng.randrange(4))}

    def agent(self, rank: int = 0) -> Agent:
        rng = self.rng
        sizes = rng.choice(((256, 256), (0, 0), (2**31 - 1, 2**31 - 1), (1, 0)))
        return Agent(rank, rng.randrange(1, 2000), *sizes, self.offers())

    def number(self, most: int) -> int:
        return self.rng.choice([n for n in NUMBERS if 0 <= n <= most])

    # --- messages ---

    def any_of(self, kinds: Sequence[type[Message]]) -> Any:
        kind = self.rng.choice(kinds)
        if kind in DEAR and self.rng.random() < 0.4:
            kind = self.rng.choice(kinds)
        if kind is Introduction:
            return self.introduction()
        if kind is Heartbeat:
            return Heartbeat(self.instance(), self.number(2000), self.beat_rooms())
        if kind is Hello:
            digest = self.rng.choice((self.digest, b"", bytes(16), bytes(1000)))
            versions = self.number(2**31 - 1), self.number(3)
            return Hello(*versions, self.instance(), self.number(2**31 - 1), digest)
        return self._by_name(kind)

    def introduction(self) -> Introduction:
        rng = self.rng
        ranks = rng.choice((*((0,),) * 8, (), (0, 0), (0, 1), (255,), tuple(range(256))))
        agents = [self.agent(rank) for rank in ranks]
        place, boot_id = rng.choice(HOSTS), rng.choice((self.boot_id, self.boot_id, ""))
        epoch, serial = rng.randrange(1, 2000), rng.randrange(2000)
        return Introduction(rng.choice(self.mine), epoch, place, boot_id, agents, serial)

    def _by_name(self, kind: type[Message]) -> Any:
        instance, slot, generation = self.handle()
        session = session_of(self.target.instance, self.target.epoch)
        ready: dict[str, Callable[[], Any]] = {
            "room": self.room,
            "rank": lambda: self.rng.choice((0, 0, 0, 1, 255)),
            "slot": lambda: slot,
            "generation": lambda: generation,
            "instance": lambda: instance,
            "epoch": lambda: self.number(2**31 - 1),
            "pages": self.pages,
            "aux_index": lambda: self.number(2**31 - 1),
            "session": lambda: self.rng.choice((session, session, "", "x#1")),
            "first": lambda: self.rng.choice((session, session, "", "x#1", "?")),
            "reason": lambda: self.rng.choice((*Reason, 99, 255)),
            "refusal": lambda: self.rng.choice((0, 0, *Reason, 99, 255)),
            "agent_epoch": lambda: self.number(2000),
            "serial": lambda: self.number(2**31 - 1),
            "length_bytes": lambda: self.number(2**63 - 1),
            "offers": self.offers,
            "agent": self.agent,
            "control": lambda: self.rng.choice(HOSTS),
            "peer": lambda: self.rng.choice(HOSTS),
            "transport": lambda: self.rng.choice(("shm", "nixl", "", "x" * 1024)),
            "detail": lambda: self.rng.choice(("", "d" * 1024, "\n\x1b[31m")),
            "layout": lambda: self.rng.choice((b"", b"\x91" * 5000, b"\x80")),
            "digest": lambda: self.digest,
            "rooms": self.beat_rooms,
            "destination": lambda: self._by_name(Destination),
        }
        values = {}
        for name, is_flag in fields_of(kind):
            make = ready.get(name)
            if make is not None:
                values[name] = make()
            else:
                values[name] = self.rng.random() < 0.5 if is_flag else self.number(2**31 - 1)
        return kind(**values)

    def stale(self) -> Any:
        """For a local door: of rooms, ranks and instances that are not there."""
        rng = self.rng
        message = self.any_of(MESSAGES)
        names = message.__struct_fields__
        other: dict[str, Any] = {
            "room": rng.getrandbits(40),
            "rank": rng.choice((1, 2, 255)),
            "generation": rng.choice((0, 2, 2**32 - 2)),  # even: of a free slot, so of no room
            "instance": rng.choice(self.mine),
            "reason": rng.choice(list(Reason)),  # our own processes know no others
        }
        if "destination" in names:
            other["destination"] = replace_struct(
                message.destination, room=rng.getrandbits(40), generation=0
            )
        if "agent" in names:
            other["agent"] = replace_struct(message.agent, rank=rng.choice((1, 255)))
        kept = {name: value for name, value in other.items() if name in names}
        return replace_struct(message, **kept)


def rng_of(seed: int, whose: str) -> random.Random:
    """Everybody has numbers of their own: with those of the rooms, a gun would come to name one of
    them, "at random"."""
    return random.Random(f"{whose} {seed}")


def is_message(data: bytes) -> bool:
    """Would a local door take it in?"""
    try:
        codec.decode(data, from_peer=False)
    except ProtocolError:
        return False
    return True


class Frames:
    """Frames for one door, with what each is to be counted as ("" if it is taken)."""

    def __init__(self, seed: int, names: Names, *, from_peer: bool) -> None:
        self._rng = random.Random(seed)
        self._names, self._from_peer = names, from_peer
        good = [msgspec.msgpack.encode([self._one(names.mixable())]) for _ in range(64)]
        self._mutate = Mutator(seed, good)

    def _one(self, names: Names) -> AnyMessage:
        message: AnyMessage = names.any_of(PEER_MESSAGES) if self._from_peer else names.stale()
        return message

    def __call__(self) -> bytes:
        rng = self._rng
        kind = rng.randrange(20)
        if kind < 9:
            messages = [self._one(self._names) for _ in range(rng.choice(MESSAGES_A_FRAME))]
            return codec.seal(msgspec.msgpack.encode(messages))
        if kind == 9:  # many, and cheap to make
            count = rng.choice(COPIES)
            data = codec.seal(msgspec.msgpack.encode([self._one(self._names)] * count))
            return data if len(data) < LARGE_BYTES else b""
        if kind < 16:
            data = codec.seal(self._mutate())
            return data if self._from_peer or not is_message(data) else codec.MAGIC
        return rng.choice(
            (
                b"",
                b"GET / HTTP/1.1\r\n\r\n",
                codec.MAGIC,
                codec.MAGIC + rng.randbytes(40),
                rng.randbytes(200),
                rng.randbytes(1),
            )
        )
