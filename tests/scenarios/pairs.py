"""Rooms between any prefill and any decode of a world that has several of both."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdrt.protocol.states import KVPoll, Reason
from tests.actors.engines import Job, Plan
from tests.actors.world import World


def plan_pair(world: World, room: int, prefill: str, decode: str, pages_count: int = 4) -> None:
    peer = world.trees[prefill].control
    world.engine(prefill).plan(Plan(room, pages_count=pages_count))
    world.engine(decode).plan(Plan(room, pages_count=pages_count, peer=peer))


def find_job(world: World, name: str, room: int) -> Job | None:
    """The latest use of a room id, None if this life of the engine has not begun it."""
    if "engine" not in world.trees[name].processes:
        return None
    return next((j for j in reversed(world.engine(name).history) if j.plan.room == room), None)


def verdict_of(world: World, name: str, room: int) -> KVPoll | None:
    job = find_job(world, name, room)
    return None if job is None else job.verdict


def has_verdict(world: World, name: str, room: int) -> bool:
    return verdict_of(world, name, room) is not None


@dataclass
class Load:
    """Opens rooms between every two trees, and remembers them; one at a time for each pair."""

    world: World
    prefills: tuple[str, ...]
    decodes: tuple[str, ...]
    rooms: dict[int, tuple[str, str]] = field(default_factory=dict)
    _open: dict[tuple[str, str], int] = field(default_factory=dict)

    def turn(self) -> None:
        for prefill in self.prefills:
            for decode in self.decodes:
                room = self._open.get((prefill, decode))
                if room is None or self._is_over(room, prefill, decode):
                    self._begin(prefill, decode)

    def _is_over(self, room: int, *names: str) -> bool:
        """Or unknown to a life of a tree that came later."""
        jobs = [find_job(self.world, name, room) for name in names]
        return all(job is None or job.cleared for job in jobs)

    def _begin(self, prefill: str, decode: str) -> None:
        if all("engine" in self.world.trees[name].processes for name in (prefill, decode)):
            room = len(self.rooms)
            self.rooms[room] = prefill, decode
            self._open[prefill, decode] = room
            plan_pair(self.world, room, prefill, decode)

    def verdicts(self, room: int) -> set[KVPoll]:
        jobs = [find_job(self.world, name, room) for name in self.rooms[room]]
        return {job.verdict for job in jobs if job is not None and job.verdict is not None}

    def reasons(self, room: int) -> set[Reason]:
        jobs = [find_job(self.world, name, room) for name in self.rooms[room]]
        return {job.reason for job in jobs if job is not None} - {Reason.NONE}
