from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.actors.world import World


@pytest.fixture(params=[False, True], ids=["nixl-like", "shm-like"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with World(shm=request.param) as world:
        yield world
        world.settle()
