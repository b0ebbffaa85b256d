from __future__ import annotations

import math
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdrt.config import (
    ROOMS_MAX,
    TIMEOUT_FLAGS,
    Settings,
    Timeouts,
    cache_folder,
    default_environment,
    environment_with,
)
from pdrt.errors import BadConfig
from pdrt.protocol.codec import decode, encode
from pdrt.protocol.messages import Heartbeat, NewsTaken


def test_the_defaults_of_both_roles_are_accepted() -> None:
    for role in ("prefill", "decode"):
        assert Settings(role=role).role == role


BAD: list[tuple[dict[str, object], str]] = [
    ({"role": "router"}, "role 'router'"),
    ({"transport": "tcp"}, "--transport 'tcp'"),
    ({"engine": "vllm"}, "--engine 'vllm'"),
    ({"devices": ()}, "--devices"),
    ({"devices": ("cpu:0", "cpu:0")}, "give each device once"),
    ({"devices": ("cuda:0",)}, "device 'cuda:0'"),
    ({"devices": ("cpu",)}, "device 'cpu'"),
    ({"devices": ("cpu:x",)}, "device 'cpu:x'"),
    ({"on_transfer_failure": "retry", "role": "decode"}, "'retry' is not one of fail, recompute"),
    ({"on_transfer_failure": "recompute"}, "--on-transfer-failure is decode's choice"),
    ({"page_size": 0}, "--page-size must be at least 1"),
    ({"pool_tokens": 0}, "--pool-tokens"),
    ({"aux_rows": -1}, "--aux-rows"),
    ({"rooms_max": 0}, "--rooms-max"),
    ({"rooms_max": ROOMS_MAX + 1}, f"--rooms-max {ROOMS_MAX + 1}: at most {ROOMS_MAX}"),
    ({"chunked_prefill_size": 0}, "--chunked-prefill-size"),
    ({"port": -1}, "--port -1 is not a port"),
    ({"bootstrap_port": 65536}, "--bootstrap-port"),
    ({"supervisor_port": 70000}, "--supervisor-port"),
]


@pytest.mark.parametrize(("wrong", "words"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_value_is_refused_by_the_name_of_its_flag(
    wrong: dict[str, object], words: str
) -> None:
    with pytest.raises(BadConfig, match=words):
        Settings(**({"role": "prefill"} | wrong))  # type: ignore[arg-type]


def test_the_most_rooms_fit_in_a_heartbeat_and_their_slots_in_a_message() -> None:
    assert Settings(role="prefill", rooms_max=ROOMS_MAX).rooms_max == ROOMS_MAX
    served = np.full((ROOMS_MAX, 2), (ROOMS_MAX - 1, 0xFFFFFFFF), dtype="<u8").tobytes()
    beat = Heartbeat("p" * 64, 1, served)
    assert decode(encode([beat]), from_peer=True) == [beat]
    taken = NewsTaken(ROOMS_MAX - 1, 1)
    assert decode(encode([taken])) == [taken]


@pytest.mark.parametrize("name", Timeouts.__struct_fields__)
@pytest.mark.parametrize("value", [0.0, -1.0, 0.0005, 1e7, math.nan, math.inf])
def test_a_time_that_would_be_no_deadline_is_refused(name: str, value: float) -> None:
    flag = TIMEOUT_FLAGS.get(name, name).replace("_", "-")
    with pytest.raises(BadConfig, match=f"--{flag} must be from 0.001"):
        Settings(role="prefill", timeouts=Timeouts(**{name: value}))


def test_settings_travel_as_they_are_and_do_not_change() -> None:
    sent = Settings(role="decode", devices=("cpu:0", "cpu:1"), timeouts=Timeouts(quiet_s=1.5))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Settings) == sent
    with pytest.raises(AttributeError):
        sent.port = 1  # type: ignore[misc]


def test_settings_that_travel_are_checked_again() -> None:
    plain = msgspec.to_builtins(Settings(role="decode")) | {"role": "router"}
    with pytest.raises(BadConfig):
        msgspec.msgpack.decode(msgspec.msgpack.encode(plain), type=Settings)


@settings(deadline=None)
@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_the_pool_holds_its_tokens_in_whole_pages(pool_tokens: int, page_size: int) -> None:
    told = Settings(role="prefill", pool_tokens=pool_tokens, page_size=page_size)
    assert (told.pages_count - 1) * page_size < pool_tokens <= told.pages_count * page_size


def test_threads_are_as_told_or_half_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings(role="prefill", threads=3).torch_threads == 3
    for cores, threads in ((8, 4), (1, 1), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert Settings(role="prefill").torch_threads == threads


def test_the_operators_environment_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDRT_TEST_SET", "mine")
    monkeypatch.setenv("PDRT_TEST_UNSET", "")  # so that it is restored
    monkeypatch.delenv("PDRT_TEST_UNSET")
    default_environment({"PDRT_TEST_SET": "default", "PDRT_TEST_UNSET": "default"})
    assert os.environ["PDRT_TEST_SET"] == "mine"
    assert os.environ["PDRT_TEST_UNSET"] == "default"


def test_a_childs_environment_is_ours_with_something_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDRT_TEST_SET", "mine")
    made = environment_with({"PDRT_TEST_CHILD": "1"})
    assert (made["PDRT_TEST_SET"], made["PDRT_TEST_CHILD"]) == ("mine", "1")
    assert "PDRT_TEST_CHILD" not in os.environ


def test_the_cache_is_where_the_operator_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDRT_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    monkeypatch.setenv("HOME", "/three")
    assert cache_folder() == Path("/one")
    monkeypatch.delenv("PDRT_CACHE")
    assert cache_folder() == Path("/two/pdrt")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == Path("/three/.cache/pdrt")


def test_a_hung_actor_is_seen_before_rooms_are_fenced_by_force() -> None:
    def hang_s(**given: float) -> float:
        return Settings(role="decode", timeouts=Timeouts(**given)).timeouts.hang_s

    assert hang_s() == Timeouts().hang_s
    assert hang_s(quiet_s=3.0, hang_s=5.0) == 2.0
    assert hang_s(quiet_s=3.0, hang_s=1.0) == 1.0
    assert hang_s(quiet_s=0.3) == hang_s(quiet_s=0.3, hang_s=5.0) == 0.2
    with pytest.raises(BadConfig, match=r"--quiet-timeout 0.29: at least 0.3 seconds"):
        hang_s(quiet_s=0.29)
    with pytest.raises(BadConfig, match=r"^hang_s 0.1: at least 0.2 seconds"):
        hang_s(hang_s=0.1)
