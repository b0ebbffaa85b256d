"""The benchmark's own arithmetic, and a tiny run of it, so that it does not rot unseen."""

from __future__ import annotations

import importlib
import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stress.bench import aborts, table
from stress.bench.__main__ import MEASUREMENTS, parse
from stress.bench.bench import Bench
from stress.bench.figures import COLUMNS, Figure, Goal, Result, digits, rank, summarise
from stress.bench.report import Machine, console, markdown
from stress.bench.trees import LARGE, SMALL, Cpu

SAMPLES = st.lists(st.floats(0, 1e6), min_size=1, max_size=300)


@given(SAMPLES)
def test_a_summary_is_made_of_the_samples(samples):
    summary = summarise(samples)
    assert summary.n == len(samples)
    assert summary.median == pytest.approx(statistics.median(samples))
    assert summary.max == max(samples)
    assert summary.p99 in samples
    assert summary.spread >= 0


@given(SAMPLES, st.floats(0.01, 1.0))
def test_a_rank_is_the_smallest_sample_that_enough_do_not_exceed(samples, part):
    found = rank(sorted(samples), part)
    assert sum(s <= found for s in samples) >= part * len(samples) - 1e-9
    assert sum(s < found for s in samples) < part * len(samples)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=99))
def test_of_fewer_than_a_hundred_samples_p99_is_the_largest(samples):
    assert summarise(samples).p99 == max(samples)


def test_p99_leaves_out_one_of_a_hundred():
    assert summarise([1.0] * 99 + [50.0]).p99 == 1.0
    assert summarise([1.0] * 98 + [50.0] * 2).p99 == 50.0


@given(SAMPLES, st.sampled_from(["median", "p99", "max"]), st.floats(0, 1e6))
def test_a_goal_is_met_on_its_own_side_of_the_bound_and_on_the_bound(samples, statistic, bound):
    value = getattr(summarise(samples), statistic)
    assert Figure("f", "ms", samples, Goal(statistic, bound)).met is (value <= bound)
    assert Figure("f", "ms", samples, Goal(statistic, bound, at_least=True)).met is (value >= bound)
    assert Figure("f", "ms", samples, Goal(statistic, value)).met
    assert Figure("f", "ms", samples, Goal(statistic, value, at_least=True)).met


@given(st.floats(1e-6, 1e9))
def test_digits_are_right_to_half_of_the_last_one(value):
    assert float(digits(value)) == pytest.approx(value, rel=0.5e-2)
    assert "e" not in digits(value)


def test_nothing_measured_is_neither_met_nor_missed_and_says_so():
    empty = Figure("f", "ms", [], Goal("max", 1.0))
    assert empty.met is None
    assert empty.record()["summary"] is None
    assert "not measured" in empty.cells()


@given(st.integers(1, 1000), st.floats(0.001, 1.0))
def test_a_part_of_the_samples_is_at_least_one_and_at_most_all(count, part):
    bench = Bench(Path(), part=part)
    assert 1 <= bench.count(count) <= count
    assert abs(bench.count(count) - part * count) <= 1


def test_rounds_end_with_the_budget_but_one_is_always_played():
    assert list(Bench(Path()).rounds(5, 0.0)) == [0]
    assert list(Bench(Path()).rounds(5, 60.0)) == [0, 1, 2, 3, 4]


def test_the_rooms_are_as_large_as_their_names_say():
    assert SMALL.room_bytes == 16 << 10
    assert LARGE.room_bytes == 8 << 20
    assert SMALL.layout.item_bytes == SMALL.item_bytes
    assert LARGE.layout.page_bytes(0) == LARGE.page_bytes


def test_processor_time_is_what_was_used_between_two_looks_also_by_a_new_process():
    before = Cpu({("tree worker0", 7): 3.0, ("tree listener", 8): 1.0})
    after = Cpu({("tree worker0", 7): 3.5, ("tree listener", 9): 0.25})
    assert after.since(before) == {"tree worker0": 0.5, "tree listener": 0.25}
    assert after.per_room(before, 1000) == "tree worker0 500 us, tree listener 250 us"


def result(**figures: Figure) -> Result:
    return Result("some", "Some figures", list(figures.values()), ["a | remark"], 1.5)


def test_a_report_has_every_figure_and_why_a_goal_is_missed():
    good = Figure("good", "ms", [1.0, 2.0, 3.0], Goal("p99", 5.0), "not to be seen")
    bad = Figure("bad", "x", [7.0], Goal("median", 1.2), "the worker copies twice")
    plain = Figure("plain", "ms", [4.0], None, "nor this")
    broken = result(good=good, bad=bad, plain=plain)
    broken.error = "TimeoutError: nobody came"
    text = markdown(Machine.now(["bin/bench", "some thing"]), [broken])
    assert "| good | 3 | 2.00 | 3.00 | 3.00 |" in text
    assert "1 of 2 goals met" in text
    assert "the worker copies twice" in text
    assert "not to be seen" not in text
    assert "nor this" not in text + console(broken)
    assert "nobody came" in text
    assert "bin/bench 'some thing'" in text
    assert "load" in text
    rows = [line for line in text.splitlines() if line.startswith("| good")]
    assert rows[0].count("|") == len(COLUMNS) + 1
    for words in ("good", "bad", "MISSED", "the worker copies twice", "nobody came", "a | remark"):
        assert words in console(broken)


def test_a_name_that_is_no_measurement_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse(["abortz"])
    assert "abortz" in capsys.readouterr().err
    assert parse(["table", "rooms"]).names == ["table", "rooms"]


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_each_measurement_has_a_title_and_a_limit(name):
    module, limit_s = MEASUREMENTS[name]
    assert module.__name__ == f"stress.bench.{name}"
    assert module.TITLE
    assert callable(module.measure)
    assert 0 < limit_s <= 600


def test_the_stock_engine_runs_without_anything_of_ours():
    path = Path(importlib.import_module("stress.bench").__path__[0]) / "stock_engine.py"
    lines = [line.strip() for line in path.read_text().splitlines()]
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    assert not [line for line in imports if "pdrt" in line or "stress" in line]


def test_a_tiny_run_measures_everything_it_names(tmp_path):
    """One sample of each: real trees, an abort each way, a killed engine on each side."""
    bench = Bench(tmp_path, part=0.001, transports=("shm",))
    for module, least in ((table, 6), (aborts, 10)):
        found = Result(module.__name__, module.TITLE)
        module.measure(bench, found)
        assert len(found.figures) >= least
        assert all(figure.samples for figure in found.figures), console(found)
        assert all(math.isfinite(s) and s >= 0 for f in found.figures for s in f.samples)
