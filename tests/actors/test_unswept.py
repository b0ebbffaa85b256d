"""The janitor's timer has stopped, or the whole supervisor is frozen: nothing ends late.

A room ends at its deadline by whoever looks at it: its engine, the listener of its side, or the
janitor; each alone, as `ENFORCERS` says.  What does wait is what only the supervisor can do: slots
of a dead engine, the forced fence, and a successor for whoever died.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pdrt.protocol.states import ENFORCERS, ON_EXPIRY, OPEN, TIMEOUT_OF, KVPoll, Reason, Role
from tests.actors import schedule
from tests.actors.laws import SLACK_MS
from tests.actors.steps import moving, succeeds, to_phase, until_state, until_verdict, verdict
from tests.actors.tree import Tree
from tests.actors.world import TIMEOUTS, World

BOTH = ("prefill", "decode0")
CHILDREN = ("listener", "worker0", "engine")
CELLS = [(role, state, by) for role in Role for state in sorted(OPEN) for by in ENFORCERS[role]]


#: No peer is lost, so that deadlines alone decide; and a queue is believed for a short time.
ALONE = replace(TIMEOUTS, peer_s=100.0, queue_s=3.0)
QUEUED = replace(TIMEOUTS, queue_s=3.0)
LONGEST_MS = int((QUEUED.queue_s + QUEUED.waiting_s + QUEUED.stall_s) * 1000) + SLACK_MS


def stop_janitors(world: World, *, supervisors: bool = False) -> None:
    for tree in world.trees.values():
        tree.sweeps = False
        tree.supervised = tree.supervised and not supervisors


def states_of(tree: Tree) -> list[tuple[KVPoll, Reason]]:
    words = [
        tree.table.read(s, int(tree.table.words[s]) >> 32) for s in tree.table.live_slots().tolist()
    ]
    return [(word.state, word.reason) for word in words if word is not None]


def ended(world: World, side: str) -> tuple[KVPoll, Reason] | None:
    """Verdict of room 1: its engine may have cleared it already."""
    job = world.job(side, 1)
    word = world.trees[side].table.read(*job.handles[0][1:])
    if word is not None:
        return (word.state, word.reason) if word.state not in OPEN else None
    return (job.verdict, job.reason) if job.verdict is not None else None


def bring(world: World, side: str, state: KVPoll) -> None:
    """Room 1 to a state on one side, with nobody left who would move it on."""
    decode = side == "decode0"
    if state is KVPoll.Bootstrapping:
        if decode:  # its prefill does not answer
            world.post.cuts.add(frozenset(BOTH))
            world.receive(1)
        else:
            world.send(1)
    elif state is KVPoll.WaitingForInput:
        world.send(1, mute=True)
        world.receive(1, pace_ms=100_000 if decode else 0)
    else:
        world.send(1, mute=decode, chunks=4, pace_ms=100_000)
        world.receive(1)
    until_state(world, side, 1, state)


@pytest.mark.parametrize(
    ("role", "state", "by"), CELLS, ids=lambda value: getattr(value, "name", value)
)
def test_each_observer_alone_ends_a_room_at_its_deadline(
    role: Role, state: KVPoll, by: str
) -> None:
    side = BOTH[role - 1]
    with World(timeouts=ALONE) as world:
        tree, other = world.trees[side], world.trees[BOTH[2 - role]]
        for each in world.trees.values():
            each.shape.hang_s = 1000.0  # nobody kills those that we freeze
        if state is not KVPoll.Bootstrapping:
            succeeds(world, 0)
        bring(world, side, state)
        tree.sweeps = by == "janitor"
        for name in CHILDREN:
            other.freeze(name)
            if name != by:
                tree.freeze(name)
        world.post.cuts.add(frozenset(BOTH))
        begun_ms = world.now_ms
        timeout_ms = int(getattr(ALONE, TIMEOUT_OF[state]) * 1000)
        queued_ms = int(ALONE.queue_s * 1000) if by == "engine" else 0  # it renews what it queues
        world.until(lambda: ended(world, side) is not None, max(timeout_ms, queued_ms) + SLACK_MS)
        assert ended(world, side) == (KVPoll.Failed, ON_EXPIRY[state])
        # It was renewed, at the latest, by a beat that was on its way.
        assert world.now_ms - begun_ms >= timeout_ms - 500


@pytest.mark.parametrize("supervisors", [False, True], ids=["janitors", "supervisors"])
@pytest.mark.parametrize("phase", ["Bootstrapping", "WaitingForInput", "Transferring"])
@pytest.mark.parametrize("side", BOTH)
@pytest.mark.parametrize("victim", CHILDREN)
def test_a_room_ends_on_both_sides_though_nobody_sweeps_and_somebody_dies(
    victim: str, side: str, phase: str, supervisors: bool
) -> None:
    with World(timeouts=QUEUED) as world:
        to_phase(world, phase)
        stop_janitors(world, supervisors=supervisors)
        world.trees[side].kill(victim)
        world.run(LONGEST_MS, step_ms=5)
        for name in BOTH:
            left = states_of(world.trees[name])
            assert all(state not in OPEN for state, _ in left), f"{name}: {left}"
        world.settle()


@pytest.mark.parametrize("supervisors", [False, True], ids=["janitors", "supervisors"])
@pytest.mark.parametrize("side", BOTH)
def test_pages_become_quiet_without_a_janitor_where_a_worker_lives_to_say_so(
    world: World, side: str, supervisors: bool
) -> None:
    for tree in world.trees.values():
        tree.shape.hang_s = 1000.0
    moving(world)
    stop_janitors(world, supervisors=supervisors)
    world.abort(side, 1)
    world.until(lambda: all(world.job(name, 1).cleared for name in BOTH), within_ms=300)
    moving(world, 2)
    world.trees["prefill"].freeze("engine")  # the writes of its worker end all the same
    until_verdict(world, 2, "decode0", within_ms=int(TIMEOUTS.stall_s * 2000) + SLACK_MS)
    world.until(lambda: world.job("decode0", 2).cleared, within_ms=1500)
    succeeds_after(world)


def succeeds_after(world: World) -> None:
    """Rooms go on without any janitor."""
    world.trees["prefill"].thaw("engine")
    world.run(300)
    for room in (10, 11, 12):
        succeeds(world, room)


def test_what_waits_for_the_janitor_is_a_fence_by_force_and_a_dead_engines_slots() -> None:
    with World() as world:
        moving(world)
        world.trees["decode0"].sweeps = False
        world.trees["prefill"].kill("worker0")  # and nobody is left who could fence
        until_verdict(world, 1, *BOTH, within_ms=600)
        world.run(int(TIMEOUTS.quiet_s * 3000), step_ms=5)
        assert not world.job("decode0", 1).half.quiet()
        assert world.trees["decode0"].forced == []
        succeeds(world, 2)
        world.receive(3)
        world.run(20)
        world.trees["decode0"].kill("engine")
        world.run(int(TIMEOUTS.bootstrap_s * 1000) + SLACK_MS, step_ms=5)
        assert states_of(world.trees["decode0"]), "who clears them?"
        world.trees["decode0"].sweeps = True
        world.run(int(TIMEOUTS.quiet_s * 1000) + 200, step_ms=5)
        assert world.trees["decode0"].forced == ["worker0"]
        world.settle()


def test_a_queue_that_never_moves_ends_its_rooms_on_both_sides() -> None:
    """Decode's engine lives, beats and never gets its pages; its beats renew prefill's half."""
    with World(timeouts=replace(TIMEOUTS, queue_s=6.0)) as world:
        succeeds(world, 0)
        world.send(1)
        world.receive(1, pace_ms=100_000)
        until_state(world, "decode0", 1, KVPoll.WaitingForInput)

        def queue(ms: int) -> None:
            """As an engine's KVManager does."""
            for _ in range(0, ms, 200):
                world.job("decode0", 1).half.renew_queued(world.clock())
                world.run(200, step_ms=5)

        queue(3600)  # longer than any deadline: it is known to wait
        assert verdict(world, "prefill", 1) is verdict(world, "decode0", 1) is None
        queue(2600)
        until_verdict(world, 1, *BOTH, within_ms=SLACK_MS)
        reasons = {world.job(name, 1).reason for name in BOTH}
        assert reasons & {Reason.BOOTSTRAP_TIMEOUT, Reason.WAITING_TIMEOUT}
        world.settle()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", [1000])
def test_the_laws_hold_in_chaos_without_a_janitor(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rooms, deaths, freezes and cuts; each change and each look sees that none is open past its
    time."""
    build = World.__init__

    def unswept(world: World, *arguments: object, **named: object) -> None:
        build(world, *arguments, **named)  # type: ignore[arg-type]
        stop_janitors(world)

    monkeypatch.setattr(World, "__init__", unswept)
    for seed in range(first, first + 5):
        where = schedule.setting(seed)
        assert schedule.failure(where, schedule.schedule(where)) is None, f"seed {seed}"
