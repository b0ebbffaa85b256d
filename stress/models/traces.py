"""What spin tells of one random run of a model."""

from __future__ import annotations

import argparse
import logging
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from stress.models.check import HERE, Unusable, missing

TRACES = Path(__file__).parents[2] / "tests/stress/traces"


class Diverged(Exception):
    """Model and code disagree."""


def simulate(
    model: str, defines: Iterable[str], seed: int, steps: int, *, mutant: bool = False
) -> str:
    """The lines that the model tells; a mutant may break off.  Raises Unusable."""
    if reason := missing():
        raise Unusable(reason)
    command = ["spin", *(f"-D{d}" for d in defines), f"-n{seed}", f"-u{steps}", str(HERE / model)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line.strip() for line in done.stdout.splitlines() if line.lstrip().startswith("EV")]
    if (done.returncode != 0 and not mutant) or not lines:
        raise Unusable(f"{' '.join(command)}\n{done.stdout[-500:]}{done.stderr[-500:]}")
    return "\n".join(lines) + "\n"


def understood(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """What the model tells, line by line, whatever spin prints beside it.  Raises Unusable: a line
    that is passed over is not compared."""
    for line in map(str.strip, text.splitlines()):
        if match := pattern.match(line):
            yield match
        elif line.startswith("EV"):
            raise Unusable(f"not understood: {line}")


def play(
    program: str,
    description: str | None,
    arguments: list[str],
    *,
    worlds: Iterable[str],
    recorded: Iterable[tuple[Path, str, int]],
    simulated: Callable[[str, int, int], str],
    replayed: Callable[[str, str], Counter[str]],
    seeds: int,
    steps: int,
) -> int:
    """The command of a replay; 1 if model and code disagree.  `recorded`: where the trace of which
    world and seed is kept for the tests.  `simulated(world, seed, steps)`: what the model tells.
    `replayed(world, text)`: how often each move was made."""
    parser = argparse.ArgumentParser(prog=f"python -m stress.models.{program}")
    parser.description = description
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seeds", type=int, default=seeds, help="simulations of each world")
    parser.add_argument("--steps", type=int, default=steps, help="steps of each simulation")
    parser.add_argument("--record", action="store_true", help="write the traces of the tests anew")
    asked = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)  # what the code says of what is done to it
    try:
        if asked.record:
            TRACES.mkdir(exist_ok=True)
            for path, world, seed in recorded:
                path.write_text(simulated(world, seed, steps))
        for world in worlds:
            counts: Counter[str] = Counter()
            for seed in range(1, asked.seeds + 1):
                try:
                    counts += replayed(world, simulated(world, seed, asked.steps))
                except Diverged as error:
                    raise Diverged(f"world {world}, seed {seed}: {error}") from None
            each = ", ".join(f"{what} {count:,}" for what, count in counts.most_common())
            print(f"{world}: {asked.seeds} simulations, {counts.total():,} lines, all the same")
            print(f"  {each}")
    except (Unusable, Diverged) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
