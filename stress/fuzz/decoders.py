"""Everything of pdrt that turns bytes from outside into something: what it is fed, and what it may
answer.

A decoder answers a value, or raises the one kind of error that its callers handle.  Anything else
that it raises ends a turn of somebody's loop, or a process.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, get_args

import msgspec
from msgspec import inspect

from pdrt.attach import AttachReply, AttachRequest, read_reply, read_request
from pdrt.clock import ManualClock
from pdrt.errors import AttachFailed, BadConfig, CorruptAux, PdrtError, ProtocolError
from pdrt.mail.names import split
from pdrt.memory.aux import ROW, AuxRow, AuxRows
from pdrt.protocol import codec
from pdrt.protocol.layout import AUX_ROW_BYTES, Layout, RegionMap, layout_of
from pdrt.protocol.messages import PEER_MESSAGES, AnyMessage, Message
from pdrt.serving.generate import parse_abort, parse_generate
from pdrt.serving.http import status_of
from pdrt.serving.openai import parse_chat, parse_completion
from pdrt.serving.plan import Context, rooms_named
from pdrt.transports import metadata
from pdrt.transports.base import TransportError
from pdrt.transports.metadata import FakeMetadata, NixlMetadata, ShmMetadata
from stress.fuzz.mutate import Mutator, binary
from tests.serving.http_fakes import INFO, FakeTokens

LAYOUT = Layout(model="m", layers=2, kv_heads=1, head_dim=2, dtype="float32", page_size=1, ranks=2)
MAP = RegionMap(layout=LAYOUT, rank=0, pages_count=4, aux_rows=2)
MESSAGES: tuple[type[Message], ...] = get_args(AnyMessage)
packed = msgspec.msgpack.encode
ROOM = 7


@dataclass(frozen=True)
class Decoder:
    """`samples(seed)` gives endless input; `read` answers or raises one of `refuses`."""

    name: str
    read: Callable[[bytes], object]
    refuses: tuple[type[Exception], ...]
    samples: Callable[[int], Callable[[], bytes]]

    def check(self, data: bytes) -> bool:
        """Was it taken?  Raises what may not be raised."""
        try:
            self.read(data)
        except self.refuses:
            return False
        return True


# --- good samples ---


def example(cls: type[msgspec.Struct]) -> Any:
    """One of a type, with a likely value in each field."""
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    return cls(**{field.name: _likely(field.name, field.type) for field in info.fields})


def _likely(name: str, kind: inspect.Type) -> Any:
    match kind:
        case inspect.IntType():
            return 1
        case inspect.StrType():
            return {"control": "127.0.0.1:8998", "peer": "127.0.0.1:8998"}.get(name, f"some-{name}")
        case inspect.BytesType():
            return bytes(16)
        case inspect.BoolType():
            return True
        case inspect.ListType(item_type=item):
            return [_likely(name, item)]
        case inspect.DictType():
            return {"shm": SHM}
        case inspect.StructType(cls=cls):
            return example(cls)
        case _:
            raise AssertionError(f"no example of {kind}")


SHM = packed(
    ShmMetadata(agent="a", boot_id="b", address="@pdrt-nobody", key="0#1", region_bytes=4096)
)
NIXL = packed(
    NixlMetadata(
        agent="a",
        version="1.5.1",
        agent_metadata=b"nixl",
        checksum=metadata.checksum(b"nixl"),
        region_address=4096,
        region_bytes=8192,
        scratch_offset=4096,
    )
)
REPLY = packed(AttachReply(instance="i", row=48, incarnation=1, maps=(MAP,), workers=("w",)))
REQUESTS = [
    packed(AttachRequest(kind="engine", name="n")),
    packed(AttachRequest(kind="region", rank=1, instance="i", epoch=3)),
]
BODIES: dict[str, list[bytes]] = {
    "completion": [
        b'{"model":"tiny","prompt":"ab","max_tokens":3,"n":2,"logprobs":1,"seed":4,"stream":true,'
        b'"stream_options":{"include_usage":true},"stop":["a"],"bootstrap_room":[1,2],'
        b'"bootstrap_host":"h","bootstrap_port":[null,7],"rid":["a","b"]}',
        b'{"prompt":[[1,2],[3]],"temperature":0.5,"top_p":1,"stop_token_ids":[1],"top_k":-1}',
    ],
    "chat": [
        b'{"messages":[{"role":"user","content":[{"type":"text","text":"x"}]},'
        b'{"role":"assistant","content":"y"}],"max_completion_tokens":2,"logprobs":true,'
        b'"top_logprobs":2,"tools":[],"response_format":{"type":"text"},"bootstrap_room":9}',
    ],
    "generate": [
        b'{"text":["a","b"],"sampling_params":[{"n":1,"max_new_tokens":2,"stop":"x"},{"seed":1}],'
        b'"return_logprob":true,"top_logprobs_num":1,"stream":true,"rid":["a","b"],'
        b'"bootstrap_room":[5,6],"bootstrap_host":[null,"h"],"bootstrap_port":1}',
        b'{"input_ids":[1,2,3],"sampling_params":{"temperature":0,"ignore_eos":true}}',
    ],
    "abort": [b'{"rid":"a"}', b'{"abort_all":true}'],
}


# --- what they are fed, and how ---


def _frames(good: Sequence[type[Message]], seed: int) -> Callable[[], bytes]:
    """Sealed most of the time: behind a wrong checksum nothing else is reached."""
    rng = random.Random(seed)
    mutate = Mutator(seed, [packed([example(cls)]) for cls in good])

    def sample() -> bytes:
        data = mutate()
        return codec.seal(data) if rng.random() < 0.95 else data

    return sample


def _packed(good: Sequence[bytes], seed: int) -> Callable[[], bytes]:
    return Mutator(seed, good)


def _json(good: Sequence[bytes], seed: int) -> Callable[[], bytes]:
    return Mutator(seed, good, is_json=True)


def _aux(seed: int) -> Callable[[], bytes]:
    """As long as a row always is; only its contents come from a peer."""
    rng, good = random.Random(seed), ROW.pack(ROOM, 0, 1, -0.5, 3, 2, *range(40))

    def sample() -> bytes:
        return binary(rng, good, rng.choice("bhiq")).ljust(AUX_ROW_BYTES, b"\xff")

    return sample


def _read_frame(data: bytes, *, from_peer: bool) -> list[AnyMessage]:
    messages = codec.decode(data, from_peer=from_peer)
    assert len(messages) <= codec.MESSAGES_MAX
    assert all(isinstance(m, PEER_MESSAGES if from_peer else MESSAGES) for m in messages)
    return messages


@cache
def _aux_rows() -> tuple[AuxRows, memoryview]:
    region = memoryview(bytearray(MAP.length_bytes))
    return AuxRows([region], [MAP]), region


def _read_aux(data: bytes) -> AuxRow:
    rows, region = _aux_rows()
    region[MAP.aux_offset : MAP.aux_offset + AUX_ROW_BYTES] = data
    row = rows.read(0, ROOM)
    assert row.room == ROOM
    return row


def _context() -> Context:
    return Context(tokens=FakeTokens(), info=INFO, clock=ManualClock(), wall_s=lambda: 0.0)


@contextlib.contextmanager
def _as_caller_error() -> Iterator[None]:
    """A body is the caller's: its error is a 400 and never a 500."""
    try:
        yield
    except PdrtError as error:
        if status_of(error) != 400:
            raise AssertionError(f"status {status_of(error)}: {error}") from error
        raise


