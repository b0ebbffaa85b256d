"""The judge of `soak` on planted curves, and what it samples."""

from __future__ import annotations

import math
import mmap
import os
import random
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stress.cascades.piece import Outcome
from stress.cascades.soak import sample as samples
from stress.cascades.soak.cascade import allowed, draw, judge_series
from stress.cascades.soak.judge import Points, Tolerance, judge, line_of
from stress.cascades.soak.sample import (
    TOLERANCES,
    Series,
    family_of,
    held_by,
    mapped_memfds,
    sample,
    tolerance_of,
)

CYCLE_S = 1.0
HOUR = 3600
DESCRIPTORS = TOLERANCES["descriptors"]
HEAP = TOLERANCES["heap"]


def curve(value: list[float], every_s: float = CYCLE_S) -> Points:
    return [(i * every_s, v) for i, v in enumerate(value)]


def noise(seed: int, spread: float, count: int) -> list[float]:
    chance = random.Random(seed)
    return [chance.gauss(0, spread) for _ in range(count)]


def leak(cycles: int, per_cycle: float, base: float = 30) -> list[float]:
    """Whole descriptors."""
    return [base + math.floor(i * per_cycle) for i in range(cycles)]


@pytest.mark.parametrize("cycles", [600, HOUR])
def test_a_leak_of_one_descriptor_in_a_hundred_cycles_is_seen(cycles):
    points = curve([a + b for a, b in zip(leak(cycles, 0.01), noise(1, 0.3, cycles), strict=True)])
    fault = judge("descriptors: decode1 listener", points, DESCRIPTORS)
    line = line_of(points)
    assert line is not None
    assert line.rise == pytest.approx(cycles / 2 * 0.01, rel=0.25)
    assert "decode1 listener" in fault
    assert "an hour" in fault


@given(st.integers(0, 1000), st.floats(0, 20), st.floats(0, 2000))
@settings(max_examples=30)
def test_what_is_flat_is_no_leak_however_noisy(seed, spread, base):
    points = curve([base + n for n in noise(seed, spread, 400)])
    tolerance = Tolerance(max(2.0, spread))
    assert judge("flat", points, tolerance) == ""


@given(st.integers(0, 400), st.integers(3, 40), st.floats(1, 500))
@settings(max_examples=30)
def test_a_sawtooth_is_no_leak_wherever_it_begins(phase, period, height):
    """A process that grows and is replaced; at least five teeth in the half that is looked at."""
    points = curve([50 + height * ((i + phase) % period) / period for i in range(400)])
    line = line_of(points)
    assert line is not None
    assert judge("sawtooth", points, Tolerance(0.35 * height)) == ""


def test_a_leak_under_a_sawtooth_is_seen():
    points = curve([10 + 0.02 * i + 5 * (i % 25) / 25 for i in range(2000)])
    assert judge("leak", points, Tolerance(5.0))


def test_warm_up_is_no_leak_and_a_leak_after_it_is():
    warm = [20 + 80 * (1 - math.exp(-i / 60)) for i in range(1000)]
    assert judge("heap", curve(warm), HEAP) == ""
    assert judge("heap", curve([w + 0.02 * i for i, w in enumerate(warm)]), HEAP)


@given(st.integers(0, 100))
@settings(max_examples=20)
def test_a_few_odd_samples_decide_nothing(seed):
    chance = random.Random(seed)
    odd = {chance.randrange(300) for _ in range(40)}
    values = [30.0 + (1000 if i in odd else 0) for i in range(300)]
    assert judge("odd", curve(values), DESCRIPTORS) == ""
    values = [v + i * 0.1 for i, v in enumerate(values)]
    assert judge("odd", curve(values), DESCRIPTORS)


def test_what_falls_is_no_leak_and_too_few_samples_say_nothing():
    assert judge("falls", curve([100.0 - i for i in range(100)]), DESCRIPTORS) == ""
    assert line_of(curve([1.0 * i for i in range(11)])) is None
    assert judge("few", curve([100.0 * i for i in range(11)]), DESCRIPTORS) == ""
    assert line_of([(5.0, float(i)) for i in range(50)]) is None


def test_a_rise_within_its_tolerance_is_none_and_it_grows_with_the_height():
    points = curve([1000 + 0.1 * i for i in range(400)])  # by 20 in the second half
    assert judge("heap", points, Tolerance(1.0, 0.03)) == ""
    assert judge("heap", points, Tolerance(1.0, 0.01))


