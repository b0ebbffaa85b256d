"""Trees that the cells of a module share, and where their records go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.crash.scene import Record
from tests.crash.stage import Stage, Stages

RECORDS = "PDRT_CRASH_RECORDS"  # a file; tests/crash/render.py makes docs/crash-matrix.md of it


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages[Stage]]:
    made = Stages(tmp_path_factory.mktemp("crash"), Stage)
    yield made
    made.close()


@pytest.fixture(scope="session")
def records() -> Iterator[list[Record]]:
    collected: list[Record] = []
    yield collected
    if path := os.environ.get(RECORDS):
        with Path(path).open("ab") as output:
            for record in collected:
                output.write(msgspec.json.encode(record) + b"\n")
