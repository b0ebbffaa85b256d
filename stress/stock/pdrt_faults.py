"""The faults, put to pdrt: real process trees, real NIXL, and this process as their engines."""

from __future__ import annotations

import contextlib
import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial

import numpy as np
import zmq
from numpy.typing import NDArray

from pdrt.clock import monotonic_ns
from pdrt.protocol.codec import Malformed
from pdrt.protocol.counters import Counter
from pdrt.protocol.states import TERMINAL
from stress.bench.figures import summarise
from stress.bench.trees import SMALL, Shape, Tree, pair, started, wait
from stress.bench.trips import ROOMS, Phase, Route, Side, half
from stress.stock.findings import Found, Play, Trial, ms, until
from stress.stock.pdrt_race import race

LARGE = Shape(layers=2, item_bytes=65536, pages=500, chunks=2, pages_count=1000)  # 125 MiB
PLAIN = Shape(layers=1, item_bytes=131072, pages=500, chunks=2, pages_count=500)  # 125 MiB
ROOM_S, QUIET_S, SETTLED_S = 30.0, 60.0, 0.5
BEFORE, SENT, PATTERN = 0x00, 0xAA, 0x55
HELD = 4  # rooms of the frozen decode
COMPARISONS = 3
KINDS = slice(Counter.MALFORMED, Counter.MALFORMED + len(Malformed))


def health(tree: Tree) -> str:
    """ "/live 200 /ready 503 (why)": what its supervisor says."""
    said = []
    for path in ("live", "ready", "health"):
        try:
            with urllib.request.urlopen(f"{tree.facts['supervisor']}/{path}", timeout=5) as got:
                said.append(f"/{path} {got.status}{_degraded(got.read())}")
        except urllib.error.HTTPError as error:
            said.append(f"/{path} {error.code}")
    return " ".join(said)


def _degraded(body: bytes) -> str:
    reasons = json.loads(body).get("degraded")
    return f" (degraded: {', '.join(reasons)})" if reasons else ""


def _calm(tree: Tree) -> None:
    """Until its spare processes are warm, so that what health says is of the fault."""
    wait(lambda: "degraded" not in health(tree), ROOM_S, "a tree that lacks nothing", pause_s=0.1)


def _whole_s(route: Route) -> float:
    """A room from its opening to Success, seen by its engines."""
    begun = time.monotonic()
    route.whole(ROOM_S)
    return time.monotonic() - begun


def _malformed(tree: Tree) -> int:
    return int(tree.table.counters[:, KINDS].sum())


def frame(trial: Trial) -> Found:
    trees = [
        Tree(trial.folder, role, SMALL, name=name)
        for name, role in {"prefill": "prefill", "decode": "decode", "later": "decode"}.items()
    ]
    with started(trees):
        prefill, decode, later = trees
        route = Route(prefill, decode, SMALL)
        route.whole()
        _calm(prefill)
        before = summarise([_whole_s(route) for _ in range(trial.count(50))])
        listener, counted = prefill.pid("listener"), _malformed(prefill)
        with zmq.Context() as context, context.socket(zmq.DEALER) as door:
            door.connect(f"tcp://{prefill.control}")
            door.send_multipart([b"GARBAGE"])
            wait(lambda: _malformed(prefill) > counted, ROOM_S, "the frame to be counted")
        next_s = _whole_s(route)
        stranger_s = _whole_s(Route(prefill, later, SMALL))
        same, told = prefill.pid("listener") == listener, health(prefill)
        counted = _malformed(prefill) - counted
    return Found(
        f"counted and dropped; the next room succeeds in {ms(next_s)} (before: "
        f"{ms(before.median)}), the first one of a decode that comes later in {ms(stranger_s)}; "
        f"health: {told}",
        "One ZMQ message of one part, `GARBAGE`, is sent to prefill's control port. Then a room to "
        "a decode that had met this prefill, and one to a decode that had not.",
        {
            "rooms before the frame, median ms": 1e3 * before.median,
            "next room, ms": 1e3 * next_s,
            "first room of another decode, ms": 1e3 * stranger_s,
            "malformed frames counted": counted,
            "listener is the same process": same,
            "prefill's health": told,
        },
    )


def _has_failed(side: Side) -> bool:
    return side.failed_ns() != 0


