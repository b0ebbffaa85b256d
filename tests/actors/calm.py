"""The laws of a calm world: nothing is lost, nobody dies, nothing is tight, and all that happens to
a room is that one of its engines gives it up.

Elsewhere nearly every end of a room has an excuse.  Here a room that nobody gave up succeeds, and
of one that somebody did, the other half is told long before its own deadline.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import permutations

from pdrt.clock import MILLISECOND_NS
from pdrt.protocol.states import KVPoll, Reason, told_by_peer
from tests.actors.engines import Job
from tests.actors.post import LATE_MS_MAX, Weather
from tests.actors.tree import Tree
from tests.actors.world import World

HEARD_MS = 100  # law 6, on a link that is no slower than it should be
CROSSINGS = 4  # of a slow one: hello and its answer, then the question and its answer
GIVEN_UP = frozenset({Reason.ABORTED, Reason.CLIENT_GONE, Reason.SHUTDOWN})


@dataclass(frozen=True)
class Half:
    job: Job
    tree: Tree

    @property
    def reason(self) -> Reason:
        """Of the rank that failed first."""
        return self.job.half._reason

    def world_ms(self, at_ns: int) -> int:
        """A time of this tree's, by the clock of the world."""
        return (at_ns - self.tree.clock.skew_ns) // MILLISECOND_NS


def check(world: World) -> None:
    """Of a world that has settled, and in which both sides opened each room once."""
    halves: dict[int, list[Half]] = defaultdict(list)
    for tree in world.trees.values():
        for job in world.engine(tree.name).history:
            halves[job.plan.room].append(Half(job, tree))
    bound_ms = _bound_ms(world.post.weather)
    for room, both in halves.items():
        assert len(both) == 2, f"calm: {len(both)} halves of room {room}"
        for half, other in permutations(both):
            if broken := _broken(half, other, bound_ms):
                where = half.tree.name
                raise AssertionError(f"calm: room {room}: {broken}: {where}: {half.job.detail}")


def _bound_ms(weather: Weather) -> int:
    """How long it may take to hear that the other side has given a room up."""
    slow_ms = CROSSINGS * weather.delay_ms[1]
    return HEARD_MS + slow_ms + (LATE_MS_MAX if weather.overtaken else 0)


def _broken(half: Half, other: Half, bound_ms: int) -> str:
    """The law that this half breaks; "" if none."""
    job, succeeded = half.job, half.job.verdict is KVPoll.Success
    if half.reason in GIVEN_UP:
        return ""
    if other.reason not in GIVEN_UP:
        return "" if succeeded else "it failed for nothing"
    # Success, too, if the last byte was faster: on prefill alone, which the ledger sees to.
    if not succeeded and half.reason is not told_by_peer(other.reason):
        return "the peer gave it up, unheard"
    since_ms = max(other.world_ms(other.job.verdict_ns), half.world_ms(job.opened_ns))
    late_ms = half.world_ms(job.verdict_ns) - since_ms
    return f"the peer gave it up, heard {late_ms} ms later" if late_ms > bound_ms else ""
