"""The oracle: reads the histories of a piece when it is over, and says what they prove.

It knows the laws and the plan of the rooms, and nothing of pdrt: no counter, no constant and no
decoding of pdrt's own is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stress.cascades.history import DTYPE, Kind, read_all
from stress.cascades.oracle.causes import judge_causes
from stress.cascades.oracle.faults import Faults, read_faults
from stress.cascades.oracle.fences import read_fences
from stress.cascades.oracle.findings import Findings
from stress.cascades.oracle.halves import DIED, Room, has_left, judge_rooms, read_rooms
from stress.cascades.oracle.moves import judge_words
from stress.cascades.oracle.power import ask_innocents
from stress.cascades.oracle.survey import judge_census
from stress.cascades.plan import Mix

SERVED_S = 10.0  # a connection that waits longer for a listener's first word counts as lost

Histories = Mapping[str, NDArray[np.void]]


def judge(folder: Path, sides: Sequence[int], salt: int, mix: Mix) -> Findings:
    """`sides` of the players, by their number."""
    return judge_histories(read_all(folder), sides, salt, mix)


def judge_histories(histories: Histories, sides: Sequence[int], salt: int, mix: Mix) -> Findings:
    findings = Findings()
    nothing = np.zeros(0, dtype=DTYPE)
    driver = histories.get("driver", nothing)
    watcher = histories.get("watcher", nothing)
    players = {name: h for name, h in histories.items() if name.startswith("player")}
    ended_s = _ended_s(driver)
    faults = read_faults(driver, watcher, findings)
    judge_words(watcher, findings)
    rooms = read_rooms(players, sides, faults.killed, findings)
    judge_rooms(rooms, salt, mix, findings)
    fences = read_fences(watcher, players)
    fences.judge(faults, findings)
    judge_causes(rooms, faults, fences, ended_s, findings)
    ask_innocents(rooms, faults, fences, ended_s, findings)
    _judge_watching(histories, findings)
    _judge_connects(histories.get("connector", nothing), faults, findings)
    judge_census(driver, findings)
    _draw(rooms, faults, findings)
    return findings


def _ended_s(driver: NDArray[np.void]) -> float:
    ends = driver["ns"][driver["kind"] == Kind.END]
    return float(ends[0]) / 1e9 if len(ends) else float("inf")


def _judge_watching(histories: Histories, findings: Findings) -> None:
    """Without a witness nothing is proved."""
    for name in ("watcher", "connector"):
        if name not in histories or not has_left(histories[name]):
            findings.violation(DIED, name)


def _judge_connects(connector: NDArray[np.void], faults: Faults, findings: Findings) -> None:
    """Nobody is refused, unless the whole tree is away; nobody waits for long, or is dropped but by
    a listener that dies."""
    waiting: dict[int, tuple[float, int]] = {}
    for ns, number, c, _, tree, kind in connector.tolist():
        at_s = ns / 1e9
        if kind == Kind.LEFT:
            continue
        findings.counts[f"connects: {Kind(kind).name.lower()}"] += 1
        if kind == Kind.CONNECTING:
            waiting[number] = at_s, tree
            continue
        if kind == Kind.CONNECTED:
            findings.counts["connects"] += 1
            waiting.setdefault(number, (at_s, tree))
            continue
        begun_s, _ = waiting.pop(number, (at_s, tree))
        text = f"tree {tree} at {at_s:.6f}, after {at_s - begun_s:.3f} s"
        if kind == Kind.TURNED_AWAY and not faults.is_away(tree, at_s):
            findings.violation("refused connects", f"{text}: errno {c}")
        elif kind == Kind.RESET and not faults.ended_listener(tree, begun_s, at_s):
            findings.violation("connects reset without a cause", text)
        elif kind == Kind.SERVED:
            findings.peak("connect until served, s", at_s - begun_s)
            if at_s - begun_s > SERVED_S:
                findings.violation("connects never served", text)
    last_s = float(connector["ns"].max(initial=0)) / 1e9
    for at_s, tree in waiting.values():
        if at_s < last_s - SERVED_S:
            findings.violation("connects never served", f"tree {tree} at {at_s:.6f}")


def _draw(rooms: Mapping[int, Room], faults: Faults, findings: Findings) -> None:
    """Curves: verdicts and blows in each second."""
    ends = [half.verdict_s for room in rooms.values() for half in room.halves.values()]
    ends = [at_s for at_s in ends if at_s]
    if not ends:
        return
    begun_s = min(ends)
    edges = np.arange(0, max(ends) - begun_s + 1, 1.0)
    if len(edges) < 2:
        return
    for name, times in (
        ("verdicts/s", ends),
        ("blows/s", [fault.begun_s for fault in faults.all if fault.asked]),
    ):
        counts, _ = np.histogram(np.array(times) - begun_s, bins=edges)
        findings.series[name] = [
            (float(at), float(n)) for at, n in zip(edges[:-1], counts, strict=True)
        ]
