"""SGLang's /generate and /abort_request."""

from __future__ import annotations

from typing import Any

import pytest

from pdrt.clock import ManualClock
from pdrt.serving.types import Delta, FinishReason, Rendezvous
from tests.serving.http_fakes import FakeGenerator, call, events, make_app, post, say, steps


def answer(body: dict[str, Any], script: Any = None) -> tuple[Any, FakeGenerator]:
    generator = FakeGenerator(script or say("ab", FinishReason.LENGTH))
    response = post(make_app(generator), "/generate", body)
    assert response.status_code == 200, response.text
    assert generator.open == set()
    return events(response.text) if body.get("stream") else response.json(), generator


def test_one_prompt_gives_one_object():
    body, generator = answer({"text": "xyz", "rid": "r1"})
    assert body == {
        "text": "ab",
        "output_ids": [97, 98],
        "meta_info": {
            "id": "r1",
            "finish_reason": {"type": "length", "length": 2},
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "cached_tokens": 0,
            "e2e_latency": 0.0,
            "room": {"state": "Success"},
        },
    }
    assert generator.submitted[0].sampling.max_tokens == 61  # 128, cut to what the context has


def test_latency_is_in_seconds():
    clock = ManualClock()

    def script(request: Any) -> Any:
        clock.advance_s(1.5)
        return say("a")(request)

    response = post(make_app(FakeGenerator(script), clock=clock), "/generate", {"text": "x"})
    assert response.json()["meta_info"]["e2e_latency"] == 1.5


def test_sampling_params_reach_the_engine():
    params = {
        "max_new_tokens": 5,
        "min_new_tokens": 1,
        "temperature": 0.0,
        "top_p": 0.9,
        "stop": ["e"],
        "stop_token_ids": [3],
        "ignore_eos": True,
        "sampling_seed": 4,
        "top_k": 1 << 30,
        "spaces_between_special_tokens": True,
    }
    _, generator = answer({"input_ids": [1, 2], "sampling_params": params})
    (request,) = generator.submitted
    assert request.prompt_tokens == (1, 2)
    assert (request.sampling.max_tokens, request.sampling.min_tokens) == (5, 1)
    assert (request.sampling.temperature, request.sampling.top_p) == (0.0, 0.9)
    assert (request.sampling.stop, request.sampling.stop_token_ids) == (("e",), (3,))
    assert (request.sampling.ignore_eos, request.sampling.seed) == (True, 4)


def test_a_batch_gives_a_list():
    body, generator = answer(
        {
            "text": ["x", "yz"],
            "rid": ["r", "s"],
            "sampling_params": [{"max_new_tokens": 3}, {"max_new_tokens": 4}],
            "bootstrap_room": [5, 6],
            "bootstrap_host": ["h", "h"],
            "bootstrap_port": [1, 2],
        }
    )
    assert [each["meta_info"]["id"] for each in body] == ["r", "s"]
    assert [each.sampling.max_tokens for each in generator.submitted] == [3, 4]
    assert [each.rendezvous for each in generator.submitted] == [
        Rendezvous(room=5, host="h", port=1),
        Rendezvous(room=6, host="h", port=2),
    ]


@pytest.mark.parametrize("fields", [{"text": ["x"]}, {"input_ids": [[1]]}])
def test_a_batch_of_one_gives_a_list(fields: dict[str, Any]):
    body, _ = answer(fields)
    assert isinstance(body, list)


def test_samples_of_one_prompt_give_a_list():
    body, generator = answer({"text": "x", "sampling_params": {"n": 2, "seed": 1}, "rid": "r"})
    assert [each["meta_info"]["id"] for each in body] == ["r-0", "r-1"]
    assert [each.sampling.seed for each in generator.submitted] == [1, 2]


def test_events_repeat_what_came_before():
    chunks, _ = answer({"text": "x", "stream": True})
    assert [chunk["text"] for chunk in chunks] == ["a", "ab"]
    assert [chunk["output_ids"] for chunk in chunks] == [[97], [97, 98]]
    assert chunks[0]["meta_info"]["finish_reason"] is None
    assert "index" not in chunks[0]


def test_events_of_a_batch_carry_their_index():
    chunks, _ = answer({"text": ["x", "y"], "stream": True})
    assert sorted(chunk["index"] for chunk in chunks) == [0, 0, 1, 1]


def test_logprobs():
    body, _ = answer({"text": "x", "return_logprob": True, "top_logprobs_num": 2})
    meta = body["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 97, None], [-0.5, 98, None]]
    assert meta["output_top_logprobs"][0] == [[-0.5, 97, None], [-9999.0, 63, None]]
    fields = {"return_logprob": [True], "return_text_in_logprobs": True}
    body, _ = answer({"text": ["x"], **fields})
    assert body[0]["meta_info"]["output_token_logprobs"][0] == [-0.5, 97, "a"]


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (
            Delta(finish_reason=FinishReason.STOP, meta={"matched": 2}),
            {"type": "stop", "matched": 2},
        ),
        (Delta(finish_reason=FinishReason.STOP), {"type": "stop", "matched": None}),
        (Delta(finish_reason=FinishReason.ABORT), {"type": "abort", "message": "aborted"}),
    ],
)
def test_finish_reasons(last: Delta, expected: dict[str, Any]):
    body, _ = answer({"text": "x"}, steps(last))
    assert body["meta_info"]["finish_reason"] == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"text": "x", "input_ids": [1]}, None),
        ({"text": 5}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"text": "x", "sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ({"text": "x", "sampling_params": {"top_k": 5}}, "top_k"),
        ({"text": ["x", "y"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["x", "y"], "sampling_params": [{"n": 2}, {"n": 3}]}, "sampling_params"),
        ({"text": "x", "top_logprobs_num": [1, 2]}, "top_logprobs_num"),
    ],
)
def test_a_wrong_body_is_refused_by_name(body: dict[str, Any], param: str | None):
    response = post(make_app(FakeGenerator(say("a"))), "/generate", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("body", "prefix"),
    [({"rid": "r"}, "r"), ({"rid": "", "abort_all": True}, ""), ({"abort_all": True}, "")],
)
def test_abort_hands_the_prefix_on(body: dict[str, Any], prefix: str):
    generator = FakeGenerator(say("a"))
    generator.open = {"r1"}
    response = post(make_app(generator), "/abort_request", body)
    assert (response.status_code, response.json()) == (200, {"aborted": 1})
    assert generator.abort_prefixes == [prefix]


@pytest.mark.parametrize("body", [{}, {"rid": ""}, {"rid": None, "abort_all": False}, {"rid": 1}])
def test_abort_of_nothing_in_particular_is_refused(body: dict[str, Any]):
    generator = FakeGenerator(say("a"))
    response = post(make_app(generator), "/abort_request", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "rid"
    assert generator.abort_prefixes == []


def test_abort_with_garbage_is_refused():
    app = make_app(FakeGenerator(say("a")))
    assert call(app, "POST", "/abort_request", content=b"{").status_code == 400