def abort(trial: Trial) -> Found:
    with pair(trial.folder) as (prefill, decode):
        route = Route(prefill, decode, SMALL)
        route.whole()
        known_s = []
        for _ in range(trial.count(200)):
            trip = route.to(Phase.WAITING)
            begun_ns = monotonic_ns()
            trip.prefill.room.abort()
            side = trip.decode
            route.wait(partial(_has_failed, side), ROOM_S, "decode to know")
            known_s.append((side.failed_ns() - begun_ns) / 1e9)
            reason = side.word().reason.name
            route.clear(trip)
    told = summarise(known_s)
    return Found(
        f"decode's room is Failed ({reason}) after {ms(told.median)} (median), {ms(told.p99)} "
        f"(p99), {ms(told.max)} (most), {told.n} rooms",
        "Both halves are open and prefill knows the destination; prefill's engine calls `abort()`. "
        "The time is the one that decode's listener wrote into the slot.",
        {
            "rooms": told.n,
            "decode knows after, median ms": 1e3 * told.median,
            "p99 ms": 1e3 * told.p99,
            "most ms": 1e3 * told.max,
        },
    )


def stopped(trial: Trial) -> Found:
    with pair(trial.folder, LARGE) as (prefill, decode):
        route = Route(prefill, decode, LARGE)
        route.whole()
        _calm(prefill)
        trip = route.to(Phase.WAITING)
        stopped_ns = monotonic_ns()
        decode.signal(signal.SIGSTOP)
        try:
            trip.advance(Phase.WHOLE)
            moving = trip.prefill.word().state
            side = trip.prefill
            with contextlib.suppress(TimeoutError):
                route.wait(partial(_has_failed, side), trial.watch_s, "prefill's verdict")
            failed_ns, reason = side.failed_ns(), side.word().reason.name
            told = health(prefill)
        finally:
            decode.signal(signal.SIGCONT)
        route.clear(trip)
        after_s = _after(route)
    took_s = (failed_ns - stopped_ns) / 1e9 if failed_ns else None
    return Found(
        f"prefill's room is Failed ({reason}) after {until(took_s, trial.watch_s)}; prefill's "
        f"health: {told}; rooms succeed again {until(after_s, ROOM_S)} after SIGCONT"
        if failed_ns
        else f"prefill's room is still open after {trial.watch_s:g} s",
        "A room of 500 pages (125 MiB) has its destination; every process of decode's tree is "
        "SIGSTOPped, the pages are sent. Then the tree goes on. Default time-outs.",
        {
            "Failed after, s": took_s,
            "reason": reason,
            "state right after the send": moving.name,
            "prefill's health while decode is stopped": told,
            "first Success after SIGCONT, s": after_s,
        },
    )


def _after(route: Route) -> float:
    begun_ns = monotonic_ns()
    entered_ns, _ = route.first_success(ROOM_S)
    return (entered_ns - begun_ns) / 1e9


@contextlib.contextmanager
def _frozen(route: Route) -> Iterator[None]:
    """The route's decode is stopped while rooms to it move."""
    trips = [route.to(Phase.WAITING) for _ in range(HELD)]
    route.decode.signal(signal.SIGSTOP)
    try:
        for trip in trips:
            trip.advance(Phase.WHOLE)
        route.pause()
        yield
    finally:
        route.decode.signal(signal.SIGCONT)
    for trip in trips:
        for side in trip.sides():
            side.room.abort()
    route.clear(*trips)


def starved(trial: Trial) -> Found:
    names = {"prefill": "prefill", "healthy": "decode", "frozen": "decode"}
    trees = [Tree(trial.folder, role, LARGE, name=name) for name, role in names.items()]
    count = trial.count(200)
    with started(trees):
        prefill, healthy, ill = trees
        small = Shape(layers=2, item_bytes=65536, pages=1, chunks=1, pages_count=1000)
        route, frozen = Route(prefill, healthy, small), Route(prefill, ill, LARGE)
        route.whole()
        frozen.whole()
        ratios, alone_ms, beside_ms = [], [], []
        for _ in range(COMPARISONS):
            alone = summarise([_whole_s(route) for _ in range(count)])
            with _frozen(frozen):
                beside = summarise([_whole_s(route) for _ in range(count)])
            ratios.append(beside.median / alone.median)
            alone_ms.append(1e3 * alone.median)
            beside_ms.append(1e3 * beside.median)
            frozen.first_success(ROOM_S)
    ratio = summarise(ratios)
    return Found(
        f"{ratio.median:.2f}x (median of {COMPARISONS} comparisons of medians, {count} rooms each)",
        "Two decodes at one prefill, which has one worker for both; one decode's tree is "
        f"SIGSTOPped while {HELD} rooms of 500 pages go to it, the other has rooms of one page "
        "(256 KiB), one after the other.",
        {
            "rooms alone, medians ms": alone_ms,
            "rooms beside the frozen decode, medians ms": beside_ms,
            "ratios of medians": ratios,
        },
    )


