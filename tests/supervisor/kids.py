"""What is supervised here: a board in a memfd, and children that misbehave in one way each.

Light on imports, for every child imports it again.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import select
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pdrt.child import Descriptor, Promotion, parent_pidfd
from pdrt.supervisor import ChildSpec, ChildState, Phase, Supervisor
from tests.waiting import wait_until

ROW = struct.Struct("<QQQ")  # ready, pulse, note: whatever a child wants a test to know
ROWS = 8
PULSE_S = 0.02
DEADLINE_S = 10.0


class MemoryBoard:
    """A Board, and a diary of what the supervisor told it."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("board", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, ROWS * ROW.size)
        self.memory = mmap.mmap(self.fd, 0)
        self.diary: list[tuple[str, int, object]] = []

    def close(self) -> None:
        self.memory.close()
        os.close(self.fd)

    def note(self, row: int) -> int:
        return int(ROW.unpack_from(self.memory, row * ROW.size)[2])

    def incarnate(self, row: int, incarnation: int, pid: int) -> None:
        if pid == 0:
            struct.pack_into("<Q", self.memory, row * ROW.size, 0)
            self.diary.append(("incarnate", row, incarnation))
        else:
            self.diary.append(("pid", row, pid))

    def ready(self, row: int) -> bool:
        return bool(ROW.unpack_from(self.memory, row * ROW.size)[0])

    def pulse(self, row: int) -> int:
        return int(ROW.unpack_from(self.memory, row * ROW.size)[1])

    def buried(self, row: int, incarnation: int) -> None:
        self.diary.append(("buried", row, incarnation))

    def failed(self, row: int, detail: str) -> None:
        self.diary.append(("failed", row, detail))


class Row:
    """A child's own row."""

    def __init__(self, board: Descriptor, row: int) -> None:
        self.memory = mmap.mmap(board.fd, 0)
        self.offset = row * ROW.size

    def put(self, field: int, value: int) -> None:
        struct.pack_into("<Q", self.memory, self.offset + 8 * field, value)

    def announce(self) -> None:
        self.put(0, 1)

    def note(self, value: int) -> None:
        self.put(2, value)

    def live(self) -> None:
        """Pulse for ever; a signal handler or the supervisor's death ends it."""
        beat = 0
        while not select.select([parent_pidfd()], [], [], PULSE_S)[0]:
            beat += 1
            self.put(1, beat)


def wait_for_ever() -> None:
    while True:
        signal.pause()


def exit_on_sigterm() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


# --- targets; each takes the board's descriptor and a row ----------------------------------------


def steady(board: Descriptor, row: int) -> None:
    exit_on_sigterm()
    mine = Row(board, row)
    mine.announce()
    mine.live()


