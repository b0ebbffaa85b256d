"""The board that supervised children and their supervisor share."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.supervisor.kids import MemoryBoard


@pytest.fixture
def board() -> Generator[MemoryBoard]:
    made = MemoryBoard()
    yield made
    made.close()
