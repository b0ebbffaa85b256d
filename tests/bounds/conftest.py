from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.actors.world import World
from tests.mail.conftest import short_queues, site

__all__ = ["short_queues", "site", "world"]


@pytest.fixture
def world() -> Iterator[World]:
    with World() as world:
        yield world
        world.settle()
