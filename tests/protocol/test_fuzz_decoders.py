"""Each decoder of bytes from outside answers a value or its one typed error, in bounded time and
memory: see stress/fuzz/decoders.py.  `python -m stress.fuzz.guided` lets a coverage-guided fuzzer
look for what these samples miss.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdrt.attach import AttachRequest
from pdrt.errors import ProtocolError
from pdrt.protocol.codec import UNDECODABLE, seal
from stress.fuzz import decoders
from stress.fuzz.decoders import DECODERS, Decoder
from stress.fuzz.mutate import JSON_LIES, LIES, Mutator

SAMPLES = 1500
MANY = 100_000
SECONDS_MAX = 2.0  # of one decode: a hang guard
BYTES_PER_BYTE = 200  # of memory for one of input: a list of small numbers takes 60 or so
BYTES_FREE = 256 << 10

by_name = pytest.mark.parametrize("decoder", DECODERS, ids=lambda d: d.name)


def play(decoder: Decoder, seed: int, count: int) -> tuple[int, int]:
    """How many samples were taken, how many refused."""
    sample = decoder.samples(seed)
    taken = 0
    for _ in range(count):
        data = sample()
        began = time.monotonic()
        try:
            taken += decoder.check(data)
        except Exception as error:
            pytest.fail(f"{decoder.name} of {data[:200]!r}: {type(error).__name__}: {error}")
        assert time.monotonic() - began < SECONDS_MAX, data[:200]
    return taken, count - taken


@by_name
def test_a_hostile_sample_is_a_value_or_the_typed_error(decoder: Decoder) -> None:
    taken, refused = play(decoder, 0, SAMPLES)
    assert taken > SAMPLES / 100, "nothing gets far enough to be looked at"
    assert refused > SAMPLES / 100, "the samples are not hostile"


@pytest.mark.slow
@pytest.mark.timeout(900)
@by_name
def test_a_great_many_hostile_samples(decoder: Decoder) -> None:
    play(decoder, 1, MANY)


@by_name
@settings(deadline=None, max_examples=50)
@given(data=st.binary(max_size=300))
@example(data=b"")
def test_any_bytes_are_a_value_or_the_typed_error(decoder: Decoder, data: bytes) -> None:
    if decoder.name == "aux-row":
        data = data[:256].ljust(256, b"\0")
    decoder.check(data)
    if decoder.name.startswith("frame"):
        decoder.check(seal(data))


@by_name
def test_each_lie_of_the_format_is_refused_or_harmless(decoder: Decoder) -> None:
    """Lengths beyond the end, nesting without end, text that is none, alone and as a field."""
    if decoder.name == "aux-row":
        return
    for lie in (*LIES, *JSON_LIES):
        for data in (lie, b"\x91" + lie, b"\x81\xa1x" + lie, b'{"x":' + lie + b"}", lie * 3):
            decoder.check(data)
            decoder.check(seal(data))


@by_name
def test_no_byte_of_input_asks_for_much_memory(decoder: Decoder) -> None:
    sample = decoder.samples(2)
    big = [sample() * 1 for _ in range(200)]
    if decoder.name.startswith("frame"):
        big += [seal(lie * 1000) for lie in LIES]
    for data in big:
        decoder.check(data)  # whatever is made once is not this sample's
        tracemalloc.start()
        decoder.check(data)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < BYTES_FREE + BYTES_PER_BYTE * len(data), (peak, len(data), data[:100])


def test_the_same_seed_gives_the_same_samples() -> None:
    for decoder in DECODERS:
        first, second = (decoder.samples(5) for _ in range(2))
        assert [first() for _ in range(50)] == [second() for _ in range(50)]


# --- the fuzzer sees what it is there to see ---


def _forgetful(*caught: type[Exception]) -> Callable[[bytes], object]:
    def read(data: bytes) -> object:
        try:
            return msgspec.msgpack.decode(data, type=AttachRequest)
        except caught as error:
            raise ProtocolError("UNREADABLE") from error

    return read


@pytest.mark.parametrize("forgotten", UNDECODABLE)
def test_a_decoder_that_forgets_one_kind_of_error_is_found(forgotten: type[Exception]) -> None:
    """Nesting without end raises an error that msgspec does not own."""
    rest = tuple(kind for kind in UNDECODABLE if kind is not forgotten)
    mutate = Mutator(0, decoders.REQUESTS)
    hurt = Decoder("hurt", _forgetful(*rest), (ProtocolError,), lambda seed: mutate)
    with pytest.raises(pytest.fail.Exception, match=r"hurt of"):
        play(hurt, 0, 20_000)
