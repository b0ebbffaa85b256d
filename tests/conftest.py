"""What every test runs under: the leak check.  Waiting is in tests/waiting.py."""

from __future__ import annotations

import pytest

from tests.leaks import LeakCheck


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(LeakCheck(), "leaks")
