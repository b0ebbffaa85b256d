"""How every process of a tree logs: to stderr, one line an event, with role and pid."""

from __future__ import annotations

import logging

from pdrt.config import Settings


def start_logging(settings: Settings) -> None:
    """Once in each process, before anything is logged."""
    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s "
        f"role={settings.role} pid=%(process)d %(message)s",
    )
