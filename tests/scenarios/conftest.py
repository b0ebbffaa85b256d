from __future__ import annotations

from tests.actors.conftest import world
from tests.mail.conftest import short_queues, site

__all__ = ["short_queues", "site", "world"]
