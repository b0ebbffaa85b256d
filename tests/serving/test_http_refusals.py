"""A body that is refused here is refused at once there: the peers of its rooms are told; and what
an answer says of a prompt that was computed on decode."""

from __future__ import annotations

from typing import Any

import pytest

from pdrt.errors import Draining, PromptTooLong, QueueFull
from pdrt.serving.types import Delta, FinishReason, Rendezvous
from tests.serving.http_fakes import (
    FakeGenerator,
    Forever,
    Script,
    call,
    events,
    make_app,
    post,
    say,
    steps,
    token,
)

GENERATING = ["/v1/completions", "/v1/chat/completions", "/generate"]
ROOMS = {"bootstrap_room": [7, 8, 9], "bootstrap_host": ["p"] * 3, "bootstrap_port": [1, 2, 3]}
MEETINGS = [Rendezvous(room=7 + i, host="p", port=1 + i) for i in range(3)]


def body_of(path: str, **more: Any) -> dict[str, Any]:
    if path == "/generate":
        sampling = {"n": more.pop("n", 1)}
        return {"text": "x", "sampling_params": sampling, **more}
    content = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    return {**content, "model": "tiny", **more}


@pytest.mark.parametrize("error", [Draining("d"), QueueFull("q"), PromptTooLong("p"), KeyError()])
@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("takes", [0, 1, 2])
def test_the_rooms_of_choices_that_submit_did_not_take_are_declined(
    path: str, takes: int, error: Exception
) -> None:
    """Those that it took are aborted, which tells their peers too."""
    generator = FakeGenerator(steps(Forever()), refusal=error, takes=takes)
    post(make_app(generator), path, body_of(path, n=3, **ROOMS))
    assert generator.declined == MEETINGS[takes:]
    assert len(generator.aborted) == takes


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(
    ("rooms", "declined"),
    [
        (ROOMS, MEETINGS),
        (
            {"bootstrap_room": 7, "bootstrap_host": "p", "bootstrap_port": None},
            [Rendezvous(room=7, host="p")],
        ),
        ({"bootstrap_room": 7}, [Rendezvous(room=7)]),
        ({}, []),
        ({"bootstrap_room": 0, "bootstrap_host": "2.2.2.2"}, []),  # a probe has no peer
        ({"bootstrap_room": [7, 7], "bootstrap_host": "p"}, []),
        ({"bootstrap_room": "seven"}, []),
        ({"bootstrap_room": [7, 8], "bootstrap_host": ["p"]}, []),
    ],
)
def test_the_rooms_of_a_body_that_is_wrong_are_declined(
    path: str, rooms: dict[str, Any], declined: list[Rendezvous]
) -> None:
    generator = FakeGenerator(say("a"))
    for wrong in ({"stream": "perhaps"}, {"n": -1, "sampling_params": {"n": -1}}):
        generator.declined.clear()
        response = post(make_app(generator), path, {**body_of(path), **wrong, **rooms})
        assert response.status_code == 400
        assert generator.declined == declined


@pytest.mark.parametrize("path", GENERATING)
def test_a_prompt_beyond_our_context_only_declines_its_room(path: str) -> None:
    generator = FakeGenerator(say("a"))
    long = "x" * 100  # the tokenizer makes one token a character; 64 are the most
    body = body_of(path, bootstrap_room=7, bootstrap_host="p")
    body |= {"text": long} if path == "/generate" else {"prompt": long}
    body["messages"] = [{"role": "user", "content": long}]
    assert post(make_app(generator), path, body).status_code == 400
    assert generator.declined == [Rendezvous(room=7, host="p")]
    assert generator.submitted == []


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"bootstrap_room": 7'])
def test_a_body_that_names_no_room_declines_none(body: bytes) -> None:
    generator = FakeGenerator(say("a"))
    for path in GENERATING:
        assert call(make_app(generator), "POST", path, content=body).status_code == 400
    assert generator.declined == []


@pytest.mark.parametrize("path", GENERATING)
def test_a_request_that_runs_to_its_end_declines_nothing(path: str) -> None:
    generator = FakeGenerator(say("a"))
    assert post(make_app(generator), path, body_of(path, n=3, **ROOMS)).status_code == 200
    assert generator.declined == []


# --- what an answer says ---


def half_recomputed() -> Script:
    """The second of two choices was."""

    def script(request: Any) -> Any:
        lost = request.rendezvous is not None and request.rendezvous.room == 8
        meta = {"reason": "PEER_LOST", "recomputed": True} if lost else {"reason": "NONE"}
        return [token("a"), Delta(finish_reason=FinishReason.STOP, meta=meta)]

    return script


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GENERATING)
def test_an_answer_says_which_choice_was_recomputed(path: str, stream: bool) -> None:
    generator = FakeGenerator(half_recomputed())
    rooms = {"bootstrap_room": [7, 8], "bootstrap_host": "p"}
    response = post(make_app(generator), path, body_of(path, n=2, stream=stream, **rooms))
    assert response.status_code == 200
    found: dict[int, bool] = {}
    payloads = events(response.text) if stream else response.json()
    for index, payload in enumerate(payloads if isinstance(payloads, list) else [payloads]):
        if path == "/generate":
            facts = payload["meta_info"]
            found[payload.get("index", index)] = facts.get("recomputed", False)
            assert facts["finish_reason"] is None or "room" in facts
            continue
        for choice in payload["choices"]:
            before = found.get(choice["index"], False)
            found[choice["index"]] = before or choice.get("recomputed", False)
    assert found == {0: False, 1: True}