def test_each_curve_is_judged_by_what_it_measures_and_some_are_plotted():
    series = Series()
    series.curves["descriptors: prefill1 listener"] = list(curve(leak(600, 0.02)))
    series.curves["descriptors: prefill1 worker0"] = list(curve([30.0] * 600))
    series.curves["rss: prefill1 worker0"] = list(curve([1.0 * i for i in range(600)]))
    series.curves["descriptors: prefill0 listener"] = list(curve([30.0] * 600))
    series.curves["threads: prefill1 engine"] = list(curve([1.0] * 5))
    outcome = Outcome(cascade="soak", seed=1)
    judge_series(series, outcome)
    assert outcome.counts["curves"] == 3
    assert outcome.counts["curves that rise"] == 1
    assert [v for v in outcome.violations if "prefill1 listener" in v] == outcome.violations
    assert outcome.series.keys() == {
        "descriptors: prefill1 listener",
        "descriptors: prefill1 worker0",
    }
    assert any("too few" in note for note in outcome.notes)


def test_only_a_prefills_listener_may_grow_by_what_it_remembers_and_only_until_that_is_full():
    def more(name: str, rooms: int) -> float:
        tolerance, plain = allowed(name, rooms), tolerance_of(name)
        assert tolerance is not None
        assert plain is not None
        return tolerance.amount - plain.amount

    assert more("heap: prefill1 listener", 0) == 0
    assert more("heap: prefill1 listener", 20_000) == pytest.approx(10_000 * 512 / (1 << 20))
    assert more("heap: prefill1 listener", 200_000) == 0
    assert 0 < more("heap: prefill1 listener", 100_000) < more("heap: prefill1 listener", 65_536)
    for name in ("heap: prefill1 worker0", "heap: decode1 listener", "threads: prefill1 listener"):
        assert more(name, 65_536) == 0
    assert allowed("rss: prefill1 listener", 65_536) is None


def test_a_process_is_sampled_as_it_is():
    """This one: another descriptor, thread, memfd and 8 MiB show."""
    before = held_by(os.getpid())
    fd = os.memfd_create("soak-test")
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    try:
        os.posix_fallocate(fd, 0, 1 << 20)
        thread.start()
        # Mapped by hand: malloc may well have as much left from a test before.
        memory = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.write(b"x" * len(memory))
        after = held_by(os.getpid())
    finally:
        stop.set()
        thread.join()
        memory.close()
        os.close(fd)
    assert before is not None
    assert after is not None
    assert after.descriptors == before.descriptors + 1
    assert after.threads == before.threads + 1
    assert sum(after.memfds.values()) == sum(before.memfds.values()) + (1 << 20)
    assert after.heap > before.heap + 6
    assert after.rss >= after.pss >= after.heap
    assert 0 <= before.age_s <= after.age_s


def test_a_memfd_that_is_mapped_and_not_open_counts_too():
    fd = os.memfd_create("soak-test")
    inode = os.fstat(fd).st_ino
    os.posix_fallocate(fd, 0, 1 << 20)
    with mmap.mmap(fd, 1 << 20), mmap.mmap(fd, 4096):
        os.close(fd)
        assert mapped_memfds(Path("/proc/self/maps").read_text())[inode] == 1 << 20
    assert inode not in mapped_memfds(Path("/proc/self/maps").read_text())


def test_every_curve_of_a_sample_has_a_name_that_is_judged_or_is_for_the_plot_alone():
    series = Series()
    sample(series, {"tree": {"supervisor": [os.getpid()], "gone": [1 << 22]}})
    kinds = {name.partition(": ")[0] for name in series.curves}
    plotted = {"rss", "pss", "pss of files", "pss of shared memory"}
    assert {kind for kind in kinds if tolerance_of(kind) is None} <= plotted
    assert not [name for name in series.curves if "gone" in name]
    assert series.curves["processes: trees"][0][1] == 1
    assert family_of(1 << 22) == {}


def test_a_process_that_starts_counts_for_the_whole_and_not_for_its_role(monkeypatch):
    monkeypatch.setattr(samples, "YOUNG_S", 0.0)  # this one may be
    series, me = Series(), os.getpid()
    sample(series, {"tree": {"listener": [me]}}, {me})
    sample(series, {"tree": {"listener": [me]}}, {1})
    assert [value for _, value in series.curves["processes: trees"]] == [1, 1]
    assert len(series.curves["heap: tree listener"]) == 1


def test_only_the_trees_that_may_be_hit_are_hit():
    source = random.Random(1)
    plans = [draw(source, [0, 2]) for _ in range(500)]
    assert {plan.tree for plan in plans} == {0, 2}
    assert len({plan.role for plan in plans}) == 5