def ghosts(trial: Trial) -> Found:
    count = trial.count(200)
    with pair(trial.folder) as (prefill, decode):
        route = Route(prefill, decode, SMALL)
        route.whole()
        _calm(prefill)
        numbers = [next(ROOMS) for _ in range(count)]
        gone = [half(prefill.manager, number, "", SMALL) for number in numbers]
        for side in gone:
            side.room.abort()
        route.clear_sides(*gone)
        late = [half(decode.manager, number, prefill.control, SMALL) for number in numbers]
        route.wait(lambda: all(s.failed_ns() for s in late), ROOM_S, "late rooms to be told")
        reasons = sorted({side.word().reason.name for side in late})
        route.clear_sides(*late)
        left = len(prefill.table.live_slots()) + len(decode.table.live_slots())
        told = health(prefill)
        route.whole()
    return Found(
        f"decode is told at once ({', '.join(reasons)}); {left} slots left of {len(late)} rooms on "
        "both sides",
        "Prefill opens the rooms, aborts and clears them. Then decode opens its halves. What "
        "prefill's listener remembers of rooms that are over is bounded (65,536 of each kind) and "
        "counts for the bootstrap time-out.",
        {
            "rooms": len(late),
            "reasons that decode is told": reasons,
            "slots left, both sides": left,
            "prefill's health": told,
        },
    )


def _pool(tree: Tree, shape: Shape) -> NDArray[np.uint8]:
    return np.frombuffer(tree.manager.kv(0), np.uint8).reshape(shape.pages_count, -1)


def _late(route: Route, *, freeze: bool) -> dict[str, float]:
    """Decode gives a room up midway; its pages get their next owner once the room is quiet."""
    source, target = (_pool(tree, route.shape) for tree in (route.prefill, route.decode))
    source[:], target[:] = SENT, BEFORE
    trip = route.to(Phase.WAITING)
    trip.advance(Phase.WHOLE)
    receiver = trip.decode.room
    route.wait(lambda: bool(target[:, 0].any()), ROOM_S, "the first bytes")
    if freeze:
        route.prefill.signal(signal.SIGSTOP)
    try:
        receiver.abort()
        outstanding = int((target[:, -1] != SENT).sum())
        begun = time.monotonic()
        route.wait(lambda: receiver.poll() in TERMINAL and receiver.quiet(), QUIET_S, "quiet pages")
        waited_s = time.monotonic() - begun
        target[:] = PATTERN
    finally:
        route.prefill.signal(signal.SIGCONT)
    lost = _settle(route, target)
    route.clear(trip)
    route.first_success(ROOM_S)
    return {"outstanding": outstanding, "waited_s": waited_s, "lost": lost}


def _settle(route: Route, target: NDArray[np.uint8]) -> int:
    """Pages that are not as their owner left them, once nothing lands any more."""
    last, since = -1, time.monotonic()

    def settled() -> bool:
        nonlocal last, since
        if (now := int((target != PATTERN).any(axis=1).sum())) != last:
            last, since = now, time.monotonic()
        return time.monotonic() - since >= SETTLED_S

    route.wait(settled, ROOM_S, "the last byte to have landed")
    return last


def late(trial: Trial) -> Found:
    plays = trial.count(3)
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with pair(trial.folder, PLAIN) as (prefill, decode):
        route = Route(prefill, decode, PLAIN)
        route.whole()
        for freeze, outcomes in found.items():
            for _ in range(plays):
                outcomes.append(_late(route, freeze=freeze))
    lost = {freeze: sum(o["lost"] for o in outcomes) for freeze, outcomes in found.items()}
    waited_s = summarise([o["waited_s"] for o in found[True]]).median
    pages = plays * PLAIN.pages
    names = {False: "prefill lives", True: "prefill stopped"}
    return Found(
        f"prefill answers: {lost[False]:.0f} of {pages:,} pages overwritten; prefill is stopped: "
        f"decode uses the pages again after {waited_s:.1f} s, behind a fence, and "
        f"{lost[True]:.0f} of {pages:,} are overwritten once it goes on",
        f"A room of {PLAIN.pages} pages (125 MiB); when decode's engine sees the first bytes it "
        "aborts. Its pages are refilled with a pattern once the room is quiet, and those without "
        "it are counted once nothing lands any more. Once with a prefill that lives, once with a "
        "prefill of which every process is SIGSTOPped at the abort and continued after the refill: "
        "then decode's own worker is restarted. More of these: "
        "docs/reports/late-bytes.md.",
        {
            f"{names[freeze]}: {what}": [o[key] for o in outcomes]
            for freeze, outcomes in found.items()
            for key, what in {
                "outstanding": "still to land at the abort, pages",
                "waited_s": "quiet after, s",
                "lost": "overwritten",
            }.items()
        },
    )


PLAYS: dict[str, Play] = {
    "frame": frame,
    "abort": abort,
    "stopped": stopped,
    "starved": starved,
    "ghosts": ghosts,
    "race": race,
    "late": late,
}
