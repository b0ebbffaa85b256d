"""What every room is to be, drawn from its id: both engines and the oracle draw the same.

A room id is   lane (14 bits from bit 48) | calm (bit 47) | number in its lane.
A calm room is aborted by nobody.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

MASK = (1 << 64) - 1
LANE_SHIFT, CALM_BIT = 48, 1 << 47
NUMBER_MASK = CALM_BIT - 1
STEP = 0x9E37_79B9_7F4A_7C15  # odd: pages of a room differ
PAGE_WORDS = 1024  # 8 KiB

PREFILL, DECODE = 1, 2

#: Where in a room's life its abort is aimed.  Each side reads it its own way.
OPENING, KNOWN, FIRST, MIDDLE, LAST, LANDING, AFTER, WHENEVER = range(1, 9)
AIMS = {
    OPENING: "bootstrapping",
    KNOWN: "destination known",
    FIRST: "first chunk in flight",
    MIDDLE: "middle chunk in flight",
    LAST: "last chunk in flight",
    LANDING: "between last chunk and verdict",
    AFTER: "after the verdict",
    WHENEVER: "any time",
}


class Mix(msgspec.Struct, frozen=True):
    """How often what is drawn, of 1,000 rooms."""

    aborts: int = 40
    middle: int = 60  # a few chunks
    large: int = 30  # caught in the middle
    lingers: int = 20  # not cleared at once, but looked at again


class Spec(NamedTuple):
    chunks: tuple[int, ...]  # pages in each
    ahead: bool  # prefill sends before it knows the destination
    paced: bool  # a chunk waits until the one before has landed
    aborter: int  # PREFILL, DECODE or 0
    aim: int
    delay_us: int  # of the aim
    client_gone: bool  # the abort's reason
    linger_ms: int
    after_restart: int  # a follower that starts anew on it: 0 opens, 1 declines, 2 forgets
    held: bool = False  # the last chunk never comes: it ends with its client

    @property
    def pages_count(self) -> int:
        return sum(self.chunks)


def mix64(value: int) -> int:
    """splitmix64's finisher."""
    value = (value + STEP) & MASK
    value = ((value ^ value >> 30) * 0xBF58_476D_1CE4_E5B9) & MASK
    value = ((value ^ value >> 27) * 0x94D0_49BB_1331_11EB) & MASK
    return value ^ value >> 31


def room_of(lane: int, number: int, *, calm: bool = False) -> int:
    return lane << LANE_SHIFT | (CALM_BIT if calm else 0) | number


def lane_of(room: int) -> int:
    return room >> LANE_SHIFT


def is_calm(room: int) -> bool:
    return bool(room & CALM_BIT)


CLIENTS = 1 << 40  # numbers from here on are of rooms that belong to a client
_CLIENTS_ROOM = Spec((2, 2, 2), True, False, 0, 0, 0, True, 0, 0, held=True)


def spec(salt: int, room: int, drawn: Mix) -> Spec:
    if room & CLIENTS:
        return _CLIENTS_ROOM
    bits = mix64(salt ^ room)
    size = bits % 1000
    if size < drawn.large:
        count = 3 + (bits >> 10) % 4
        chunks = tuple(16 + (bits >> (12 + i)) % 16 for i in range(count))
    elif size < drawn.large + drawn.middle:
        chunks = tuple(1 + (bits >> (12 + i)) % 4 for i in range(2 + (bits >> 10) % 5))
    else:
        chunks = (2,)
    more = mix64(bits)
    aborted = more % 1000 < drawn.aborts and not is_calm(room)
    aim = 1 + (more >> 10) % 8 if aborted else 0
    return Spec(
        chunks=chunks,
        ahead=bool(more >> 16 & 1),
        paced=len(chunks) > 1 and bool(more >> 17 & 1),
        aborter=(PREFILL if more >> 18 & 1 else DECODE) if aborted else 0,
        aim=aim,
        delay_us=_delay_us(aim, more >> 20 & 0xFFFF),
        client_gone=bool(more >> 19 & 1),
        linger_ms=(more >> 36) % 300 if (more >> 46) % 1000 < drawn.lingers else 0,
        after_restart=(0, 0, 0, 0, 0, 1, 1, 2)[more >> 56 & 7],
    )


def _delay_us(aim: int, bits: int) -> int:
    if aim == WHENEVER:
        return (1, 10, 100, 1000, 5000)[bits % 5] * (
            1 + (bits >> 3) % 9
        )  # 0 to 45 ms, small ones as often
    if aim in (OPENING, LAST, AFTER) and bits & 1:
        return bits % 3000
    return 0


def first_word(salt: int, room: int) -> int:
    """Of the room's first page, throughout; page i holds this plus i * STEP."""
    return mix64(mix64(salt ^ room) + 1)


def canary(salt: int, room: int) -> int:
    """What the pages of a failed room hold once it is quiet."""
    return mix64(mix64(salt ^ room) + 2)


def token(salt: int, room: int) -> int:
    return mix64(mix64(salt ^ room) + 3) & 0x7FFF_FFFF


def digest(salt: int, room: int, pages_count: int) -> int:
    """Sum of every page's word times (2 * its index + 1): a page of another room, or in another
    place, changes it."""
    first = first_word(salt, room)
    return sum((first + i * STEP) * (2 * i + 1) for i in range(pages_count)) & MASK
