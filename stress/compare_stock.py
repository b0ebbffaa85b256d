"""The same faults, put to unmodified components of SGLang and vLLM and to pdrt, side by side.

    python -m stress.compare_stock [--only sglang,vllm,pdrt] [--faults frame,abort,...]
                                   [--json FILE.json] [--report FILE.md] [--beside FILE.json ...]

The first time it makes an environment for each stock stack in the cache (3 GB each; minutes).  A
run takes 8 to 15 minutes on a quiet host, most of it waiting for what does not happen.  Exits with
1 if something of pdrt's column could not be played; what another stack lacks is said in its cells.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pdrt.config import default_environment
from stress.bench.report import Machine
from stress.stock import environments, pdrt_faults, sglang_faults, vllm_faults
from stress.stock.findings import (
    FAULTS,
    STACKS,
    WATCH_S,
    Finding,
    Kept,
    NoEnvironment,
    NoSuchThing,
    Play,
    Trial,
    markdown,
    side_by_side,
)

PLAYS: dict[str, Mapping[str, Play]] = {
    "sglang": sglang_faults.PLAYS,
    "vllm": vllm_faults.PLAYS,
    "pdrt": pdrt_faults.PLAYS,
}
LOG_LINES = 15


class Column(msgspec.Struct):
    """One stack, and the run that played it."""

    versions: str
    findings: list[Finding]
    machine: dict[str, Any] = msgspec.field(default_factory=dict)


def play(stack: str, fault: str, trial: Trial) -> Finding:
    """One cell.  What goes wrong is said in it, and spoils what was kept for the next."""
    begun = time.monotonic()
    finding = Finding(stack=stack, fault=fault)
    try:
        found = PLAYS[stack][fault](trial)
        finding.said, finding.how, finding.figures = found.said, found.how, dict(found.figures)
    except NoSuchThing as error:
        finding.said = f"no such thing: {error}"
    except Exception as error:
        traceback.print_exc()
        _show_logs(trial.folder)
        finding.why_not = f"{type(error).__name__}: {error}".splitlines()[0]
        trial.kept.close()
    finding.took_s = round(time.monotonic() - begun, 1)
    return finding


def _show_logs(folder: Path) -> None:
    for log in sorted([*folder.glob("*.err"), *folder.glob("*.log")]):
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        print(f"-- {log.name}", *lines, sep="\n", file=sys.stderr)


def column(stack: str, faults: Sequence[str], folder: Path, options: argparse.Namespace) -> Column:
    """Every fault of one stack, in the order that suits it."""
    mine = [fault for fault in PLAYS[stack] if fault in faults]
    python = None
    try:
        if stack == "pdrt":
            versions = environments.our_versions()
        else:
            python = environments.MAKERS[stack]()
            versions = environments.versions(stack, python)
    except NoEnvironment as error:
        why_not = f"its environment could not be made: {error}"
        return Column(
            "not installed", [Finding(stack=stack, fault=f, why_not=why_not) for f in mine]
        )
    findings = []
    with contextlib.closing(Kept()) as kept:
        trial = Trial(folder, kept, python, options.watch_s, options.part)
        for fault in mine:
            findings.append(play(stack, fault, trial))
            print(f"{stack} {fault} ({findings[-1].took_s:g} s): {findings[-1].cell}", flush=True)
    return Column(versions, findings)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m stress.compare_stock",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--only", help=f"stacks, of {','.join(STACKS)}", default=",".join(STACKS))
    parser.add_argument("--faults", help=f"of {','.join(FAULTS)}", default=",".join(FAULTS))
    parser.add_argument("--watch-s", type=float, default=WATCH_S, help="how long to watch")
    parser.add_argument("--part", type=float, default=1.0, help="part of the rooms of each figure")
    parser.add_argument("--json", type=Path, help="write findings and figures here")
    parser.add_argument(
        "--beside",
        type=Path,
        nargs="+",
        default=[],
        help="columns of earlier runs, from their --json, for stacks that are not played now",
    )
    parser.add_argument("--report", type=Path, help="write a report in Markdown here")
    options = parser.parse_args(arguments)
    for name, known in (("only", STACKS), ("faults", FAULTS)):
        asked = getattr(options, name).split(",")
        if unknown := set(asked) - known.keys():
            parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        setattr(options, name, [each for each in known if each in asked])
    return options


def facts(machine: Machine, columns: Mapping[str, Column], took_s: float) -> dict[str, Any]:
    """Where and when, for the report; what was played by an earlier run has its own date."""
    record = machine.record()
    record["versions"] = "; ".join(
        f"{STACKS[stack]}: {column.versions}" for stack, column in columns.items()
    )
    record["took"] = f"{took_s / 60:.0f} minutes"
    for stack, each in columns.items():
        if each.machine != machine.record():
            run = " ".join(f"{name} {each.machine[name]}," for name in ("date", "commit", "load"))
            record[f"{STACKS[stack]}, played before"] = f"{run} {each.machine['command']}"
    return record


def shown(argument: str) -> str:
    """In a report, a path of this machine is its last name."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def earlier(files: Sequence[Path], played: Sequence[str]) -> dict[str, Column]:
    found: dict[str, Column] = {}
    for file in files:
        found |= msgspec.json.decode(file.read_bytes(), type=dict[str, Column])
    return {stack: each for stack, each in found.items() if stack not in played}


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    machine = Machine.now(["python", "-m", "stress.compare_stock", *map(shown, arguments)])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    default_environment({"UCX_TLS": "tcp,self"})  # as the stock engines: stress/stock/puppets.py
    columns, begun = earlier(options.beside, options.only), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pdrt-stock-") as name:
        for stack in options.only:
            folder = Path(name) / stack
            folder.mkdir()
            columns[stack] = column(stack, options.faults, folder, options)
            columns[stack].machine = machine.record()
            if options.json:  # as far as it is: a run is long
                mine = {each: columns[each] for each in options.only if each in columns}
                options.json.write_bytes(msgspec.json.format(msgspec.json.encode(mine)) + b"\n")
    findings = [finding for each in columns.values() for finding in each.findings]
    print("", *side_by_side(findings), sep="\n", flush=True)
    if options.report:
        told = facts(machine, columns, time.monotonic() - begun)
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(markdown(told, findings))
    return int(any(f.stack == "pdrt" and not f.said for f in findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
