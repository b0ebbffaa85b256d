"""Frames <-> messages.  Refuses what it does not know, by kind.

    +------+-----------------------+-----------------------------+
    | 0xd7 | CRC-32, little-endian | msgpack array of messages   |
    +------+-----------------------+-----------------------------+

Grouping what one duty cycle has to say to one listener into one frame is what keeps small rooms
cheap.  The checksum is for page numbers: a flipped bit that TCP let through would send KV into
somebody else's page.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated

import msgspec

from pdrt.errors import ProtocolError
from pdrt.protocol.messages import PEER_MESSAGES, AnyMessage

MAGIC = b"\xd7"  # not a valid first byte of UTF-8 text, of ZMTP or of a bare msgpack array
HEAD_BYTES = 5  # magic and checksum
FRAME_BYTES_MAX = 4 << 20
MESSAGES_MAX = 4096  # in one frame

_FOR_PEERS = frozenset(PEER_MESSAGES)


class Malformed(IntEnum):
    """Kinds of frames that are counted and dropped."""

    PARTS = 0  # not exactly one frame after the envelope
    EMPTY = 1
    OVERSIZED = 2
    FOREIGN = 3  # another protocol: no magic
    UNREADABLE = 4  # not msgpack, or truncated
    UNKNOWN = 5  # a tag or a field type that this version does not have, or too many messages
    NOT_FOR_PEERS = 6  # a local message on the control port
    VALUE = 7  # well-formed, impossible value


#: What decoding can raise: of nesting without end it is not msgspec that complains.
UNDECODABLE = (msgspec.MsgspecError, RecursionError)

_encoder = msgspec.msgpack.Encoder()
# The bound is in the type, so that it is checked before the first message is made: a frame of a
# million small messages costs nothing.
_decoder = msgspec.msgpack.Decoder(
    Annotated[list[AnyMessage], msgspec.Meta(max_length=MESSAGES_MAX)]
)


def seal(payload: bytes) -> bytes:
    """A frame of encoded messages."""
    return MAGIC + _checksum(payload) + payload


def _checksum(payload: bytes | memoryview) -> bytes:
    return zlib.crc32(payload).to_bytes(4, "little")


def encode(messages: Sequence[AnyMessage]) -> bytes:
    """One frame.  Raises ProtocolError(OVERSIZED) when the frame would be refused by the
    receiver."""
    frame = seal(_encoder.encode(messages))
    if len(frame) > FRAME_BYTES_MAX:
        raise ProtocolError(Malformed.OVERSIZED.name, f"{len(frame)} bytes")
    return frame


def decode(frame: bytes | memoryview, *, from_peer: bool = False) -> list[AnyMessage]:
    """The messages of a frame.  Raises ProtocolError and nothing else, whatever the bytes are."""
    if len(frame) == 0:
        raise ProtocolError(Malformed.EMPTY.name)
    if len(frame) > FRAME_BYTES_MAX:
        raise ProtocolError(Malformed.OVERSIZED.name, f"{len(frame)} bytes")
    if frame[0] != MAGIC[0]:
        raise ProtocolError(Malformed.FOREIGN.name)
    payload = frame[HEAD_BYTES:]
    if len(frame) < HEAD_BYTES or bytes(frame[1:HEAD_BYTES]) != _checksum(payload):
        raise ProtocolError(Malformed.UNREADABLE.name, "damaged: the checksum differs")
    try:
        messages = _decoder.decode(payload)
    except msgspec.ValidationError as error:
        raise ProtocolError(Malformed.UNKNOWN.name, str(error)) from None
    except UNDECODABLE as error:
        raise ProtocolError(Malformed.UNREADABLE.name, str(error)) from None
    if from_peer:
        for message in messages:
            if type(message) not in _FOR_PEERS:
                raise ProtocolError(Malformed.NOT_FOR_PEERS.name, type(message).__name__)
    return messages
