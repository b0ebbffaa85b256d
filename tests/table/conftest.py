"""A table of four rooms, seen by one process or by two."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from pdrt.shm_status import StatusTable
from tests.table.views import tables


@pytest.fixture
def table() -> Generator[StatusTable]:
    with tables(1) as [view]:
        yield view


@pytest.fixture
def pair() -> Generator[list[StatusTable]]:
    with tables(2) as views:
        yield views
