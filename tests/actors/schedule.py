"""Chaos as data: a setting and a list of acts with times, made from a seed, and played in a world.

A setting is what holds for a whole run: how many trees, what the network does, which deadlines and
bounds there are.  An act is one thing that happens.  A schedule that fails can be shrunk.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

from msgspec.structs import replace

from pdrt.actors import decode_failing, decodes, missing, news, past, prefill_failing
from pdrt.clock import SECOND_NS
from pdrt.config import Timeouts
from pdrt.protocol.states import Reason
from tests.actors import calm
from tests.actors.tally import Tally
from tests.actors.tree import control_of
from tests.actors.world import LAYOUT, TIMEOUTS, World

#: Rooms of a schedule and how many milliseconds it goes on, by size.  Many small worlds find more
#: interleavings than few large ones, and what needs many rooms at once only large ones find.
SIZES = {"small": (8, 400), "medium": (24, 1200), "large": (60, 3000)}
WEIGHTS = (6, 3, 1)

PAGES_MAX = 5  # of a room

#: In which a world settles; rooms of one id, which follow each other, need some for each.
SETTLED_MS, ROOM_MS = 20_000, 6_000

CALM = 0.05  # of the seeds are

#: A queue is believed for so long that even that can end within a run.
PATIENT = replace(TIMEOUTS, queue_s=3.0)
#: Deadlines that pass all the time.
BRIEF = Timeouts(
    bootstrap_s=0.3,
    waiting_s=0.25,
    stall_s=0.25,
    queue_s=0.8,
    quiet_s=0.45,
    beat_s=0.05,
    peer_s=0.3,
    resend_s=0.03,
)
#: What listeners and workers remember of rooms and peers that are over, each a constant.
BOUNDS = (
    (past, "MEMORY_MAX"),
    (prefill_failing, "FAILING_MAX"),
    (decode_failing, "FAILING_MAX"),
    (news, "NEWS_MAX"),
    (decodes, "BURIED_MAX"),
    (missing, "MISSING_MAX"),
)


@dataclass(frozen=True)
class Act:
    at_ms: int
    verb: str  # a key of VERBS
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Setting:
    seed: int
    size: str = "large"
    decodes: int = 1
    ranks: int = 1
    shm: bool = False
    polls: int = 1
    loss: float = 0.0
    repeat: float = 0.0
    overtaken: float = 0.0
    delay_ms: tuple[int, int] = (1, 3)
    brief: bool = False
    restart_ms: int = 30  # 1: a standby is promoted
    rooms_max: int = 256  # slots of a table
    remembered: int = 0  # at most so many rooms and peers that are over; 0: pdrt's own bounds
    skewed: bool = False
    born: int = 1  # incarnations begin here; they go round after 2047
    deaf: float = 0.0
    spin_ms: int = 1
    renew_ms: int = 0
    foreign: bool = False  # decodes have another KV layout
    preempted: int = 0  # instructions between two that another process gets in between; 0: never
    ids: int = 0  # all rooms share so few, and prefill loses all its memory at once; 0: they do not
    calm: bool = False  # all that happens to a room is an abort

    @property
    def rooms(self) -> int:
        return SIZES[self.size][0]

    @property
    def busy_ms(self) -> int:
        return SIZES[self.size][1]

    def world(self, witness: Tally | None = None) -> World:
        names = ["prefill", *(f"decode{i}" for i in range(self.decodes))]
        rng = random.Random(self.seed)
        skews_ns = {name: rng.randrange(10**6) * SECOND_NS for name in names if self.skewed}
        roomy: dict[str, Any] = {}
        if self.calm:
            roomy = {"pages_count": PAGES_MAX * self.rooms, "aux_rows": self.rooms}
        world = World(
            self.seed,
            decodes=self.decodes,
            ranks=self.ranks,
            decode_layout=replace(LAYOUT, ranks=self.ranks, page_size=2) if self.foreign else None,
            shm=self.shm,
            polls=self.polls,
            timeouts=BRIEF if self.brief else PATIENT,
            witness=witness,
            skews_ns=skews_ns,
            rooms_max=self.rooms_max,
            restart_ms=self.restart_ms,
            hang_s=0.15 if self.brief else 1.0,
            born=self.born,
            deaf=self.deaf,
            spin_ms=self.spin_ms,
            renew_ms=self.renew_ms,
            preempted=self.preempted,
            **roomy,
        )
        weather = world.post.weather
        weather.loss, weather.repeat, weather.delay_ms = self.loss, self.repeat, self.delay_ms
        weather.overtaken = self.overtaken
        world.elapses = True
        return world


# --- what can happen -----------------------------------------------------------------------------


def _send(world: World, room: int, how: dict[str, Any]) -> None:
    world.send(room, **how)


def _receive(world: World, room: int, decode: str, how: dict[str, Any]) -> None:
    world.receive(room, decode, **how)


def _decline(world: World, name: str, room: int) -> None:
    """Unless the room is open there, as KVManager.decline has it."""
    engine = world.find_engine(name)
    if engine is not None and room not in engine.jobs:
        engine.decline(room, "" if name == "prefill" else control_of("prefill"))


def _storm(world: World, name: str, share: float) -> None:
    """Many clients leave at once."""
    engine = world.find_engine(name)
    rooms = list(engine.jobs) if engine is not None else []
    for room in rooms:
        if world.rng.random() < share:
            world.abort(name, room, Reason.CLIENT_GONE)


def _kill(world: World, tree: str, name: str, again_ms: int | None = None) -> None:
    if tree in world.trees:
        world.trees[tree].kill(name, again_ms=again_ms)


def _freeze(world: World, tree: str, name: str) -> None:
    if tree in world.trees:
        world.trees[tree].freeze(name)


def _thaw(world: World, tree: str, name: str) -> None:
    if tree in world.trees:
        world.look(tree)
        world.trees[tree].thaw(name)


def _numb(world: World, name: str) -> None:
    """The supervisor is frozen: nobody sees a death or a hang, nobody sweeps or starts a child."""
    if name in world.trees:
        world.trees[name].supervised = False


def _rouse(world: World, name: str) -> None:
    if name in world.trees:
        world.look(name)
        world.trees[name].supervised, world.trees[name].due_ns = True, 0


def _fail_writes(world: World, name: str, writes: int) -> None:
    tree = world.trees.get(name)
    for process in tree.processes.values() if tree is not None else ():
        if process.agent in world.fabric.agents:
            world.fabric.fail_next(process.agent, writes)


def _replace(world: World, name: str) -> None:
    if name in world.trees:
        world.replace(name)


def _desert(world: World, name: str, silent: bool) -> None:
    if name in world.trees:
        world.desert(name, silent=silent)


def _revive(world: World, name: str) -> None:
    if name not in world.trees:
        world.revive(name)


VERBS: dict[str, Callable[..., object]] = {
    "send": _send,
    "receive": _receive,
    "abort": World.abort,
    "storm": _storm,
    "decline": _decline,
    "kill": _kill,
    "freeze": _freeze,
    "thaw": _thaw,
    "numb": _numb,
    "rouse": _rouse,
    "cut": lambda world, a, b: world.post.cuts.add(frozenset((a, b))),
    "cut one way": lambda world, a, b: world.post.cuts.add((a, b)),
    "mend": lambda world, a, b: world.post.mend(a, b),
    "fail": _fail_writes,
    "replace": _replace,
    "desert": _desert,
    "revive": _revive,
}
#: Those that end a trouble are no faults.
FAULTS = frozenset(VERBS) - {"send", "receive", "thaw", "rouse", "mend", "revive"}


# --- made from a seed ----------------------------------------------------------------------------


def setting(seed: int) -> Setting:
    rng = random.Random(seed)
    rough = rng.random() < 0.6
    where = Setting(
        seed,
        size=rng.choices(list(SIZES), WEIGHTS)[0],
        decodes=rng.choice([1, 2]),
        ranks=rng.choice([1, 1, 2]),
        shm=rng.random() < 0.3,
        polls=rng.choice([0, 1, 3, 20]),
        loss=rng.choice([0.02, 0.1]) if rough else 0.0,
        repeat=rng.choice([0.0, 0.05]) if rough else 0.0,
        overtaken=rng.choice([0.0, 0.0, 0.05]) if rough else 0.0,
        delay_ms=rng.choice([(1, 3), (1, 3), (5, 40)]),
        brief=rng.random() < 0.3,
        restart_ms=rng.choice([1, 30, 30, 200]),
        rooms_max=rng.choice([256, 256, 256, 6]),
        remembered=rng.choice([0, 0, 0, 2]),
        skewed=rng.random() < 0.5,
        born=rng.choice([1, 1, 2046]),
        deaf=rng.choice([0.0, 0.2, 1.0]),
        spin_ms=rng.choice([1, 1, 5]),
        renew_ms=rng.choice([0, 100]),
        foreign=rng.random() < 0.01,
        preempted=rng.choice([0, 0, 30, 300]),
        ids=rng.choice([1, 2, 3, *[0] * 37]),
    )
    if random.Random(seed ^ 0xCA1).random() < CALM:  # the other seeds are what they would be
        calm = dataclasses.replace(where, calm=True, loss=0.0, brief=False, rooms_max=256)
        return dataclasses.replace(calm, remembered=0, foreign=False, ids=0)
    if not where.ids:
        return where
    # A use of an id meets what is left of the one before if messages are lost and come again.
    return dataclasses.replace(
        where,
        loss=rng.choice([0.05, 0.2, 0.3]),
        ranks=rng.choice([1, 2]),
        restart_ms=rng.choice([1, 30]),
    )


def schedule(where: Setting) -> list[Act]:
    """Rooms, aborts and faults, by time."""
    rng = random.Random(where.seed ^ 0x5EED)
    acts: list[Act] = []
    if where.calm:
        for room in range(where.rooms):
            acts += _calm_room(rng, where, room)
        return sorted(acts, key=lambda act: act.at_ms)
    reused = rng.random() < 0.4
    shared = where.ids or (1 + where.rooms // 3 if reused else 0)
    for i in range(where.rooms):
        acts += _room(rng, where, rng.randrange(shared) if shared else i)
    for _ in range(rng.randint(1, 5) if where.ids else 0):
        acts += _amnesia(rng, where)
    for _ in range(rng.choice([0, 1, 3, 6]) * (1 if where.size == "small" else 2)):
        acts += _fault(rng, where)
    return sorted(acts, key=lambda act: act.at_ms)


def _room(rng: random.Random, where: Setting, room: int) -> list[Act]:
    decode = f"decode{rng.randrange(where.decodes)}"
    at_ms = rng.randrange(where.busy_ms)
    pages_count = 1 + room % PAGES_MAX  # the same for each use of an id
    chunks = rng.randint(1, pages_count)
    pace_ms = rng.choice([0, 0, 10, 60])
    sender = {"pages_count": pages_count, "chunks": chunks, "pace_ms": pace_ms}
    sender["eager"] = rng.random() < (0.6 if where.ids else 0.3)
    sender["mute"] = rng.random() < 0.03
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
    if rng.random() < 0.05:  # a router that sends the same request again, perhaps elsewhere
        again = f"decode{rng.randrange(where.decodes)}"
        acts.append(Act(at_ms + rng.choice([0, 5, 50]), "receive", (room, again, receiver)))
        acts.append(Act(at_ms + rng.choice([0, 5, 50]), "send", (room, sender)))
    for side in ("prefill", decode):
        while rng.random() < 0.15:
            abort_ms = at_ms + rng.choice([0, 5, 20, 50, 100, 300, 600])
            reason = rng.choice([Reason.ABORTED, Reason.CLIENT_GONE, Reason.SHUTDOWN])
            acts.append(Act(abort_ms, "abort", (side, room, reason)))
    return acts


def _calm_room(rng: random.Random, where: Setting, room: int) -> list[Act]:
    """Both halves, and perhaps an abort."""
    decode = f"decode{rng.randrange(where.decodes)}"
    at_ms = rng.randrange(where.busy_ms)
    pages_count = rng.randint(1, PAGES_MAX)
    sender = {"pages_count": pages_count, "chunks": rng.randint(1, pages_count)}
    sender |= {"pace_ms": rng.choice([0, 0, 10, 60]), "eager": rng.random() < 0.3}
    receiver = {"pages_count": pages_count, "pace_ms": rng.choice([0, 0, 30, 200])}
    moments = [at_ms + rng.choice([0, 0, 20, 300]) for _ in range(2)]
    acts = [Act(moments[0], "send", (room, sender))]
    acts.append(Act(moments[1], "receive", (room, decode, receiver)))
    while rng.random() < 0.15:
        abort_ms = at_ms + rng.choice([0, 5, 20, 50, 100, 300, 600])
        reason = rng.choice([Reason.ABORTED, Reason.CLIENT_GONE, Reason.SHUTDOWN])
        acts.append(Act(abort_ms, "abort", (rng.choice(["prefill", decode]), room, reason)))
    return acts


def _fault(rng: random.Random, where: Setting) -> list[Act]:
    at_ms = rng.randrange(where.busy_ms)
    decode = f"decode{rng.randrange(where.decodes)}"
    tree = rng.choice(["prefill", decode])
    name = rng.choice(["listener", "worker0", f"worker{where.ranks - 1}", "engine"])
    lasting_ms = rng.choice([20, 100, 400, 900, 1500])
    match rng.choices(list(TROUBLES), list(TROUBLES.values()))[0]:
        case "kill":
            return [Act(at_ms, "kill", (tree, name))]
        case "promote":  # a standby takes the place, and perhaps dies in it
            moments = [at_ms + i * rng.choice([1, 2, 5, 30]) for i in range(rng.randint(1, 3))]
            return [Act(ms, "kill", (tree, name, 1)) for ms in moments]
        case "freeze":
            end = Act(at_ms + lasting_ms, "thaw", (tree, name))
            return [Act(at_ms, "freeze", (tree, name)), end]
        case "numb":
            return [Act(at_ms, "numb", (tree,)), Act(at_ms + lasting_ms, "rouse", (tree,))]
        case "cut":
            verb, *ways = rng.choice([("cut", 0, 1), ("cut one way", 0, 1), ("cut one way", 1, 0)])
            pair = tuple(("prefill", decode)[way] for way in ways)
            return [Act(at_ms, verb, pair), Act(at_ms + lasting_ms, "mend", pair)]
        case "fail":
            return [Act(at_ms, "fail", (tree, rng.randint(1, 4)))]
        case "storm":
            return [Act(at_ms, "storm", (tree, rng.choice([0.5, 1.0])))]
        case "absence":
            return _absence(rng, at_ms, tree, decode if tree == "prefill" else "prefill")
        case _ if rng.random() < 0.5:
            return [Act(at_ms, "replace", (tree,))]
        case _:
            gone = [Act(at_ms, "desert", (tree, rng.random() < 0.5))]
            back = rng.random() < 0.7
            return [*gone, Act(at_ms + lasting_ms, "revive", (tree,))] if back else gone


def _amnesia(rng: random.Random, where: Setting) -> list[Act]:
    """Nobody is left on prefill who knows what was given to whom."""
    at_ms = rng.randrange(where.busy_ms)
    dying = ["listener", *(f"worker{rank}" for rank in range(where.ranks))]
    again_ms = rng.choice([1, 5, 30])
    return [Act(at_ms + rng.choice([0, 0, 5, 30]), "kill", ("prefill", n, again_ms)) for n in dying]


def _absence(rng: random.Random, at_ms: int, tree: str, other: str) -> list[Act]:
    """A listener is away for a while, and does not see what happens in it."""
    away_ms = rng.choice([50, 150, 400])
    unseen = [
        Act(at_ms + rng.randrange(away_ms), *rng.choice([
            ("replace", (other,)),
            ("storm", (tree, 0.5)),
            ("storm", (other, 0.5)),
            ("kill", (tree, "worker0")),
            ("kill", (tree, "engine")),
            ("kill", (other, "listener", away_ms)),
            ("kill", (other, "engine")),
        ]))
        for _ in range(rng.randint(1, 3))
    ]  # fmt: skip
    return [Act(at_ms, "kill", (tree, "listener", away_ms)), *unseen]


#: How often each comes.
TROUBLES = {
    "kill": 8,
    "promote": 4,
    "freeze": 4,
    "numb": 2,
    "cut": 5,
    "fail": 2,
    "storm": 2,
    "tree": 2,
    "absence": 3,
}


# --- played --------------------------------------------------------------------------------------


@contextmanager
def _bounded(remembered: int) -> Iterator[None]:
    """Nobody remembers more than so many of a kind; 0: as many as pdrt does."""
    patches = [mock.patch.object(m, name, remembered) for m, name in BOUNDS if remembered]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def run(where: Setting, acts: list[Act], tally: Tally | None = None) -> World:
    """Play a schedule, then let the dust settle.  Raises what a law or an actor raises."""
    with _bounded(where.remembered), where.world(tally) as world:
        start_ms = world.now_ms
        try:
            for act in acts:
                world.elapse(act.at_ms - (world.now_ms - start_ms))
                VERBS[act.verb](world, *act.args)
            settled_ms = SETTLED_MS + ROOM_MS * where.rooms if where.ids else SETTLED_MS
            world.settle(settled_ms)
            if where.calm:
                calm.check(world)
            world.serves()
            world.settle(settled_ms)
        finally:
            if tally is not None:
                tally.seeds += 1
                tally.virtual_ms += world.now_ms - start_ms
                tally.turns += world.turns
                tally.frames += world.post.carried
                tally.acts.update(act.verb for act in acts)
        return world


def failure(where: Setting, acts: list[Act], tally: Tally | None = None) -> str | None:
    """What goes wrong, as one line; None if nothing does."""
    try:
        run(where, acts, tally)
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
