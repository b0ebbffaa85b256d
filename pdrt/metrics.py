"""Prometheus series, read from shared memory at each scrape.  Reads only; the one home of
prometheus-client.  Every series exists at zero from the first scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from pdrt.protocol.codec import Malformed
from pdrt.protocol.counters import BUCKETS, Counter, bucket_end_s
from pdrt.protocol.states import KVPoll, Reason
from pdrt.shm_status import QUIET_BIT, STATE_MASK, StatusTable

SIMPLE = (
    (Counter.FRAMES_IN, "frames_received", "Frames taken in by mailboxes"),
    (Counter.FRAMES_OUT, "frames_sent", "Frames sent by mailboxes"),
    (Counter.MESSAGES_IN, "messages_received", "Messages taken in by mailboxes"),
    (Counter.MESSAGES_OUT, "messages_sent", "Messages sent by mailboxes"),
    (Counter.SENDS_REFUSED, "sends_refused", "Messages dropped because a queue was full"),
    (Counter.RESENDS, "resends", "Messages sent again for want of an acknowledgement"),
    (Counter.LATE, "late_messages", "Messages about rooms that were over or unknown"),
    (Counter.ROOMS_OPENED, "rooms_opened", "Rooms opened by engines"),
    (Counter.ROOMS_REFUSED, "rooms_refused", "Rooms refused because the table was full"),
    (Counter.BYTES_MOVED, "transferred_bytes", "KV and aux bytes of rooms that succeeded"),
    (Counter.CHUNKS_MOVED, "transferred_chunks", "Chunks of rooms that succeeded"),
    (Counter.FENCES, "fences", "Fences posted for rooms that failed while moving"),
    (Counter.ABORTS_SENT, "aborts_sent", "Aborts sent to peers, repeats included"),
    (Counter.ABORTS_TAKEN, "aborts_received", "Aborts received from peers"),
    (Counter.RESYNCS, "resyncs", "Handshakes started again"),
    (Counter.PEERS_LOST, "peers_lost", "Peers whose heartbeat stopped"),
    (Counter.DEADLINES, "room_deadlines_exceeded", "Rooms ended by their deadline"),
    (Counter.SWEPT, "rooms_swept", "Rooms ended because a process of ours died"),
    (Counter.QUIET_FORCED, "quiet_forced", "Workers restarted to make a room quiet"),
    (Counter.CALLBACK_ERRORS, "callback_errors", "Exceptions in the supervisor's loop"),
    (Counter.FORGOTTEN, "forgotten", "Things that a full memory forgot before their time"),
    (Counter.STRANGERS, "strangers", "Connections to a control port that never shook hands"),
    (
        Counter.CONNECTIONS_REFUSED,
        "connections_refused",
        "Connections to a control port beyond its bound",
    ),
    (Counter.SHORTAGES, "descriptor_shortages", "Seconds in which nobody new could be let in"),
)


class TableCollector(Collector):
    """Custom collector over one status table."""

    def __init__(
        self,
        table: StatusTable,
        *,
        role: str,
        restarts: Callable[[], Sequence[tuple[str, int]]],
    ) -> None:
        """`restarts()`: (child, restarts so far) of every child."""
        self._table = table
        self._role = role
        self._restarts = restarts

    def collect(self) -> Iterable[Metric]:
        totals = self._table.counters.sum(axis=0).tolist()
        yield from self._rooms()
        verdicts = CounterMetricFamily(
            "pdrt_room_verdicts", "Rooms that ended", labels=["role", "verdict", "reason"]
        )
        verdicts.add_metric([self._role, "success", ""], totals[Counter.VERDICT_SUCCESS])
        for reason in Reason:
            if reason is not Reason.NONE:
                value = totals[Counter.VERDICT_FAILED + reason]
                verdicts.add_metric([self._role, "failed", reason.name.lower()], value)
        yield verdicts
        malformed = CounterMetricFamily(
            "pdrt_malformed_frames", "Frames dropped, by kind", labels=["role", "kind"]
        )
        for kind in Malformed:
            value = totals[Counter.MALFORMED + kind]
            malformed.add_metric([self._role, kind.name.lower()], value)
        yield malformed
        restarts = CounterMetricFamily(
            "pdrt_process_restarts", "Restarts of each child", labels=["role", "process"]
        )
        for name, count in self._restarts():
            restarts.add_metric([self._role, name], count)
        yield restarts
        for counter, name, words in SIMPLE:
            family = CounterMetricFamily(f"pdrt_{name}", words, labels=["role"])
            family.add_metric([self._role], totals[counter])
            yield family
        for name, words, bucket, total in (
            ("room_seconds", "From opened to verdict", Counter.ROOM_BUCKET, Counter.ROOM_NS),
            (
                "transfer_seconds",
                "In Transferring, of rooms that succeeded",
                Counter.TRANSFER_BUCKET,
                Counter.TRANSFER_NS,
            ),
        ):
            yield self._histogram(name, words, totals[bucket : bucket + BUCKETS], totals[total])

    def _histogram(self, name: str, words: str, counts: list[int], sum_ns: int) -> Metric:
        family = HistogramMetricFamily(f"pdrt_{name}", words, labels=["role"])
        running = np.cumsum(counts).tolist()
        buckets = [(f"{bucket_end_s(i):.6g}", running[i]) for i in range(BUCKETS - 1)]
        family.add_metric([self._role], [*buckets, ("+Inf", running[-1])], sum_ns / 1e9)
        return family

    def _rooms(self) -> Iterable[Metric]:
        words = self._table.words[self._table.live_slots()]
        states = np.bincount(words & np.uint64(STATE_MASK), minlength=16)
        rooms = GaugeMetricFamily("pdrt_rooms", "Rooms in the table", labels=["role", "state"])
        for state in KVPoll:
            rooms.add_metric([self._role, state.name], int(states[state]))
        yield rooms
        failed = words[(words & np.uint64(STATE_MASK)) == KVPoll.Failed]
        unquiet = int(np.count_nonzero(failed & np.uint64(QUIET_BIT) == 0))
        gauge = GaugeMetricFamily(
            "pdrt_rooms_unquiet", "Failed rooms whose bytes may still move", labels=["role"]
        )
        gauge.add_metric([self._role], unquiet)
        yield gauge
        room_max = GaugeMetricFamily("pdrt_rooms_max", "Slots in the table", labels=["role"])
        room_max.add_metric([self._role], self._table.rooms_max)
        yield room_max


COUNTED = {"recomputed": "Requests whose room was lost and whose prompt was computed here"}


class StatsCollector(Collector):
    """An engine's own numbers: one gauge each, and a counter of those in COUNTED."""

    def __init__(self, stats: Callable[[], Mapping[str, int]], *, role: str) -> None:
        self._stats = stats
        self._role = role

    def collect(self) -> Iterable[Metric]:
        for name, value in self._stats().items():
            words = COUNTED.get(name, f"Engine: {name.replace('_', ' ')}")
            kind = CounterMetricFamily if name in COUNTED else GaugeMetricFamily
            family = kind(f"pdrt_engine_{name}", words, labels=["role"])
            family.add_metric([self._role], value)
            yield family


def exposition(*collectors: Collector) -> Callable[[], bytes]:
    """A function that renders the text format of some collectors."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return lambda: generate_latest(registry)
