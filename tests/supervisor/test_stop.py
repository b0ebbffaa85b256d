"""How a tree ends: asked to, by signals, and by the supervisor's own death.

Where signals and that death are the point, the supervisor runs in a process of its own.
"""

from __future__ import annotations

import select
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pdrt.supervisor import Phase
from tests.supervisor import kids
from tests.supervisor.kids import DEADLINE_S, MemoryBoard, pid_of, spec, supervised, words
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


def start_main(*targets: str) -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-Werror", "-c", f"from tests.supervisor.kids import main; main{targets}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], DEADLINE_S)[0], "it did not come up"
    line = process.stdout.readline()
    assert line, process.communicate(timeout=DEADLINE_S)[1]
    return process, [int(pid) for pid in line.split()]


def wait_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), DEADLINE_S, "all to be gone")


def test_stop_ends_children_in_reverse_and_kills_one_that_ignores_sigterm(
    board: MemoryBoard,
) -> None:
    specs = [
        spec(board, 0, kids.steady),
        spec(board, 1, kids.stubborn, shutdown_s=0.3),
        spec(board, 2, kids.steady),
    ]
    with supervised(*specs, board=board) as supervisor:
        supervisor.start()
        supervisor.stop("test")
        assert [state.phase for state in supervisor.children()] == [Phase.DONE] * 3
    assert words(board, "buried") == [("buried", 2), ("buried", 1), ("buried", 0)]


def test_stop_waits_for_each_child_before_it_turns_to_the_next(board: MemoryBoard) -> None:
    specs = [spec(board, 0, kids.steady), spec(board, 1, kids.stubborn, shutdown_s=0.3)]
    with supervised(*specs, board=board) as supervisor:
        supervisor.start()
        pids = [pid_of(state) for state in supervisor.children()]
        others_alive: list[bool] = []
        buried = board.buried

        def look(row: int, incarnation: int) -> None:
            others_alive.append(psutil.pid_exists(pids[0]))
            buried(row, incarnation)

        board.buried = look  # type: ignore[method-assign]
        supervisor.stop("test")
    assert others_alive == [True, False]


def test_no_child_survives_a_killed_supervisor() -> None:
    process, pids = start_main("steady", "stubborn", "loops")
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    assert len(pids) == 3
    wait_gone(pids)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_tree_and_an_orphan_cannot_hold_up_the_exit(signum: int) -> None:
    process, pids = start_main("steady", "leaves_orphan")
    assert len(pids) == 3
    process.send_signal(signum)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert out == f"stopped: {signal.Signals(signum).name}\n", err
    assert process.returncode == 7
    assert not any(map(psutil.pid_exists, pids))


def test_a_second_signal_kills_all_at_once() -> None:
    process, pids = start_main("steady", "stubborn")  # stubborn has 30 s to shut down
    children = [psutil.Process(pid) for pid in pids]
    # Two of a kind might become one on the way, if the first is not read yet.
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert out.startswith("stopped: SIG"), err
    assert not any(child.is_running() for child in children)


def test_a_supervisor_has_no_process_but_its_children() -> None:
    process, pids = start_main("steady")
    assert [child.pid for child in psutil.Process(process.pid).children(recursive=True)] == pids
    process.terminate()
    process.communicate(timeout=DEADLINE_S)
