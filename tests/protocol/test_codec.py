from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from pdrt.errors import ProtocolError
from pdrt.protocol.codec import (
    FRAME_BYTES_MAX,
    MAGIC,
    MESSAGES_MAX,
    Malformed,
    decode,
    encode,
    seal,
)
from pdrt.protocol.messages import (
    PEER_MESSAGES,
    Abort,
    AnyMessage,
    Destination,
    Heartbeat,
    Introduction,
    Message,
    PeerGone,
)
from tests.protocol.messages_any import CLASSES, any_message, of_struct

ABORT = Abort(room=7, rank=0, slot=-1, generation=0, instance="d", reason=1)
packed = msgspec.msgpack.Encoder().encode


def frame_of(plain: object) -> bytes:
    return seal(packed(plain))


def refused_as(frame: bytes | memoryview, *, from_peer: bool = False) -> Malformed:
    with pytest.raises(ProtocolError) as caught:
        decode(frame, from_peer=from_peer)
    return Malformed[caught.value.kind]


def plain_of(message: AnyMessage) -> list[Any]:
    plain = msgspec.msgpack.decode(packed(message))
    assert isinstance(plain, list)
    return plain


def check_any(frame: bytes) -> None:
    """Whatever the bytes are: messages, or a ProtocolError of a known kind."""
    for from_peer in (False, True):
        try:
            messages = decode(frame, from_peer=from_peer)
        except ProtocolError as error:
            kind = error.kind
        else:
            kind = ""
            assert len(messages) <= MESSAGES_MAX
            allowed = PEER_MESSAGES if from_peer else CLASSES
            assert all(isinstance(message, allowed) for message in messages)
            assert decode(encode(messages)) == messages
        assert kind in ("", *Malformed.__members__)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_message_survives_a_round_trip(cls: type[AnyMessage]) -> None:
    @settings(deadline=None, max_examples=25)
    @given(st.lists(of_struct(cls), max_size=3))
    def round_trip(messages: list[AnyMessage]) -> None:
        frame = encode(messages)
        assert decode(frame) == messages
        assert decode(memoryview(frame)) == messages

    round_trip()


@settings(deadline=None)
@given(st.lists(any_message, max_size=5))
def test_a_peer_is_let_in_only_with_peer_messages(messages: list[AnyMessage]) -> None:
    frame = encode(messages)
    if all(isinstance(message, PEER_MESSAGES) for message in messages):
        assert decode(frame, from_peer=True) == messages
    else:
        assert refused_as(frame, from_peer=True) is Malformed.NOT_FOR_PEERS


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
@example(seal(b"\x91" * 100_000))  # nested without end
@example(seal(b"\xdd\xff\xff\xff\xff"))  # four billion messages, it says
@example(seal(b"\xdd\xff\xff\xff\xff" * 1000))
@example(seal(b"\x91\xdd\xff\xff\xff\xff\x0d"))
@example(seal(b"\x91\x92\x0d\xc6\xff\xff\xff\xff"))  # four billion bytes
@example(seal(b"\x91\x92\x0d\xdb\xff\xff\xff\xff"))  # ... of text
@example(seal(b"\x91\x92\x0d\xdf\xff\xff\xff\xff"))  # ... pairs
@example(seal(b"\x91\x92\x21\x92\x01\xc9\xff\xff\xff\xff\x01"))  # ... of an extension
@example(seal(b"\x91\x93\x24\xa2\xff\xfe\xc0"))  # not UTF-8
@example(seal(b"\x91" + b"\x81\xa1a" * 100_000))
@example(seal(b"\xc1"))  # the one byte that msgpack does not use
@example(seal(b"\x91\x91\xd3" + struct.pack(">q", -(2**63))))
@example(seal(b"\x91\x99\x0d\x01\x00\x00\x01\xa1d\x01\xc2" + b"\x91" * 100_000))  # appended
@example(seal(b"\x91\x94\x21\x01\x01\x81\xa2\xff\xfe\xc4\x00"))
@example(seal(b"\x90trailing"))
def test_any_bytes_are_messages_or_a_protocol_error(data: bytes) -> None:
    check_any(data)
    check_any(seal(data))


@settings(deadline=None, max_examples=300)
@given(st.lists(any_message, min_size=1, max_size=3), st.data())
def test_a_frame_damaged_anywhere_is_messages_or_a_protocol_error(
    messages: list[AnyMessage], data: st.DataObject
) -> None:
    frame = bytearray(encode(messages))
    at = data.draw(st.integers(1, len(frame) - 1))
    how = data.draw(st.sampled_from(["change", "cut", "insert"]))
    if how == "cut":
        assert refused_as(bytes(frame[:at])) in (Malformed.UNREADABLE, Malformed.UNKNOWN)
        return
    if how == "change":
        frame[at] = data.draw(st.integers(0, 255))
    else:
        frame[at:at] = data.draw(st.binary(min_size=1, max_size=5))
    check_any(bytes(frame))


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)


