"""Numbers of processes that are gone: kept in the sums, and never as series of their own.

F143.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdrt.process_rows import Owner
from pdrt.protocol.counters import Counter
from tests.test_metrics import Scraped


@pytest.fixture
def scraped() -> Iterator[Scraped]:
    made = Scraped()
    yield made
    made.close()


def test_two_hundred_lives_of_a_worker_are_one_series(scraped: Scraped) -> None:
    before = scraped.scrape().keys()
    table = scraped.tables[1]
    for life in range(1, 201):
        table.bury(2)
        table.incarnate(2, life, 40_000 + life, "worker0")
        table.me = Owner(2, life)
        table.count(Counter.CHUNKS_MOVED, 1)
        scraped.restarts[1] = "worker0", life - 1
    after = scraped.scrape()
    assert after.keys() == before
    assert scraped.value("pdrt_transferred_chunks_total") == 200
    assert scraped.value("pdrt_process_restarts_total", process="worker0") == 199
    assert not [labels for _, labels in after if any("400" in value for _, value in labels)]
