"""`soak`: steady load with a blow every second or so, for hours; what it holds must stay flat.

Of each side one tree is hit, and the other never: its processes live from the beginning to the end,
while the peers, and now and then the engine, of all of them die.  So a leak in a process that lives
long shows in its curve, and one that is left by the dead shows in what all hold together.
Supervisors are not hit here; `kill_cascade` does that.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace

from stress.cascades import census, judgement
from stress.cascades.history import Kind
from stress.cascades.lanes import PREFILLS
from stress.cascades.oracle.faults import Mode, Role
from stress.cascades.piece import Outcome, Piece, Share
from stress.cascades.plan import Mix
from stress.cascades.rig import UNLIMITED, Rig, salt_of
from stress.cascades.soak.judge import Tolerance, judge, line_of
from stress.cascades.soak.sample import MIB, Series, family_of, sample, tolerance_of
from stress.cascades.trees import ACTORS, Tree
from stress.cascades.victims import MODES, PAUSES_S, Executioner, Plan

NAME = "soak"
LIMIT_S = 6 * 3600.0
QUICK = Share(pieces=1, cycles=1_000_000, seconds=20.0)
RELEASE = Share(pieces=1, cycles=1_000_000, seconds=2 * 3600.0)

MIX = Mix()
WINDOW = 4
ROOMS_PER_S, ROOMS_MAX = 60.0, 300_000  # what the oracle can take in
EVERY_S = (0.6, 1.6)  # from one blow to the next
SAMPLES = 1200
SAMPLE_S = (0.5, 10.0)
TURN_S = 0.005
BACK_S = 60.0
#: A prefill's listener remembers how its last rooms ended, for decodes that ask late; while that
#: memory fills it grows, as it is meant to.
REMEMBERED_ROOMS, REMEMBERED_BYTES = 65_536, 512
WEIGHTS = {
    Role.LISTENER: 30,
    Role.WORKER: 24,
    Role.LISTENER_STANDBY: 8,
    Role.WORKER_STANDBY: 8,
    Role.PLAYER: 30,
}


class Soak:
    def __init__(self, piece: Piece, rig: Rig) -> None:
        self._rig = rig
        self._source = piece.random("victims")
        self._executioner = Executioner(rig)
        self._hit = [tree.index for tree in rig.trees if tree.name.endswith("0")]
        self._pause_s = min(max(piece.seconds / SAMPLES, SAMPLE_S[0]), SAMPLE_S[1])
        self._end_s = piece.begun_s + piece.seconds
        self.series = Series()
        self.blows = 0

    def run(self, cycles: int) -> str:
        """A sentence if a role did not come back."""
        blow_s = look_s = time.monotonic()
        while (now_s := time.monotonic()) < self._end_s and self.blows < cycles:
            self._executioner.turn()
            if late := self._late(now_s):
                return late
            if now_s >= blow_s:
                blow_s = now_s + self._source.uniform(*EVERY_S)
                self._strike()
            if now_s >= look_s:
                look_s = now_s + self._pause_s
                self._look()
            time.sleep(TURN_S)
        return self._settle()

    def _strike(self) -> None:
        self._rig.writer.append(Kind.CYCLE, self.blows)
        self._executioner.strike([draw(self._source, self._hit)], self.blows)
        self.blows += 1

    def _settle(self) -> str:
        while self._executioner.pending:
            self._executioner.turn()
            if late := self._late(time.monotonic()):
                return late
            time.sleep(TURN_S)
        return ""

    def _late(self, now_s: float) -> str:
        for strike in self._executioner.pending:
            if now_s - strike.at_ns / 1e9 > BACK_S:
                return f"not back within {BACK_S:g} s: {strike.plan}"
        return ""

    def _look(self) -> None:
        rig, series = self._rig, self.series
        families = {tree.name: family_of(tree.pid) for tree in rig.trees}
        for number, held in enumerate(rig.players):
            if held is not None:
                families[rig.trees[number].name]["engine"] = [held.pid]
        sample(series, families, self._starting(families))
        for tree in rig.trees:
            self._look_at_table(tree)

    def _starting(self, families: dict[str, dict[str, list[int]]]) -> set[int]:
        """Children that do not serve in their row yet."""
        found: set[int] = set()
        for tree in self._rig.trees:
            children = {
                pid
                for role, pids in families[tree.name].items()
                if role not in ("supervisor", "engine")
                for pid in pids
            }
            rows = [row for row in ACTORS.values() if tree.view.serves(row, 0)]
            found |= children - {tree.view.pid_of(row) for row in rows}
        return found

    def _look_at_table(self, tree: Tree) -> None:
        series = self.series
        words = tree.view.words.copy().tolist()
        live = [word for word in words if word >> 32 & 1]
        series.add("rooms in the table", tree.name, len(live))
        series.add("rooms not quiet", tree.name, sum(not word & 0x1F for word in live))
        series.add("rooms with an engine", tree.name, self._rig.busy(tree.index))


def draw(source: random.Random, trees: list[int]) -> Plan:
    role = source.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    mode = source.choices(list(MODES), list(MODES.values()))[0]
    if mode is Mode.HANG and role is Role.PLAYER:
        mode = Mode.PAUSE
    return Plan(role, source.choice(trees), mode, source.choice(PAUSES_S))


def run(piece: Piece) -> Outcome:
    late = ""
    with Rig(piece, MIX) as rig:
        census.before(rig)
        rig.load(WINDOW, min(ROOMS_PER_S, ROOMS_MAX / piece.seconds))
        rig.grant(UNLIMITED)
        soak = Soak(piece, rig)
        late = soak.run(piece.cycles)
        drained = rig.drain()
        census.after(rig)
    outcome = judgement.judge(piece, NAME, salt_of(piece), MIX)
    outcome.cycles = soak.blows
    if late:
        outcome.violations.append(late)
    if not drained:
        outcome.violations.append("rooms were left when the piece was over")
    judge_series(soak.series, outcome, outcome.rooms // PREFILLS)
    return outcome


def is_plotted(name: str) -> bool:
    """A few of a hundred and more: of who lives throughout, and what all hold together."""
    what, _, role = name.partition(": ")
    if what in ("heap", "descriptors"):
        return role.endswith(("1 supervisor", "1 listener", "1 worker0"))
    whole = ("pss but shared memory", "pss of files", "pss of shared memory")
    return what in (*whole, "memfd bytes", "processes") or name == "rooms in the table"


def allowed(name: str, rooms: int) -> Tolerance | None:
    """What may rise, where each prefill had so many rooms from the beginning to the end."""
    tolerance = tolerance_of(name)
    what, _, role = name.partition(": ")
    listener = role.startswith("prefill") and role.endswith(" listener")
    if tolerance is None or not (what == "pss but shared memory" or (what == "heap" and listener)):
        return tolerance
    newly = min(rooms, REMEMBERED_ROOMS) - min(rooms // 2, REMEMBERED_ROOMS)
    each = newly * REMEMBERED_BYTES / MIB
    return replace(tolerance, amount=tolerance.amount + each * (1 if listener else PREFILLS))


def judge_series(series: Series, outcome: Outcome, rooms: int = 0) -> None:
    """Each curve against what is tolerated.  Those for the plot, and those that rise, go into the
    outcome."""
    for name, points in sorted(series.curves.items()):
        if is_plotted(name):
            outcome.series[name] = points
        tolerance = allowed(name, rooms)
        if tolerance is None:
            continue
        line = line_of(points)
        if line is None:
            outcome.notes.append(f"{name}: {len(points)} samples are too few for a line")
            continue
        outcome.count("curves")
        fault = judge(name, points, tolerance)
        outcome.none("curves that rise", int(bool(fault)), "curves")
        outcome.peak(f"rise of {name.partition(': ')[0]}", line.rise)
        if fault:
            outcome.violations.append(fault)
            outcome.series[name] = points
