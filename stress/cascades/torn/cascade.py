"""`torn`: readers against writers on one real status table; no impossible word is ever read.

A round is a table of its own.  Writers do anything to any slot at full speed, some are killed or
stopped at random moments and buried, readers read in every way there is.  Every word that is
written is in a history; afterwards the histories must make one legal chain of each slot, and every
word that any reader saw must stand in it.  So a word that was torn, on the way in or out, is seen
twice: by the reader's laws at once, and by the oracle.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pdrt.actors.base import Beating
from pdrt.actors.janitor import Janitor
from pdrt.clock import monotonic_ns
from pdrt.config import Timeouts
from pdrt.memfd import memory_fd
from pdrt.process_rows import Owner
from pdrt.protocol.states import OPEN, Role
from pdrt.shm_status import create
from stress.bench.trees import ROOT
from stress.cascades.history import Writer as History
from stress.cascades.piece import Outcome, Piece, Share
from stress.cascades.torn.gate import OPEN as GATE_OPEN
from stress.cascades.torn.gate import SHUT, Gate, Told
from stress.cascades.torn.oracle import Written, judge
from stress.cascades.torn.table import Tracked, region_map

NAME = "torn"
LIMIT_S = 1200.0
QUICK = Share(pieces=1, cycles=1_000_000, seconds=8.0)
RELEASE = Share(pieces=2, cycles=1_000_000, seconds=600.0)

ROUND_S = 8.0
SMALL_S = 60.0  # a piece that is over sooner has fewer processes
START_S, END_S = 60.0, 60.0
TIMEOUT_MS = 60_000
SWEEP_S = 0.05  # the supervisor's
SLOTS = (1, 2, 3, 8, 64, 1024)
FIRST_READER, JANITOR = 32, 60  # rows; writers have those from 1
KILL_EVERY_S = (0.3, 1.5)
STOPPED_S = (0.001, 0.2)
SWEEPS_MAX = 8


@dataclass(frozen=True)
class Crew:
    writers: int
    readers: int
    kills: bool = True
    mutant: str = ""


@dataclass
class Found:
    """What a round has shown."""

    faults: list[str] = field(default_factory=list)
    reads: dict[str, int] = field(default_factory=dict)
    writes: int = 0
    rooms: int = 0
    kills: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)
    stale_times: int = 0


@dataclass
class Hand:
    """One reader or writer, as a process."""

    module: str
    told: Told
    popen: subprocess.Popen[bytes]

    @classmethod
    def start(cls, module: str, told: Told) -> Hand:
        main = f"from stress.cascades.torn.{module} import main; main()"
        popen = subprocess.Popen(
            [sys.executable, "-c", main, msgspec.json.encode(told).decode()],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            pass_fds=(told.table_fd, told.region_fd),
        )
        return cls(module, told, popen)

    @property
    def name(self) -> str:
        return f"{self.module} {self.told.row}"

    def ended(self) -> bool:
        return self.popen.poll() is not None

    def kill(self) -> list[str]:
        """The faults of one that had answered, or had ended, before it was struck."""
        alone = self.ended()
        self.popen.kill()
        text, _ = self.popen.communicate(timeout=END_S)
        struck = not alone and self.popen.returncode == -signal.SIGKILL
        faults: list[str] = self._answer(text, struck=struck)["faults"]
        return faults

    def result(self) -> dict[str, Any]:
        """What it answers at the end.  That it does not, or ends otherwise, is a fault."""
        try:
            text, _ = self.popen.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            return {"faults": [*self.kill(), f"{self.name} did not end"]}
        return self._answer(text, struck=False)

    def _answer(self, text: bytes, *, struck: bool) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(text) if text else {"faults": []}
        if not struck and (self.popen.returncode or not text):
            answer["faults"].append(f"{self.name}: exit {self.popen.returncode}")
        return answer


class Round:
    """One table, from its making to the judgement."""

    def __init__(self, folder: Path, seed: str, crew: Crew, slots: int, role: Role) -> None:
        self._folder, self._seed, self._crew, self._slots = folder, seed, crew, slots
        self._chance = random.Random(f"{seed} driver")
        self._fds = (
            create(
                role,
                rooms_max=slots,
                instance=b"torn",
                timeouts_ms=dict.fromkeys(OPEN, TIMEOUT_MS),
                now_ns=monotonic_ns(),
            ),
            memory_fd("torn-region", region_map(slots).length_bytes),
        )
        self._history = History(folder / "janitor.history")
        self._table = Tracked(self._fds[0], Owner(JANITOR, 1), self._history)
        self._gate = Gate(self._told(0, "").region(), slots)
        self._janitor = Janitor(
            table=self._table,
            timeouts=Timeouts(),
            mapped=lambda *_: False,
            fence=lambda *_: None,
            wake=lambda _: None,
            beating=Beating(lambda: None),
        )
        self._writers: dict[int, Hand] = {}
        self._readers: list[Hand] = []
        self.found = Found()

    def __enter__(self) -> Round:
        return self

    def __exit__(self, *_: object) -> None:
        for hand in self._hands():
            hand.kill()
        self._gate.close()
        self._table.close()
        for fd in self._fds:
            os.close(fd)

    def _hands(self) -> list[Hand]:
        return [*self._writers.values(), *self._readers]

    def _told(self, row: int, out: str, incarnation: int = 1) -> Told:
        table_fd, region_fd = self._fds
        return Told(
            table_fd=table_fd,
            region_fd=region_fd,
            slots=self._slots,
            seed=f"{self._seed} {row} {incarnation}",
            row=row,
            incarnation=incarnation,
            mutant=self._crew.mutant,
            out=str(self._folder / out),
        )

    def start(self) -> None:
        """Until all are there."""
        for row in range(1, self._crew.writers + 1):
            self._start_writer(row, 1)
        for row in range(FIRST_READER, FIRST_READER + self._crew.readers):
            self._readers.append(Hand.start("reader", self._told(row, f"{row}.npz")))
        rows = [*self._writers, *(hand.told.row for hand in self._readers)]
        end = time.monotonic() + START_S
        while not all(self._table.pulse(row) for row in rows):
            if time.monotonic() > end:
                raise TimeoutError("readers and writers did not start in time")
            time.sleep(0.005)

    def _start_writer(self, row: int, incarnation: int) -> None:
        self._table.incarnate(row, incarnation, os.getpid(), "writer")
        told = self._told(row, f"{row}-{incarnation}.history", incarnation)
        self._writers[row] = Hand.start("writer", told)

    def play(self, seconds: float) -> None:
        """Let them work; kill, stop and sweep.  Ends sooner if one has seen enough, or is dead."""
        self._gate.set(GATE_OPEN)
        end = time.monotonic() + seconds
        strike = time.monotonic() + self._chance.uniform(*KILL_EVERY_S)
        while time.monotonic() < end and not self._is_over():
            time.sleep(SWEEP_S)
            self._janitor.sweep(monotonic_ns())
            if self._crew.kills and time.monotonic() > strike:
                strike = time.monotonic() + self._chance.uniform(*KILL_EVERY_S)
                self._strike()

    def _is_over(self) -> bool:
        return bool(self.found.faults) or any(hand.ended() for hand in self._hands())

    def _strike(self) -> None:
        row = self._chance.choice(list(self._writers))
        hand = self._writers[row]
        if self._chance.random() < 0.5:
            hand.popen.send_signal(signal.SIGSTOP)
            time.sleep(self._chance.uniform(*STOPPED_S))
        if self._chance.random() < 0.2:
            hand.popen.send_signal(signal.SIGCONT)
            return
        self.found.faults += hand.kill()
        self.found.kills += 1
        self._table.bury(row)
        self._start_writer(row, hand.told.incarnation + 1)

    def finish(self) -> Found:
        """Take the answers, sweep what the dead have left, judge."""
        found = self.found
        early = [hand.name for hand in self._hands() if hand.ended()]
        self._gate.set(SHUT)
        for hand in self._writers.values():
            found.faults += hand.result()["faults"]
            self._table.bury(hand.told.row)
        sights = []
        for hand in self._readers:
            answer = hand.result()
            found.faults += answer["faults"]
            if "reads" not in answer:  # it crashed
                continue
            found.stale_times += answer["stale_times"]
            for way, count in answer["reads"].items():
                found.reads[way] = found.reads.get(way, 0) + count
            with np.load(hand.told.out) as saved:
                sights.append((saved["slots"], saved["words"]))
        for _ in range(SWEEPS_MAX):
            self._janitor.sweep(monotonic_ns())
        left = self._table.live_slots().tolist()
        found.faults += [f"slot {slot}: the sweeps did not free it" for slot in left[:5]]
        self._history.close()
        written = Written.read(self._folder.glob("*.history"))
        found.faults += judge(written, self._table.words.copy(), sights)
        found.writes, found.rooms = len(written.slots), written.rooms
        found.verdicts = written.verdicts()
        if early and not found.faults:
            found.faults = [f"{name} ended, and saw no fault" for name in early]
        return found


def play_round(
    folder: Path, seed: str, crew: Crew, *, slots: int, role: Role, seconds: float
) -> Found:
    """The files of the round stay in `folder` if something is wrong."""
    folder.mkdir(parents=True)
    with Round(folder, seed, crew, slots, role) as this:
        this.start()
        this.play(seconds)
        found = this.finish()
    if not found.faults:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    return found


def lots(piece: Piece) -> Iterator[tuple[int, int, Role]]:
    """Number, slots and role of each round."""
    chance = piece.random("rounds")
    for number in piece.rounds():
        yield number, chance.choice(SLOTS), chance.choice(tuple(Role))


def run(piece: Piece) -> Outcome:
    outcome = Outcome(cascade=NAME, seed=piece.seed)
    small = piece.quick or piece.seconds < SMALL_S
    crew = Crew(writers=2, readers=3) if small else Crew(writers=4, readers=12)
    for number, slots, role in lots(piece):
        left_s = piece.seconds - piece.spent_s()
        seconds = max(1.0, min(ROUND_S, left_s - 2.0))
        found = play_round(
            piece.folder / f"round-{number}",
            f"{piece.seed} {number}",
            crew,
            slots=slots,
            role=role,
            seconds=seconds,
        )
        outcome.cycles += 1
        outcome.count("rooms in a table, without bytes", found.rooms)
        outcome.count("words written", found.writes)
        outcome.count("writers killed", found.kills)
        outcome.count("times of an earlier room", found.stale_times)
        for way, count in (found.reads | found.verdicts).items():
            outcome.count(way, count)
        outcome.none("impossible reads", len(found.faults), "words")
        outcome.violations += [
            f"round {number} ({slots} slots, {role.name}): {fault}" for fault in found.faults
        ]
        rate = found.reads.get("words", 0) / seconds
        outcome.series.setdefault("words read a second", []).append((piece.spent_s(), rate))
    outcome.took_s = piece.spent_s()
    return outcome
