"""One child process from both ends: how it is launched and reaped; what it does before its target.

It decides nothing (`supervisor` does) and is not an actor: no mailbox, no table, no loop.

A child is a fresh interpreter, as multiprocessing's "spawn" gives, but launched by `subprocess`:

- `__main__` is not imported again, so a heavy main module costs its children nothing;
- no resource tracker is started, so none can outlive us or hold up our exit;
- nothing joins the children at interpreter exit, so one that cannot die cannot hang us;
- what the child needs is written to a memfd before it exists; a frozen child blocks nobody;
- the child leads its own session.  A terminal's Ctrl-C does not reach it, and whatever it forked
  can be found and killed with it: a grandchild may map the same memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import context, reduction
from typing import Any, BinaryIO, NoReturn

from pdrt.errors import BadConfig
from pdrt.supervision import Spent

logger = logging.getLogger("pdrt.supervisor")

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36

# sys.path comes first: without it `pdrt` itself might not be found.
BOOT = (
    "import sys, pickle; payload = open(int(sys.argv[1]), 'rb'); "
    "sys.path[:] = pickle.load(payload); "
    "from pdrt.child import run_child; run_child(payload)"
)


def prctl(option: int, argument: int | bytes) -> None:
    """Call prctl(2); raise OSError if the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    value = argument if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    zero = ctypes.c_ulong(0)
    if libc.prctl(option, value, zero, zero, zero) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


# --- descriptors ---------------------------------------------------------------------------------


class Descriptor:
    """A file descriptor that may stand among the args of a child, several of them too.

    The launching side keeps its own and may close it once the child runs.  In the child `fd` is
    open, close-on-exec, and the child's to close.  Works with multiprocessing's spawn as well.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def fileno(self) -> int:
        return self.fd

    def __reduce__(self) -> tuple[Callable[[Any], Descriptor], tuple[Any]]:
        # Outside a launch DupFd would start a thread and a socket to serve the descriptor.
        context.assert_spawning(self)
        return _received, (reduction.DupFd(self.fd),)


def _received(duplicate: Any) -> Descriptor:
    fd: int = duplicate.detach()
    os.set_inheritable(fd, False)
    return Descriptor(fd)


class _Passed:
    """A descriptor that keeps its number across exec."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def detach(self) -> int:
        return self.fd


class _Launch:
    """What multiprocessing's reducers ask of a process that is being spawned."""

    DupFd = _Passed

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.append(fd)
        return fd


# --- a standby's way into a role -----------------------------------------------------------------


class Promotion:
    """A standby's end of a pipe: through it the supervisor says which child to become."""

    def __init__(self, pipe: Descriptor) -> None:
        self._pipe = pipe

    def wait(self, beat: Callable[[], object], period_s: float) -> str:
        """The name of that child.  Calls `beat` about every period_s until then."""
        poller = select.poll()  # not select(): the pipe keeps the supervisor's number, over 1,023
        poller.register(self._pipe, select.POLLIN)
        beat()
        while not poller.poll(period_s * 1000):
            beat()
        name = os.read(self._pipe.fd, 256).decode()
        os.close(self._pipe.fd)
        if not name:  # the supervisor gave it up
            sys.exit(0)
        _rename(name)
        return name


