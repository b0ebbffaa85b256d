"""What is hooked into the supervisor's loop cannot hurt it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from pdrt.supervisor import Phase, Supervisor
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
)
from tests.waiting import wait_until


def test_a_raising_callback_is_counted_and_the_loop_goes_on(board: MemoryBoard) -> None:
    r, w = os.pipe()
    os.write(w, b"x")  # stays readable: a loop that did not let it rest would spin
    calls = {"timer": 0, "service": 0, "good": 0}

    def count(name: str, fails: bool) -> Callable[[], None]:
        def callback() -> None:
            calls[name] += 1
            if fails:
                raise RuntimeError("this callback fails on purpose")

        return callback

    with supervised(spec(board, 0, kids.steady), board=board) as supervisor:
        supervisor.add_service(r, count("service", True))
        supervisor.add_timer(0.01, count("timer", True))
        supervisor.add_timer(0.01, count("good", False))
        supervisor.start()
        turn_until(supervisor, lambda: min(calls.values()) >= 3, "the callbacks to be called again")
        assert supervisor.callback_errors_count == calls["timer"] + calls["service"]
        assert calls["service"] < calls["timer"]
        supervisor.remove_service(r)
        assert only(supervisor).phase is Phase.UP
    os.close(r)
    os.close(w)


def test_a_board_that_raises_at_a_burial_does_not_stop_the_restart(board: MemoryBoard) -> None:
    def fail(row: int, incarnation: int) -> None:
        raise RuntimeError("this board fails on purpose")

    with supervised(spec(board, 0, kids.steady), board=board) as supervisor:
        supervisor.start()
        board.buried = fail  # type: ignore[method-assign]
        os.kill(pid_of(only(supervisor)), signal.SIGKILL)
        turn_until(supervisor, is_up_again(supervisor), "the restart")
        assert supervisor.callback_errors_count == 1


def test_a_service_is_called_while_its_descriptor_is_readable(board: MemoryBoard) -> None:
    r, w = os.pipe()
    got: list[bytes] = []
    with supervised(spec(board, 0, kids.steady), board=board) as supervisor:
        supervisor.add_service(r, lambda: got.append(os.read(r, 10)))
        supervisor.start()
        os.write(w, b"hello")
        turn_until(supervisor, lambda: got, "the service")
        supervisor.remove_service(r)
    assert got == [b"hello"]
    os.close(r)
    os.close(w)


def test_another_thread_may_look_restart_and_stop(board: MemoryBoard) -> None:
    seen: list[Phase] = []

    def meddle(supervisor: Supervisor) -> None:
        wait_until(lambda: only(supervisor).phase is Phase.UP, DEADLINE_S, "the child to be up")
        supervisor.restart("child0", "from a thread")
        wait_until(is_up_again(supervisor), DEADLINE_S, "the restart")
        seen.append(only(supervisor).phase)
        supervisor.request_stop("from a thread")

    with supervised(spec(board, 0, kids.steady), board=board) as supervisor:
        thread = threading.Thread(target=meddle, args=(supervisor,))
        thread.start()
        assert supervisor.run() == "from a thread"
        thread.join(DEADLINE_S)
    assert seen == [Phase.UP]


def test_signal_handlers_are_given_back(board: MemoryBoard) -> None:
    signums = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
    before = [signal.getsignal(signum) for signum in signums]
    with supervised(board=board):
        assert [signal.getsignal(signum) for signum in signums] != before
    assert [signal.getsignal(signum) for signum in signums] == before
