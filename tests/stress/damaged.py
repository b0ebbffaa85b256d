"""A trace of a model that is not understood, whoever replays it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from stress.models.check import Unusable

#: What may become of a line that a model tells.
DAMAGED = ["{} 1", "EV {}", "EV", "EVENT 1"]


def refuses(parse: Callable[[str], Sequence[object]], trace: Path, damaged: str) -> None:
    """Assert it.  Else a model that comes to tell it in other words is replayed with nothing
    compared."""
    line = trace.read_text().splitlines()[0]
    assert len(parse(f"spin says more\n{line}\n")) == 1
    with pytest.raises(Unusable, match="not understood"):
        parse(f"{line}\n{damaged.format(line)}\n")
