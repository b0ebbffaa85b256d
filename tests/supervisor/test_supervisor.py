"""Laws of supervision, shown with real processes: start, death, restart, hangs.

The tests turn the supervisor's loop themselves, in this process.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import psutil
import pytest

from pdrt.errors import BadConfig, BadRequest, CallerError, Escalated, StartFailed
from pdrt.supervisor import Phase, Restart, Supervisor
from tests.supervisor import kids
from tests.supervisor.kids import (
    DEADLINE_S,
    MemoryBoard,
    is_up_again,
    only,
    pid_of,
    spec,
    supervised,
    turn_until,
    words,
)

# --- start ----------------------------------------------------------------------------------------


def test_children_start_in_order_each_after_the_one_before_is_ready(board: MemoryBoard) -> None:
    specs = [spec(board, row, kids.steady) for row in (2, 0, 1)]
    ready_at_launch = []
    incarnate = board.incarnate

    def watch(row: int, incarnation: int, pid: int) -> None:
        if pid == 0:
            ready_at_launch.append([board.ready(r) for r in (2, 0, 1)])
        incarnate(row, incarnation, pid)

    board.incarnate = watch  # type: ignore[method-assign]
    with supervised(*specs, board=board) as supervisor:
        supervisor.start()
        assert [state.name for state in supervisor.children()] == ["child2", "child0", "child1"]
        assert all(state.phase is Phase.UP for state in supervisor.children())
    assert words(board, "incarnate") == [("incarnate", 2), ("incarnate", 0), ("incarnate", 1)]
    assert ready_at_launch == [[False] * 3, [True, False, False], [True, True, False]]


def test_a_child_that_is_never_ready_fails_the_start_by_name(board: MemoryBoard) -> None:
    late = spec(board, 1, kids.never_ready, ready_s=0.5)
    with (
        supervised(spec(board, 0, kids.steady), late, board=board) as supervisor,
        pytest.raises(StartFailed, match=r"child1 did not start: not ready within 0.5 s") as caught,
    ):
        supervisor.run()
    assert caught.value.name == "child1"
    assert words(board, "buried", "failed") == [("buried", 1), ("failed", 1), ("buried", 0)]


@pytest.mark.parametrize("exit_code", [0, 3])
def test_a_permanent_child_that_ends_before_it_is_ready_fails_the_start(
    board: MemoryBoard, exit_code: int
) -> None:
    child = spec(board, 0, kids.ends_unready, exit_code)
    with (
        supervised(child, board=board) as supervisor,
        pytest.raises(StartFailed, match=f"exit code {exit_code}"),
    ):
        supervisor.start()
    assert words(board, "incarnate") == [("incarnate", 0)]


def test_a_one_shot_child_may_end_before_it_is_ready(board: MemoryBoard) -> None:
    child = spec(board, 0, kids.ends_unready, 0, restart=Restart.TRANSIENT)
    with supervised(child, board=board) as supervisor:
        supervisor.start()
        assert only(supervisor).phase is Phase.DONE
    assert words(board, "failed") == []


def test_others_are_supervised_while_one_is_starting(board: MemoryBoard) -> None:
    first, slow = spec(board, 0, kids.steady), spec(board, 1, kids.never_ready)
    with supervised(first, slow, board=board) as supervisor:
        killed = False

        def disturb() -> None:
            nonlocal killed
            state, other = supervisor.children()
            if not killed and other.phase is Phase.STARTING:
                killed = True
                os.kill(pid_of(state), signal.SIGKILL)
            elif is_up_again(supervisor)():
                supervisor.request_stop("seen enough")

        supervisor.add_timer(0.01, disturb)
        assert supervisor.run() == "seen enough"
    assert words(board, "incarnate") == [("incarnate", 0), ("incarnate", 1), ("incarnate", 0)]


def test_args_that_cannot_travel_are_refused_by_name(board: MemoryBoard) -> None:
    child = spec(board, 0, kids.steady, threading.Lock())
    with supervised(child, board=board) as supervisor, pytest.raises(StartFailed, match="child0"):
        supervisor.start()


@pytest.mark.parametrize(("row", "name"), [(0, "other"), (1, "child0")])
def test_names_and_rows_are_unique(board: MemoryBoard, row: int, name: str) -> None:
    first, second = spec(board, 0, kids.steady), spec(board, row, kids.steady, name=name)
    with pytest.raises(BadConfig):
        Supervisor([first, second], board)


# --- death and restart ----------------------------------------------------------------------------


def test_a_killed_child_is_buried_and_then_comes_back(
    board: MemoryBoard, record_property: Callable[[str, object], None]
) -> None:
    with supervised(spec(board, 0, kids.steady), board=board) as supervisor:
        supervisor.start()
        first = only(supervisor)
        killed_at = time.monotonic()
        os.kill(pid_of(first), signal.SIGKILL)
        turn_until(supervisor, is_up_again(supervisor), "the child to come back")
        record_property("kill_to_ready_s", time.monotonic() - killed_at)
        second = only(supervisor)
        assert second.pid != first.pid
        assert (second.incarnation, second.restarts) == (2, 1)
        assert second.cause == "ended by SIGKILL"
        assert second.uptime_s < first.uptime_s + DEADLINE_S
    assert [(kind, value) for kind, _, value in board.diary if kind in ("incarnate", "buried")] == [
        ("incarnate", 1),
        ("buried", 1),
        ("incarnate", 2),
        ("buried", 2),
    ]


def test_nothing_of_the_dead_is_left_when_the_board_hears_of_it(board: MemoryBoard) -> None:
    """Not even a process that the child forked: it may map the same memory."""
    alive: list[bool] = []
    with supervised(spec(board, 0, kids.leaves_orphan), board=board) as supervisor:
        supervisor.start()
        pids = [pid_of(only(supervisor)), board.note(0)]
        buried = board.buried

        def look(row: int, incarnation: int) -> None:
            alive.extend(psutil.pid_exists(pid) for pid in pids)
            buried(row, incarnation)

        board.buried = look  # type: ignore[method-assign]
        os.kill(pids[0], signal.SIGKILL)
        turn_until(supervisor, lambda: alive, "the burial")
        assert alive == [False, False]


def test_orphans_of_a_child_become_the_supervisors_to_reap(board: MemoryBoard) -> None:
    with supervised(spec(board, 0, kids.leaves_orphan), board=board) as supervisor:
        supervisor.start()
        orphan = psutil.Process(board.note(0))
        os.kill(pid_of(only(supervisor)), signal.SIGKILL)
        turn_until(supervisor, lambda: only(supervisor).phase is Phase.BURYING, "the death")
        assert orphan.ppid() == os.getpid()


@pytest.mark.parametrize(
    ("restart", "exit_code", "returns"),
    [
        (Restart.PERMANENT, 0, True),
        (Restart.TRANSIENT, 0, False),
        (Restart.TRANSIENT, 3, True),
        (Restart.TEMPORARY, 3, False),
    ],
)
def test_the_spec_says_whether_a_child_returns(
    board: MemoryBoard, restart: Restart, exit_code: int, returns: bool
) -> None:
    child = spec(board, 0, kids.ends, exit_code, restart=restart)
    with Supervisor([child], board, deaths_max=100) as supervisor:
        supervisor.start()
        settled = (lambda s: s.incarnation == 2) if returns else (lambda s: s.phase is Phase.DONE)
        turn_until(supervisor, lambda: settled(only(supervisor)), f"{restart} to settle")
        assert only(supervisor).cause == f"exit code {exit_code}"
    assert (("incarnate", 0, 2) in board.diary) is returns
    assert bool(words(board, "failed")) is (restart is Restart.TEMPORARY)


def test_too_many_deaths_escalate_with_a_reason_after_a_stop_in_reverse(board: MemoryBoard) -> None:
    specs = [spec(board, row, kids.steady) for row in (0, 1)]
    specs.append(spec(board, 2, kids.ends, 9))
    with (
        supervised(*specs, board=board) as supervisor,
        pytest.raises(Escalated, match=r"more than 2 deaths in 30 s; last child2: exit code 9"),
    ):
        supervisor.run()
    assert words(board, "incarnate").count(("incarnate", 2)) == 3
    buried = words(board, "buried", "failed")
    assert buried == [("buried", 2)] * 3 + [("failed", 2), ("buried", 1), ("buried", 0)]


def test_a_deliberate_restart_does_not_count_as_a_death(board: MemoryBoard) -> None:
    with Supervisor([spec(board, 0, kids.steady)], board, deaths_max=0) as supervisor:
        supervisor.start()
        for incarnation in (2, 3):
            supervisor.restart("child0", "fence")
            turn_until(supervisor, is_up_again(supervisor, incarnation), "the deliberate restart")
        assert only(supervisor).restarts == 0
        assert only(supervisor).cause == "restart: fence"
        os.kill(pid_of(only(supervisor)), signal.SIGKILL)
        with pytest.raises(Escalated):
            turn_until(supervisor, lambda: False, "the escalation")


def test_a_deliberate_restart_waits_for_nobody(board: MemoryBoard) -> None:
    """New work is given to the old process until it is gone: it is not asked to end."""
    with supervised(spec(board, 0, kids.steady), board=board) as supervisor:
        supervisor.start()
        supervisor.restart("child0", "fence")
        turn_until(supervisor, lambda: only(supervisor).phase is not Phase.UP, "its end to begin")
        assert only(supervisor).phase is Phase.KILLED


def test_restart_brings_back_a_child_that_was_done(board: MemoryBoard) -> None:
    child = spec(board, 0, kids.ends, 0, restart=Restart.TEMPORARY)
    with supervised(child, board=board) as supervisor:
        supervisor.start()
        turn_until(supervisor, lambda: only(supervisor).phase is Phase.DONE, "its end")
        supervisor.restart("child0", "again")
        turn_until(supervisor, lambda: only(supervisor).incarnation == 2, "its return")


def test_restart_of_an_unknown_child_is_the_callers_error(board: MemoryBoard) -> None:
    with supervised(spec(board, 0, kids.steady), board=board) as supervisor:
        with pytest.raises(BadRequest) as caught:
            supervisor.restart("nobody", "why not")
        assert isinstance(caught.value, CallerError)


# --- hangs ----------------------------------------------------------------------------------------


def test_a_stopped_child_is_killed_and_restarted(board: MemoryBoard) -> None:
    with supervised(spec(board, 0, kids.steady, hang_s=0.5), board=board) as supervisor:
        supervisor.start()
        os.kill(pid_of(only(supervisor)), signal.SIGSTOP)
        turn_until(supervisor, is_up_again(supervisor), "the stopped child to come back")
        assert only(supervisor).cause == "hung: no pulse for 0.5 s"


def test_a_child_that_is_stopped_before_it_is_ready_is_not_waited_for(board: MemoryBoard) -> None:
    incarnate = board.incarnate

    def stop_second(row: int, incarnation: int, pid: int) -> None:
        incarnate(row, incarnation, pid)
        if pid and incarnation == 2:
            os.kill(pid, signal.SIGSTOP)

    board.incarnate = stop_second  # type: ignore[method-assign]
    child = spec(board, 0, kids.steady, hang_s=0.3, ready_s=10 * DEADLINE_S)
    with supervised(child, board=board) as supervisor:
        supervisor.start()
        os.kill(pid_of(only(supervisor)), signal.SIGKILL)
        turn_until(supervisor, is_up_again(supervisor, 3), "one that runs")
        assert only(supervisor).cause == "stopped for 0.3 s before it was ready"


def test_a_child_that_is_continued_before_it_is_ready_goes_on(board: MemoryBoard) -> None:
    incarnate, started_ns = board.incarnate, time.monotonic_ns()

    def stop(row: int, incarnation: int, pid: int) -> None:
        incarnate(row, incarnation, pid)
        if pid:
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(0.3, os.kill, (pid, signal.SIGCONT)).start()

    board.incarnate = stop  # type: ignore[method-assign]
    with supervised(spec(board, 0, kids.steady, hang_s=5.0), board=board) as supervisor:
        supervisor.start()
        assert only(supervisor).incarnation == 1
        assert time.monotonic_ns() - started_ns > 250_000_000


def test_an_endless_loop_without_a_pulse_is_killed(board: MemoryBoard) -> None:
    child = spec(board, 0, kids.loops, hang_s=0.3, restart=Restart.TEMPORARY)
    with supervised(child, board=board) as supervisor:
        supervisor.start()
        turn_until(supervisor, lambda: only(supervisor).phase is Phase.DONE, "the hang to end")
        assert only(supervisor).cause == "hung: no pulse for 0.3 s"


def test_time_in_which_the_supervisor_was_stopped_counts_against_nobody(board: MemoryBoard) -> None:
    clock_ns = time.monotonic_ns()
    with Supervisor(
        [spec(board, 0, kids.steady, hang_s=2.0)], board, clock=lambda: clock_ns
    ) as supervisor:
        supervisor.start()
        first = only(supervisor)
        os.kill(pid_of(first), signal.SIGSTOP)  # the child stands still as well
        supervisor.step(0.0)
        clock_ns += 3_600_000_000_000
        supervisor.step(0.0)
        assert only(supervisor).phase is Phase.UP
        os.kill(pid_of(first), signal.SIGCONT)


def test_a_child_that_survives_sigkill_gets_no_twin(
    board: MemoryBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process here can survive SIGKILL, so it gets lost on the way."""
    send = signal.pidfd_send_signal

    def send_all_but_sigkill(pidfd: int, signum: int) -> None:
        if signum != signal.SIGKILL:
            send(pidfd, signum)

    child = spec(board, 0, kids.steady, hang_s=0.3)
    with Supervisor([child], board, kill_s=0.3) as supervisor:
        supervisor.start()
        pid = pid_of(only(supervisor))
        with monkeypatch.context() as patched:
            patched.setattr(signal, "pidfd_send_signal", send_all_but_sigkill)
            os.kill(pid, signal.SIGSTOP)
            quarantined = lambda: only(supervisor).phase is Phase.QUARANTINED  # noqa: E731
            turn_until(supervisor, quarantined, "the quarantine")
            for _ in range(50):
                supervisor.step(0.01)
            assert only(supervisor).pid == pid
            assert words(board, "buried", "failed") == [("failed", 0)]
        os.kill(pid, signal.SIGKILL)
        turn_until(supervisor, is_up_again(supervisor), "the successor of the truly dead")
    assert words(board, "buried", "failed") == [("failed", 0), ("buried", 0), ("buried", 0)]
