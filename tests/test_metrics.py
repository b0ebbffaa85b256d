from __future__ import annotations

import os
import re
from collections.abc import Generator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from pdrt.clock import SECOND_NS
from pdrt.metrics import SIMPLE, StatsCollector, TableCollector, exposition
from pdrt.process_rows import Owner
from pdrt.protocol.codec import Malformed
from pdrt.protocol.counters import BUCKETS, Counter, bucket_of
from pdrt.protocol.states import Event, KVPoll, Reason, Role
from pdrt.shm_status import StatusTable, create

NOW = 10**15
ROLE = (("role", "prefill"),)
Labels = tuple[tuple[str, str], ...]


class Scraped:
    """A table, and what Prometheus would make of it."""

    def __init__(self) -> None:
        fd = create(
            Role.PREFILL,
            rooms_max=100,
            instance=b"",
            timeouts_ms={KVPoll.Bootstrapping: 1000},
            now_ns=NOW,
        )
        self.tables = [StatusTable(fd, Owner(row, 1)) for row in (1, 2)]
        os.close(fd)
        self.restarts = [("listener", 0), ("worker0", 0)]
        collector = TableCollector(self.tables[0], role="prefill", restarts=lambda: self.restarts)
        self.render = exposition(collector)

    def scrape(self) -> dict[tuple[str, Labels], float]:
        found = {}
        for family in text_string_to_metric_families(self.render().decode()):
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                assert key not in found, f"{key} twice"
                found[key] = sample.value
        return found

    def value(self, name: str, **labels: str) -> float:
        return self.scrape()[name, tuple(sorted({"role": "prefill", **labels}.items()))]

    def close(self) -> None:
        for table in self.tables:
            table.close()


@pytest.fixture
def scraped() -> Generator[Scraped]:
    made = Scraped()
    yield made
    made.close()


def expected_series() -> set[tuple[str, Labels]]:
    def with_role(**labels: str) -> Labels:
        return tuple(sorted({"role": "prefill", **labels}.items()))

    series = {("pdrt_rooms", with_role(state=state.name)) for state in KVPoll}
    series |= {("pdrt_rooms_unquiet", ROLE), ("pdrt_rooms_max", ROLE)}
    series |= {(f"pdrt_{name}_total", ROLE) for _, name, _ in SIMPLE}
    series |= {("pdrt_malformed_frames_total", with_role(kind=k.name.lower())) for k in Malformed}
    series |= {
        ("pdrt_room_verdicts_total", with_role(verdict="failed", reason=reason.name.lower()))
        for reason in list(Reason)[1:]
    }
    series.add(("pdrt_room_verdicts_total", with_role(verdict="success", reason="")))
    series |= {
        ("pdrt_process_restarts_total", with_role(process=name)) for name in ("listener", "worker0")
    }
    return series


def test_every_series_exists_at_zero_from_the_first_scrape(scraped: Scraped) -> None:
    found = scraped.scrape()
    plain = {key for key in found if not re.search("_seconds_(bucket|sum|count)$", key[0])}
    assert plain == expected_series()
    for name in ("pdrt_room_seconds", "pdrt_transfer_seconds"):
        assert {(f"{name}_sum", ROLE), (f"{name}_count", ROLE)} <= found.keys()
        assert sum(key[0] == f"{name}_bucket" for key in found) == BUCKETS
    assert {key for key, value in found.items() if value} == {("pdrt_rooms_max", ROLE)}
    assert found["pdrt_rooms_max", ROLE] == 100


def test_every_counter_of_its_own_has_a_series() -> None:
    blocks = {
        Counter.MALFORMED,
        Counter.VERDICT_SUCCESS,
        Counter.VERDICT_FAILED,
        Counter.ROOM_NS,
        Counter.ROOM_BUCKET,
        Counter.TRANSFER_NS,
        Counter.TRANSFER_BUCKET,
    }
    assert {counter for counter, _, _ in SIMPLE} == set(Counter) - blocks
    names = [name for _, name, _ in SIMPLE]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("counter", "name"), [(c, name) for c, name, _ in SIMPLE])
def test_what_every_process_counted_is_added_up(
    scraped: Scraped, counter: Counter, name: str
) -> None:
    for amount, table in enumerate(scraped.tables, start=1):
        table.count(counter, amount)
    assert scraped.value(f"pdrt_{name}_total") == 3


def test_a_malformed_frame_is_seen_by_its_kind(scraped: Scraped) -> None:
    for kind in Malformed:
        scraped.tables[1].count(Counter.MALFORMED, 1 + kind, kind)
    for kind in Malformed:
        assert scraped.value("pdrt_malformed_frames_total", kind=kind.name.lower()) == 1 + kind


def test_restarts_are_read_at_each_scrape(scraped: Scraped) -> None:
    scraped.restarts[1] = ("worker0", 4)
    assert scraped.value("pdrt_process_restarts_total", process="worker0") == 4


