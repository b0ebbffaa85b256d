"""A site for each test, and queues that are soon full."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from pdrt.mail import mailbox as mailbox_module
from tests.mail.site import Site


@pytest.fixture
def site() -> Generator[Site]:
    made = Site()
    yield made
    made.close()


@pytest.fixture
def short_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox_module, "QUEUE_MAX", 8)
