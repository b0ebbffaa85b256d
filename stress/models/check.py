"""Checks the Promela models with spin: the laws must hold, and every mutant must break one.

usage: python -m stress.models.check [--quick] [--model NAME] [--jobs N] [--list] [--install]

A mutant is the model with one guard taken away.  A model that a mutant of it does not break proves
nothing; nor does a mutant that breaks another law than the one it names.  It needs the programs
`spin` and a C compiler; `--install` gets both where there is apt-get, and needs root there.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from stress.models.runs import RUNS, Run

HERE = Path(__file__).parent
MEMORY_MB = 3000
DEPTH_MAX = 2_000_000
RUN_S_MAX = 900
JOBS = 2
COMPILERS = ("cc", "gcc", "clang")
PACKAGES = ("spin", "gcc", "libc6-dev")


class Unusable(Exception):
    """A tool is missing, or a model is not even a model."""


@dataclass(frozen=True)
class Outcome:
    run: Run
    seconds: float
    states_count: int
    depth: int
    violated: bool  # a counterexample was found
    broken: str  # what it breaks, in the verifier's words
    complete: bool  # every state was seen, or a counterexample
    detail: str = field(default="", compare=False)

    @property
    def good(self) -> bool:
        if self.run.is_mutant:
            return self.complete and self.violated and self._as_named
        return self.complete and not self.violated

    @property
    def _as_named(self) -> bool:
        """Spaces are the verifier's own."""
        return self.run.caught_by.replace(" ", "") in self.broken.replace(" ", "")

    @property
    def verdict(self) -> str:
        if not self.complete:
            return f"INCOMPLETE: {self.detail}"
        if not self.run.is_mutant:
            return f"VIOLATED: {self.broken}" if self.violated else "holds"
        if not self.violated:
            return "NOT CAUGHT"
        return "caught" if self._as_named else f"CAUGHT BY ANOTHER LAW: {self.broken}"


def missing() -> str:
    """What has to be installed first, as a sentence; empty if nothing has."""
    if shutil.which("spin") is None:
        return f"spin is not installed: apt-get install {' '.join(PACKAGES)}, or --install"
    if compiler() is None:
        return f"no C compiler ({', '.join(COMPILERS)}) is installed: apt-get install gcc"
    return ""


def compiler() -> str | None:
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def check(run: Run) -> Outcome:
    """Translate, compile and run one verification.  Raises Unusable."""
    return check_all([run])[0]


def check_all(runs: Sequence[Run], jobs: int = 1) -> list[Outcome]:
    """The outcome of each, in this order.  Claims of one world share a verifier, and the longest
    are begun first.  Raises Unusable."""
    groups: dict[tuple[object, ...], list[Run]] = {}
    for run in sorted(runs, key=lambda run: not run.large):
        groups.setdefault((run.model, run.defines, bool(run.ltl), run.large), []).append(run)
    with ThreadPoolExecutor(jobs) as pool:
        done = [outcome for found in pool.map(_check_group, groups.values()) for outcome in found]
    by_run = {outcome.run: outcome for outcome in done}
    return [by_run[run] for run in runs]


def _check_group(runs: Sequence[Run]) -> list[Outcome]:
    first = runs[0]
    with tempfile.TemporaryDirectory(prefix="pdrt-model-") as folder:
        started = time.monotonic()
        defines = [f"-D{d}" for d in (*first.defines, *(["LIVENESS"] if first.ltl else []))]
        _tool(["spin", "-a", *defines, str(HERE / first.model)], folder)
        kind = ["-DNFAIR=4"] if first.ltl else ["-DSAFETY", "-DNOCLAIM"]
        # Short runs are over before an optimiser would be.
        flags = ["-w", "-O2" if first.large else "-O0", f"-DMEMLIM={MEMORY_MB}", *kind]
        _tool([compiler() or "cc", *flags, "-o", "pan", "pan.c"], folder)
        outcomes = []
        for run in runs:
            text = _verify(run, folder)
            outcome = read(run, text, time.monotonic() - started)
            print(f"{run.model} {run.name}: {outcome.verdict}", file=sys.stderr, flush=True)
            outcomes.append(outcome)
            started = time.monotonic()
        return outcomes


def _verify(run: Run, folder: str) -> str:
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
    except subprocess.TimeoutExpired:
        return f"pan: longer than {RUN_S_MAX} s\n"
    return pan.stdout + pan.stderr


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
    broken = re.search(r"^pan:\d+: (.*?)(?: \(at depth \d+\))?$", text, re.MULTILINE)
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
        broken[1] if broken else "",
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
    """Debian's packages, and nothing else.  Raises Unusable."""
    wanted = f"install {' and '.join(PACKAGES[:2])} by the means of this system"
    if shutil.which("apt-get") is None:
        raise Unusable(f"no apt-get here: {wanted}")
    if os.geteuid() != 0:
        raise Unusable(f"--install needs root: sudo apt-get install {' '.join(PACKAGES)}")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for step in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        command = ["apt-get", "-q", *step]
        done = subprocess.run(command, env=quiet, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip()[-500:]
            raise Unusable(f"{' '.join(command)} failed:\n{said}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m stress.models.check", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="a choice of it, within a minute")
    parser.add_argument("--model", default="", help="only runs whose model has this in its name")
    parser.add_argument("--jobs", type=int, default=JOBS, help="verifications at a time")
    parser.add_argument("--list", action="store_true", help="say what would be run")
    parser.add_argument("--install", action="store_true", help="install what it needs first")
    asked = parser.parse_args(arguments)
    runs = [r for r in RUNS if asked.model in r.model and (r.quick or not asked.quick)]
    started = time.monotonic()
    try:
        if asked.install and missing():
            install()
        if asked.list:
            for run in runs:
                print(run.model, run.name, " ".join(run.defines), run.ltl)
            return 0
        if reason := missing():
            raise Unusable(reason)
        outcomes = check_all(runs, asked.jobs)
    except Unusable as error:
        print(error, file=sys.stderr)
        return 1
    print(table(outcomes))
    bad = [o for o in outcomes if not o.good]
    spent_s = time.monotonic() - started
    print(f"\n{len(outcomes) - len(bad)} of {len(outcomes)} as they should be, in {spent_s:.0f} s")
    return 1 if bad or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
