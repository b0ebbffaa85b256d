"""Leak check round the suite: nothing that a test started or opened may outlive it.

After each test: processes.  After the session: processes, threads and descriptors of this process,
listening sockets, shared memory, and abstract Unix sockets.  `LeakCheck` is a pytest plugin;
conftest.py registers it.

A process counts as ours if it descends from pytest or carries the marker that pytest put into the
environment, so orphans are found too.  What fixtures of a wider scope run is not a test's leak: a
process is charged to a test only if it was not there before and no process that was there before
is its ancestor (a supervisor of a module's fixture may restart its child during a test).

Other suites may run on the same machine.  System-wide things are therefore a leak only if nobody
outside this suite holds them.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import socket
import stat
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from tests.waiting import wait_until

GRACE_S = 2.0  # between a test's end and the death of what it has already told to stop
MARKER = f"LEAKCHECK_{os.getpid()}"  # a variable of its own for each suite, so that suites nest

# Memfds, sockets and regular files are counted strictly.  Of pipes, epoll, eventfd and the like a
# foreign library may keep a few for the life of the process once a test has used it (a thread
# pool's wake-up, an OpenMP runtime), however often it is used; a leak by our code grows with tests.
SPARE_DESCRIPTORS = 8

# One for the life of a process, started by the library's first use.
FOREIGN_THREADS = {"tqdm_monitor"}

Found = TypeVar("Found")
Pids = dict[int, float]  # pid -> start time: a pid alone may be somebody else by now


# --- processes ---


def _carries_marker(pid: int) -> bool:
    try:
        return MARKER.encode() + b"=" in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False  # gone, or another user's


def _marked_pids() -> set[int]:
    return {pid for pid in psutil.pids() if pid != os.getpid() and _carries_marker(pid)}


def our_processes() -> Pids:
    """All living descendants, orphans included, and zombies that pytest has not waited for."""
    multiprocessing.active_children()  # joins those of multiprocessing that are over
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    found = {}
    for pid in children | _marked_pids():
        try:
            found[pid] = psutil.Process(pid).create_time()
        except psutil.NoSuchProcess:
            continue
    return found


def _descends_from(pid: int, older: Pids) -> bool:
    try:
        parents = psutil.Process(pid).parents()
    except psutil.NoSuchProcess:
        return True  # gone: nobody's leak
    return any(older.get(parent.pid) == parent.create_time() for parent in parents)


def processes_since(before: Pids) -> Pids:
    """Our processes that were not there before and belong to none that was."""
    new = {pid: born for pid, born in our_processes().items() if before.get(pid) != born}
    return {pid: born for pid, born in new.items() if not _descends_from(pid, before)}


def describe_process(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return f"process {pid} (zombie: it ended and nobody waited for it)"
        return f"process {pid} ({process.status()}): {' '.join(process.cmdline())}"
    except psutil.NoSuchProcess:
        return f"process {pid} (gone by now)"


def end_processes(pids: Pids) -> None:
    """Kill what leaked, so that the next test does not meet it."""
    for pid, born in pids.items():
        try:
            process = psutil.Process(pid)
            if process.create_time() == born:
                process.kill()
                process.wait(timeout=GRACE_S)
        except (psutil.NoSuchProcess, psutil.TimeoutExpired):
            continue


# --- what this process runs and has open ---


def threads() -> set[threading.Thread]:
    """Those that Python started; what a foreign library starts in C is its business."""
    return {t for t in threading.enumerate() if t.is_alive() and t.name not in FOREIGN_THREADS}


def describe_thread(thread: threading.Thread) -> str:
    return f"thread {thread.name!r}{' (daemon)' if thread.daemon else ''}"


def open_descriptors() -> dict[int, str]:
    """Descriptor -> what /proc says it is."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of the listing itself
    return found


