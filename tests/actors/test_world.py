"""One law a test: rooms between a prefill and its decodes, in a world that breaks on purpose."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdrt.actors.decode_listener import DecodeListener
from pdrt.protocol.messages import Landed
from pdrt.protocol.states import OPEN, KVPoll, Reason
from tests.actors.world import LAYOUT, World

ABORT_MS = 100
PHASES = ["before the peer", "Bootstrapping", "WaitingForInput", "Transferring"]


def verdict(world: World, name: str, room: int) -> KVPoll | None:
    engine = world.engine(name)
    if any(plan.room == room for plan in engine.plans):
        return None  # its turn comes when the id is free
    history = engine.history
    return next((j.verdict for j in reversed(history) if j.plan.room == room), None)


def until_verdict(world: World, room: int, *names: str, within_ms: int = 5000) -> int:
    def done() -> bool:
        return all(verdict(world, name, room) is not None for name in names)

    return world.until(done, within_ms)


def succeeds(world: World, room: int, decode: str = "decode0") -> None:
    world.both(room, decode)
    until_verdict(world, room, "prefill", decode)
    assert verdict(world, "prefill", room) is verdict(world, decode, room) is KVPoll.Success


def until_state(world: World, name: str, room: int, state: KVPoll) -> None:
    def there() -> bool:
        jobs = world.engine(name).jobs
        return room in jobs and jobs[room].half.poll() is state

    world.until(there)


def moving(world: World, room: int = 1, decode: str = "decode0") -> None:
    """A room of which one chunk of many has been posted."""
    world.both(room, decode, pages_count=4, chunks=4, pace_ms=400)
    until_state(world, "prefill", room, KVPoll.Transferring)


def to_phase(world: World, phase: str) -> None:
    """Bring room 1 where both halves are in that phase."""
    succeeds(world, 0)
    if phase == "Bootstrapping":  # prefill waits for a destination
        world.send(1)
        world.receive(1, pace_ms=10_000)
        until_state(world, "decode0", 1, KVPoll.WaitingForInput)
        world.run(100)
    elif phase == "WaitingForInput":  # the destination is known, and nothing is sent
        world.both(1, mute=True)
        until_state(world, "prefill", 1, KVPoll.WaitingForInput)
    elif phase == "Transferring":
        moving(world)


# --- success ---


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("polls", [0, 1, 20])
@pytest.mark.parametrize("late_ms", [-300, 0, 300])
def test_every_byte_is_in_place_whoever_comes_first(ranks: int, polls: int, late_ms: int) -> None:
    with World(ranks=ranks, polls=polls) as world:
        for room in range(10):
            if late_ms >= 0:
                world.receive(room)
                world.run(late_ms)
                world.send(room, chunks=1 + room % 4)
            else:
                world.send(room, chunks=1 + room % 4, eager=True)
                world.run(-late_ms)
                world.receive(room)
        world.until(lambda: len(world.ledger.landed) == 10)
        world.settle()


def test_an_abort_after_success_changes_nothing(world: World) -> None:
    world.both(1)
    world.until(lambda: 1 in world.ledger.landed)
    for name in ("prefill", "decode0"):
        world.job(name, 1).half.abort()
    world.run(200)
    until_verdict(world, 1, "prefill", "decode0")
    assert verdict(world, "prefill", 1) is verdict(world, "decode0", 1) is KVPoll.Success


def test_a_room_id_may_be_used_again_at_once(world: World) -> None:
    for _ in range(5):
        succeeds(world, 1)
        moving(world, 2)
        world.abort("decode0", 2)
        until_verdict(world, 2, "prefill", "decode0")
        world.until(lambda: 2 not in world.engine("prefill").jobs)
    assert len(world.ledger.landed) == 5


def test_a_late_destination_of_an_ended_room_is_not_matched_with_a_new_one(world: World) -> None:
    world.post.weather.repeat = 1.0
    succeeds(world, 1)
    world.send(1)  # nobody on decode waits for this one
    world.run(500)
    assert verdict(world, "prefill", 1) is not KVPoll.Success
    assert world.engine("prefill").job(1).half.poll() is KVPoll.Bootstrapping


# --- aborts ---


@pytest.mark.parametrize("phase", PHASES[1:])
@pytest.mark.parametrize("side", ["prefill", "decode0"])
def test_an_abort_reaches_the_other_side_within_100_ms(world: World, side: str, phase: str) -> None:
    to_phase(world, phase)
    other = "decode0" if side == "prefill" else "prefill"
    world.abort(side, 1)
    assert until_verdict(world, 1, other, within_ms=ABORT_MS) <= ABORT_MS
    assert world.job(other, 1).reason is Reason.PEER_ABORTED


@pytest.mark.parametrize("restarted", [False, True])
def test_an_abort_before_prefill_has_answered_the_first_hello_is_told(
    world: World, restarted: bool
) -> None:
    if restarted:
        succeeds(world, 0)
        world.trees["decode0"].kill("listener")
    world.post.cuts.add(frozenset(("prefill", "decode0")))
    world.both(1, mute=True)
    until_state(world, "decode0", 1, KVPoll.Bootstrapping)
    world.run(100)
    world.abort("decode0", 1)
    world.run(20)
    world.post.mend("prefill", "decode0")
    until_verdict(world, 1, "prefill", within_ms=1000)  # it is said again after 0.2 s, and 0.4
    assert world.job("prefill", 1).reason is Reason.PEER_ABORTED


def test_an_abort_is_told_though_the_slot_was_cleared_before_the_listener_looked(
    world: World,
) -> None:
    to_phase(world, "Bootstrapping")
    world.abort("decode0", 1)  # what says so is under way
    world.job("decode0", 1).half.clear()
    listener = world.trees["decode0"].processes["listener"].actor
    assert isinstance(listener, DecodeListener)
    listener._scan(world.clock())
    until_verdict(world, 1, "prefill", within_ms=ABORT_MS)
    assert world.job("prefill", 1).reason is Reason.PEER_ABORTED


@pytest.mark.parametrize("side", ["prefill", "decode0"])
def test_an_abort_before_the_peer_knows_the_room_meets_it(world: World, side: str) -> None:
    succeeds(world, 0)
    first, second = (
        (world.send, world.receive) if side == "prefill" else (world.receive, world.send)
    )
    other = "decode0" if side == "prefill" else "prefill"
    first(1)
    world.run(10)
    world.abort(side, 1)
    world.run(300)
    second(1)
    assert until_verdict(world, 1, other, within_ms=ABORT_MS) <= ABORT_MS
    assert verdict(world, other, 1) is KVPoll.Failed


def test_prefill_that_opens_and_aborts_after_decode_asked_tells_it_at_once(world: World) -> None:
    succeeds(world, 0)
    world.receive(1, pace_ms=10_000)
    world.run(1000)  # its questions have become rare
    world.send(1)
    world.run(30)
    world.abort("prefill", 1)
    assert until_verdict(world, 1, "decode0", within_ms=ABORT_MS) <= ABORT_MS


@pytest.mark.parametrize("phase", PHASES[1:])
def test_both_sides_abort_at_once_and_twice(world: World, phase: str) -> None:
    to_phase(world, phase)
    for _ in range(2):
        world.abort("prefill", 1)
        world.abort("decode0", 1)
    until_verdict(world, 1, "prefill", "decode0", within_ms=ABORT_MS)
    for name in ("prefill", "decode0"):
        assert world.job(name, 1).reason is Reason.ABORTED
    succeeds(world, 1)


@pytest.mark.parametrize("side", ["prefill", "decode0"])
def test_an_abort_whose_listener_dies_reaches_the_other_side_all_the_same(
    world: World, side: str
) -> None:
    to_phase(world, "Transferring")
    other = "decode0" if side == "prefill" else "prefill"
    world.trees[side].kill("listener")
    world.abort(side, 1)
    # Of a room that was cleared before prefill's new listener looked, only decode's deadline tells.
    until_verdict(world, 1, other, within_ms=1000 if side == "decode0" else 2000)
    succeeds(world, 2)


# --- quiet ---


def test_pages_of_an_aborted_room_are_held_until_the_last_byte_has_landed() -> None:
    with World(polls=200) as world:
        moving(world)
        world.abort("decode0", 1)
        world.run(20)
        assert not world.job("decode0", 1).half.quiet()
        world.settle()
        assert world.job("decode0", 1).cleared


def test_a_listener_that_was_restarted_does_not_call_a_moving_room_quiet() -> None:
    with World(polls=300) as world:
        moving(world)
        world.trees["prefill"].kill("listener", again_ms=0)
        world.abort("decode0", 1)
        world.run(60)
        assert not world.job("decode0", 1).half.quiet()
        world.settle()


def test_a_dead_prefill_worker_is_no_fence_unless_its_death_ends_its_writes(world: World) -> None:
    moving(world)
    shm = world.trees["prefill"].transports()[0].name == "shm"
    world.trees["prefill"].kill("worker0")
    until_verdict(world, 1, "prefill", "decode0", within_ms=400)
    world.until(lambda: world.job("decode0", 1).cleared, within_ms=3000)
    assert world.trees["decode0"].forced == ([] if shm else ["worker0"])


# --- deaths ---


@pytest.mark.parametrize("tree", ["prefill", "decode0"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_listener_restart_costs_no_room(world: World, tree: str, phase: str) -> None:
    succeeds(world, 0)
    world.send(1, chunks=4, pace_ms=60)
    world.receive(1, pace_ms=60)
    if phase != PHASES[0]:
        until_state(world, "decode0", 1, KVPoll[phase])
    world.trees[tree].kill("listener")
    until_verdict(world, 1, "prefill", "decode0")
    assert verdict(world, "prefill", 1) is verdict(world, "decode0", 1) is KVPoll.Success


@pytest.mark.parametrize("tree", ["prefill", "decode0"])
def test_rooms_that_only_wait_survive_a_worker_restart(world: World, tree: str) -> None:
    succeeds(world, 0)
    world.receive(1, pace_ms=300)
    world.send(1)
    until_state(world, "decode0", 1, KVPoll.WaitingForInput)
    world.trees[tree].kill("worker0")
    until_verdict(world, 1, "prefill", "decode0")
    assert verdict(world, "prefill", 1) is verdict(world, "decode0", 1) is KVPoll.Success


def test_prefills_worker_restart_costs_no_room_whose_bytes_it_did_not_move(world: World) -> None:
    to_phase(world, "WaitingForInput")
    world.trees["prefill"].kill("worker0")
    world.run(200)
    world.engine("prefill").unmute(1)
    until_verdict(world, 1, "prefill", "decode0")
    assert verdict(world, "prefill", 1) is verdict(world, "decode0", 1) is KVPoll.Success


@pytest.mark.parametrize("tree", ["prefill", "decode0"])
def test_a_worker_death_fails_the_rooms_it_moved_and_no_later_one(world: World, tree: str) -> None:
    moving(world)
    world.trees[tree].kill("worker0")
    until_verdict(world, 1, "prefill", "decode0", within_ms=400)
    assert world.job(tree, 1).reason is Reason.WORKER_DIED
    succeeds(world, 2)


@pytest.mark.parametrize("phase", PHASES[1:])
@pytest.mark.parametrize("tree", ["prefill", "decode0"])
def test_an_engine_death_is_told_to_the_other_side(world: World, tree: str, phase: str) -> None:
    to_phase(world, phase)
    other = "decode0" if tree == "prefill" else "prefill"
    world.trees[tree].kill("engine")
    until_verdict(world, 1, other, within_ms=200)
    assert world.job(other, 1).reason is Reason.ENGINE_DIED
    world.until(lambda: "engine" in world.trees[tree].processes)
    succeeds(world, 2)


@pytest.mark.parametrize("name", ["listener", "worker0", "engine"])
@pytest.mark.parametrize("tree", ["prefill", "decode0"])
def test_every_room_ends_though_somebody_is_frozen(world: World, tree: str, name: str) -> None:
    world.trees[tree].shape.hang_s = 1000.0  # and nobody kills it
    moving(world)
    world.both(2)
    world.trees[tree].freeze(name)
    world.run(6000, step_ms=5)
    for each in world.trees.values():
        words = each.table.words[each.table.live_slots()].tolist()
        assert all(word & 0xF not in OPEN for word in words)
    world.trees[tree].thaw(name)
    world.run(1000, step_ms=5)
    succeeds(world, 3)


def test_a_frozen_decode_slows_nobody_else() -> None:
    with World(decodes=2) as world:
        succeeds(world, 0, "decode0")
        succeeds(world, 1, "decode1")
        alone_ms = _ms_of(world, 2)
        moving(world, 3, "decode0")
        for name in ("listener", "worker0", "engine"):
            world.trees["decode0"].freeze(name)
        assert _ms_of(world, 4) <= alone_ms + 10
        world.settle()


def test_a_room_that_stands_still_does_not_keep_its_worker_awake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not even after others have moved: polling it at once takes time from those who work."""
    with World(decodes=2, polls=20) as world:
        succeeds(world, 0, "decode0")
        succeeds(world, 1, "decode1")
        world.both(2, "decode0", mute=True)
        until_state(world, "prefill", 2, KVPoll.WaitingForInput)
        world.trees["decode0"].freeze("worker0")
        world.engine("prefill").unmute(2)
        until_state(world, "prefill", 2, KVPoll.Transferring)
        world.run(400, step_ms=1)
        succeeds(world, 3, "decode1")
        worker = world.trees["prefill"].processes["worker0"].actor
        sleeps_ms: list[int] = []
        monkeypatch.setattr(worker, "tick", _noting(worker.tick, sleeps_ms))
        world.run(100, step_ms=1)
        assert verdict(world, "prefill", 2) is None, "it still stands there"
        assert sleeps_ms
        assert 0 not in sleeps_ms
        world.trees["decode0"].thaw("worker0")
        world.settle()


