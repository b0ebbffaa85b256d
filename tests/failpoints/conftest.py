"""Trees that the cells of a module share, and where their records go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.crash.stage import Stages
from tests.failpoints.scene import Record
from tests.failpoints.stage import Stage

RECORDS = "PDRT_FAILPOINT_RECORDS"  # a file; see tests/failpoints/render.py


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stages[Stage]]:
    made = Stages(tmp_path_factory.mktemp("failpoints"), Stage)
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
