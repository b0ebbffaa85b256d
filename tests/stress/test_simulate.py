"""The simulator's command: it plays every seed once, reports what it saw, and would see a fault.

`python -m stress.simulate` plays 10,000 seeds; the default tests play a handful (see also
tests/actors/test_chaos.py, which plays hundreds in one process).
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

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


@pytest.fixture
def handlers() -> Iterator[None]:
    """Those of this process are put back."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_was_stopped_says_so_and_does_not_pass(
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def wait_and_be_stopped(*going: Any, **how: Any) -> Any:
        found = wait(*going, **how)
        signal.raise_signal(number)
        return found

    monkeypatch.setattr(simulate, "wait", wait_and_be_stopped)
    monkeypatch.setattr(simulate, "CHUNK", 1)
    file = tmp_path / "figures.json"
    order = ["--seeds", "5000", "--jobs", "1", "--json", str(file)]
    assert simulate.command(order) == 128 + number
    found = json.loads(file.read_text())
    assert 0 < found["seeds"] < 100
    assert (found["seeds_ordered"], found["stopped_by"]) == (5000, number.name)
    said = f"STOPPED by {number.name}: {found['seeds']} of 5,000 were played"
    assert said in capsys.readouterr().out


@pytest.mark.usefixtures("handlers")
def test_who_is_stopped_while_nothing_can_be_said_does_not_pass_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stopped(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(simulate, "catch", stopped)
    assert simulate.command(["--mutants"]) == 128 + signal.SIGTERM


def test_a_fault_counts_though_not_all_was_played() -> None:
    report = Report(jobs=1, first=0, signal=signal.SIGTERM)
    assert report.exit_code == 143
    report.add(Tally(seeds=4), [Failure(17, "AssertionError: late", "Setting()", ("Act()",))])
    assert report.exit_code == 1


@pytest.mark.parametrize("order", ["--seeds 0", "--seeds -1", "--minutes 0", "--minutes nan"])
def test_an_order_of_nothing_is_an_error(order: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        simulate.main([*order.split(), "--jobs", "1"])
    assert ended.value.code == 2
    assert "nothing would be played" in capsys.readouterr().err


def test_a_time_in_which_nothing_is_played_does_not_pass(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert simulate.main(["--minutes", "1e-12", "--jobs", "1"]) == 2
    assert "NOTHING was played" in capsys.readouterr().out


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
