"""What happens in a world, in words."""

from __future__ import annotations

from pdrt.protocol.states import KVPoll
from tests.actors.world import World

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