def _is_strict(descriptor: int, target: str) -> bool:
    """Memfds, sockets and files of the disk; not the devices, pipes and anonymous inodes."""
    if target.startswith(("/memfd:", "socket:", "/dev/shm/")):
        return True
    try:
        return stat.S_ISREG(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def _is_listening(descriptor: int) -> bool:
    try:
        borrowed = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return False
    with borrowed:
        return bool(borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _describe_descriptor(descriptor: int, target: str) -> str:
    if not target.startswith("socket:"):
        return f"descriptor {descriptor}: {target}"
    kind = "listening socket" if _is_listening(descriptor) else "socket"
    with socket.socket(fileno=os.dup(descriptor)) as borrowed:
        return f"{kind}, descriptor {descriptor}: {borrowed.family.name} {borrowed.getsockname()}"


def descriptors_since(before: dict[int, str]) -> list[str]:
    """One line for each descriptor that leaked."""
    gc.collect()  # an unclosed object in a reference cycle is no leak yet
    new = {fd: target for fd, target in open_descriptors().items() if before.get(fd) != target}
    # pytest's capture duplicates the descriptors of its output as it goes on and off.
    strict = {
        fd: target
        for fd, target in new.items()
        if _is_strict(fd, target) and target not in before.values()
    }
    counted = strict if len(new) - len(strict) <= SPARE_DESCRIPTORS else new
    return [_describe_descriptor(fd, target) for fd, target in sorted(counted.items())]


# --- what the system holds ---


def shared_memory() -> set[str]:
    """Names in /dev/shm, and System V segments that nobody has attached."""
    names = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] == "0":
            names.add(f"System V segment {fields[1]} of creator {fields[4]}")
    return names


def abstract_sockets() -> dict[str, str]:
    """Abstract Unix sockets with our name in theirs: address -> "socket:[inode]"."""
    found = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and fields[7].startswith("@") and "pdrt" in fields[7]:
            found[fields[7]] = f"socket:[{fields[6]}]"
    return found


def _held_elsewhere() -> set[str]:
    """What processes outside this suite have open or mapped, in the words of /proc."""
    ours = our_processes().keys() | {os.getpid()}
    held = set()
    for pid in set(psutil.pids()) - ours:
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                held.add(os.readlink(f"/proc/{pid}/fd/{name}"))
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "/dev/shm/" in line:
                    held.add(line.split(maxsplit=5)[-1])
        except OSError:
            continue  # gone, or another user's
    return held


def system_since(before: Census) -> list[str]:
    """One line for each thing that the system still holds for us."""
    memory = shared_memory() - before.shared_memory
    sockets = {k: v for k, v in abstract_sockets().items() if k not in before.abstract_sockets}
    if not memory and not sockets:
        return []
    elsewhere = _held_elsewhere()
    leaked = [f"shared memory: {name}" for name in sorted(memory - elsewhere)]
    leaked += [f"abstract socket: {k}" for k, v in sorted(sockets.items()) if v not in elsewhere]
    return leaked


# --- the check ---


@dataclass(frozen=True)
class Census:
    """What there was when the session began."""

    processes: Pids = field(default_factory=our_processes)
    threads: set[threading.Thread] = field(default_factory=threads)
    descriptors: dict[int, str] = field(default_factory=open_descriptors)
    shared_memory: set[str] = field(default_factory=shared_memory)
    abstract_sockets: dict[str, str] = field(default_factory=abstract_sockets)


def _left_after_grace(find: Callable[[], Found]) -> Found:
    """What `find` still finds once everything had its time to end."""
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not find(), GRACE_S, "nothing to be left")
    return find()


class LeakCheck:
    """The plugin.  A leaked process is an error of its test; anything else fails the session."""

    def __init__(self) -> None:
        self.before = Census()
        self.leaked: list[str] = []
        self.first_seen: dict[str, str] = {}  # line of a leak -> test after which it was there

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self) -> None:
        """The census comes last: by now pytest and its plugins have opened what they keep."""
        os.environ[MARKER] = "1"
        # spawn starts a tracker that lives as long as this process: have it in the census.
        resource_tracker.ensure_running()
        self.before = Census()

    @pytest.fixture(autouse=True)
    def leaves_no_process(self, request: pytest.FixtureRequest) -> Generator[None]:
        """First set up, so last torn down, of what a test itself asks for."""
        before = our_processes()
        yield
        leaked = _left_after_grace(lambda: processes_since(before))
        for line in self._opened():
            self.first_seen.setdefault(line, request.node.nodeid)
        if leaked:
            lines = [describe_process(pid) for pid in leaked]
            end_processes(leaked)
            pytest.fail("the test left behind:\n  " + "\n  ".join(lines), pytrace=False)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        processes = _left_after_grace(lambda: processes_since(self.before.processes))
        self.leaked = [describe_process(pid) for pid in processes]
        end_processes(processes)
        left = _left_after_grace(lambda: threads() - self.before.threads)
        self.leaked += [describe_thread(thread) for thread in left]
        self.leaked += descriptors_since(self.before.descriptors)
        self.leaked += system_since(self.before)
        if self.leaked and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.leaked:
            return
        terminalreporter.section("LEAKS: the session fails", sep="=", red=True, bold=True)
        for line in self.leaked:
            terminalreporter.line(line)
        opened = set(self._opened())
        for line, test in self.first_seen.items():
            if line in opened:
                terminalreporter.line(f"  {line} first seen after {test}")

    def _opened(self) -> Iterator[str]:
        """What this process has more than at first; cheap, and more than is a leak."""
        for thread in threads() - self.before.threads:
            yield describe_thread(thread)
        for descriptor, target in open_descriptors().items():
            if self.before.descriptors.get(descriptor) != target:
                yield f"descriptor {descriptor}: {target}"
