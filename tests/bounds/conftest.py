from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.actors.world import World


@pytest.fixture
def world() -> Iterator[World]:
    with World() as world:
        yield world
        world.settle()
