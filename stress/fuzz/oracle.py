"""What is compared before and after: processes, incarnations, descriptors, memory, counters."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections import Counter as Multiset
from dataclasses import dataclass
from typing import Any

import psutil

from pdrt.protocol.codec import Malformed
from pdrt.protocol.counters import Counter
from stress.bench.trees import Tree

FDS_MORE = 16
# What an actor remembers of rooms is bounded (docs/bounds.md), and 10^6 frames fill some of it.
RSS_MORE_BYTES = {"listener": 384 << 20, "": 96 << 20}
COUNTED = (
    *(Counter.FRAMES_IN, Counter.MESSAGES_IN, Counter.LATE, Counter.STRANGERS),
    *(Counter.CONNECTIONS_REFUSED, Counter.FORGOTTEN, Counter.SENDS_REFUSED, Counter.RESYNCS),
    *(Counter.PEERS_LOST, Counter.QUIET_FORCED, Counter.CALLBACK_ERRORS, Counter.DEADLINES),
)


@dataclass(frozen=True)
class Child:
    pid: int
    incarnation: int
    restarts: int


@dataclass(frozen=True)
class State:
    """Of one tree."""

    children: dict[str, Child]
    fds: dict[str, int]  # by child, the supervisor included
    rss_bytes: dict[str, int]
    malformed: Multiset[str]
    counted: dict[str, int]
    callback_errors: int

    @classmethod
    def of(cls, tree: Tree) -> State:
        with urllib.request.urlopen(f"{tree.facts['supervisor']}/health", timeout=30) as answer:
            found: list[dict[str, Any]] = json.load(answer)["children"]
        children = {c["name"]: Child(c["pid"] or 0, c["incarnation"], c["restarts"]) for c in found}
        pids = {name: child.pid for name, child in children.items()} | {
            "supervisor": tree.popen.pid
        }
        fds, rss = {}, {}
        for name, pid in pids.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                fds[name], rss[name] = process.num_fds(), process.memory_info().rss
        totals = tree.table.counters.sum(axis=0)
        malformed = Multiset({k.name: int(totals[Counter.MALFORMED + k]) for k in Malformed})
        counted = {c.name: int(totals[c]) for c in COUNTED}
        return cls(children, fds, rss, malformed, counted, _callback_errors(tree))


def _callback_errors(tree: Tree) -> int:
    """Of the supervisor's loop; it is counted there, and not in the table."""
    with urllib.request.urlopen(f"{tree.facts['supervisor']}/metrics", timeout=30) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("pdrt_callback_errors_total"):
                return int(float(line.rsplit(" ", 1)[1]))
    return 0


def descriptors_are_back(before: State, tree: Tree) -> bool:
    now = State.of(tree)
    return all(now.fds.get(name, 0) <= fds + FDS_MORE for name, fds in before.fds.items())


def faults(name: str, before: State, after: State) -> list[str]:
    """Deaths, restarts and growth, as sentences."""
    found = []
    for child, was in before.children.items():
        if after.children.get(child) != was:
            found.append(f"{name}: {child} was {was}, is {after.children.get(child)}")
    for child, fds in before.fds.items():
        more = after.fds.get(child, 0) - fds
        if more > FDS_MORE:
            found.append(f"{name}: {child} has {more} descriptors more than before")
        grown = after.rss_bytes.get(child, 0) - before.rss_bytes[child]
        limit = RSS_MORE_BYTES.get(child, RSS_MORE_BYTES[""])
        if grown > limit:
            found.append(f"{name}: {child} has grown by {grown >> 20} MiB")
    if raised := after.malformed[Malformed.VALUE.name] - before.malformed[Malformed.VALUE.name]:
        found.append(f"{name}: {raised} messages made a handler raise")
    if after.callback_errors != before.callback_errors:
        found.append(f"{name}: {after.callback_errors - before.callback_errors} callbacks raised")
    return found


def unaccounted(
    name: str, before: State, after: State, sent: Multiset[str], lost_at_most: Multiset[str]
) -> list[str]:
    """Each malformed frame is counted once, by its kind; those of broken connections perhaps."""
    found = []
    for kind in (k.name for k in Malformed if k is not Malformed.VALUE):
        counted = after.malformed[kind] - before.malformed[kind]
        if not sent[kind] - lost_at_most[kind] <= counted <= sent[kind]:
            span = f"{sent[kind] - lost_at_most[kind]} to {sent[kind]}"
            found.append(f"{name}: {span} frames {kind} were sent, {counted} are counted")
    taken = after.counted["FRAMES_IN"] - before.counted["FRAMES_IN"]
    all_sent = sum(n for kind, n in sent.items() if kind not in ("attach", "http"))
    all_lost = sum(lost_at_most.values())
    if taken < all_sent - all_lost:  # those of the rooms come on top
        found.append(f"{name}: {all_sent - all_lost} frames or more were sent, {taken} came")
    return found