def _noting(tick: Callable[[int], int], sleeps_ms: list[int]) -> Callable[[int], int]:
    def noting(now_ns: int) -> int:
        sleeps_ms.append(tick(now_ns))
        return sleeps_ms[-1]

    return noting


def _ms_of(world: World, room: int) -> int:
    world.both(room, "decode1")
    return until_verdict(world, room, "prefill", "decode1")


def test_another_instance_at_prefills_address_fails_old_rooms_at_once(world: World) -> None:
    to_phase(world, "Transferring")
    world.replace("prefill")
    until_verdict(world, 1, "decode0", within_ms=300)
    assert world.job("decode0", 1).reason is Reason.PEER_RESTARTED
    succeeds(world, 2)


def test_another_instance_at_decodes_address_gets_no_news_of_the_old_one(world: World) -> None:
    moving(world)
    before = world.trees["decode0"].instance
    world.replace("decode0")
    world.receive(7, pages_count=4)  # the same slot and generation as room 1 had
    world.send(7, mute=True)
    until_state(world, "prefill", 7, KVPoll.WaitingForInput)
    listener = world.trees["decode0"].processes["listener"]
    handle = world.job("decode0", 7).handles[0]
    news = Landed(1, 0, handle.slot, handle.generation, 1, 1, before)
    listener.actor.handle(("control", b"ghost"), news, world.clock())
    assert verdict(world, "decode0", 7) is None
    world.run(10)
    assert world.job("decode0", 7).half.poll() is KVPoll.Transferring
    world.engine("prefill").unmute(7)
    until_verdict(world, 7, "prefill", "decode0")
    assert verdict(world, "decode0", 7) is KVPoll.Success


