"""The Promela models hold, and their mutants are caught: a little of it, and all that is quick with
the slow tests.

`python -m stress.models.check` runs them all.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from stress.models import check
from stress.models.runs import CLAIMS, RUNS, Run, holds

needs_spin = pytest.mark.skipif(bool(check.missing()), reason=check.missing())
QUICK = [run for run in RUNS if run.quick]


#: A second each; the third model has a test of its own.
FEW = [
    next(run for run in QUICK if run.model == model and run.is_mutant and not run.large)
    for model in ("room_word.pml", "two_sides.pml")
]


def name(run: Run) -> str:
    return f"{run.model}-{run.name}-{run.ltl}".replace(" ", "_")


@needs_spin
@pytest.mark.parametrize("run", FEW, ids=name)
def test_a_mutant_is_caught(run):
    outcome = check.check(run)
    assert outcome.good, outcome.verdict


@needs_spin
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_quick_runs_are_as_they_should_be():
    assert check.main(["--quick"]) == 0


@needs_spin
def test_claims_of_one_world_share_a_verifier_and_are_told_apart(monkeypatch):
    """And come back in the order they were asked in."""
    tools = []
    really = check._tool

    def noted(command, folder):
        tools.append(command[0])
        really(command, folder)

    monkeypatch.setattr(check, "_tool", noted)
    world = "FAILURES=1", "DEATHS_MAX=0", "STUCK=0"
    runs = [
        holds("supervisor.pml", "one failure", *world, ltl=ltl, large=False)
        for ltl in ("served", "settles")
    ]
    outcomes = check.check_all(runs)
    assert [(o.run.ltl, o.good) for o in outcomes] == [("served", True), ("settles", True)]
    assert outcomes[0].states_count != outcomes[1].states_count
    assert tools == ["spin", check.compiler()]


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


MUTANT = next(run for run in RUNS if run.name == "mutant LANDED_EARLY")
FOUND = "pan:1: {} (at depth 46)\nState-vector 9 byte, depth reached 245, errors: 1\n"


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (FOUND.format("assertion violated (placed == 3)"), "caught"),
        (FOUND.format("assertion violated (pages==room)"), "CAUGHT BY ANOTHER LAW"),
        (FOUND.format("acceptance cycle"), "CAUGHT BY ANOTHER LAW"),
        ("State-vector 9 byte, depth reached 245, errors: 1\n", "CAUGHT BY ANOTHER LAW"),
        ("State-vector 9 byte, depth reached 245, errors: 0\n", "NOT CAUGHT"),
        ("", "INCOMPLETE"),
    ],
)
def test_a_mutant_is_caught_by_the_law_that_it_names_or_not_at_all(text, verdict):
    outcome = check.read(MUTANT, text, 0.0)
    assert outcome.verdict.split(":")[0] == verdict
    assert outcome.good is (verdict == "caught")


@needs_spin
def test_a_mutant_that_breaks_another_law_is_a_failure(monkeypatch):
    """And the command says so."""
    named = replace(FEW[0], caught_by="(pages==room)")
    monkeypatch.setattr(check, "RUNS", (named,))
    assert check.main([]) == 1


def test_a_mutant_of_a_claim_is_caught_by_the_claim():
    """An assertion that happens to be on the way says nothing of the claim."""
    for run in RUNS:
        assert not run.is_mutant or (run.caught_by in CLAIMS) is bool(run.ltl), run.name


class Refused:
    returncode, stdout, stderr = 100, "", "E: Unable to locate package spin"


@pytest.mark.parametrize(
    ("apt", "uid", "reason"),
    [
        (None, 0, "no apt-get here"),
        ("/usr/bin/apt-get", 1000, "needs root"),
        ("/usr/bin/apt-get", 0, "Unable to locate package spin"),
    ],
)
def test_what_cannot_be_installed_is_said(monkeypatch, capsys, apt, uid, reason):
    monkeypatch.setattr(shutil, "which", lambda name: apt if name == "apt-get" else None)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: Refused)
    assert check.main(["--install"]) == 1
    assert reason in capsys.readouterr().err


def test_what_is_missing_is_said(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert check.main([]) == 1
    assert "apt-get install spin" in capsys.readouterr().err
