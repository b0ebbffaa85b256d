"""/v1/completions and /v1/chat/completions: OpenAI's shapes, and what reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest

from pdrt.errors import PeerLost
from pdrt.serving.types import Delta, FinishReason, Rendezvous
from tests.serving.http_fakes import (
    INFO,
    WALL_S,
    FakeGenerator,
    Forever,
    events,
    make_app,
    post,
    say,
    steps,
    token,
)

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


def answer(path: str, body: dict[str, Any], script: Any = None) -> tuple[Any, FakeGenerator]:
    generator = FakeGenerator(script or say("ab"))
    response = post(make_app(generator), path, body)
    assert response.status_code == 200, response.text
    assert generator.open == set()
    streamed = response.headers["content-type"].startswith("text/event-stream")
    return events(response.text) if streamed else response.json(), generator


def refusal(path: str, body: Any) -> dict[str, Any]:
    generator = FakeGenerator(say("ab"))
    response = post(make_app(generator), path, body)
    assert response.status_code == 400
    assert generator.submitted == []
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert isinstance(error, dict)
    return error


def test_a_completion_has_openais_shape():
    body, generator = answer(COMPLETIONS, {"model": "any", "prompt": "xyz", "rid": "r1"})
    assert body == {
        "id": "cmpl-r1",
        "object": "text_completion",
        "created": int(WALL_S),
        "model": "tiny",
        "choices": [{"index": 0, "text": "ab", "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }
    (request,) = generator.submitted
    assert request.prompt_tokens == (120, 121, 122)
    assert request.sampling.max_tokens == 16
    assert request.rendezvous is None


def test_a_chat_completion_has_openais_shape():
    body, generator = answer(CHAT, {"messages": HELLO, "rid": "r1"})
    message = {"role": "assistant", "content": "ab", "refusal": None}
    assert body == {
        "id": "chatcmpl-r1",
        "object": "chat.completion",
        "created": int(WALL_S),
        "model": "tiny",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 8, "completion_tokens": 2, "total_tokens": 10},
    }
    assert generator.submitted[0].sampling.max_tokens == INFO.max_model_len - 8


def test_completion_chunks_and_their_usage():
    body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}, "rid": "r"}
    chunks, _ = answer(COMPLETIONS, body)
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "text": "a", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "b", "logprobs": None, "finish_reason": "stop"}],
        [],
    ]
    assert [chunk["usage"] for chunk in chunks] == [
        None,
        None,
        {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
    ]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert {chunk["id"] for chunk in chunks} == {"cmpl-r"}


def test_chat_chunks_start_with_the_role_and_have_no_usage_unless_asked():
    chunks, _ = answer(CHAT, {"messages": HELLO, "stream": True, "stream_options": None})
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert set(chunks[0]) == {"id", "object", "created", "model", "choices"}


def test_a_chat_stream_tells_usage_last():
    body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    chunks, _ = answer(CHAT, body)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 2


def test_tokens_without_text_make_no_chunk():
    script = steps(Delta(token_ids=[1]), Delta(token_ids=[2], finish_reason=FinishReason.LENGTH))
    chunks, _ = answer(COMPLETIONS, {"prompt": "x", "stream": True}, script)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == ["length"]


def test_completion_logprobs():
    body, _ = answer(COMPLETIONS, {"prompt": "x", "logprobs": 2})
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5, "?": -9999.0}, {"b": -0.5, "?": -9999.0}],
        "text_offset": [0, 1],
    }


def test_completion_logprobs_of_chunks_go_on_counting_the_text():
    chunks, _ = answer(COMPLETIONS, {"prompt": "x", "logprobs": 0, "stream": True})
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [each["text_offset"] for each in logprobs] == [[0], [1]]
    assert [each["top_logprobs"] for each in logprobs] == [None, None]


def test_chat_logprobs():
    body, generator = answer(CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 1})
    first = body["choices"][0]["logprobs"]["content"][0]
    best = {"token": "a", "logprob": -0.5, "bytes": [97]}
    assert first == best | {"top_logprobs": [best]}
    assert generator.submitted[0].sampling.logprobs == 1
    _, generator = answer(CHAT, {"messages": HELLO, "logprobs": True})
    assert generator.submitted[0].sampling.logprobs == 0
    _, generator = answer(CHAT, {"messages": HELLO, "logprobs": False, "top_logprobs": 0})
    assert generator.submitted[0].sampling.logprobs is None


def test_sampling_reaches_the_engine():
    body = {
        "prompt": "x",
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0,
        "top_p": 0.5,
        "seed": 11,
        "stop": "end",
        "stop_token_ids": [4],
        "ignore_eos": True,
    }
    _, generator = answer(COMPLETIONS, body)
    sampling = generator.submitted[0].sampling
    assert (sampling.max_tokens, sampling.min_tokens) == (7, 2)
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.0, 0.5, 11)
    assert (sampling.stop, sampling.stop_token_ids) == (("end",), (4,))
    assert sampling.ignore_eos


def test_what_routers_inject_changes_nothing():
    nulls = dict.fromkeys(
        "max_tokens temperature top_p seed stop n user logit_bias rid top_k stream stream_options "
        "bootstrap_room tools response_format".split()
    )
    defaults = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "repetition_penalty": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "separate_reasoning": True,
        "skip_special_tokens": True,
        "kv_transfer_params": {"do_remote_decode": True},
    }
    _, plain = answer(COMPLETIONS, {"prompt": "x"})
    _, injected = answer(COMPLETIONS, {**nulls, **defaults, "prompt": "x", "echo": False})
    assert plain.submitted[0].sampling == injected.submitted[0].sampling
    answer(CHAT, {**nulls, **defaults, "messages": HELLO, "tools": []})


def test_max_completion_tokens_wins():
    body = {"messages": HELLO, "max_completion_tokens": 5, "max_tokens": 9}
    _, generator = answer(CHAT, body)
    assert generator.submitted[0].sampling.max_tokens == 5
    _, generator = answer(CHAT, {"messages": HELLO, "max_tokens": 9})
    assert generator.submitted[0].sampling.max_tokens == 9


def test_content_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    _, generator = answer(CHAT, {"messages": [{"role": "user", "content": parts}]})
    assert bytes(generator.submitted[0].prompt_tokens) == b"<user>a\nb"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [(97, 98)]),
        (["a", "b"], [(97,), (98,)]),
        ([5, 6], [(5, 6)]),
        ([[5], [6, 7]], [(5,), (6, 7)]),
    ],
)
def test_every_form_of_prompt(prompt: Any, expected: list[tuple[int, ...]]):
    body, generator = answer(COMPLETIONS, {"prompt": prompt})
    assert [each.prompt_tokens for each in generator.submitted] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_samples_of_a_prompt_get_their_own_seed_and_rid():
    body, generator = answer(COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "seed": 10, "rid": "r"})
    assert len(body["choices"]) == 4
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 8, "total_tokens": 10}
    requests = generator.submitted
    assert [each.prompt_tokens for each in requests] == [(97,), (97,), (98,), (98,)]
    assert [each.sampling.seed for each in requests] == [10, 11, 10, 11]
    assert [each.rid for each in requests] == ["r-0", "r-1", "r-2", "r-3"]


def test_choices_of_a_stream_carry_their_index():
    chunks, _ = answer(CHAT, {"messages": HELLO, "n": 2, "stream": True})
    texts = ["", ""]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == ["ab", "ab"]


@pytest.mark.parametrize(
    ("fields", "rooms"),
    [
        ({"prompt": "a", "bootstrap_room": 7}, [7]),
        ({"prompt": "a", "bootstrap_room": 2**63 - 1}, [2**63 - 1]),
        ({"prompt": "a", "bootstrap_room": [7]}, [7]),
        ({"prompt": ["a", "b"], "bootstrap_room": [7, 1]}, [7, 1]),
        ({"prompt": "a", "n": 2, "bootstrap_room": [7, 1]}, [7, 1]),
        ({"prompt": "a", "n": 2, "bootstrap_room": 7}, [7, 8]),
        ({"prompt": "a", "n": 2, "bootstrap_room": 2**63 - 1}, [2**63 - 1, 0]),
        ({"prompt": ["a", "b"], "n": 2, "bootstrap_room": [7, 1]}, [7, 8, 1, 2]),
        ({"prompt": ["a", "b"], "n": 2, "bootstrap_room": [7, 1, 5, 3]}, [7, 1, 5, 3]),
    ],
)
def test_every_choice_has_its_room(fields: dict[str, Any], rooms: list[int]):
    _, generator = answer(COMPLETIONS, fields | {"bootstrap_host": "p", "bootstrap_port": None})
    expected = [Rendezvous(room=room, host="p", port=None) for room in rooms]
    assert [each.rendezvous for each in generator.submitted] == expected


def test_hosts_and_ports_may_be_lists_with_nulls():
    body = {
        "prompt": ["a", "b"],
        "bootstrap_room": [1, 2],
        "bootstrap_host": ["p", "q"],
        "bootstrap_port": [None, 9],
    }
    _, generator = answer(COMPLETIONS, body)
    assert [each.rendezvous for each in generator.submitted] == [
        Rendezvous(room=1, host="p", port=None),
        Rendezvous(room=2, host="q", port=9),
    ]


def test_sglangs_fake_host_means_no_transfer():
    body = {"prompt": "a", "bootstrap_room": 0, "bootstrap_host": "2.2.2.2"}
    _, generator = answer(COMPLETIONS, body)
    assert generator.submitted[0].rendezvous is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, -2]}, "prompt[1]"),
        ({"prompt": [2**30]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"logprobs": 21}, "logprobs"),
        ({"n": 9}, "n"),
        ({"n": 2, "prompt": ["a"] * 5}, "prompt"),
        ({"stop": ""}, "stop"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"bootstrap_room": -1}, "bootstrap_room"),
        ({"bootstrap_room": 2**63}, "bootstrap_room"),
        ({"bootstrap_room": "7"}, "bootstrap_room"),
        ({"bootstrap_room": [1, 2]}, "bootstrap_room"),
        ({"bootstrap_room": 1, "bootstrap_host": ["p", "q"]}, "bootstrap_host"),
        ({"prompt": ["a", "b"], "bootstrap_room": [1, 1]}, "bootstrap_room"),
        ({"bootstrap_room": 1, "bootstrap_port": 70000}, "bootstrap_port"),
        ({"rid": "x" * 257}, "rid"),
        ({"rid": ["a", "b"]}, "rid"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str):
    error = refusal(COMPLETIONS, {"prompt": "x"} | fields)
    assert error["param"] == param
    assert error["code"] == "invalid_request"
    assert error["message"].startswith(param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(fields: dict[str, Any], param: str):
    assert refusal(CHAT, {"messages": HELLO} | fields)["param"] == param


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"echo": True}, "echo"),
        (COMPLETIONS, {"suffix": "x"}, "suffix"),
        (COMPLETIONS, {"best_of": 3}, "best_of"),
        (COMPLETIONS, {"top_k": 40}, "top_k"),
        (COMPLETIONS, {"presence_penalty": 0.5}, "presence_penalty"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
    ],
)
def test_what_would_change_the_text_and_is_not_there_is_refused(
    path: str, fields: dict[str, Any], param: str
):
    error = refusal(path, {"prompt": "x", "messages": HELLO} | fields)
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")


@pytest.mark.parametrize("fields", [{"prompt": "x" * 64}, {"prompt": "x", "max_tokens": 64}])
def test_what_does_not_fit_the_context_is_refused(fields: dict[str, Any]):
    error = refusal(COMPLETIONS, fields)
    assert error["code"] == "prompt_too_long"
    assert "64" in error["message"]


def test_the_last_token_of_the_context_can_be_used():
    _, generator = answer(COMPLETIONS, {"prompt": "x" * 63})
    assert generator.submitted[0].sampling.max_tokens == 1


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_error_after_the_first_token_is_an_event(path: str):
    generator = FakeGenerator(steps(token("a"), Delta(error=PeerLost(7, "the peer is gone"))))
    body = {"prompt": "x", "messages": HELLO, "stream": True}
    response = post(make_app(generator), path, body)
    assert response.status_code == 200
    *chunks, last = events(response.text)
    assert chunks
    assert last["error"] == {
        "message": "room 7: the peer is gone",
        "type": "server_error",
        "param": None,
        "code": "peer_lost",
    }


def test_an_error_of_one_choice_aborts_the_others():
    def script(request: Any) -> Any:
        return [PeerLost(7, "gone")] if request.rid == "r-1" else [Forever()]

    generator = FakeGenerator(script)
    response = post(make_app(generator), COMPLETIONS, {"prompt": "x", "n": 3, "rid": "r"})
    assert response.status_code == 503
    assert generator.open == set()
    assert sorted(generator.aborted) == ["r-0", "r-2"]


def test_a_stream_that_just_ends_is_our_fault_and_said_so():
    response = post(make_app(FakeGenerator(steps(token("a")))), COMPLETIONS, {"prompt": "x"})
    assert response.status_code == 500
    assert "finish reason" in response.json()["error"]["message"]
