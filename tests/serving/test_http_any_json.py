"""Whatever JSON comes in, a JSON answer with an honest status goes out, and nothing stays open."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving.http_fakes import FakeGenerator, call, make_app, post, say

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(min_value=-(2**70), max_value=2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
ANY = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
NAMES = [
    *["prompt", "messages", "text", "input_ids", "sampling_params", "n", "max_tokens", "seed"],
    *["stop", "stream", "stream_options", "logprobs", "top_logprobs", "rid", "bootstrap_room"],
    *["bootstrap_host", "bootstrap_port", "temperature", "top_p", "min_tokens", "abort_all"],
    *["return_logprob", "top_logprobs_num", "top_k", "logit_bias", "response_format", "echo"],
]
# Mostly right, so that what comes after the decoder is reached too.
LIKELY = {
    "prompt": st.text(max_size=5)
    | st.lists(st.text(max_size=3), max_size=3)
    | st.lists(st.integers(0, 2**31), max_size=4),
    "text": st.text(max_size=5) | st.lists(st.text(max_size=3), max_size=3),
    "messages": st.lists(
        st.fixed_dictionaries({"role": st.text(max_size=4), "content": st.text(max_size=4)}),
        max_size=3,
    ),
    "n": st.integers(-1, 9) | st.none(),
    "max_tokens": st.integers(0, 70) | st.none(),
    "seed": st.integers(-(2**63), 2**63) | st.none(),
    "stream": st.booleans() | st.none(),
    "rid": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "bootstrap_room": st.integers(-1, 2**63) | st.lists(st.integers(0, 3), max_size=4),
    "bootstrap_host": st.text(max_size=3) | st.lists(st.none() | st.text(max_size=3), max_size=4),
    "bootstrap_port": st.none() | st.integers(0, 70000) | st.lists(st.none(), max_size=3),
    "logprobs": st.integers(0, 3) | st.booleans(),
    "sampling_params": st.dictionaries(st.sampled_from(["n", "stop", "seed"]), SCALARS),
}
BODIES = (
    ANY
    | st.dictionaries(st.sampled_from(NAMES), ANY, max_size=8)
    | st.fixed_dictionaries({}, optional=LIKELY)
)
PATHS = ["/v1/completions", "/v1/chat/completions", "/generate", "/abort_request"]


def check(generator: FakeGenerator, response: Any) -> None:
    assert response.status_code in {200, 400}, response.text
    streamed = response.headers["content-type"].startswith("text/event-stream")
    if not streamed:
        body = response.json()
        assert response.status_code == 200 or set(body["error"]) == {
            "message",
            "type",
            "param",
            "code",
        }
    assert generator.open == set()


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=150, deadline=None)
@given(body=BODIES)
def test_any_json_is_answered_and_never_breaks_us(path: str, body: Any):
    generator = FakeGenerator(say("ab"))
    check(generator, post(make_app(generator), path, body))


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=50, deadline=None)
@given(content=st.binary(max_size=40))
def test_any_bytes_are_answered_and_never_break_us(path: str, content: bytes):
    generator = FakeGenerator(say("ab"))
    check(generator, call(make_app(generator), "POST", path, content=content))
