"""Checks the Promela models with spin: the laws must hold, and every mutant must break one.

usage: python -m stress.models.check [--quick] [--model NAME] [--list] [--install]

A mutant is the model with one guard taken away.  A model that a mutant of it does not break proves
nothing.  It needs the programs `spin` (the Debian package of that name) and a C compiler.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from stress.models.runs import RUNS, Run

HERE = Path(__file__).parent
MEMORY_MB = 3000
DEPTH_MAX = 2_000_000
RUN_S_MAX = 300
COMPILERS = ("cc", "gcc", "clang")


class Unusable(Exception):
    """A tool is missing, or a model is not even a model."""


@dataclass(frozen=True)
class Outcome:
    run: Run
    seconds: float
    states_count: int
    depth: int
    violated: bool  # a counterexample was found
    complete: bool  # every state was seen, or a counterexample
    detail: str = field(default="", compare=False)

    @property
    def good(self) -> bool:
        return self.complete and self.violated == self.run.is_mutant

    @property
    def verdict(self) -> str:
        if not self.complete:
            return f"INCOMPLETE: {self.detail}"
        if self.run.is_mutant:
            return "caught" if self.violated else "NOT CAUGHT"
        return f"VIOLATED: {self.detail}" if self.violated else "holds"


def missing() -> str:
    """What has to be installed first, as a sentence; empty if nothing has."""
    if shutil.which("spin") is None:
        return "spin is not installed: apt-get install spin, or --install"
    if compiler() is None:
        return f"no C compiler ({', '.join(COMPILERS)}) is installed: apt-get install gcc"
    return ""


def compiler() -> str | None:
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def check(run: Run) -> Outcome:
    """Translate, compile and run one verification.  Raises Unusable."""
    with tempfile.TemporaryDirectory(prefix="pdrt-model-") as folder:
        started = time.monotonic()
        defines = [f"-D{define}" for define in (*run.defines, *(["LIVE"] if run.ltl else []))]
        _tool(["spin", "-a", *defines, str(HERE / run.model)], folder)
        kind = ["-DNFAIR=4"] if run.ltl else ["-DSAFETY", "-DNOCLAIM"]
        # Short runs are over before an optimiser would be.
        flags = ["-w", "-O1" if run.large else "-O0", f"-DMEMLIM={MEMORY_MB}", *kind]
        _tool([compiler() or "cc", *flags, "-o", "pan", "pan.c"], folder)
        how = ["-a", "-f", "-N", run.ltl] if run.ltl else []
        try:
            pan = subprocess.run(
                ["./pan", f"-m{DEPTH_MAX}", "-E", "-n", *how],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=RUN_S_MAX,
                check=False,
            )
            text = pan.stdout + pan.stderr
        except subprocess.TimeoutExpired:
            text = f"pan: longer than {RUN_S_MAX} s\n"
        return read(run, text, time.monotonic() - started)


def _tool(command: list[str], folder: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0 or "Error:" in done.stdout + done.stderr:
        raise Unusable(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def read(run: Run, text: str, seconds: float) -> Outcome:
    """What a verifier's output says.  Whatever it does not say is no proof."""
    errors = re.search(r"errors: (\d+)", text)
    states = re.search(r"(\d+) states, stored", text)
    depth = re.search(r"depth reached (\d+)", text)
    notes = re.findall(r"^(?:pan:(?!\d* ?(?:elapsed|rate)).*|error: .*)$", text, re.MULTILINE)
    violated = errors is not None and int(errors[1]) > 0
    cut = (
        "too small" in text
        or (depth is not None and int(depth[1]) >= DEPTH_MAX - 1)
        or "MEMLIM" in text
        or "out of memory" in text
        or errors is None
    )
    return Outcome(
        run,
        seconds,
        int(states[1]) if states else 0,
        int(depth[1]) if depth else 0,
        violated,
        violated or not cut,
        notes[0][:100] if notes else "",
    )


def table(outcomes: Iterable[Outcome]) -> str:
    """As Markdown, so that the README can carry it."""
    lines = [
        "| model | run | checks | states | depth | seconds | verdict |",
        "| --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    lines += [
        f"| {o.run.model.removesuffix('.pml')} | {o.run.name} | {o.run.ltl or 'safety'} "
        f"| {o.states_count:,} | {o.depth:,} | {o.seconds:.1f} | {o.verdict} |"
        for o in outcomes
    ]
    return "\n".join(lines)


def install() -> None:
    """The Debian package, and nothing else."""
    if shutil.which("apt-get") is None:
        raise Unusable("no apt-get here: install spin by the means of this system")
    done = subprocess.run(["apt-get", "install", "-y", "spin"], check=False)
    if done.returncode != 0:
        raise Unusable("apt-get install spin failed; root and a package list are needed")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m stress.models.check", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="a choice of it, in some 10 s")
    parser.add_argument("--model", default="", help="only runs whose model has this in its name")
    parser.add_argument("--list", action="store_true", help="say what would be run")
    parser.add_argument("--install", action="store_true", help="install the package spin first")
    asked = parser.parse_args(arguments)
    runs = [r for r in RUNS if asked.model in r.model and (r.quick or not asked.quick)]
    if asked.list:
        for run in runs:
            print(run.model, run.name, " ".join(run.defines), run.ltl)
        return 0
    try:
        if asked.install and shutil.which("spin") is None:
            install()
        if reason := missing():
            raise Unusable(reason)
        outcomes = []
        for run in runs:
            outcome = check(run)
            outcomes.append(outcome)
            print(f"{run.model} {run.name}: {outcome.verdict}", file=sys.stderr, flush=True)
    except Unusable as error:
        print(error, file=sys.stderr)
        return 1
    print(table(outcomes))
    bad = [o for o in outcomes if not o.good]
    print(f"\n{len(outcomes) - len(bad)} of {len(outcomes)} as they should be")
    return 1 if bad or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
