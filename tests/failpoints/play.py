"""One play for the world in which every actor's failpoint is hit, and what must hold after it."""

from __future__ import annotations

from functools import partial

from pdrt.failpoints import Failpoint
from pdrt.protocol.states import KVPoll
from tests.actors.world import World
from tests.failpoints.strikes import Strikes, struck

PLAIN, WAITS, ABORTED, GIVEN_UP, ORPHAN, LONELY, FENCED, SHORT, UNHEARD = range(1, 10)
NEXT = range(100, 104)
SEED = 7
UNQUIET_MS = 1500  # longer than `janitor.IDLE_FENCE_NS`

#: What nobody foresaw may have moved bytes here, so the worker ends the room (TRANSPORT_FAILED).
GIVES_UP = {"worker.write.after_post"}


def play(failpoint: Failpoint | None, *, shm: bool) -> Strikes:
    """Rooms that succeed, rooms that either side aborts before and while bytes move, deaths of a
    worker and of an engine, a destination that is too short, two trees that hear nothing of each
    other; the failpoint strikes on top of it.  Raises what a law raises."""
    strikes = Strikes(failpoint)
    with World(SEED, shm=shm, polls=6) as world:
        with struck(world, strikes):
            _act(world)
            world.settle()
        _judge(world, strikes)
        _next_rooms(world)
        world.settle()
    return strikes


def _act(world: World) -> None:
    world.both(PLAIN, pages_count=4, chunks=2)
    world.both(WAITS, pages_count=3, chunks=3, pace_ms=20)
    world.run(200)
    world.both(ABORTED, pages_count=4, chunks=4, pace_ms=4)
    world.run(14)
    world.abort("decode0", ABORTED)
    world.both(GIVEN_UP, pages_count=4, chunks=4, pace_ms=4)
    world.run(14)
    world.abort("prefill", GIVEN_UP)
    world.send(LONELY, pages_count=2)
    world.run(30)
    world.abort("prefill", LONELY)
    world.receive(LONELY, pages_count=2)
    world.run(60)
    world.both(ORPHAN, pages_count=4, chunks=4, pace_ms=10)
    world.run(20)
    world.trees["prefill"].kill("worker0")
    world.run(60)
    world.both(FENCED, pages_count=4, chunks=4, pace_ms=10)
    world.run(20)
    world.trees["decode0"].kill("engine")
    world.run(100)
    world.send(SHORT, pages_count=4)
    world.receive(SHORT, pages_count=3)
    world.run(UNQUIET_MS)  # until decode has its worker again, and has seen what is too short
    world.both(UNHEARD, pages_count=4, chunks=4, pace_ms=10)
    world.run(20)
    # Nobody can tell decode that the writes have ended: on every transport it fences by force.
    world.post.cuts.add(frozenset(("prefill", "decode0")))
    world.abort("decode0", UNHEARD)
    world.run(UNQUIET_MS)
    world.post.mend("prefill", "decode0")


def _next_rooms(world: World) -> None:
    """Whoever died has a successor, and it serves."""
    for room in NEXT:
        world.both(room, pages_count=2)
    for room in NEXT:
        for name in ("prefill", "decode0"):
            world.until(partial(_succeeded, world, name, room), within_ms=3000)


def _verdict(world: World, name: str, room: int) -> KVPoll | None:
    jobs = [job for job in world.engine(name).history if job.plan.room == room]
    return jobs[-1].verdict if jobs else None


def _succeeded(world: World, name: str, room: int) -> bool:
    verdict = _verdict(world, name, room)
    assert verdict is not KVPoll.Failed, f"{name}: room {room} after the strike: {verdict}"
    return verdict is KVPoll.Success


def _judge(world: World, strikes: Strikes) -> None:
    """Law 7: nobody but a worker or an engine takes a room with it that has no other fault, and no
    message is so dear that to drop it half-way costs the room."""
    if strikes.failpoint is not None and strikes.failpoint.point in GIVES_UP:
        return
    if strikes.died and strikes.victim.endswith((".worker0", ".engine", ".supervisor")):
        return
    for room in (PLAIN, WAITS):
        verdict = _verdict(world, "prefill", room)
        assert verdict is KVPoll.Success, f"room {room} is {verdict}; struck: {strikes.victim}"
