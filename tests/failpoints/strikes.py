"""Failpoints in the world: a death, or an exception, at the n-th hit of a point, in virtual time.

All processes of the world share this one, so a death is an exception that nobody catches on its way
out of the process's turn; there the world kills that process, as SIGKILL would have at that point.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

from pdrt import failpoints
from pdrt.actors.base import Actor
from pdrt.actors.decode_listener import DecodeListener
from pdrt.actors.prefill_listener import PrefillListener
from pdrt.actors.transfer import TransferWorker
from pdrt.failpoints import Action, Failpoint, Injected
from tests.actors.post import Box
from tests.actors.tree import Process, Tree
from tests.actors.world import World

#: Points that only a real process comes by; tests/failpoints/test_matrix.py has them.
NOT_IN_THE_WORLD = {
    "actor.start.before_ready",
    "standby.promotion.read",
    "board.buried.before_sweep",
    *(point for point in failpoints.POINTS if point.startswith("supervisor.")),
}


class Died(BaseException):
    """The process that runs just now is no more."""


@dataclass
class Strikes:
    """Counts every hit; at `failpoint.on_hit` of its point the process dies or raises."""

    failpoint: Failpoint | None = None
    hits: Counter[str] = field(default_factory=Counter)
    victim: str = ""  # who was struck: "prefill.worker0"
    died: bool = False  # of it; else a message was dropped, or a sweep given up
    running: str = ""

    def __call__(self, point: str) -> None:
        self.hits[point] += 1
        wanted = self.failpoint
        if wanted is None or point != wanted.point or self.hits[point] != wanted.on_hit:
            return
        self.victim = self.running
        if wanted.action is Action.RAISE:
            raise Injected(point)
        raise Died(point)


@contextmanager
def struck(world: World, strikes: Strikes) -> Iterator[None]:
    """In this block the world's processes come by failpoints, and die there as processes do."""
    doomed: list[str] = []

    def turn_or_die(turn: Callable[..., None], process: Process, *when: int) -> None:
        tree = next(t for t in world.trees.values() if process in t.processes.values())
        strikes.running = f"{tree.name}.{process.name}"
        try:
            turn(process, *when)
        except (Died, Injected):
            strikes.died = True
            tree.kill(process.name)

    def upkeep_or_die(upkeep: Callable[..., None], tree: Tree, *when: int) -> None:
        strikes.running = f"{tree.name}.supervisor"
        try:
            upkeep(tree, *when)
        except Injected:
            return  # its loop counts it, and goes on
        except Died:
            strikes.died = True
            doomed.append(tree.name)

    def abort_or_die(abort: Callable[..., None], self: World, name: str, room: int) -> None:
        strikes.running = f"{name}.engine"
        try:
            abort(self, name, room)
        except (Died, Injected):
            strikes.died = True
            self.trees[name].kill("engine")

    def step_and_bury(step: Callable[..., None], self: World, *ms: int) -> None:
        step(self, *ms)
        while doomed:
            self.replace(doomed.pop())

    def flush_or_die(flush: Callable[..., None], box: Box) -> None:
        at_end = not strikes.running.endswith((".engine", ".supervisor"))  # as `actors.base.run`
        if at_end:
            failpoints.hit("actor.turn.before_flush")
        flush(box)
        if at_end:
            failpoints.hit("actor.turn.before_wake")

    with ExitStack() as patches:
        _wrap(patches, Process, "turn", turn_or_die)
        _wrap(patches, Tree, "upkeep", upkeep_or_die)
        _wrap(patches, World, "abort", abort_or_die)
        _wrap(patches, World, "step", step_and_bury)
        _wrap(patches, Box, "flush", flush_or_die)
        for actor in (PrefillListener, DecodeListener, TransferWorker):
            _wrap(patches, actor, "handle", _handle_or_drop)
        patches.callback(failpoints.disarm)
        failpoints.hit = strikes
        yield


def _handle_or_drop(handle: Callable[..., None], actor: Actor, *what: object) -> None:
    """Law 8, as `actors.base.run` keeps it."""
    with suppress(Injected):
        handle(actor, *what)


def _wrap(patches: ExitStack, owner: type, name: str, by: Callable[..., None]) -> None:
    whole = getattr(owner, name)
    patches.callback(setattr, owner, name, whole)
    setattr(owner, name, lambda *arguments, **named: by(whole, *arguments, **named))
