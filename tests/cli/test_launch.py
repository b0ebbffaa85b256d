"""Flags, variables and files become settings, or an error that names what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdrt.cli.launch import Flags, settings_from
from pdrt.config import authority, environment_with, is_loopback, ucx_environment


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
    )
    t = settings_from("decode", flags).timeouts
    found = (t.bootstrap_s, t.waiting_s, t.stall_s, t.quiet_s, t.peer_s, t.drain_s)
    assert found == (1, 2, 3, 4, 5, 6)


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
    ],
)
def test_a_wrong_command_line_names_the_mistake(flags: list[str], words: str) -> None:
    done = launch(*flags)
    assert done.returncode != 0
    assert words in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_ucx_stays_on_loopback_while_the_role_does() -> None:
    assert ucx_environment(settings_from("decode", Flags()))["UCX_NET_DEVICES"] == "lo"
    outside = ucx_environment(settings_from("decode", Flags(host="0.0.0.0")))
    assert "UCX_NET_DEVICES" not in outside


def test_addresses() -> None:
    assert authority("::1", 80) == "[::1]:80"
    assert authority("127.0.0.1", 80) == "127.0.0.1:80"
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("10.0.0.1")
