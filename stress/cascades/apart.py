"""Runs one piece in a process of its own, and where the machine allows in namespaces of its own:
whatever goes wrong in there, nothing outside is touched and nothing stays.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType

import msgspec
import psutil

from stress.bench.trees import ROOT, tie_to_parent
from stress.cascades.logs import deaths_in, errors_in
from stress.cascades.piece import Outcome, Piece

#: Modules, in the order they are played.
CASCADES = {
    "torn": "torn.cascade",
    "abort_storm": "abort_storm",
    "kill_cascade": "kill_cascade",
    "agents": "agents.cascade",
    "soak": "soak.cascade",
}
UNSHARE = (
    "unshare",
    "--map-root-user",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
)
#: Of this machine's shared memory nothing is seen, so that nothing of it is taken for ours.
INSIDE = ("sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh")
END_S = 10.0  # until nothing of a piece is left
GRACE_S = 30.0  # to judge the histories
ERRORS_SHOWN = 12


class Order(msgspec.Struct, frozen=True):
    """One piece."""

    cascade: str
    seed: int
    cycles: int
    seconds: float
    quick: bool = False

    @property
    def name(self) -> str:
        return f"{self.cascade}-{self.seed}"

    def replay(self, cycles: int) -> str:
        return f"bin/stress {self.cascade} --seed {self.seed} --cycles {cycles}"


def load(cascade: str) -> ModuleType:
    return importlib.import_module(f"stress.cascades.{CASCADES[cascade]}")


@functools.cache
def prefix() -> tuple[str, ...]:
    """Before a command that is to run in namespaces of its own; empty where that is not allowed."""
    if shutil.which("unshare") is None:
        return ()
    command = [*UNSHARE, *INSIDE, "true"]
    done = subprocess.run(command, capture_output=True, check=False, timeout=20)
    return () if done.returncode else (*UNSHARE, *INSIDE)


def play(order: Order, folder: Path) -> Outcome:
    """Run one piece; its files go below `folder`, and stay there if something is wrong."""
    place = folder / order.name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    result = place / "outcome.json"
    begun_s = time.monotonic()
    wrong = _run(order, place)
    outcome = Outcome(cascade=order.cascade, seed=order.seed)
    if result.exists():
        outcome = msgspec.json.decode(result.read_bytes(), type=Outcome)
    elif not wrong:
        wrong = "it ended without a result"
    outcome.took_s = outcome.took_s or time.monotonic() - begun_s
    if wrong:
        outcome.violations.append(f"{order.name}: {wrong}")
    if outcome.violations:
        outcome.notes.append(
            f"`{order.replay(outcome.cycles or 1)}` plays it again; its histories are kept"
        )
    else:
        shutil.rmtree(place, ignore_errors=True)
    return outcome


def _run(order: Order, place: Path) -> str:
    """A sentence if something went wrong with the process itself."""
    told = msgspec.json.encode(order).decode()
    command = [sys.executable, "-c", "from stress.cascades.apart import main; main()", told]
    limit_s = float(load(order.cascade).LIMIT_S) + GRACE_S
    with (place / "piece.log").open("wb") as log:
        popen = subprocess.Popen(
            [*prefix(), *command, str(place)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=not prefix(),
        )
        try:
            code = popen.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"given up after {limit_s:g} s"
        finally:
            _end(popen)
    tail = "\n".join((place / "piece.log").read_text(errors="replace").splitlines()[-12:])
    return f"ended with {code}:\n{tail}" if code else ""


def _end(popen: subprocess.Popen[bytes]) -> None:
    """With the first process of a namespace everything in it ends."""
    if popen.poll() is None:
        family = psutil.Process(popen.pid).children(recursive=True)
        popen.kill()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    popen.wait()


def main() -> None:
    """In the new process."""
    tie_to_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    order = msgspec.json.decode(sys.argv[1], type=Order)
    place = Path(sys.argv[2])
    shared = set(os.listdir("/dev/shm"))
    piece = Piece(order.seed, order.cycles, order.seconds, place, quick=order.quick)
    outcome = Outcome(cascade=order.cascade, seed=order.seed)
    try:
        outcome = load(order.cascade).run(piece)
    except Exception as error:
        traceback.print_exc()
        outcome.violations.append(f"{type(error).__name__}: {error}")
    outcome.took_s = piece.spent_s()
    for death, times in sorted(deaths_in(place).items()):
        outcome.count(f"as supervisors say: {death}", times)
    errors = list(errors_in(place))
    outcome.none("errors of their own", len(errors), "pieces")
    outcome.violations += [f"errors of their own: {line}" for line in errors[:ERRORS_SHOWN]]
    left = strays()
    outcome.none("processes left behind", len(left), "pieces")
    outcome.violations += [f"left behind: {line}" for line in left]
    names = set(os.listdir("/dev/shm")) - shared if prefix_is_here() else set()
    outcome.none("shared memory left behind", len(names), "pieces")
    outcome.violations += [f"left behind: /dev/shm/{name}" for name in sorted(names)]
    outcome.counts["pieces"] = 1
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    outcome.count("processor time, s", round(sum(each.ru_utime + each.ru_stime for each in used)))
    (place / "outcome.tmp").write_bytes(msgspec.json.encode(outcome))
    (place / "outcome.tmp").rename(place / "outcome.json")


def prefix_is_here() -> bool:
    """Is this the first process of a namespace?"""
    return os.getpid() == 1


def strays() -> list[str]:
    """Processes below us that do not end, by what they are."""
    end_s = time.monotonic() + END_S
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = [
            process
            for process in psutil.Process().children(recursive=True)
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        ]
        if not left or time.monotonic() > end_s:
            break
        time.sleep(0.05)
    return [_describe(process) for process in left]


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"process {process.pid}: {' '.join(process.cmdline())[-100:] or process.name()}"
    return f"process {process.pid}"
