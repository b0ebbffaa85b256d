"""The Promela models hold, and their mutants are caught: the quick part of it.

`python -m stress.models.check` runs them all.
"""

from __future__ import annotations

import re

import pytest

from stress.models import check
from stress.models.runs import RUNS, Run, holds

needs_spin = pytest.mark.skipif(bool(check.missing()), reason=check.missing())
QUICK = [run for run in RUNS if run.quick]


def name(run: Run) -> str:
    return f"{run.model}-{run.name}-{run.ltl}".replace(" ", "_")


@needs_spin
@pytest.mark.parametrize("run", QUICK, ids=name)
def test_a_law_holds_and_a_mutant_is_caught(run):
    outcome = check.check(run)
    assert outcome.good, outcome.verdict


def test_the_quick_set_has_mutants_and_laws_of_each_model():
    for model in {run.model for run in RUNS}:
        mine = [run for run in QUICK if run.model == model]
        assert any(run.is_mutant for run in mine), model
    assert any(not run.is_mutant for run in QUICK)


@pytest.mark.parametrize("model", sorted({run.model for run in RUNS}))
def test_every_mutant_of_a_model_is_run(model):
    """A guard that is written down as a mutant, and never taken away, proves nothing."""
    head = (check.HERE / model).read_text().split("*/")[0]
    written = set(re.findall(r"\b[A-Z][A-Z_]{3,}\b", head.split("Mutants (-D):")[1])) - {"PATIENT"}
    assert written == {r.defines[-1] for r in RUNS if r.is_mutant and r.model == model}


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("State-vector 9 byte, depth reached 7, errors: 0\n 12 states, stored\n", True),
        ("State-vector 9 byte, depth reached 7, errors: 1\n 12 states, stored\n", False),
        ("error: max search depth too small\ndepth reached 7, errors: 0\n", False),
        ("pan: reached -DMEMLIM bound\ndepth reached 7, errors: 0\n", False),
        ("pan: longer than 1 s\n", False),
        ("", False),
    ],
)
def test_what_was_not_seen_to_the_end_is_no_proof(text, good):
    assert check.read(holds("m.pml", "law"), text, 0.0).good is good
