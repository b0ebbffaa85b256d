"""Any history of two trees and their network, chosen and shrunk by hypothesis.

The world (tests/actors/world.py) runs pdrt's own actors in virtual time and checks every law at
every change of a room.  Here each rule is one thing that may happen to it, and at the end all must
come to rest with nothing left behind.  Strangers talk too, as stress/fuzz/hostile.py has them.

PDRT_MACHINE_EXAMPLES=1000 looks at more; hypothesis prints the shortest history that fails.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pdrt.protocol.messages import PEER_MESSAGES
from stress.fuzz.hostile import Known, Names
from tests.actors import mutants
from tests.actors.schedule import VERBS, Setting
from tests.actors.world import World

EXAMPLES = int(os.environ.get("PDRT_MACHINE_EXAMPLES", "35"))
MANY, STEPS = 400, 40
ROOMS = st.integers(0, 5)  # few, so that ids are used again
DECODES = st.sampled_from(["decode0", "decode1"])
SIDES = st.sampled_from(["prefill", "decode0", "decode1"])
CHILDREN = st.sampled_from(["listener", "worker0", "engine"])
MOMENTS = st.sampled_from([0, 1, 3, 10, 40, 150, 600])
CHANCES = st.sampled_from([0.0, 0.1, 0.4])
SETTINGS = st.builds(
    Setting,
    seed=st.integers(0, 2**16),
    size=st.just("small"),
    decodes=st.just(2),
    shm=st.booleans(),
    polls=st.sampled_from([0, 1, 20, 100]),
    delay_ms=st.sampled_from([(1, 3), (5, 40)]),
    brief=st.booleans(),
    restart_ms=st.sampled_from([1, 30]),
    rooms_max=st.sampled_from([4, 256]),
    remembered=st.just(0),
    born=st.sampled_from([1, 2045]),
    preempted=st.sampled_from([0, 20]),
)


class Protocol(RuleBasedStateMachine):
    """A prefill, two decodes, and whatever happens to them."""

    world: World | None = None

    @initialize(where=SETTINGS)
    def begin(self, where: Setting) -> None:
        self.world = where.world()
        self.rng = random.Random(where.seed)

    def do(self, verb: str, *args: Any) -> None:
        assert self.world is not None
        VERBS[verb](self.world, *args)

    # --- rooms ---

    @rule(
        rooms=st.lists(ROOMS, min_size=1, max_size=4, unique=True),
        decode=DECODES,
        chunks=st.integers(1, 5),
        paces_ms=st.tuples(st.sampled_from([0, 0, 10, 60]), st.sampled_from([0, 0, 30, 200])),
        eager=st.booleans(),
        which=st.sampled_from(["both", "both", "both", "both", "send", "receive"]),
        then_ms=MOMENTS,
    )
    def open(
        self,
        rooms: list[int],
        decode: str,
        chunks: int,
        paces_ms: tuple[int, int],
        eager: bool,
        which: str,
        then_ms: int,
    ) -> None:
        """An id always has as many pages: halves of two uses may meet, and are one room then."""
        for room in rooms:
            pages_count = 1 + room % 5
            if which != "receive":
                how = {"pages_count": pages_count, "chunks": min(chunks, pages_count)}
                self.do("send", room, how | {"pace_ms": paces_ms[0], "eager": eager})
            if which != "send":
                how = {"pages_count": pages_count, "pace_ms": paces_ms[1]}
                self.do("receive", room, decode, how)
        self.advance(then_ms)

    @rule(rooms=st.lists(ROOMS, min_size=1, max_size=4, unique=True), side=SIDES, then_ms=MOMENTS)
    def abort(self, rooms: list[int], side: str, then_ms: int) -> None:
        for room in rooms:
            self.do("abort", side, room)
        self.advance(then_ms)

    @rule(side=SIDES, share=st.sampled_from([0.3, 1.0]))
    def storm(self, side: str, share: float) -> None:
        self.do("storm", side, share)

    @rule(room=ROOMS, side=SIDES)
    def decline(self, room: int, side: str) -> None:
        assert self.world is not None
        if side in self.world.trees:
            self.do("decline", side, room)

    # --- processes ---

    @rule(side=SIDES, child=CHILDREN)
    def kill(self, side: str, child: str) -> None:
        self.do("kill", side, child)

    @rule(side=SIDES, child=CHILDREN)
    def freeze(self, side: str, child: str) -> None:
        self.do("freeze", side, child)

    @rule(side=SIDES, child=CHILDREN)
    def thaw(self, side: str, child: str) -> None:
        self.do("thaw", side, child)

    @rule(side=SIDES)
    def replace_tree(self, side: str) -> None:
        self.do("replace", side)

    @rule(side=DECODES, silent=st.booleans())
    def desert(self, side: str, silent: bool) -> None:
        self.do("desert", side, silent)

    @precondition(lambda self: self.world is not None and len(self.world.trees) < 3)
    @rule(side=DECODES)
    def revive(self, side: str) -> None:
        self.do("revive", side)

    @rule(side=SIDES, writes=st.integers(1, 3))
    def fail(self, side: str, writes: int) -> None:
        self.do("fail", side, writes)

    # --- the network ---

    @rule(decode=DECODES, verb=st.sampled_from(["cut", "cut one way"]), back=st.booleans())
    def cut(self, decode: str, verb: str, back: bool) -> None:
        self.do(verb, *((decode, "prefill") if back else ("prefill", decode)))

    @rule(decode=DECODES)
    def mend(self, decode: str) -> None:
        self.do("mend", "prefill", decode)

    @rule(loss=CHANCES, repeat=CHANCES, overtaken=CHANCES)
    def weather(self, loss: float, repeat: float, overtaken: float) -> None:
        """Frames are lost, come twice, overtake each other."""
        assert self.world is not None
        weather = self.world.post.weather
        weather.loss, weather.repeat, weather.overtaken = loss, repeat, overtaken

    @rule(side=SIDES, seed=st.integers(0, 2**16))
    def stranger(self, side: str, seed: int) -> None:
        """Says something to a control port that names no room exactly."""
        assert self.world is not None
        speak(self.world, side, random.Random(seed))

    # --- time ---

    @rule(ms=MOMENTS)
    def wait(self, ms: int) -> None:
        self.advance(ms)

    def advance(self, ms: int) -> None:
        assert self.world is not None
        self.world.elapse(ms)

    @invariant()
    def laws(self) -> None:
        """What is not checked at every change already."""
        if self.world is not None:
            self.world._look()

    def teardown(self) -> None:
        if self.world is None:
            return
        with self.world as world:
            for name in ("decode0", "decode1"):
                self.do("revive", name)
            world.post.weather.overtaken = 0.0
            world.settle()
            world.serves()
            world.settle()


def speak(world: World, side: str, rng: random.Random, count: int = 3) -> None:
    """To the listener of a tree, if it runs.  Nothing that is said may make it raise."""
    tree = world.trees.get(side)
    process = tree.processes.get("listener") if tree is not None else None
    if tree is None or process is None or process.frozen_ns:
        return
    table = tree.table
    slots = table.live_slots()
    rooms = [
        {"room": int(row[1]), "slot": slot, "generation": int(row[0]) >> 32}
        for slot, row in zip(slots.tolist(), table.rows(slots), strict=True)
    ]
    known = Known(tree.role.name.lower(), tree.instance, process.incarnation, rooms)
    names = Names(rng, known, tree.shape.layout.digest, "host", "@nobody")
    for _ in range(count):
        message = names.any_of(PEER_MESSAGES)
        process.actor.handle(("control", b"stranger"), message, tree.clock())
    process.box.flush()


def run(examples: int, *, shrinks: bool = True) -> None:
    phases = set(Phase) - (set() if shrinks else {Phase.shrink, Phase.explain})
    run_state_machine_as_test(
        Protocol,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            phases=sorted(phases, key=lambda phase: phase.value),
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )


@pytest.mark.timeout(600)
def test_every_history_keeps_the_laws_and_comes_to_rest() -> None:
    run(EXAMPLES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_great_many_histories_keep_the_laws() -> None:
    run(MANY)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "mutant", [mutants.done_when_posted, mutants.quiet_when_failed, mutants.nobody_ends_late]
)
def test_a_history_is_found_that_shows_a_broken_law(mutant: mutants.Mutant) -> None:
    with mutants.mutated(mutant), pytest.raises(Exception) as caught:  # noqa: PT011  any law
        run(200, shrinks=False)
    assert not isinstance(caught.value, pytest.fail.Exception)
