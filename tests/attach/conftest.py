"""A tree for each test."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.attach.tree import Tree


@pytest.fixture
def tree() -> Generator[Tree]:
    made = Tree()
    yield made
    made.close()
