"""Rooms a second and their latency, without any engine's work, beside the stock components.

All that is compared runs in turn, A B C A B C, within one run; those that use processor time while
idle are frozen meanwhile.  A ratio is taken within one turn, so its n is the number of turns.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from stress.bench.bench import Bench
from stress.bench.figures import Goal, Result, summarise
from stress.bench.players import Players, Run
from stress.bench.trees import LARGE, SMALL, Cpu, Shape, Tree, pair

TITLE = "Rooms between two engines; latency is decode's, from asking for the room to Success"
STOCK = "stock"


@dataclass(frozen=True)
class Case:
    """`goals`: what is held against the stock components' figure, by transport."""

    shape: Shape
    open_max: int
    rooms: int
    stock_rooms: int
    goals: dict[str, dict[str, Goal]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        size = self.shape.room_bytes
        text = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
        return f"{text}, {self.open_max} open"


def _both(**ratios: Goal) -> dict[str, dict[str, Goal]]:
    return {transport: dict(ratios) for transport in ("nixl", "shm")}


def _at_least(bound: float) -> Goal:
    return Goal("median", bound, at_least=True)


def _at_most(bound: float) -> Goal:
    return Goal("median", bound)


P99_16, P99_64 = _at_most(0.1), _at_most(0.05)
CASES = (
    Case(SMALL, 1, 1000, 400, _both(p50=_at_most(0.7), p99=_at_most(0.2))),
    Case(
        SMALL,
        16,
        4000,
        1000,
        {"nixl": {"rate": _at_least(4), "p99": P99_16}, "shm": {"p99": P99_16}},
    ),
    Case(
        SMALL,
        64,
        4000,
        1000,
        {
            "nixl": {"rate": _at_least(5), "p99": P99_64},
            "shm": {"rate": _at_least(10), "p99": P99_64},
        },
    ),
    Case(LARGE, 1, 100, 100, _both(p50=_at_most(0.9), p99=_at_most(0.5))),
)


@dataclass
class Series:
    """The rounds of one contestant in one case."""

    runs: list[Run] = field(default_factory=list)
    why: str = ""


def measure(bench: Bench, result: Result) -> None:
    for shape in dict.fromkeys(case.shape for case in CASES):
        with contextlib.ExitStack() as stack:
            crews: dict[str, tuple[Players, tuple[Tree, ...]]] = {}
            for transport in bench.transports:
                trees = stack.enter_context(pair(bench.folder, shape, transport=transport))
                players = Players.ours(bench.folder, transport, *trees, shape)
                crews[transport] = stack.enter_context(players), trees
            if bench.stock_python is not None:
                players = Players.stock(bench.folder, bench.stock_python, shape)
                crews[STOCK] = stack.enter_context(players), ()
            for players, _ in crews.values():
                players.run(20, 1)
            for case in CASES:
                if case.shape == shape:
                    _play(bench, result, case, crews)


def _play(
    bench: Bench, result: Result, case: Case, crews: dict[str, tuple[Players, tuple[Tree, ...]]]
) -> None:
    series: dict[str, Series] = {}
    for _ in range(bench.repeats):
        for name, (players, trees) in crews.items():
            rooms = bench.count(case.stock_rooms if name == STOCK else case.rooms)
            for ahead in (False,) if name == STOCK else (False, True):
                entry = series.setdefault(f"{name}, sent ahead" if ahead else name, Series())
                _round(players, trees, rooms, case.open_max, ahead, entry, frozen=crews)
    stock = series.get(STOCK)
    for name, entry in series.items():
        _tell(result, case, name, entry)
        if stock is not None and name in crews and entry is not stock:
            _hold(result, case, name, entry, stock)


def _round(
    players: Players,
    trees: tuple[Tree, ...],
    rooms: int,
    open_max: int,
    ahead: bool,
    entry: Series,
    *,
    frozen: dict[str, tuple[Players, tuple[Tree, ...]]],
) -> None:
    if STOCK in frozen and frozen[STOCK][0] is not players:
        frozen[STOCK][0].freeze()
    try:
        before = Cpu.of(*trees)
        run = players.run(rooms, open_max, ahead=ahead)
        entry.runs.append(run)
        engines = f"prefill engine {run.cpu_us[0]:.0f} us, decode engine {run.cpu_us[1]:.0f} us"
        parts = [Cpu.of(*trees).per_room(before, rooms), engines]
        entry.why = "CPU a room: " + ", ".join(part for part in parts if part)
    finally:
        if STOCK in frozen:
            frozen[STOCK][0].thaw()


def _tell(result: Result, case: Case, name: str, entry: Series) -> None:
    what = f"{case.name}, {name}"
    result.add(f"{what}: rate", "rooms/s", [run.rooms_per_s for run in entry.runs])
    result.add(f"{what}: latency", "ms", [ms for run in entry.runs for ms in run.decode_ms])
    if "ahead" not in name:
        sent = [ms for run in entry.runs for ms in run.prefill_ms]
        result.add(f"{what}: prefill, first send to Success", "ms", sent)
        if name == STOCK:
            result.notes.append(f"{what}: {entry.why}")


def _hold(result: Result, case: Case, name: str, entry: Series, stock: Series) -> None:
    """Against the stock components' rounds of the same turns."""
    turns = list(zip(entry.runs, stock.runs, strict=True))
    latencies = [(summarise(a.decode_ms), summarise(b.decode_ms)) for a, b in turns]
    ratios = {
        "rate": [a.rooms_per_s / b.rooms_per_s for a, b in turns],
        "p50": [a.median / b.median for a, b in latencies],
        "p99": [a.p99 / b.p99 for a, b in latencies],
    }
    goals = case.goals.get(name, {})
    for ratio, samples in ratios.items():
        what = f"{case.name}, {name} / stock: {ratio}"
        result.add(what, "x", samples, goals.get(ratio), entry.why)