def _read_body(parse: Callable[..., object], data: bytes) -> object:
    rooms_named(data)  # is asked about every body that is refused
    with _as_caller_error():
        return parse(data, "request", _context())


def _read_abort(data: bytes) -> str:
    with _as_caller_error():
        return parse_abort(data)


def _decoders() -> Iterator[Decoder]:
    for name, from_peer, good in (("local", False, MESSAGES), ("peer", True, PEER_MESSAGES)):
        read = partial(_read_frame, from_peer=from_peer)
        yield Decoder(f"frame-{name}", read, (ProtocolError,), partial(_frames, good))
    yield Decoder("layout", layout_of, (BadConfig,), partial(_packed, [packed(LAYOUT)]))
    kinds: list[tuple[type[Any], bytes]] = [
        (NixlMetadata, NIXL),
        (ShmMetadata, SHM),
        (FakeMetadata, packed(FakeMetadata("a"))),
    ]
    for kind, sample in kinds:
        yield Decoder(
            f"metadata-{kind.__name__}",
            partial(metadata.decode, kind=kind),
            (TransportError,),
            partial(_packed, [sample, SHM]),
        )
    yield Decoder("attach-request", read_request, (AttachFailed,), partial(_packed, REQUESTS))
    yield Decoder("attach-reply", read_reply, (AttachFailed,), partial(_packed, [REPLY]))
    yield Decoder("aux-row", _read_aux, (CorruptAux,), _aux)
    for name, parse in (
        ("completion", parse_completion),
        ("chat", parse_chat),
        ("generate", parse_generate),
    ):
        read_body = partial(_read_body, parse)
        yield Decoder(f"http-{name}", read_body, (PdrtError,), partial(_json, BODIES[name]))
    yield Decoder("http-abort", _read_abort, (PdrtError,), partial(_json, BODIES["abort"]))
    addresses = [b"tcp://localhost:8998", b"tcp://[::1]:1", b"tcp://a.b-c:65536"]
    yield Decoder("address", _read_address, (UnicodeDecodeError,), partial(_packed, addresses))


def _read_address(data: bytes) -> object:
    """Addresses come as text that a message's decoder has read."""
    return split(data.decode())


DECODERS = tuple(_decoders())