# --- refusals ---


def test_a_layout_mismatch_names_the_field_on_both_sides() -> None:
    fields = {name: getattr(LAYOUT, name) for name in LAYOUT.__struct_fields__}
    other = LAYOUT.__class__(**{**fields, "page_size": 2})
    with World(decode_layout=other) as world:
        world.both(1)
        until_verdict(world, 1, "prefill", "decode0", within_ms=ABORT_MS)
        decode = world.job("decode0", 1)
        assert decode.reason is Reason.LAYOUT_MISMATCH
        assert "page_size 2/1" in decode.detail
        assert world.job("prefill", 1).reason is Reason.LAYOUT_MISMATCH
        world.settle()


def test_pages_outside_the_pool_fail_that_room_and_no_other(world: World) -> None:
    world.send(1)
    world.receive(1, bad=True)
    world.both(2)
    until_verdict(world, 1, "prefill", "decode0")
    until_verdict(world, 2, "prefill", "decode0")
    assert world.job("decode0", 1).reason is Reason.BAD_DESTINATION
    assert world.job("prefill", 1).reason is Reason.BAD_DESTINATION
    assert verdict(world, "decode0", 2) is KVPoll.Success


def test_a_failed_write_fails_its_room_and_no_later_one(world: World) -> None:
    succeeds(world, 0)
    world.fabric.fail_next(world.trees["decode0"].processes["worker0"].agent)
    world.both(1)
    until_verdict(world, 1, "prefill", "decode0", within_ms=400)
    assert world.job("prefill", 1).reason is Reason.TRANSPORT_FAILED
    succeeds(world, 2)


def test_a_second_decode_with_the_same_room_is_refused() -> None:
    with World(decodes=2) as world:
        succeeds(world, 0, "decode0")
        succeeds(world, 1, "decode1")
        moving(world, 2, "decode0")
        world.receive(2, "decode1")
        until_verdict(world, 2, "decode1", within_ms=ABORT_MS)
        assert world.job("decode1", 2).reason is Reason.PEER_REFUSED
        until_verdict(world, 2, "prefill", "decode0")
        assert verdict(world, "decode0", 2) is KVPoll.Success
        world.settle()


def test_a_healed_link_carries_new_rooms(world: World) -> None:
    moving(world)
    world.post.cuts.add(frozenset(("prefill", "decode0")))
    until_verdict(world, 1, "prefill", "decode0", within_ms=2000)
    world.post.mend("prefill", "decode0")
    world.run(500)
    succeeds(world, 2)
