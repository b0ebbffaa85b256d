"""A round of `torn` loses nothing that one of its processes found, however that process ends."""

from __future__ import annotations

import math
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdrt.protocol.states import Role
from stress.cascades.torn.cascade import FIRST_READER, Crew, Hand, Round
from stress.cascades.torn.gate import OPEN, SHUT, Told

SLOTS = 2
WRITERS_ALONE = "old handles"  # the mutant that no reader sees, and no history
END_S = 15.0


@contextmanager
def begun(folder: Path, crew: Crew) -> Iterator[Round]:
    """Real processes that wait for the gate to open."""
    folder.mkdir()
    with Round(folder, "seed", crew, SLOTS, Role.PREFILL) as this:
        this.start()
        yield this


def strike(this: Round) -> None:
    """A kill; some strikes are only a stop."""
    while not this.found.kills:
        this._strike()


def test_a_round_ends_when_a_writer_has_seen_a_fault_and_says_which(tmp_path):
    crew = Crew(writers=1, readers=1, kills=False, mutant=WRITERS_ALONE)
    with begun(tmp_path / "round", crew) as this:
        this.play(math.inf)
        faults = this.finish().faults
    assert faults
    assert all("changed a room" in fault for fault in faults), "others saw it, too"


def test_a_strike_loses_no_fault_of_a_writer_that_had_ended(tmp_path):
    with begun(tmp_path / "round", Crew(writers=1, readers=1, mutant=WRITERS_ALONE)) as this:
        this._gate.set(OPEN)
        this._writers[1].popen.wait(END_S)
        strike(this)
        this.play(math.inf)
        faults = this.finish().faults
    assert any("changed a room" in fault for fault in faults), faults


@pytest.mark.parametrize("struck", [True, False])
def test_a_writer_that_crashed_is_a_fault_whether_it_is_struck_afterwards_or_not(tmp_path, struck):
    with begun(tmp_path / "round", Crew(writers=1, readers=1)) as this:
        crashed = this._writers[1].popen
        crashed.terminate()
        crashed.wait(END_S)
        if struck:
            strike(this)
        this.play(math.inf)
        assert "writer 1: exit -15" in this.finish().faults


def test_a_reader_that_crashed_is_a_fault_and_the_others_are_heard(tmp_path):
    with begun(tmp_path / "round", Crew(writers=1, readers=2)) as this:
        this._readers[0].popen.terminate()
        this._readers[0].popen.wait(END_S)
        this.play(math.inf)
        found = this.finish()
    assert found.faults == [f"reader {FIRST_READER}: exit -15"]
    assert "words" in found.reads


def test_whoever_ends_before_it_is_told_is_a_fault(tmp_path):
    with begun(tmp_path / "round", Crew(writers=2, readers=1)) as this:
        this._gate.set(SHUT)
        this._writers[1].popen.wait(END_S)
        faults = this.finish().faults
    assert "writer 1 ended, and saw no fault" in faults


ANSWER = """print('{"faults": ["seen"]}', flush=True)"""
HANGS = "import time; time.sleep(60)"


@pytest.mark.parametrize(
    ("program", "faults"),
    [
        (HANGS, []),
        (f"{ANSWER}; {HANGS}", ["seen"]),
        (ANSWER, ["seen"]),
        (f"{ANSWER}; exit(3)", ["seen", "writer 1: exit 3"]),
        ("", ["writer 1: exit 0"]),
    ],
)
def test_what_was_said_before_a_kill_counts_and_the_kill_does_not(program, faults):
    told = Told(table_fd=0, region_fd=0, slots=1, seed="", row=1, out="")
    popen = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert popen.stdout is not None
    if HANGS not in program:
        popen.wait(END_S)
    elif ANSWER in program:
        select.select([popen.stdout], [], [], END_S)
    assert Hand("writer", told, popen).kill() == faults