def stubborn(board: Descriptor, row: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mine = Row(board, row)
    mine.announce()
    mine.live()


def never_ready(board: Descriptor, row: int) -> None:
    exit_on_sigterm()
    Row(board, row).live()


def ends(board: Descriptor, row: int, exit_code: int) -> None:
    """So soon after it was ready that the supervisor hears of both at once."""
    Row(board, row).announce()
    os._exit(exit_code)


def ends_unready(board: Descriptor, row: int, exit_code: int) -> None:
    sys.exit(exit_code)


def fails(board: Descriptor, row: int) -> None:
    Row(board, row).announce()
    raise RuntimeError("this child fails on purpose")


def loops(board: Descriptor, row: int) -> None:
    Row(board, row).announce()
    while True:
        pass


def starves(board: Descriptor, row: int) -> None:
    """A process of its own session loops on its CPU, and has sixty times its share of it."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if os.fork() == 0:
        while True:
            pass
    os.nice(19)
    mine = Row(board, row)
    mine.announce()
    for beat in itertools.count():
        mine.put(1, beat)


def loses_a_thread(board: Descriptor, row: int) -> None:
    mine = Row(board, row)
    mine.announce()

    def fail() -> None:
        raise RuntimeError("this thread fails on purpose")

    threading.Thread(target=fail).start()
    mine.live()


def leaves_orphan(board: Descriptor, row: int) -> None:
    """Forks a process that ignores everything, keeps every descriptor, and is noted in the row."""
    mine = Row(board, row)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wait_for_ever()
    mine.note(pid)
    exit_on_sigterm()
    mine.announce()
    mine.live()


def writes(board: Descriptor, row: int, first: Descriptor, second: Descriptor) -> None:
    inheritable = [d for d in (board, first, second) if os.get_inheritable(d.fd)]
    cloexec = [d for d in (first, second) if fcntl.fcntl(d, fcntl.F_GETFD) & fcntl.FD_CLOEXEC]
    os.write(first.fd, f"first {len(inheritable)} {len(cloexec)}".encode())
    os.write(second.fd, b"second")
    steady(board, row)


def describes_itself(board: Descriptor, row: int, pipe: Descriptor) -> None:
    with open("/proc/self/comm", encoding="ascii") as comm:
        name = comm.read().strip()
    sigint_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    main_file = getattr(sys.modules["__main__"], "__file__", None)
    heavy = sorted({"pytest", "hypothesis"} & sys.modules.keys())
    session_leader = os.getsid(0) == os.getpid()
    known = {0, 1, 2, board.fd, pipe.fd, parent_pidfd()}
    with os.scandir("/proc/self/fd") as listing:  # which is itself the one that is not known
        unknown = len({int(entry.name) for entry in listing} - known) - 1
    facts = [name, sigint_ignored, main_file, heavy, session_leader, unknown]
    os.write(pipe.fd, repr(facts).encode())
    steady(board, row)


# --- standbys: a promotion comes before the board and their row -----------------------------------


def stands_by(promotion: Promotion, board: Descriptor, row: int, roles: dict[str, int]) -> None:
    """Becomes the child it is told, in that child's row, which `roles` knows."""
    spare = Row(board, row)
    spare.announce()
    beats = itertools.count(1)
    name = promotion.wait(lambda: spare.put(1, next(beats)), PULSE_S)
    steady(board, roles[name])


def stands_by_and_never_gets_ready(
    promotion: Promotion, board: Descriptor, row: int, roles: dict[str, int]
) -> None:
    spare = Row(board, row)
    spare.announce()
    beats = itertools.count(1)
    never_ready(board, roles[promotion.wait(lambda: spare.put(1, next(beats)), PULSE_S)])


def cannot_stand_by(promotion: Promotion, board: Descriptor, row: int, _: dict[str, int]) -> None:
    sys.exit(3)


# --- what tests ask of a supervisor ---------------------------------------------------------------


@contextmanager
def supervised(*specs: ChildSpec, board: MemoryBoard) -> Iterator[Supervisor]:
    with Supervisor(specs, board, deaths_max=2, period_s=30.0, kill_s=2.0) as supervisor:
        yield supervisor


def spec(
    board: MemoryBoard, row: int, target: Callable[..., None], *extra: Any, **changes: Any
) -> ChildSpec:
    return ChildSpec(
        **{
            "name": f"child{row}",
            "target": target,
            "args": (Descriptor(board.fd), row, *extra),
            "row": row,
            "ready_s": DEADLINE_S,
            "shutdown_s": 2.0,
            **changes,
        }
    )


def turn_until(supervisor: Supervisor, predicate: Callable[[], object], what: str) -> None:
    def turned() -> bool:
        supervisor.step(0.0)
        return bool(predicate())

    wait_until(turned, DEADLINE_S, what)


def only(supervisor: Supervisor) -> ChildState:
    (state,) = supervisor.children()
    return state


def pid_of(state: ChildState) -> int:
    assert state.pid is not None
    return state.pid


def is_up_again(supervisor: Supervisor, incarnation: int = 2) -> Callable[[], bool]:
    def up() -> bool:
        state = supervisor.children()[0]
        return state.phase is Phase.UP and state.incarnation == incarnation

    return up


def words(board: MemoryBoard, *kinds: str) -> list[tuple[str, int]]:
    return [(kind, row) for kind, row, _ in board.diary if kind in kinds]


# --- a supervisor in a process of its own --------------------------------------------------------


def main(*targets: str) -> None:
    """Supervise the named targets of this module; write their pids and a line when it is over."""
    board = MemoryBoard()
    specs = [
        ChildSpec(
            name=name,
            target=globals()[name],
            args=(Descriptor(board.fd), row),
            row=row,
            shutdown_s=30.0 if name == "stubborn" else 2.0,
        )
        for row, name in enumerate(targets)
    ]
    announced = False

    def announce() -> None:
        nonlocal announced
        if announced or not all(board.ready(spec.row) for spec in specs):
            return
        announced = True
        pids = [state.pid for state in supervisor.children()]
        pids += [board.note(spec.row) for spec in specs if board.note(spec.row)]
        sys.stdout.write(" ".join(map(str, pids)) + "\n")
        sys.stdout.flush()

    with supervised(*specs, board=board) as supervisor:
        supervisor.add_timer(0.02, announce)
        reason = supervisor.run()
    sys.stdout.write(f"stopped: {reason}\n")
    sys.exit(7)
