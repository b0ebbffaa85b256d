"""Results for people: on the console, and as a report in Markdown."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stress.bench.figures import COLUMNS, Result

ROOT = Path(__file__).parent.parent.parent


def default_report() -> Path:
    """Where today's report goes, below the working folder."""
    return Path("docs") / "reports" / f"{datetime.now(UTC):%Y-%m-%d}-bench.md"


@dataclass(frozen=True)
class Machine:
    """Where and when, taken before anything is started."""

    command: str
    date: str
    commit: str
    cpu: str
    cores: int
    memory_gib: float
    load: str
    kernel: str
    versions: str

    @classmethod
    def now(cls, command: Sequence[str]) -> Machine:
        info = Path("/proc/cpuinfo").read_text()
        models = [
            v for k, _, v in (x.partition(":") for x in info.splitlines()) if "model name" in k
        ]
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        packages = ("numpy", "pyzmq", "msgspec", "atomicshm", "nixl-cu12")
        versions = [f"Python {platform.python_version()}", *(f"{p} {version(p)}" for p in packages)]
        return cls(
            command=shlex.join(command),
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            commit=commit(),
            cpu=models[0].strip() if models else platform.machine(),
            cores=os.cpu_count() or 0,
            memory_gib=round(memory, 1),
            load=" ".join(f"{load:.2f}" for load in os.getloadavg()),
            kernel=platform.release(),
            versions=", ".join(versions),
        )

    def record(self) -> dict[str, Any]:
        return asdict(self)


def commit() -> str:
    """Of the working tree, and whether it has changes of its own."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    return (git("rev-parse", "--short", "HEAD") or "unknown") + (
        " with changes" if git("status", "--porcelain") else ""
    )


def console(result: Result) -> str:
    rows = [COLUMNS, *(figure.cells() for figure in result.figures)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = [f"\n{result.name}: {result.title} ({result.took_s:g} s)"]
    for row in rows:
        first, *others = (
            cell.ljust(width) if i in (0, 6, 7) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(["  " + first, *others]).rstrip())
    lines += [f"  missed: {'; '.join(names)}: {why}" for why, names in result.missed.items()]
    lines += [f"  note: {note}" for note in result.notes]
    if result.error:
        lines.append(f"  NOT FINISHED: {result.error}")
    return "\n".join(lines)


def markdown(machine: Machine, results: Sequence[Result]) -> str:
    lines = ["# Benchmark", "", "Written by `bin/bench --report`; see `stress/bench/`.", ""]
    lines += _table(["", ""], [[name, str(value)] for name, value in machine.record().items()])
    figures = [figure for result in results for figure in result.figures]
    goals = [figure.met for figure in figures if figure.met is not None]
    lines += [
        "",
        f"{len(figures)} figures; {goals.count(True)} of {len(goals)} goals met.",
        "",
        "p99 is by nearest rank: of fewer than 100 samples it is the largest. Spread is the",
        "distance between the quartiles. A figure with no failure in n independent trials still",
        "leaves an upper bound of 3/n for its rate (95 %).",
    ]
    for result in results:
        lines += ["", f"## {result.name}: {result.title}", ""]
        lines += _table(COLUMNS, [figure.cells() for figure in result.figures])
        for why, names in result.missed.items():
            lines += ["", f"**Missed**: {'; '.join(names)}. {why}."]
        lines += ["", *(f"- {note}" for note in result.notes)] if result.notes else []
        lines += ["", f"Took {result.took_s:g} s."]
        if result.error:
            lines += ["", f"**Not finished**: {result.error}"]
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(head), line(["---"] * len(head)), *map(line, rows)]
