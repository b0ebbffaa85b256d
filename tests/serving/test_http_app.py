"""Everything round the answers: probes, facts, statuses, ids, limits."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from pdrt import errors
from pdrt.http_door import HttpDoor
from pdrt.serving.http import KEEP_ALIVE_S, uvicorn_config
from tests.serving.http_fakes import (
    INFO,
    WALL_S,
    FakeGenerator,
    Forever,
    call,
    events,
    make_app,
    post,
    say,
    steps,
)

GENERATING = ["/v1/completions", "/v1/chat/completions", "/generate"]
BODY = {"prompt": "x", "text": "x", "messages": [{"role": "user", "content": "x"}]}


def get(path: str, **options: Any) -> httpx.Response:
    return call(make_app(FakeGenerator(say("a")), **options), "GET", path)


def test_live_answers_whatever_health_says():
    assert get("/live", health=lambda: (False, {})).json() == {"status": "live"}


@pytest.mark.parametrize(("good", "status"), [(True, 200), (False, 503)])
def test_health_and_ready_carry_their_facts(good: bool, status: int):
    facts = {"status": "draining", "reasons": ["draining"]}
    for path in ("/health", "/ready"):
        response = get(path, health=lambda: (good, facts))
        assert (response.status_code, response.json()) == (status, facts)


def test_ready_can_differ_from_health():
    options: dict[str, Any] = {"ready": lambda: (False, {"reasons": ["bootstrap down"]})}
    assert get("/ready", **options).status_code == 503
    assert get("/health", **options).status_code == 200
    assert get("/server_info", **options).json()["status"] == "not_ready"


def test_metrics_are_prometheus_text():
    response = get("/metrics")
    assert response.content == b"pdrt_rooms 0\n"
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_models():
    body = get("/v1/models").json()
    assert body["object"] == "list"
    (model,) = body["data"]
    assert {"id", "object", "created", "owned_by"} <= set(model)
    assert (model["id"], model["created"]) == ("tiny", int(WALL_S))


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info_has_what_routers_read(path: str):
    body = get(path).json()
    assert body["served_model_name"] == "tiny"
    assert body["model_path"] == "/models/tiny"
    assert body["disaggregation_mode"] == "decode"
    assert (body["tp_size"], body["dp_size"]) == (1, 1)
    assert body["max_running_requests"] == 48
    assert body["internal_states"] == [{"running": 3, "waiting": 2, "tokens": 250}]


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info_has_what_routers_read(path: str):
    body = get(path).json()
    assert body["model_path"] == body["tokenizer_path"] == "/models/tiny"
    assert body["is_generation"] is True


@pytest.mark.parametrize("path", ["/loads?model=tiny", "/v1/loads?include=core,queues"])
def test_loads(path: str):
    body = get(path).json()
    (rank,) = body["loads"]
    assert (rank["num_running_reqs"], rank["num_waiting_reqs"]) == (3, 2)
    assert rank["token_usage"] == 250 / 1000
    assert body["aggregate"]["total_reqs"] == 5


def test_get_load():
    (rank,) = get("/get_load").json()
    assert rank == {"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 250}


def test_flush_cache_takes_both_methods():
    app = make_app(FakeGenerator(say("a")))
    assert call(app, "POST", "/flush_cache").status_code == 200
    assert call(app, "GET", "/flush_cache").status_code == 200


def test_health_generate_makes_one_token_without_a_room():
    generator = FakeGenerator(say("a"))
    assert call(make_app(generator), "GET", "/health_generate").status_code == 200
    (request,) = generator.submitted
    assert request.sampling.max_tokens == 1
    assert request.rendezvous is None
    assert request.rid.startswith("HEALTH_CHECK")


def test_health_generate_has_a_deadline_and_leaves_nothing():
    generator = FakeGenerator(steps(Forever()))
    app = make_app(generator, health_generate_timeout_s=0.01)
    response = call(app, "GET", "/health_generate")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "health_timeout"
    assert generator.open == set()


@pytest.mark.parametrize("error", [errors.Draining("going"), errors.BadRequest("x")])
def test_health_generate_is_503_for_any_error(error: Exception):
    response = call(make_app(FakeGenerator(steps(error))), "GET", "/health_generate")
    assert response.status_code == 503


STATUSES = [
    (errors.BadRequest("x"), 400),
    (errors.RoomInUse(7), 400),
    (errors.PromptTooLong("x"), 400),
    (errors.IllegalMove("x"), 500),
    (errors.Closed("x"), 500),
    (errors.QueueFull("x"), 503),
    (errors.PoolFull("x"), 503),
    (errors.Draining("x"), 503),
    (errors.Aborted(7, "x"), 503),
    (errors.BootstrapTimeout(7, "x"), 503),
    (errors.TransportFailed(7, "x"), 503),
    (errors.BadModel("x"), 500),
    (errors.PdrtError("x"), 500),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(("error", "status"), STATUSES, ids=lambda value: type(value).__name__)
def test_an_error_before_the_first_token_has_its_status(
    error: errors.PdrtError, status: int, path: str, stream: bool
):
    refused_by_submit = FakeGenerator(say("a"), refusal=error)
    raised_by_the_stream = FakeGenerator(steps(error))
    for generator in (refused_by_submit, raised_by_the_stream):
        response = post(make_app(generator), path, {**BODY, "stream": stream})
        assert response.status_code == status
        body = response.json()["error"]
        assert set(body) == {"message", "type", "param", "code"}
        assert body["code"] == error.code
        assert body["type"] == ("server_error" if status >= 500 else "invalid_request_error")
        assert "content-length" not in response.headers
        assert ("retry-after" in response.headers) == isinstance(error, errors.Refused)


def test_a_refused_choice_takes_back_those_before_it():
    generator = FakeGenerator(say("a"), refusal=errors.QueueFull("full"), takes=2)
    response = post(make_app(generator), "/v1/completions", {"prompt": "x", "n": 3, "rid": "r"})
    assert response.status_code == 503
    assert generator.aborted == ["r-0", "r-1"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_crash_of_the_engine_is_a_500_without_its_text(stream: bool):
    generator = FakeGenerator(steps(ValueError("secret")))
    response = post(make_app(generator), "/v1/completions", {"prompt": "x", "stream": stream})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text


def test_a_crash_in_the_middle_of_a_stream_is_an_event():
    def script(request: Any) -> Any:
        yield next(iter(say("ab")(request)))
        yield ValueError("secret")

    body = {"prompt": "x", "stream": True}
    response = post(make_app(FakeGenerator(script)), "/v1/completions", body)
    assert response.status_code == 200
    assert events(response.text)[-1]["error"]["code"] == "internal_error"
    assert "secret" not in response.text


def test_a_crash_of_a_fact_is_a_500_in_the_same_shape():
    def metrics() -> bytes:
        raise ValueError("secret")

    response = get("/metrics", metrics=metrics)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"", "(byte 0)"),
        (b'{"a": tru', "(byte 9)"),
        (b'{"a" 1}', "(byte 5)"),
        (b'{"rid": "\xff"}', "(byte 9)"),
        (b'{"a":' + b"[" * 100_000, "too deeply"),
    ],
)
def test_bad_json_is_a_400_that_says_where(path: str, content: bytes, place: str):
    response = call(make_app(FakeGenerator(say("a"))), "POST", path, content=content)
    assert response.status_code == 400
    assert place in response.json()["error"]["message"]


@pytest.mark.parametrize("content", [b"x" * 101, [b"x" * 60, b"x" * 60]])
@pytest.mark.parametrize("path", [*GENERATING, "/abort_request"])
def test_a_body_over_the_limit_is_a_413(path: str, content: Any):
    async def pieces() -> Any:
        for piece in content:
            yield piece

    app = make_app(FakeGenerator(say("a")), body_bytes_max=100)
    body = content if isinstance(content, bytes) else pieces()
    response = call(app, "POST", path, content=body)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert "100 bytes" in response.json()["error"]["message"]


def test_a_large_body_within_the_limit_is_read():
    generator = FakeGenerator(say("a"))
    body = {"prompt": "x", "user": "u" * 100_000}
    assert post(make_app(generator), "/v1/completions", body).status_code == 200


@pytest.mark.parametrize(("method", "path"), [("GET", "/nowhere"), ("POST", "/v1/none")])
def test_an_unknown_path_is_a_404_in_openais_shape(method: str, path: str):
    response = call(make_app(FakeGenerator(say("a"))), method, path)
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("not_found", "invalid_request_error")
    assert path in error["message"]


def test_a_wrong_method_is_a_405_in_openais_shape():
    response = get("/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["code"] == "method_not_allowed"


def test_the_clients_request_id_comes_back_and_begins_the_rid():
    generator = FakeGenerator(say("a"))
    app = make_app(generator)
    for _ in range(2):
        response = post(app, "/generate", {"text": "x"}, headers={"x-request-id": "mine"})
        assert response.headers["x-request-id"] == "mine"
    first, second = (each.rid for each in generator.submitted)
    assert first.startswith("mine-")
    assert second.startswith("mine-")
    assert first != second  # a router's retry repeats the header while its first try may still run


def test_the_bodys_rid_wins_over_the_header():
    generator = FakeGenerator(say("a"))
    body = {"text": "x", "rid": "body"}
    post(make_app(generator), "/generate", body, headers={"x-request-id": "header"})
    assert generator.submitted[0].rid == "body"


def test_every_response_has_a_request_id():
    assert len(get("/health").headers["x-request-id"]) == 32
    assert len(get("/nowhere").headers["x-request-id"]) == 32


def test_uvicorn_keeps_connections_longer_than_routers_do():
    config = uvicorn_config(make_app(FakeGenerator(say("a"))))
    assert config.timeout_keep_alive == KEEP_ALIVE_S >= 120
    assert (config.http, config.access_log, config.log_config) == (HttpDoor, False, None)


def test_choices_are_limited_by_the_servers_own_number():
    body = {"prompt": ["x"] * (INFO.choices_max + 1)}
    response = post(make_app(FakeGenerator(say("a"))), "/v1/completions", body)
    assert response.status_code == 400
