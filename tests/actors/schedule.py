"""Chaos as data: a schedule is a list of acts with times, made from a seed, and can be shrunk."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.actors.world import World

ROOMS = 60
BUSY_MS = 3000


@dataclass(frozen=True)
class Act:
    at_ms: int
    verb: str  # a key of VERBS
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Setting:
    seed: int
    decodes: int
    ranks: int
    shm: bool
    polls: int
    loss: float
    repeat: float
    delay_ms: tuple[int, int]


def _send(world: World, room: int, how: dict[str, Any]) -> None:
    world.send(room, **how)


def _receive(world: World, room: int, decode: str, how: dict[str, Any]) -> None:
    world.receive(room, decode, **how)


def _decline(world: World, name: str, room: int) -> None:
    """Unless the room is open there, as KVManager.decline has it."""
    if "engine" in world.trees[name].processes and room not in world.engine(name).jobs:
        peer = "" if name == "prefill" else world.trees["prefill"].control
        world.engine(name).decline(room, peer)


def _fail_writes(world: World, name: str, writes: int) -> None:
    for process in world.trees[name].processes.values():
        if process.agent in world.fabric.agents:
            world.fabric.fail_next(process.agent, writes)


VERBS: dict[str, Callable[..., object]] = {
    "send": _send,
    "receive": _receive,
    "abort": World.abort,
    "decline": _decline,
    "kill": lambda world, tree, name: world.trees[tree].kill(name),
    "freeze": lambda world, tree, name: world.trees[tree].freeze(name),
    "thaw": lambda world, tree, name: world.trees[tree].thaw(name),
    "cut": lambda world, a, b: world.post.cuts.add(frozenset((a, b))),
    "mend": lambda world, a, b: world.post.mend(a, b),
    "fail": _fail_writes,
    "replace": World.replace,
}


def setting(seed: int) -> Setting:
    rng = random.Random(seed)
    rough = rng.random() < 0.6
    return Setting(
        seed,
        decodes=rng.choice([1, 2]),
        ranks=rng.choice([1, 1, 2]),
        shm=rng.random() < 0.3,
        polls=rng.choice([0, 1, 3, 20]),
        loss=rng.choice([0.02, 0.1]) if rough else 0.0,
        repeat=rng.choice([0.0, 0.05]) if rough else 0.0,
        delay_ms=rng.choice([(1, 3), (1, 3), (5, 40)]),
    )


def schedule(where: Setting) -> list[Act]:
    """Rooms, aborts and faults, by time."""
    rng = random.Random(where.seed ^ 0x5EED)
    acts: list[Act] = []
    reused = rng.random() < 0.4
    for i in range(ROOMS):
        acts += _room(rng, rng.randrange(ROOMS // 3) if reused else i, where.decodes)
    for _ in range(rng.choice([0, 2, 5, 10])):
        acts += _fault(rng, where.decodes)
    return sorted(acts, key=lambda act: act.at_ms)


def _room(rng: random.Random, room: int, decodes: int) -> list[Act]:
    decode = f"decode{rng.randrange(decodes)}"
    at_ms = rng.randrange(BUSY_MS)
    pages_count = 1 + room % 5  # the same for each use of an id
    chunks = rng.randint(1, pages_count)
    pace_ms = rng.choice([0, 0, 10, 60])
    sender = {"pages_count": pages_count, "chunks": chunks, "pace_ms": pace_ms}
    sender["eager"] = rng.random() < 0.3
    receiver = {"pages_count": pages_count, "pace_ms": rng.choice([0, 0, 30, 200])}
    receiver["bad"] = rng.random() < 0.03
    acts = []
    for side, verb, args in (
        ("prefill", "send", (room, sender)),
        (decode, "receive", (room, decode, receiver)),
    ):
        late_ms = rng.choice([0, 0, 20, 300])
        if rng.random() < 0.95:
            acts.append(Act(at_ms + late_ms, verb, args))
        elif rng.random() < 0.6:
            acts.append(Act(at_ms + late_ms, "decline", (side, room)))
    for side in ("prefill", decode):
        while rng.random() < 0.15:
            abort_ms = at_ms + rng.choice([0, 5, 20, 50, 100, 300, 600])
            acts.append(Act(abort_ms, "abort", (side, room)))
    return acts


def _fault(rng: random.Random, decodes: int) -> list[Act]:
    at_ms = rng.randrange(BUSY_MS)
    tree = rng.choice(["prefill", *(f"decode{i}" for i in range(decodes))])
    name = rng.choice(["listener", "worker0", "worker0", "engine"])
    lasting_ms = rng.choice([20, 100, 400, 900, 1500])
    match rng.randrange(10):
        case 0 | 1 | 2 | 3:
            return [Act(at_ms, "kill", (tree, name))]
        case 4 | 5:
            end = Act(at_ms + lasting_ms, "thaw", (tree, name))
            return [Act(at_ms, "freeze", (tree, name)), end]
        case 6 | 7:
            pair = ("prefill", f"decode{rng.randrange(decodes)}")
            return [Act(at_ms, "cut", pair), Act(at_ms + lasting_ms, "mend", pair)]
        case 8:
            return [Act(at_ms, "fail", (tree, rng.randint(1, 4)))]
        case _:
            return [Act(at_ms, "replace", (tree,))] if rng.random() < 0.5 else []


def run(where: Setting, acts: list[Act]) -> World:
    """Play a schedule, then let the dust settle.  Raises what a law or an actor raises."""
    with World(
        where.seed, decodes=where.decodes, ranks=where.ranks, shm=where.shm, polls=where.polls
    ) as world:
        weather = world.post.weather
        weather.loss, weather.repeat, weather.delay_ms = where.loss, where.repeat, where.delay_ms
        start_ms = world.now_ms
        for act in acts:
            while world.now_ms - start_ms < act.at_ms:
                world.step(5)
            VERBS[act.verb](world, *act.args)
        world.step(5)
        world.settle()
        return world


def failure(where: Setting, acts: list[Act]) -> str | None:
    """What goes wrong, as one line; None if nothing does."""
    try:
        run(where, acts)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def shrink(where: Setting, acts: list[Act], tries_max: int = 400) -> list[Act]:
    """A schedule that still fails, with as many acts dropped as a greedy search can."""
    return _dropped(partial(failure, where), acts, tries_max)


def _kind(line: str | None) -> str | None:
    """A failure without its numbers."""
    return None if line is None else "".join(c for c in line.split("=")[0] if not c.isdigit())[:40]


def _dropped(
    fails: Callable[[list[Act]], str | None], acts: list[Act], tries_max: int
) -> list[Act]:
    whole = fails(acts) or ""
    size = max(1, len(acts) // 2)
    while size and tries_max > 0:
        at = 0
        while at < len(acts) and tries_max > 0:
            fewer = acts[:at] + acts[at + size :]
            tries_max -= 1
            if fewer and _kind(fails(fewer)) == _kind(whole):
                acts = fewer
            else:
                at += size
        size //= 2
    return acts
