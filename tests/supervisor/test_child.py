"""What a child is given, and how it ends by itself."""

from __future__ import annotations

import ast
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from pdrt.child import BOOT, ChildProcess, Descriptor
from pdrt.clock import MILLISECOND_NS, monotonic_ns
from pdrt.supervision import Spent, starved_ns
from pdrt.supervisor import Phase, Restart
from tests.supervisor import kids
from tests.supervisor.kids import DEADLINE_S, MemoryBoard, only, spec, supervised, turn_until
from tests.waiting import wait_until


def test_several_descriptors_reach_the_child_and_no_further(board: MemoryBoard) -> None:
    (r1, w1), (r2, w2) = os.pipe(), os.pipe()
    child = spec(board, 0, kids.writes, Descriptor(w1), Descriptor(w2))
    with supervised(child, board=board) as supervisor:
        supervisor.start()
        assert os.read(r1, 100) == b"first 0 2"
        assert os.read(r2, 100) == b"second"
    for fd in (r1, w1, r2, w2):
        os.close(fd)


def test_a_descriptor_is_pickled_for_a_child_only() -> None:
    with pytest.raises(RuntimeError):
        pickle.dumps(Descriptor(0))


def test_a_child_is_named_leads_its_session_and_inherits_nothing_else(board: MemoryBoard) -> None:
    r, w = os.pipe()
    child = spec(board, 0, kids.describes_itself, Descriptor(w), name="transfer-worker-0")
    with supervised(child, board=board) as supervisor:
        supervisor.start()
        facts = ast.literal_eval(os.read(r, 1000).decode())
    os.close(r)
    os.close(w)
    assert facts == ["transfer-worker", True, None, [], True, 0]


@pytest.mark.parametrize("alive", [True, False])
def test_a_child_whose_parent_is_not_its_supervisor_ends_before_its_target(alive: bool) -> None:
    """As it is when the supervisor dies while its child still boots."""
    if alive:
        supervisor_pid = os.getppid()
    else:
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait(DEADLINE_S)
        supervisor_pid = gone.pid
    target = (os._exit, (9,))
    memory = os.memfd_create("payload")
    os.write(memory, b"".join(map(pickle.dumps, (sys.path, ("orphan", supervisor_pid), target))))
    os.lseek(memory, 0, os.SEEK_SET)
    process = subprocess.Popen([sys.executable, "-c", BOOT, str(memory)], pass_fds=(memory,))
    os.close(memory)
    assert process.wait(DEADLINE_S) == 1


def test_children_are_launched_from_the_main_thread_only(board: MemoryBoard) -> None:
    errors: list[BaseException] = []

    def enter() -> None:
        try:
            supervised(spec(board, 0, kids.steady), board=board).__enter__()
        except AssertionError as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(DEADLINE_S)
    assert len(errors) == 1


def ends_with_exit_code_1(board: MemoryBoard, target: Callable[..., None]) -> None:
    child = spec(board, 0, target, restart=Restart.TEMPORARY)
    with supervised(child, board=board) as supervisor:
        supervisor.start()
        turn_until(supervisor, lambda: only(supervisor).phase is Phase.DONE, "its end")
        assert only(supervisor).cause == "exit code 1"


def test_an_exception_in_the_target_is_exit_code_1_with_a_traceback(
    board: MemoryBoard, capfd: pytest.CaptureFixture[str]
) -> None:
    ends_with_exit_code_1(board, kids.fails)
    assert "RuntimeError: this child fails on purpose" in capfd.readouterr().err


def test_a_thread_that_dies_ends_its_process(
    board: MemoryBoard, capfd: pytest.CaptureFixture[str]
) -> None:
    ends_with_exit_code_1(board, kids.loses_a_thread)
    assert "this thread fails on purpose" in capfd.readouterr().err


CROWD = """
import os, sys, threading, zlib
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
data = bytes(1 << 26)
def spin():
    while True:
        zlib.crc32(data)  # without the interpreter's lock
for _ in range(5):
    threading.Thread(target=spin, daemon=True).start()
spin()
"""


def test_a_child_is_launched_where_the_kernel_keeps_no_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = os.open

    def has_none(path: str, *flags: int) -> int:
        if path.endswith("/schedstat"):
            raise FileNotFoundError(path)
        return opened(path, *flags)

    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=-1
    ) as popen:
        monkeypatch.setattr(os, "open", has_none)
        process = ChildProcess(popen)
        try:
            assert process.spent() == Spent()
        finally:
            process.kill()
            process.close()


def test_threads_that_wait_for_one_cpu_do_not_starve_longer_than_time_passes() -> None:
    with subprocess.Popen([sys.executable, "-c", CROWD]) as popen:
        process = ChildProcess(popen)
        try:
            wait_until(lambda: len(process.waits_ns()) == 6, DEADLINE_S, "the crowd")
            began_ns, before_ns = monotonic_ns(), process.waits_ns()

            def starved() -> int:
                return starved_ns(before_ns, process.waits_ns())

            wait_until(lambda: starved() > 1000 * MILLISECOND_NS, DEADLINE_S, "them to starve")
            # Six threads would make it five times as long in sum.  More than once: a wait that
            # began before we looked is counted at its end.
            assert starved() <= 1.5 * (monotonic_ns() - began_ns)
        finally:
            process.kill()
            process.close()
