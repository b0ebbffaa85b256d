"""Measures pdrt on this host and holds each figure against its goal.

Without names everything is measured.  --stock measures unmodified SGLang components beside it, in
the same run; the first time that builds an environment of 3 GB in the cache.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from stress.bench import (
    aborts,
    connects,
    crashes,
    deadlines,
    failpoints,
    hangs,
    idle,
    neighbours,
    pages,
    rooms,
    stock,
    table,
)
from stress.bench.bench import QUICK_PART, Bench
from stress.bench.figures import Result
from stress.bench.report import Machine, console, default_report, markdown

#: In the order they run, with the seconds after which each is given up.
MEASUREMENTS: dict[str, tuple[ModuleType, float]] = {
    "table": (table, 60),
    "failpoints": (failpoints, 60),
    "rooms": (rooms, 480),
    "pages": (pages, 120),
    "aborts": (aborts, 120),
    "deadlines": (deadlines, 120),
    "crashes": (crashes, 240),
    "hangs": (hangs, 300),
    "connects": (connects, 120),
    "neighbours": (neighbours, 120),
    "idle": (idle, 60),
}
LOG_LINES = 15  # of each tree, shown when a measurement goes wrong


class GivenUp(BaseException):
    """The measurement took too long.  Nothing may catch it on the way."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    def give_up(_signum: int, _frame: object) -> NoReturn:
        raise GivenUp(f"given up after {seconds:g} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def run(bench: Bench, name: str) -> Result:
    """Measure; what goes wrong becomes a line of the result."""
    module, limit_s = MEASUREMENTS[name]
    result = Result(name, module.TITLE)
    folder = bench.folder / name
    folder.mkdir()
    begun = time.monotonic()
    try:
        with at_most(limit_s):
            module.measure(dataclasses.replace(bench, folder=folder), result)
    except (Exception, GivenUp) as error:
        traceback.print_exc()
        for log in sorted(folder.glob("*.log")):
            lines = log.read_text(errors="replace").splitlines()
            odd = [line for line in lines if " INFO " not in line][-LOG_LINES:]
            if odd:
                print(f"-- {log.name}", *odd, sep="\n", file=sys.stderr)
        result.error = f"{type(error).__name__}: {error}".splitlines()[0]
    result.took_s = round(time.monotonic() - begun, 1)
    return result


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "bin/bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = ", ".join(MEASUREMENTS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"what to measure: {names}")
    parser.add_argument("--quick", action="store_true", help="a few samples of each")
    parser.add_argument("--stock", action="store_true", help="measure SGLang's components too")
    parser.add_argument("--transports", help="of rooms and pages; nixl,shm, or nixl if quick")
    parser.add_argument("--repeat", type=int, default=3, help="interleaved repeats of room rates")
    parser.add_argument("--json", type=Path, help="write figures and samples here")
    parser.add_argument(
        "--report",
        type=Path,
        nargs="?",
        const=default_report(),
        metavar="FILE.md",
        help="write a report in Markdown; by default %(const)s",
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - MEASUREMENTS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {names}")
    return options


def main(arguments: Sequence[str]) -> int:
    """0 if everything was measured, whether or not the goals are met."""
    options = parse(arguments)
    machine = Machine.now(["bin/bench", *arguments])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    transports = options.transports or ("nixl" if options.quick else "nixl,shm")
    results = []
    with tempfile.TemporaryDirectory(prefix="pdrt-bench-") as folder:
        bench = Bench(
            Path(folder),
            part=QUICK_PART if options.quick else 1.0,
            repeat=options.repeat,
            transports=tuple(transports.split(",")),
            stock_python=stock.python() if options.stock else None,
        )
        for name in options.names or MEASUREMENTS:
            results.append(run(bench, name))
            print(console(results[-1]), flush=True)
    if options.json:
        record = {"machine": machine.record(), "results": [r.record() for r in results]}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.report:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        options.report.write_text(markdown(machine, results))
    return int(any(result.error for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