@settings(deadline=None, max_examples=200)
@given(json_like, st.integers(-1, 300))
def test_any_msgpack_is_messages_or_a_protocol_error(value: object, tag: int) -> None:
    for plain in (value, [value], [[tag, value]], [[tag, value, value]]):
        check_any(frame_of(plain))


def bounded_fields() -> list[tuple[type[Message], int, int]]:
    """(class, position, value outside its bounds) of every integer on the wire."""
    found = []
    for cls in CLASSES:
        info = inspect.type_info(cls)
        assert isinstance(info, inspect.StructType)
        for position, field in enumerate(info.fields, start=1):
            if isinstance(field.type, inspect.IntType):
                assert field.type.ge is not None
                assert field.type.le is not None
                found.append((cls, position, field.type.ge - 1))
                found.append((cls, position, field.type.le + 1))
    return found


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(bounded_fields()), st.data())
def test_a_number_out_of_its_bounds_is_malformed(
    field: tuple[type[Message], int, int], data: st.DataObject
) -> None:
    cls, position, value = field
    plain = plain_of(data.draw(of_struct(cls)))
    plain[position] = value
    assert refused_as(frame_of([plain])) is Malformed.UNKNOWN


@given(st.lists(any_message, min_size=1, max_size=3), st.data())
def test_one_flipped_bit_is_always_seen(messages: list[AnyMessage], data: st.DataObject) -> None:
    frame = bytearray(encode(messages))
    bit = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[bit // 8] ^= 1 << bit % 8
    assert refused_as(bytes(frame)) in (Malformed.UNREADABLE, Malformed.FOREIGN)


def test_each_kind_of_malformed_frame_is_told_apart() -> None:
    assert refused_as(b"") is Malformed.EMPTY
    assert refused_as(memoryview(b"")) is Malformed.EMPTY
    assert refused_as(bytes(FRAME_BYTES_MAX + 1)) is Malformed.OVERSIZED
    assert refused_as(b"GET / HTTP/1.1\r\n") is Malformed.FOREIGN
    assert refused_as(packed([ABORT])) is Malformed.FOREIGN
    assert refused_as(MAGIC) is Malformed.UNREADABLE
    assert refused_as(encode([ABORT])[:-1]) is Malformed.UNREADABLE
    assert refused_as(encode([ABORT]) + b"\0") is Malformed.UNREADABLE
    assert refused_as(frame_of([[99, 1, 2]])) is Malformed.UNKNOWN
    assert refused_as(frame_of({"room": 1})) is Malformed.UNKNOWN
    assert refused_as(frame_of([ABORT] * (MESSAGES_MAX + 1))) is Malformed.UNKNOWN
    assert refused_as(encode([PeerGone("x")]), from_peer=True) is Malformed.NOT_FOR_PEERS
    assert decode(encode([PeerGone("x")])) == [PeerGone("x")]


def test_a_frame_may_be_full_but_not_fuller() -> None:
    assert len(decode(encode([ABORT] * MESSAGES_MAX))) == MESSAGES_MAX
    spare = FRAME_BYTES_MAX - len(encode([Heartbeat("p", 1, bytes(1 << 16))])) + (1 << 16)
    full = [Heartbeat("p", 1, bytes(spare))]
    assert len(encode(full)) == FRAME_BYTES_MAX
    assert decode(encode(full)) == full
    with pytest.raises(ProtocolError, match="OVERSIZED"):
        encode([Heartbeat("p", 1, bytes(spare + 1))])


def test_what_one_message_may_multiply_is_bounded() -> None:
    """Small entries without number would keep a listener busy for longer than it may be silent."""
    agents = [[0, 0, 0, 0, {}]] * 257
    assert refused_as(frame_of([[3, "d", 1, "h:1", "b", agents, 1]])) is Malformed.UNKNOWN
    offers = {str(number): b"" for number in range(17)}
    agent = [0, 0, 0, 0, offers]
    assert refused_as(frame_of([[3, "d", 1, "h:1", "b", [agent], 1]])) is Malformed.UNKNOWN
    fewer = frame_of([[3, "d", 1, "h:1", "b", agents[:256], 1]])
    [introduction] = decode(fewer, from_peer=True)
    assert isinstance(introduction, Introduction)
    assert len(introduction.agents) == 256


@settings(deadline=None)
@given(any_message, st.lists(json_like, min_size=1, max_size=3))
def test_fields_that_a_newer_version_appends_are_ignored(
    message: AnyMessage, more: list[object]
) -> None:
    assert decode(frame_of([[*plain_of(message), *more]])) == [message]


def test_fields_with_a_default_may_be_missing_and_no_others() -> None:
    plain = plain_of(ABORT)
    assert decode(frame_of([plain[:-2]])) == [ABORT]  # `quiet` and `session`
    assert refused_as(frame_of([plain[:-3]])) is Malformed.UNKNOWN


def test_text_and_bytes_are_not_taken_for_each_other() -> None:
    destination = Destination(1, 0, 0, 1, "d", 1, b"\0\0\0\0", 0)
    plain = plain_of(destination)
    plain[7] = "text"
    assert refused_as(frame_of([plain])) is Malformed.UNKNOWN
    assert decode(frame_of([plain_of(destination)])) == [destination]
