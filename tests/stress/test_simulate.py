"""The simulator's command: it plays every seed once, reports what it saw, and would see a fault.

`python -m stress.simulate` plays 10,000 seeds; the default tests play a handful (see also
tests/actors/test_chaos.py, which plays hundreds in one process).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdrt.protocol.states import Reason, Role
from stress import simulate
from stress.simulate import Failure, Report
from tests.actors import schedule
from tests.actors.mutants import MUTANTS, mutated
from tests.actors.tally import MOVING, STEPS, Tally


def test_every_seed_is_played_once() -> None:
    played = [s for first, n in simulate._chunks(7, 101) for s in range(first, first + n)]
    assert played == list(range(7, 108))


def test_a_few_seeds_over_a_process_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    assert simulate.main(["--seeds", "3", "--jobs", "1", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["seeds"] == 3
    assert found["failures"] == []
    assert found["verdicts"]["decode"]["SUCCESS"] > 0
    assert "3 schedules" in capsys.readouterr().out


def test_what_was_played_is_counted_and_two_counts_add_up() -> None:
    one, both = Tally(), Tally()
    for seed in (1, 2):
        assert simulate.play_one(seed, one if seed == 1 else both) is None
    alone = both.turns
    both += one
    assert both.seeds == 2
    assert both.turns == one.turns + alone
    for role in Role:
        verdicts = sum(n for (r, _), n in both.verdicts.items() if r is role)
        assert 0 < verdicts <= both.rooms[role]
    assert set(MOVING) <= set(STEPS)
    assert {s for s in both.steps if s in MOVING}


def test_a_fault_is_found_shrunk_and_found_again_by_its_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulate, "SHRINK_TRIES_MAX", 20)
    with mutated(MUTANTS["quiet_when_failed"]):
        seed = next(s for s in range(20) if simulate.play_one(s, Tally()) is not None)
        assert simulate.main(["--seed", str(seed)]) == 1
    out = capsys.readouterr().out
    assert "1 FAILED" in out
    assert f"python -m stress.simulate --seed {seed}" in out
    assert 0 < out.count("Act(at_ms") < len(schedule.schedule(schedule.setting(seed)))
    assert simulate.main(["--seed", str(seed)]) == 0  # and not without the mutant


def test_a_failure_is_in_the_report_with_what_replays_it() -> None:
    report = Report(jobs=2, first=0, took_s=2.0)
    report.add(Tally(seeds=4), [Failure(17, "AssertionError: late", "Setting()", ("Act()",))])
    assert "python -m stress.simulate --seed 17" in simulate.text(report)
    figures = json.loads(json.dumps(report.figures()))
    assert figures["failures"][0]["command"].endswith("--seed 17")
    assert figures["schedules_per_s"] == 2.0


def test_a_mutant_that_no_seed_catches_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    harmless = {"harmless": lambda patch: None, "quiet_when_failed": MUTANTS["quiet_when_failed"]}
    monkeypatch.setattr(simulate, "MUTANTS", harmless)
    monkeypatch.setattr(simulate, "MUTANT_SEEDS_MAX", 5)
    assert simulate.main(["--mutants"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "NOT CAUGHT" in lines[0]
    assert "quiet" in lines[1]
    assert "NOT CAUGHT" not in lines[1]


# --- minutes -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_schedules_break_no_law_and_see_every_move() -> None:
    report = simulate.play_all(0, 10_000, jobs=simulate.parse([]).jobs)
    assert report.failures == [], simulate.text(report)
    assert report.tally.seeds == 10_000
    assert set(MOVING) <= set(report.tally.steps)
    assert set(Reason) - report.tally.reasons <= simulate.BEYOND, simulate.text(report)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name: str) -> None:
    assert simulate.catch(name, 0, simulate.MUTANT_SEEDS_MAX) is not None
