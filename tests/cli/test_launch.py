"""Flags, variables and files become settings, or an error that names what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from pdrt.cli.launch import Flags, settings_from
from pdrt.config import (
    TIMEOUT_FLAGS,
    Timeouts,
    authority,
    environment_with,
    is_loopback,
    ucx_environment,
)
from pdrt.errors import BadConfig


def launch(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run pdrt-prefill with something that makes it give up at once."""
    command = [sys.executable, "-c", "from pdrt.cli.launch import prefill; prefill()", *flags]
    env = environment_with(variables)
    return subprocess.run(command, capture_output=True, text=True, timeout=30, env=env)


@pytest.mark.parametrize(("role", "port"), [("prefill", 30000), ("decode", 30001)])
def test_each_role_has_its_port_whatever_else_is_given(role: str, port: int) -> None:
    assert settings_from(role, Flags()).port == port
    assert settings_from(role, Flags(threads=1)).port == port
    assert settings_from(role, Flags(port=0)).port == 0


def test_every_timeout_flag_reaches_its_timeout() -> None:
    flags = Flags(
        bootstrap_timeout=1,
        waiting_timeout=2,
        transfer_stall_timeout=3,
        quiet_timeout=4,
        peer_timeout=5,
        drain_timeout=6,
        queue_timeout=7,
    )
    t = settings_from("decode", flags).timeouts
    found = (t.bootstrap_s, t.waiting_s, t.stall_s, t.quiet_s, t.peer_s, t.drain_s, t.queue_s)
    assert found == (1, 2, 3, 4, 5, 6, 7)


def test_the_help_of_a_timeout_tells_its_default() -> None:
    text = launch("--help").stdout
    for name, given in TIMEOUT_FLAGS.items():
        _, _, after = text.partition(f"--{given.replace('_', '-')} ")
        assert f"[{getattr(Timeouts(), name):g}]" in after.partition(" --")[0], given


SGLANG = "SGLANG_DISAGGREGATION_"


@pytest.mark.parametrize(
    ("variables", "name", "value"),
    [
        ({"BOOTSTRAP_TIMEOUT": "300"}, "bootstrap_s", 300),
        ({"WAITING_TIMEOUT": "12.5"}, "waiting_s", 12.5),
        ({"DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "30"}, "quiet_s", 30),
        ({"HEARTBEAT_INTERVAL": "4"}, "peer_s", 8),
        ({"HEARTBEAT_INTERVAL": "1"}, "peer_s", 4),  # SGLang beats every two seconds at most
        ({"HEARTBEAT_MAX_FAILURE": "3"}, "peer_s", 15),
        ({"HEARTBEAT_INTERVAL": "2.5", "HEARTBEAT_MAX_FAILURE": "4"}, "peer_s", 10),
        ({"WAITING_TIMEOUT": ""}, "waiting_s", 60),
    ],
)
def test_sglangs_variables_are_taken_where_we_were_told_nothing(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str, value: float
) -> None:
    for variable, text in variables.items():
        monkeypatch.setenv(f"{SGLANG}{variable}", text)
    found = settings_from("decode", Flags()).timeouts
    assert getattr(found, name) == value
    assert found == replace(Timeouts(), **{name: value})


def test_flags_and_our_variables_win_over_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BOOTSTRAP_TIMEOUT", "WAITING_TIMEOUT", "HEARTBEAT_INTERVAL"):
        monkeypatch.setenv(f"{SGLANG}{name}", "100")
    told = settings_from("prefill", Flags(bootstrap_timeout=60, peer_timeout=3)).timeouts
    assert (told.bootstrap_s, told.waiting_s, told.peer_s) == (60, 100, 3)
    done = launch(PDRT_WAITING_TIMEOUT="0", **{f"{SGLANG}WAITING_TIMEOUT": "100"})
    assert "bad_config: --waiting-timeout" in done.stderr


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", "1e9"])
@pytest.mark.parametrize(
    "variable",
    [
        "BOOTSTRAP_TIMEOUT",
        "WAITING_TIMEOUT",
        "DEFERRED_DECODE_KV_RELEASE_TIMEOUT",
        "HEARTBEAT_INTERVAL",
        "HEARTBEAT_MAX_FAILURE",
    ],
)
def test_a_bad_value_of_sglangs_is_named_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(f"{SGLANG}{variable}", value)
    with pytest.raises(BadConfig, match=f"^{SGLANG}{variable}='{value}'"):
        settings_from("prefill", Flags())


def test_misses_are_counted_in_whole_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{SGLANG}HEARTBEAT_MAX_FAILURE", "1.5")
    with pytest.raises(BadConfig, match=r"MAX_FAILURE='1.5' is no whole number"):
        settings_from("prefill", Flags())


def test_decode_recomputes_if_it_is_told_to_and_prefill_never() -> None:
    assert settings_from("decode", Flags()).on_transfer_failure == "fail"
    told = Flags(on_transfer_failure="recompute")
    assert settings_from("decode", told).on_transfer_failure == "recompute"
    with pytest.raises(BadConfig, match="--on-transfer-failure"):
        settings_from("prefill", told)
    done = launch("--on-transfer-failure", "recompute")
    assert done.returncode == 2
    assert "bad_config: --on-transfer-failure" in done.stderr


@pytest.mark.parametrize("form", ["--config={}", "--config {}", "PDRT_CONFIG"])
def test_a_file_is_read_however_it_is_named(tmp_path: Path, form: str) -> None:
    file = tmp_path / "pdrt.toml"
    file.write_text("page_size = 0\n")
    if form == "PDRT_CONFIG":
        done = launch(PDRT_CONFIG=str(file))
    else:
        done = launch(*form.format(file).split())
    assert done.returncode == 2
    assert "bad_config: --page-size" in done.stderr


def test_a_flag_wins_over_a_variable_and_a_variable_over_a_file(tmp_path: Path) -> None:
    file = tmp_path / "pdrt.toml"
    file.write_text('transport = "from-file"\n')
    assert "from-file" in launch("--config", str(file)).stderr
    done = launch("--config", str(file), PDRT_TRANSPORT="from-variable")
    assert "from-variable" in done.stderr
    done = launch("--transport", "from-flag", "--config", str(file), PDRT_TRANSPORT="x")
    assert "from-flag" in done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--config", "nowhere.toml"], "nowhere.toml: no such file"),
        (["--prot", "1"], "Unknown option"),
        (["--port", "many"], "--port"),
        (["--transport", "shm", "--ib-device", "mlx5_0"], "--ib-device"),
    ],
)
def test_a_wrong_command_line_names_the_mistake(flags: list[str], words: str) -> None:
    done = launch(*flags)
    assert done.returncode != 0
    assert words in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_ucx_stays_on_loopback_while_the_role_does() -> None:
    assert ucx_environment(settings_from("decode", Flags()))["UCX_NET_DEVICES"] == "lo"
    flags = Flags(host="0.0.0.0", advertise_host="10.0.0.1")
    outside = ucx_environment(settings_from("decode", flags))
    assert "UCX_NET_DEVICES" not in outside


def test_ucx_waits_for_no_host_that_does_not_answer() -> None:
    """The figures are in docs/decisions/0007; tests/netns shows what it costs."""
    assert ucx_environment(settings_from("prefill", Flags()))["UCX_TCP_CONN_NB"] == "y"


def test_addresses() -> None:
    assert authority("::1", 80) == "[::1]:80"
    assert authority("127.0.0.1", 80) == "127.0.0.1:80"
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("10.0.0.1")
