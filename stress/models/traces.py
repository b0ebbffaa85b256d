"""What spin tells of one random run of a model."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
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
    lines = [line.strip() for line in done.stdout.splitlines() if line.lstrip().startswith("EV ")]
    if (done.returncode != 0 and not mutant) or not lines:
        raise Unusable(f"{' '.join(command)}\n{done.stdout[-500:]}{done.stderr[-500:]}")
    return "\n".join(lines) + "\n"