class Promoter:
    """The supervisor's end."""

    def __init__(self) -> None:
        self._theirs, self._ours = os.pipe2(os.O_CLOEXEC)

    @property
    def promotion(self) -> Promotion:
        return Promotion(Descriptor(self._theirs))

    def launched(self) -> None:
        """The child has its own copy now; with ours open it would never see the end."""
        os.close(self._theirs)
        self._theirs = -1

    def send(self, name: str) -> None:
        """Never blocks: the pipe is empty.  A standby that died meanwhile reads nothing; its pidfd
        tells."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._ours, name.encode())

    def close(self) -> None:
        for fd in (self._theirs, self._ours):
            if fd >= 0:
                os.close(fd)
        self._theirs = self._ours = -1


# --- the launching side --------------------------------------------------------------------------


class ChildProcess:
    """A launched child.  Every call returns at once; the pidfd is readable once it is dead."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.pid = popen.pid
        self.pidfd = os.pidfd_open(self.pid)
        self._schedstat = -1
        try:
            self._schedstat = os.open(f"/proc/{self.pid}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # not every kernel keeps count
            pass
        except OSError:
            os.close(self.pidfd)
            raise

    @property
    def exit_code(self) -> int | None:
        """As subprocess has it: minus the signal number if a signal ended it; None before reap."""
        return self._popen.returncode

    def reap(self) -> int | None:
        """Collect the exit code if it is dead and nobody (a debugger) holds it back."""
        return self._popen.poll()

    def describe_exit(self) -> str:
        code = self.exit_code
        if code is None or code >= 0:
            return f"exit code {code}"
        names = {int(signum): signum.name for signum in signal.Signals}
        return f"ended by {names.get(-code, f'signal {-code}')}"

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL the child, or, if it is reaped, whatever it left in its process group."""
        if self.exit_code is None:
            self._signal(signal.SIGKILL)
            return
        # The number cannot belong to anyone else while the group has a member.
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def group_empty(self) -> bool:
        """Reap what the reaped child left behind; True once nothing of its group exists.

        Assumes that we are a subreaper: orphans of the group become our children.
        """
        assert self.exit_code is not None, "reap the child first, or its exit code is lost"
        try:
            while os.waitid(os.P_PGID, self.pid, os.WEXITED | os.WNOHANG) is not None:
                pass
        except ChildProcessError:
            pass
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False

    def spent(self) -> Spent:
        """Of its main thread, by a descriptor of our own: even where no other is left."""
        try:
            ran, waited, _ = os.pread(self._schedstat, 96, 0).split()
        except OSError:  # it is gone, or there never was one
            return Spent()
        return Spent(int(ran), int(waited))

    def waits_ns(self) -> dict[int, int]:
        """How long each thread, in all, has been ready to run and had no CPU.  The kernel adds a
        wait when it is over."""
        return {thread: int(text.split()[1]) for thread, text in self._threads("schedstat")}

    def stopped(self) -> bool:
        """By a signal, or by a debugger."""
        return self.state() in ("T", "t")

    def state(self) -> str:
        """Of its main thread, as /proc has it; "" if we may open no descriptor to look."""
        try:
            with open(f"/proc/{self.pid}/stat") as text:
                return text.read().rpartition(")")[2][1:2]
        except OSError:
            return ""

    def _threads(self, file: str) -> Iterator[tuple[int, str]]:
        """That file of every thread in /proc that is still there when its turn comes."""
        tasks = f"/proc/{self.pid}/task"
        try:
            threads = os.listdir(tasks)
        except OSError:  # it is gone, or we may open no descriptor to look
            return
        for thread in threads:
            with contextlib.suppress(OSError), open(f"{tasks}/{thread}/{file}") as text:
                yield int(thread), text.read()

    def close(self) -> None:
        os.close(self.pidfd)
        if self._schedstat >= 0:
            os.close(self._schedstat)

    def _signal(self, signum: int) -> None:
        try:
            signal.pidfd_send_signal(self.pidfd, signum)
        except ProcessLookupError:
            return


def launch(name: str, target: Callable[..., None], args: tuple[Any, ...]) -> ChildProcess:
    """Start `target(*args)` in a fresh interpreter that cannot outlive this process."""
    # The death signal of a child follows the *thread* that made it.
    assert threading.current_thread() is threading.main_thread(), "launch from the main thread"
    payload, fds = _payload(name, target, args)
    memory = os.memfd_create("pdrt-launch", os.MFD_CLOEXEC)
    try:
        with open(memory, "wb", closefd=False) as stream:
            stream.write(payload)
        os.lseek(memory, 0, os.SEEK_SET)
        # The helper is private to the stdlib, which uses it for the same purpose: -W, -X, -O, ...
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        popen = subprocess.Popen(
            [sys.executable, *flags, "-c", BOOT, str(memory), f"pdrt:{name}"],
            stdin=subprocess.DEVNULL,
            pass_fds=(memory, *fds),
            start_new_session=True,
        )
    finally:
        os.close(memory)
    try:
        return ChildProcess(popen)
    except OSError:
        popen.kill()
        popen.wait()
        raise


def _payload(
    name: str, target: Callable[..., None], args: tuple[Any, ...]
) -> tuple[bytes, list[int]]:
    """Three pickles in the order the child needs them, and the descriptors they mention."""
    path = [os.path.abspath(entry) if entry == "" else entry for entry in sys.path]
    launching = _Launch()
    # Reducers only ask for what `_Launch` has, whatever the stubs say.
    context.set_spawning_popen(launching)  # type: ignore[arg-type]
    try:
        call = bytes(reduction.ForkingPickler.dumps((target, args)))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise BadConfig(f"{name}: target or args cannot be sent to a process: {error}") from error
    finally:
        context.set_spawning_popen(None)
    return pickle.dumps(path) + pickle.dumps((name, os.getpid())) + call, launching.fds


# --- the child's side ----------------------------------------------------------------------------

_parent_pidfd: int | None = None


def parent_pidfd() -> int:
    """In a child: a descriptor that turns readable when the supervisor is dead."""
    assert _parent_pidfd is not None, "this process was not launched by a supervisor"
    return _parent_pidfd


def run_child(payload: BinaryIO) -> NoReturn:
    """Tie this process to its supervisor, then run the target.  Entered from `BOOT` only."""
    os.set_inheritable(payload.fileno(), False)
    name, supervisor_pid = pickle.load(payload)
    # Before the target is unpickled: that imports its module, which may take long.
    _tie_to(supervisor_pid)
    _reset_signals()
    prctl(PR_SET_NAME, name.encode()[:15])
    sys.argv = [name]
    faulthandler.enable()
    threading.excepthook = _end_process
    try:
        with payload:
            target, args = pickle.load(payload)
        target(*args)
    except Exception:
        logger.critical("child failed name=%s pid=%d", name, os.getpid(), exc_info=True)
        # Not sys.exit: that waits for threads, which may never end.
        os._exit(1)
    sys.exit(0)


def _tie_to(supervisor_pid: int) -> None:
    global _parent_pidfd
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        _parent_pidfd = os.pidfd_open(supervisor_pid)
    except ProcessLookupError:
        os._exit(1)
    # It may have died before the line that asks for the signal.  Checked last: if it is our parent
    # now, then the pidfd is its, and not that of a later process with the same number.
    if os.getppid() != supervisor_pid:
        os._exit(1)


def _rename(name: str) -> None:
    """Show the new name where tools look: the thread's name, and our last argument, which is
    overwritten in place (proc(5): arg_start and arg_end of /proc/pid/stat)."""
    prctl(PR_SET_NAME, name.encode()[:15])
    with open("/proc/self/stat", encoding="utf-8") as stat:
        fields = stat.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    at = ctypes.string_at(start, end - start).rfind(b"pdrt:")
    room = end - start - at - 1
    if at >= 0:
        ctypes.memmove(start + at, f"pdrt:{name}".encode()[:room].ljust(room), room)


def _reset_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # An interrupt is for the supervisor, which stops its children in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end_process(failed: threading.ExceptHookArgs) -> None:
    """A process that lost a thread only looks alive."""
    name = failed.thread.name if failed.thread is not None else "unknown"
    error = failed.exc_value or failed.exc_type()
    logger.critical("thread failed thread=%s pid=%d", name, os.getpid(), exc_info=error)
    os._exit(1)