def test_rooms_are_seen_in_the_state_they_are_in(scraped: Scraped) -> None:
    table = scraped.tables[0]
    forward = (Event.PEER_KNOWN, Event.CHUNK_POSTED, Event.LANDED)
    histories = [forward[:length] for length in range(4)]
    histories += [(Event.FAULT,), (*forward[:2], Event.FAULT), (*forward[:2], Event.FAULT)]
    handles = []
    for room, history in enumerate(histories):
        handle = table.open(room, 0, now_ns=NOW)
        handles.append(handle)
        for event in history:
            table.move(handle.slot, handle.generation, event, now_ns=NOW, reason=Reason.NONE)
    for state in KVPoll:
        expected = 3 if state is KVPoll.Failed else 1
        assert scraped.value("pdrt_rooms", state=state.name) == expected
    assert scraped.value("pdrt_rooms_unquiet") == 2
    assert scraped.value("pdrt_rooms_opened_total") == 7
    table.set_quiet(handles[-1].slot, handles[-1].generation)
    assert scraped.value("pdrt_rooms_unquiet") == 1
    table.clear(handles[-1].slot, handles[-1].generation)
    assert scraped.value("pdrt_rooms", state="Failed") == 2
    table._claim()  # taken and not yet a room
    assert sum(v for (name, _), v in scraped.scrape().items() if name == "pdrt_rooms") == 6


@pytest.mark.parametrize("reason", list(Reason)[1:])
def test_a_failure_is_seen_by_its_reason(scraped: Scraped, reason: Reason) -> None:
    table = scraped.tables[1]
    handle = table.open(1, 0, now_ns=NOW)
    table.move(handle.slot, handle.generation, Event.FAULT, now_ns=NOW, reason=reason)
    verdicts = {k[1]: v for k, v in scraped.scrape().items() if k[0] == "pdrt_room_verdicts_total"}
    assert [dict(labels)["reason"] for labels, value in verdicts.items() if value] == [
        reason.name.lower()
    ]
    assert scraped.value("pdrt_room_seconds_count") == 1
    assert scraped.value("pdrt_transfer_seconds_count") == 0


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 10**13), min_size=1, max_size=8))
def test_histograms_hold_every_duration(durations_ns: list[int]) -> None:
    scraped = Scraped()
    try:
        table = scraped.tables[0]
        for duration_ns in durations_ns:
            handle = table.open(1, 0, now_ns=NOW)
            at = handle.slot, handle.generation
            table.move(*at, Event.PEER_KNOWN, now_ns=NOW)
            table.move(*at, Event.CHUNK_POSTED, now_ns=NOW)
            table.move(*at, Event.LANDED, now_ns=NOW + duration_ns)
            table.clear(*at)
        found = scraped.scrape()
    finally:
        scraped.close()
    for name in ("pdrt_room_seconds", "pdrt_transfer_seconds"):
        assert found[f"{name}_count", ROLE] == len(durations_ns)
        assert found[f"{name}_sum", ROLE] == pytest.approx(sum(durations_ns) / SECOND_NS)
        buckets = sorted(
            (float(dict(labels)["le"]), value)
            for (series, labels), value in found.items()
            if series == f"{name}_bucket"
        )
        for index, (_, value) in enumerate(buckets):
            assert value == sum(bucket_of(duration_ns) <= index for duration_ns in durations_ns)


def test_an_engines_own_numbers_are_gauges_read_at_each_scrape() -> None:
    stats = {"running": 0, "pages_held": 3}
    render = exposition(StatsCollector(lambda: stats, role="decode"))
    stats["running"] = 2
    families = list(text_string_to_metric_families(render().decode()))
    assert {family.type for family in families} == {"gauge"}
    samples = [sample for family in families for sample in family.samples]
    assert {sample.name: sample.value for sample in samples} == {
        "pdrt_engine_running": 2,
        "pdrt_engine_pages_held": 3,
    }
    assert all(sample.labels == {"role": "decode"} for sample in samples)


def test_what_an_engine_recomputed_is_a_counter_from_the_first_scrape_on() -> None:
    stats = {"recomputed": 0}
    render = exposition(StatsCollector(lambda: stats, role="decode"))
    assert 'pdrt_engine_recomputed_total{role="decode"} 0.0' in render().decode()
    stats["recomputed"] = 3
    assert 'pdrt_engine_recomputed_total{role="decode"} 3.0' in render().decode()
    (family,) = text_string_to_metric_families(render().decode())
    assert family.type == "counter"


def test_the_text_is_a_valid_exposition(scraped: Scraped) -> None:
    text = scraped.render().decode()
    assert text.endswith("\n")
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation for family in families)
    assert {family.type for family in families} == {"counter", "gauge", "histogram"}
    assert all(family.name.startswith("pdrt_") for family in families)
