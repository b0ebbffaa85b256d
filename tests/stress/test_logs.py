"""A process that ended by an error of its own is told from one that was killed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from stress.cascades.logs import deaths_in, errors_in
from tests.supervisor import kids
from tests.supervisor.kids import (
    MemoryBoard,
    only,
    pid_of,
    spec,
    supervised,
    turn_until,
)

TRACEBACK = """\
2026-11-30 10:59:29,193 CRITICAL pdrt.supervisor role=prefill pid=31 child failed name=worker0
  Traceback (most recent call last):
    File "transfer.py", line 304, in _check
      self._table.poll(handle)
      ^^^^^^^^^^^^^^^^^^^^^^^^
  pdrt.errors.Closed: slot 10: the room was cleared
"""
ENDED = (
    "2026-11-30 10:59:29,200 WARNING pdrt.supervisor ended name=worker0 incarnation=1 cause='{}'\n"
)


def found(folder: Path, text: str, name: str = "prefill1.log") -> list[str]:
    (folder / name).write_text(text)
    return list(errors_in(folder))


@pytest.mark.parametrize(
    ("target", "args", "error"),
    [(kids.ends, (3,), "exit code 3"), (kids.fails, (), "exit code 1"), (kids.steady, (), "")],
)
def test_what_a_supervisor_says_of_its_dead_is_understood(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    target: Callable[..., None],
    args: tuple[int],
    error: str,
) -> None:
    with contextlib.closing(MemoryBoard()) as board:
        with supervised(spec(board, 0, target, *args), board=board) as supervisor:
            supervisor.start()
            if not error:
                os.kill(pid_of(only(supervisor)), signal.SIGKILL)
            turn_until(supervisor, lambda: "ended name=child0" in caplog.text, "its end")
    errors = found(tmp_path, caplog.text)
    assert bool(errors) == bool(error)
    assert all(line.startswith("prefill1: child0 ") and error in line for line in errors)


@pytest.mark.parametrize(
    "cause",
    [
        "ended by SIGKILL",
        "hung: no pulse for 0.2 s",
        "restart: room 7 did not become quiet",
        "stopped for 1 s before it was ready",
        "not ready within 1 s",
        "stop: SIGTERM",
    ],
)
def test_who_is_killed_did_not_fail(tmp_path: Path, cause: str) -> None:
    assert not found(tmp_path, ENDED.format(cause))
    assert sum(deaths_in(tmp_path).values()) == 1


def test_deaths_are_counted_by_role_and_cause(tmp_path: Path) -> None:
    rooms = [ENDED.format(f"restart: room {n} did not become quiet") for n in range(3)]
    found(tmp_path, "".join([*rooms, TRACEBACK, ENDED.format("exit code 1")]))
    assert deaths_in(tmp_path) == {"worker0 restart": 3, "worker0 exit code 1": 1}


@pytest.mark.parametrize("cause", ["exit code 1", "ended by SIGSEGV", "ended by SIGABRT"])
def test_a_failure_is_told_with_its_error(tmp_path: Path, cause: str) -> None:
    assert found(tmp_path, TRACEBACK + ENDED.format(cause)) == [
        f"prefill1: worker0 1 ended by '{cause}'; pdrt.errors.Closed: slot 10: the room was cleared"
    ]
    assert found(tmp_path, ENDED.format(cause)) == [
        f"prefill1: worker0 1 ended by '{cause}'; without a word"
    ]


def test_an_error_that_nobody_ended_by_is_told_too(tmp_path: Path) -> None:
    error = "prefill1: pdrt.errors.Closed: slot 10: the room was cleared"
    assert found(tmp_path, TRACEBACK) == [error]
    assert found(tmp_path, 2 * TRACEBACK) == [error, error]


@pytest.mark.parametrize("name", ["watcher", "connector", "nursery"])
def test_who_watches_fails_aloud_too(tmp_path: Path, name: str) -> None:
    error = f"{name}: pdrt.errors.Closed: slot 10: the room was cleared"
    assert found(tmp_path, TRACEBACK, f"{name}.log") == [error]


def test_others_are_not_listened_to(tmp_path: Path) -> None:
    assert not found(tmp_path, TRACEBACK, "clients-1-1.log")
