"""Bytes that are almost right, from a seed.

A decoder is rarely wrong about noise; it is wrong about what looks like its own.  So a sample is
taken apart (msgpack or JSON), one value of it becomes something else that the format can say, and
it is put together again; then perhaps the bytes are damaged as well.
"""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from pdrt.protocol.codec import UNDECODABLE

Plain = Any  # what msgpack or JSON can say, as Python has it

LONG = 3000  # of a text, a list: beyond most bounds, and cheap
DEEP = 300
SAMPLE_BYTES_MAX = 64 << 10  # before it is damaged
NUMBERS = (
    *(0, 1, -1, 2, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32),
    *(2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63)),
)
#: Heads of msgpack that promise more than there is, and bytes that it does not use.
LIES = (
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"),
    *(b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\xdc\xff\xff", b"\xc1", b"\xd4\xff"),
    *(b"\xc7\x0c\xff" + b"\xff" * 12, b"\xd8\x05", b"\xa2\xff\xfe", b"\xd9\x01\x80"),
    *(b"\x91" * DEEP, b"\x81\xa1a" * DEEP, b"\x91" * 20_000, b"\xcb\x7f\xf8" + bytes(6)),
)
#: The same for JSON.
JSON_LIES = (
    *(
        b"[" * DEEP,
        b"[" * 20_000,
        b'{"a":' * DEEP,
        b'{"a":1,"a":2}',
        b"NaN",
        b"-Infinity",
        b"1e999",
    ),
    *(b'"\xff\xfe"', b'"\\ud800"', b'"\\u0000"', b"9" * 400, b"-0", b"\xef\xbb\xbf", b"nul", b","),
    *(b"/**/", b"1.", b"0x10", b"1" + b"0" * 5000),
)
#: Values that no encoder writes.  Each stands for itself until the sample is put together.
NOT_TEXT, LIE = "\N{SKULL AND CROSSBONES}", "\N{RADIOACTIVE SIGN}"


def nested(rng: random.Random, depth: int = 3) -> Plain:
    """Any small value."""
    kind = rng.randrange(9 if depth else 7)
    match kind:
        case 0:
            return rng.choice(NUMBERS)
        case 1:
            return rng.choice((None, True, False))
        case 2:
            return rng.choice((0.0, -0.0, 1e308, math.inf, -math.inf, math.nan, 0.5))
        case 3:
            return rng.choice((NOT_TEXT, LIE, "", "a", "\0", "éé", "x" * LONG, "127.0.0.1:1"))
        case 4:
            return rng.randbytes(rng.choice((0, 1, 4, 7, 8, 16, 64)))
        case 5:
            return [rng.choice(NUMBERS)] * rng.choice((0, 1, 300, LONG))
        case 6:
            return rng.randrange(-(2**63), 2**64)
        case 7:
            return [nested(rng, depth - 1) for _ in range(rng.randrange(4))]
        case _:
            return {str(rng.randrange(5)): nested(rng, depth - 1) for _ in range(rng.randrange(4))}


def places(plain: Plain, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where each value of it stands, the whole first."""
    found = [path]
    if isinstance(plain, list):
        for index, item in enumerate(plain[:50]):
            found += places(item, (*path, index))
    elif isinstance(plain, dict):
        for key, item in list(plain.items())[:50]:
            found += places(item, (*path, key))
    return found


def at(plain: Plain, path: Sequence[Any]) -> Plain:
    for step in path:
        plain = plain[step]
    return plain


def replaced(plain: Plain, path: Sequence[Any], value: Plain) -> Plain:
    """A copy with another value at that place."""
    if not path:
        return value
    copy = dict(plain) if isinstance(plain, dict) else list(plain)
    copy[path[0]] = replaced(plain[path[0]], path[1:], value)
    return copy


def bent(rng: random.Random, plain: Plain, others: Sequence[Plain]) -> Plain:
    """One thing in it is otherwise, or comes from another sample."""
    path = rng.choice(places(plain))
    here = at(plain, path)
    match rng.randrange(6):
        case 0 | 1:
            return replaced(plain, path, nested(rng))
        case 2 if others:  # valid, from elsewhere
            other = rng.choice(others)
            return replaced(plain, path, at(other, rng.choice(places(other))))
        case 3 if isinstance(here, int):
            return replaced(plain, path, here + rng.choice((-1, 1)) if abs(here) < 2**62 else 0)
        case 4 if isinstance(here, list) and here:
            cut = rng.randrange(len(here))
            more = [*here[:cut], *here[cut + 1 :]] if rng.random() < 0.5 else [*here, here[cut]]
            return replaced(plain, path, more)
        case 5 if isinstance(here, dict) and here:
            gone = rng.choice(list(here))
            return replaced(plain, path, {k: v for k, v in here.items() if k != gone})
        case _:
            return replaced(plain, path, [here] * rng.choice((1, 2, 300)))


def damaged(rng: random.Random, data: bytes, lies: Sequence[bytes]) -> bytes:
    """The bytes themselves are hurt, as a bad link or another program would."""
    where = rng.randrange(len(data) + 1)
    match rng.randrange(7):
        case 0 if data:
            bit = rng.randrange(8 * len(data))
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            return bytes(flipped)
        case 1:
            return data[:where]
        case 2:
            return data[:where] + rng.choice(lies) + data[where:]
        case 3:
            return data[:where] + rng.choice(lies)
        case 4:
            return data[:where] + rng.randbytes(rng.randrange(1, 9)) + data[where:]
        case 5:
            end = rng.randrange(where, len(data) + 1)
            return data[:end] + data[where:]
        case _:
            return data[where:]


class Mutator:
    """Endless hostile samples of one format, out of good ones."""

    def __init__(self, seed: int, good: Sequence[bytes], *, is_json: bool = False) -> None:
        self._rng = random.Random(seed)
        self._good = list(good)
        self._lies = JSON_LIES if is_json else LIES
        self._read: Callable[[bytes], Plain] = json.loads if is_json else msgspec.msgpack.decode
        self._write: Callable[[Plain], bytes] = _json if is_json else msgspec.msgpack.encode
        self._plain = [plain for data in good if (plain := self._taken_apart(data)) is not None]

    def _taken_apart(self, data: bytes) -> Plain:
        try:
            return self._read(data)
        except (*UNDECODABLE, ValueError):
            return None

    def __call__(self) -> bytes:
        rng = self._rng
        if rng.random() < 0.02 or not self._plain:
            data = rng.choice([*self._good, rng.randbytes(rng.randrange(64))])
            return damaged(rng, data, self._lies)
        plain = rng.choice(self._plain)
        for _ in range(rng.choice((0, 1, 1, 2, 5))):
            once_more = bent(rng, plain, self._plain)
            if len(self._write(once_more)) > SAMPLE_BYTES_MAX:
                break
            plain = once_more
        data = self._unwritable(self._write(plain))
        return damaged(rng, data, self._lies) if rng.random() < 0.3 else data

    def _unwritable(self, data: bytes) -> bytes:
        lie = self._rng.choice(self._lies)
        if self._write is _json:
            data = data.replace(NOT_TEXT.encode(), b"\xff\xfe")
            return data.replace(b'"%b"' % LIE.encode(), lie, 3)
        data = data.replace(NOT_TEXT.encode(), b"\xff\xfe\xa0")  # as long, so that all else fits
        return data.replace(b"\xa3" + LIE.encode(), lie, 3)


def _json(plain: Plain) -> bytes:
    """With NaN and Infinity as the usual encoders have them, and bytes as text."""
    text = json.dumps(plain, default=lambda odd: odd.decode("latin-1"), ensure_ascii=False)
    return text.encode(errors="surrogatepass")


def binary(rng: random.Random, good: bytes, fields: str) -> bytes:
    """A C struct with other numbers in it, or cut."""
    if rng.random() < 0.1:
        return good[: rng.randrange(len(good))]
    data = bytearray(good)
    for _ in range(rng.randrange(1, 4)):
        size = struct.calcsize(fields)
        offset = rng.randrange(0, len(data) - size + 1)
        data[offset : offset + size] = rng.randbytes(size)
    return bytes(data)
