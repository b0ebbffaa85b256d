"""Replays traces of supervisor.pml against the real supervisor, decision by decision.

usage: python -m stress.models.replay_tree [--seeds N] [--steps N] [--record]

The supervisor is pdrt's own, its loop and its processes are not: time stands still but where the
trace says that something was late, and a process does what the trace says.  After every line each
child must be in the phase, and have the process, that the model gives it.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

from pdrt.child import ChildProcess, Promoter
from pdrt.children import Child, standby_for, standby_may_come
from pdrt.clock import to_ns
from pdrt.loop import Loop
from pdrt.supervision import ChildSpec, Phase, Spent
from pdrt.supervisor import Supervisor
from stress.models import traces
from stress.models.traces import TRACES, Diverged

NAMES = ("listener", "worker", "standby")
LINE = re.compile(r"EV (\d+) (\w+) (\d+) (\d+) (\d+) (\d+) (\d+) (\d+) (\d+)$")
PHASES = {
    Phase.IDLE: 0,
    Phase.STARTING: 1,
    Phase.UP: 2,
    Phase.KILLED: 3,
    Phase.BURYING: 4,
    Phase.BACKOFF: 5,
    Phase.DONE: 6,
    Phase.QUARANTINED: 7,
}
PROCESS_LINES = ("ready", "heard", "died", "left_helper", "helper_gone", "hangs", "sticks")
NOW_NS = 10**12
STEPS = 3000
#: Few failures and one that no SIGKILL ends; many that all end; more than the tree puts up with.
WORLDS: dict[str, tuple[int, tuple[str, ...]]] = {  # deaths_max, defines
    "stuck": (4, ("FAILURES=6", "DEATHS_MAX=4")),
    "dying": (5, ("FAILURES=9", "DEATHS_MAX=5", "STUCK=0")),
    "escalating": (1, ("FAILURES=9", "DEATHS_MAX=1", "STUCK=0")),
}
#: Worlds and seeds of the tests' traces, chosen so that every kind of line is in one of them.
RECORDED = (("stuck", 33), ("stuck", 71), ("dying", 33), ("dying", 48), ("escalating", 79))


class Told(NamedTuple):
    who: int  # a child, or, of what a process does, a process; from 1
    what: str
    phases: tuple[int, ...]
    processes: tuple[int, ...]  # of each child; 0 none
    escalated: bool


def parse(text: str) -> list[Told]:
    found = []
    for match in traces.understood(LINE, text):
        who, what, *numbers = match.groups()
        values = tuple(map(int, numbers))
        found.append(Told(int(who), what, values[:3], values[3:6], bool(values[6])))
    return found


@dataclass
class Process:
    """What the supervisor needs of a ChildProcess."""

    number: int
    ready: bool = False
    dead: bool = False
    hung: bool = False
    helper: bool = False
    kills_count: int = 0
    promotion: str = ""
    exit_code: int | None = None

    @property
    def pid(self) -> int:
        return self.number

    @property
    def pidfd(self) -> int:
        return self.number

    def reap(self) -> int | None:
        self.exit_code = -9 if self.dead else None
        return self.exit_code

    def group_empty(self) -> bool:
        return not self.helper

    def kill(self) -> None:
        self.kills_count += 1

    def close(self) -> None:
        pass

    def describe_exit(self) -> str:
        return "it died"

    def spent(self) -> Spent:
        return Spent()

    def waits_ns(self) -> dict[int, int]:
        return {}

    def state(self) -> str:
        return "S"

    def stopped(self) -> bool:
        return False  # the model's are late, or not


class PromoterToProcess:
    def __init__(self, process: Process) -> None:
        self._process = process

    def send(self, name: str) -> None:
        self._process.promotion, self._process.ready = name, False  # its new row is not ready

    def close(self) -> None:
        pass


class FakeChild(Child):
    """Launches what the trace says.  The target of its spec is never called."""

    next_process: Process

    def launch(self) -> ChildProcess:
        self.process = cast("ChildProcess", self.next_process)
        if self.is_standby:
            self.promoter = cast("Promoter", PromoterToProcess(self.next_process))
        return self.process


class StillLoop:
    """Time stands still, and nothing happens by itself."""

    now_ns = clock_ns = NOW_NS

    def watch(self, fileno: int, callback: Callable[[], object]) -> None:
        pass

    def unwatch(self, fileno: int) -> None:
        pass

    def guard(self, callback: Callable[[], object]) -> bool:
        callback()
        return True


class Tree:
    """The real supervisor over processes that do what they are told."""

    def __init__(self, deaths_max: int, supervisor_type: type[Supervisor]) -> None:
        specs = [ChildSpec(name=name, target=print, row=row) for row, name in enumerate(NAMES[:2])]
        specs.append(ChildSpec(name=NAMES[2], target=print, row=2, stands_for=NAMES[:2]))
        self.supervisor = supervisor_type(specs, self, deaths_max=deaths_max)
        self.supervisor._loop = cast("Loop", StillLoop())
        self.children = [FakeChild(spec) for spec in specs]
        self.supervisor._children = list(self.children)
        self.processes: dict[int, Process] = {}

    # the Board

    def incarnate(self, row: int, incarnation: int, pid: int) -> None:
        pass

    def ready(self, row: int) -> bool:
        process = self.children[row].process
        return process is not None and self.processes[process.pid].ready

    def pulse(self, row: int) -> int:
        child = self.children[row]
        hung = child.process is not None and self.processes[child.process.pid].hung
        return child.pulse.value + (not hung)

    def buried(self, row: int, incarnation: int) -> None:
        pass

    def failed(self, row: int, detail: str) -> None:
        pass

    # what the trace tells

    def act(self, told: Told) -> None:
        if told.what in PROCESS_LINES:
            self._of_process(told)
            return
        child = self.children[told.who - 1]
        if told.what == "begun":
            self._begin(child, told)
        elif told.what == "waits":
            if standby_for(child, self.children, NOW_NS) or not standby_may_come(
                child, self.children
            ):
                raise Diverged("no standby is on its way")
        else:
            self._tend(child, told.what)

    def _of_process(self, told: Told) -> None:
        process = self.processes[told.who]
        if told.what == "ready":
            process.ready = True
        elif told.what == "heard":
            if not process.promotion:
                raise Diverged("nobody has promoted it")
            process.promotion = ""
        elif told.what in ("died", "left_helper"):
            process.dead, process.helper = True, process.helper or told.what == "left_helper"
        elif told.what == "helper_gone":
            process.helper = False
        else:
            process.hung = True

    def _begin(self, child: FakeChild, told: Told) -> None:
        number = told.processes[told.who - 1]
        for other in self.children:
            if other.process is not None:
                hung = self.processes[other.process.pid].hung
                other.pulse.changed_ns = NOW_NS - (to_ns(other.spec.hang_s) if hung else 0)
        if number not in self.processes:
            child.next_process = self.processes[number] = Process(number)
        else:  # then the model promotes; the real one had better not launch
            child.next_process = Process(0)
            self.processes[0] = child.next_process
        self.supervisor._launch(child)

    def _tend(self, child: FakeChild, what: str) -> None:
        process = child.process
        if process is None:
            raise Diverged("it has no process")
        fake = self.processes[process.pid]
        child.deadline_ns = NOW_NS + 1
        if what == "killed":  # silent for long, or not ready in time
            child.deadline_ns = NOW_NS
            child.pulse.changed_ns = NOW_NS - 100 * to_ns(child.spec.hang_s)
        elif what == "quarantined":
            child.deadline_ns = NOW_NS
        if fake.dead and process.exit_code is None:
            self.supervisor._on_exit(child)
        kills_count = fake.kills_count
        self.supervisor._tend(child)
        if what == "killed" and fake.kills_count == kills_count:
            raise Diverged("it is not killed")
        if what == "buried":
            del self.processes[fake.number]
        elif what == "burying":  # what it left behind has had its time: it has to go
            child.deadline_ns = NOW_NS
            self.supervisor._tend(child)

    def compare(self, told: Told) -> None:
        phases = tuple(PHASES[child.phase] for child in self.children)
        same = all(
            mine == theirs or {mine, theirs} == {PHASES[Phase.BURYING], PHASES[Phase.KILLED]}
            for mine, theirs in zip(phases, told.phases, strict=True)
        )
        processes = tuple(c.process.pid if c.process else 0 for c in self.children)
        if not same or processes != told.processes:
            raise Diverged(f"the supervisor has phases {phases}, processes {processes}")
        unready = any(c.phase is Phase.DONE and not c.been_up for c in self.children)
        if (self.supervisor._escalated is not None or unready) is not told.escalated:
            raise Diverged("one of them gives up, the other does not")


def replay(
    world: str, trace: Iterable[Told], supervisor_type: type[Supervisor] = Supervisor
) -> Counter[str]:
    """Have a real supervisor do what a trace tells.  Raises Diverged."""
    counts: Counter[str] = Counter()
    tree = Tree(WORLDS[world][0], supervisor_type)
    for number, told in enumerate(trace, 1):
        counts[told.what] += 1
        try:
            tree.act(told)
            tree.compare(told)
        except Diverged as error:
            raise Diverged(f"line {number}, {told}: {error}") from None
    return counts


def simulate(world: str, seed: int, steps: int = STEPS, mutant: str = "") -> str:
    """The lines of one random run of the model, or of a mutant of it.  Raises Unusable."""
    defines = (*WORLDS[world][1], *([mutant] if mutant else []))
    return traces.simulate("supervisor.pml", defines, seed, steps, mutant=bool(mutant))


def recorded(world: str, seed: int) -> Path:
    return TRACES / f"tree_{world}_{seed}.txt"


def main(arguments: list[str]) -> int:
    return traces.play(
        "replay_tree",
        __doc__,
        arguments,
        worlds=WORLDS,
        recorded=[(recorded(world, seed), world, seed) for world, seed in RECORDED],
        simulated=simulate,
        replayed=lambda world, text: replay(world, parse(text)),
        seeds=200,
        steps=STEPS,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
