"""Start-up where something runs out: descriptors, memory, address space, the size of files.  It
ends with a typed error that says who must act, never with a traceback, and leaves nothing."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from pdrt import memfd
from pdrt.cli.launch import raise_descriptors
from pdrt.config import Settings
from pdrt.errors import BadConfig, DeploymentError, NoMemory
from pdrt.runtime import Runtime
from tests.crash.tree_process import LAYOUT
from tests.faults.trees import make_model
from tests.waiting import wait_until

SETTINGS = Settings(
    role="prefill", port=0, bootstrap_port=0, transport="shm", engine="none", pool_tokens=1024
)
SLACK_BYTES = 3 << 20  # less than a table of 65,536 rooms


def in_a_process(function: str) -> list[str]:
    """Limits are a process's, and few can be raised again."""
    code = f"from tests.bounds.test_start import {function}; {function}()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def outcome() -> str:
    """Of one start of a runtime; its memory is reserved, and no child is launched."""
    open_before = set(os.listdir("/proc/self/fd"))
    try:
        with Runtime(SETTINGS, LAYOUT, None):
            found = "started"
    except DeploymentError as error:
        found = error.code
    assert set(os.listdir("/proc/self/fd")) == open_before, "a descriptor was left behind"
    return found


def test_a_start_without_enough_descriptors_says_so_whichever_is_the_first_to_fail() -> None:
    found = in_a_process("start_with_few_descriptors")
    refused = found.index("started")
    assert found == ["bad_config"] * refused + ["started"] * (len(found) - refused)
    assert refused > 10  # or nothing was tested


def start_with_few_descriptors() -> None:
    """Entered by the test above.  One more at a time."""
    outcome()  # imports what is imported late
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    for count in range(40):
        # To look what is open takes one more, and is not what this is about.
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + count, hard))
        sys.stdout.write(outcome_of_start() + "\n")


def outcome_of_start() -> str:
    try:
        with Runtime(SETTINGS, LAYOUT, None):
            return "started"
    except DeploymentError as error:
        return error.code
    finally:
        check = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (check[1], check[1]))
        assert len(os.listdir("/proc/self/fd")) == 4, os.listdir("/proc/self/fd")


@pytest.mark.slow
def test_a_start_without_address_space_is_no_memory() -> None:
    assert in_a_process("start_without_address_space") == ["no_memory", "started"]


def start_without_address_space() -> None:
    """Entered by the test above."""
    outcome()
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used_bytes = pages * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + SLACK_BYTES, before[1]))
    refused = outcome()
    resource.setrlimit(resource.RLIMIT_AS, before)
    sys.stdout.write(f"{refused} {outcome()}\n")


def test_a_start_without_memory_is_refused_before_anything_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = threading.active_count()
    monkeypatch.setattr(memfd, "available_bytes", lambda: 1 << 20)
    assert outcome() == "no_memory"
    monkeypatch.undo()
    assert outcome() == "started"
    assert threading.active_count() == threads


def test_memory_that_a_control_group_refuses_is_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its limit may be reached by others between our look and our taking."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoMemory, match="No space left"):
        Runtime(SETTINGS, LAYOUT, None)


@pytest.mark.parametrize("missing", ["memfd_create", "eventfd"])
def test_what_the_kernel_refuses_is_named_by_who_must_act(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    for number, expected in ((errno.ENFILE, BadConfig), (errno.ENOMEM, NoMemory)):

        def refuse(*_: object, n: int = number) -> int:
            raise OSError(n, os.strerror(n))

        with monkeypatch.context() as patch:
            patch.setattr(os, missing, refuse)
            with pytest.raises(expected):
                Runtime(SETTINGS, LAYOUT, None)
    assert outcome() == "started"


# --- the whole command ---------------------------------------------------------------------------


def command(
    limit: str, value: int, folder: Path, *more: str, hard: int | None = None
) -> subprocess.Popen[str]:
    """`hard` is as `value`, if it is not given."""
    code = (
        f"import resource; resource.setrlimit(resource.{limit}, ({value}, {hard or value})); "
        "from pdrt.cli.launch import prefill; prefill()"
    )
    flags = ["--engine", "none", "--transport", "shm", "--port", "0", "--bootstrap-port", "0"]
    return subprocess.Popen(
        [sys.executable, "-c", code, *flags, *more, "--model-path", str(make_model(folder))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def last_words(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, complaint = process.communicate(timeout=60)
    lines = complaint.strip().splitlines() or [""]
    return process.returncode, lines[-1]


def test_a_memfd_beyond_the_size_of_files_ends_the_command_with_code_2(tmp_path: Path) -> None:
    code, words = last_words(command("RLIMIT_FSIZE", 1 << 20, tmp_path))
    assert code == 2
    assert words.startswith("pdrt-prefill: no_memory: cannot reserve")


def test_a_tree_takes_as_many_descriptors_as_it_may_and_warns_where_they_are_few(
    tmp_path: Path,
) -> None:
    process = command("RLIMIT_NOFILE", 100, tmp_path, "--no-standby", hard=300)
    tree = psutil.Process(process.pid)
    try:
        wait_until(lambda: len(tree.children()) == 2, 30, "a listener and a worker")
        limits = [each.rlimit(psutil.RLIMIT_NOFILE) for each in (tree, *tree.children())]
        assert limits == [(300, 300)] * 3
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "WARNING" in log
    assert "300 descriptors a process, 100 before, are enough for about 59 peers (ranks: 1)" in log


def test_descriptors_that_cannot_be_raised_are_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 2**20))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    with caplog.at_level("INFO"):
        raise_descriptors(ranks=8)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "from 1024 to 1048576: [Errno 1]" in caplog.text
    assert "1024 descriptors a process, 1024 before, are enough for about 96 peers" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("descriptors", range(8, 44, 2))
def test_a_command_with_few_descriptors_serves_or_says_why_it_does_not(
    tmp_path: Path, descriptors: int
) -> None:
    """Never by a signal, never by a traceback, whichever of its parts is the first to find none."""
    process = command("RLIMIT_NOFILE", descriptors, tmp_path)
    try:
        code, words = last_words_within(process, 6.0)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        assert last_words(process)[0] == 0  # it ran, and stopped when it was told to
        return
    assert code in (2, 69), words
    assert re.match(r"pdrt-prefill: (bad_config|start_failed): ", words), words


def last_words_within(process: subprocess.Popen[str], timeout_s: float) -> tuple[int, str]:
    process.wait(timeout_s)
    return last_words(process)
