from __future__ import annotations

from tests.actors.conftest import world

__all__ = ["world"]
