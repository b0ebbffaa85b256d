"""Which process comes by which point in which play, and what the laws say of the room then."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from pdrt.failpoints import POINTS, Action


class Play(StrEnum):
    """What happens between the two trees while the failpoint is armed."""

    WHOLE = "whole"  # a room of two chunks
    DECODE_ABORTS = "decode_aborts"  # with a chunk of 32 MiB in flight
    PREFILL_ABORTS = "prefill_aborts"  # likewise
    MISMATCH = "mismatch"  # decode names fewer pages than prefill sends
    LISTENER_DIES = "listener_dies"  # the victim tree's; no room
    LISTENER_HANGS = "listener_hangs"  # likewise
    DECODE_WORKER_DIES = "decode_worker_dies"  # no room
    PREFILL_WORKER_DIES = "prefill_worker_dies"  # with a chunk of 32 MiB in flight


class Victim(StrEnum):
    """Who is armed, in the tree of the cell's side."""

    LISTENER = "listener"
    WORKER = "worker0"
    ENGINE = "engine"  # in a process of its own
    SUPERVISOR = "supervisor"
    NEXT = "next"  # whichever process of the tree comes by, one that is still to start included


class Expect(StrEnum):
    SUCCESS = "Success"
    FAILED = "Failed"
    SAME = "same"  # on both sides, whichever it is
    ANY = "any"  # each side a verdict of its own, in time: one engine is gone
    NOTHING = "-"  # no room


#: Nobody kills these for standing still, within a test's time: it continues them.
CONTINUED = {Victim.ENGINE, Victim.SUPERVISOR}


@dataclass(frozen=True)
class Cell:
    point: str
    action: Action
    side: str
    victim: Victim
    play: Play
    expect: Expect
    transport: str = "shm"
    on_hit: int = 1

    def __str__(self) -> str:
        hit = [str(self.on_hit)] if self.on_hit > 1 else []
        return "-".join([self.point, self.action, self.side, self.victim, self.transport, *hit])

    @property
    def dies_whole(self) -> bool:
        """Does the victim's tree have to be started again?"""
        if self.victim is not Victim.SUPERVISOR:
            return False
        guarded = not self.point.startswith("supervisor.")  # in a callback of its loop
        return self.action is Action.KILL or (self.action is Action.RAISE and not guarded)


@dataclass(frozen=True)
class Place:
    """Where a point is played.  `expect` is what the laws say if the victim is not just slow."""

    side: str
    victim: Victim
    play: Play = Play.WHOLE
    expect: Expect = Expect.SUCCESS
    transport: str = "shm"
    on_hit: int = 1


P, D = "prefill", "decode"
_ABORT_D = Place(P, Victim.LISTENER, Play.DECODE_ABORTS, Expect.FAILED)
_ABORT_P = Place(P, Victim.LISTENER, Play.PREFILL_ABORTS, Expect.FAILED)
_WORKER = Place(P, Victim.WORKER)
_MOVING = Place(P, Victim.WORKER, expect=Expect.SAME)
_FENCE = Place(P, Victim.WORKER, Play.DECODE_ABORTS, Expect.FAILED)
_ENGINE_D = Place(D, Victim.ENGINE, expect=Expect.ANY)
_ENGINE_P = Place(P, Victim.ENGINE, expect=Expect.ANY)
_RESTART = Place(P, Victim.SUPERVISOR, Play.LISTENER_DIES, Expect.NOTHING)


def on_both(place: Place) -> tuple[Place, ...]:
    """What a worker does is about its transport, so both are played."""
    return place, replace(place, transport="nixl")


#: Every point; several places where what a death leaves undone depends on whose it is.
PLACES: dict[str, tuple[Place, ...]] = {
    "table.open.claimed": (_ENGINE_D, _ENGINE_P),
    "table.open.before_word": (_ENGINE_D, _ENGINE_P),
    "table.move.after_cas": (
        Place(P, Victim.LISTENER),
        Place(D, Victim.LISTENER),
        _MOVING,
        _ENGINE_D,
        Place(P, Victim.SUPERVISOR, Play.PREFILL_WORKER_DIES, Expect.FAILED),
    ),
    "actor.start.before_ready": (
        Place(P, Victim.NEXT, Play.LISTENER_DIES, Expect.NOTHING),
        Place(D, Victim.NEXT, Play.DECODE_WORKER_DIES, Expect.NOTHING, "nixl"),
    ),
    "actor.turn.before_flush": (
        Place(P, Victim.LISTENER, on_hit=3),
        Place(D, Victim.LISTENER, on_hit=3),
        *on_both(replace(_MOVING, on_hit=3)),
    ),
    "actor.turn.before_wake": (
        Place(P, Victim.LISTENER, on_hit=4),
        Place(D, Victim.LISTENER, on_hit=4),
        replace(_MOVING, on_hit=4),
    ),
    "standby.promotion.read": (
        Place(P, Victim.NEXT, Play.LISTENER_DIES, Expect.NOTHING),
        Place(D, Victim.NEXT, Play.DECODE_WORKER_DIES, Expect.NOTHING),
    ),
    "prefill.match.before_move": (Place(P, Victim.LISTENER),),
    "prefill.match.before_deliver": (Place(P, Victim.LISTENER),),
    "prefill.destination.before_taken": (Place(P, Victim.LISTENER),),
    "prefill.fail.before_tell": (_ABORT_P,),
    "prefill.fenced.before_tell": on_both(_ABORT_P),
    "prefill.abort.before_answer": (_ABORT_D,),
    "prefill.introduce.before_workers": (
        Place(P, Victim.LISTENER, Play.DECODE_WORKER_DIES, Expect.NOTHING),
    ),
    "decode.peer_known.before_move": (Place(D, Victim.LISTENER),),
    "decode.destination.before_post": (Place(D, Victim.LISTENER),),
    "decode.taken.before_mark": (Place(D, Victim.LISTENER),),
    "decode.landed.before_move": (Place(D, Victim.LISTENER),),
    "decode.landed.after_move": (Place(D, Victim.LISTENER),),
    "decode.abort.before_answer": (replace(_ABORT_P, side=D),),
    "decode.fail.before_abort": (replace(_ABORT_D, side=D),),
    "decode.quiet.before_mark": on_both(replace(_ABORT_D, side=D)),
    "worker.chunk.before_taken": on_both(_WORKER),
    "worker.deliver.before_post": on_both(_WORKER),
    "worker.post.after_move": on_both(_MOVING),
    "worker.write.after_post": on_both(_MOVING),
    "worker.landed.before_verdict": on_both(_MOVING),
    "worker.verdict.before_news": on_both(_WORKER),
    "worker.fault.before_tell": (Place(P, Victim.WORKER, Play.MISMATCH, Expect.FAILED),),
    # shm copies before `write` returns: nothing is in flight, so there is nothing to fence.
    "worker.fence.posted": (replace(_FENCE, transport="nixl"),),
    "worker.fence.before_quiet": on_both(_FENCE),
    "worker.fence.before_fenced": on_both(_FENCE),
    "worker.path.before_report": on_both(
        Place(P, Victim.WORKER, Play.DECODE_WORKER_DIES, Expect.NOTHING)
    ),
    "engine.receiver.before_opened": (_ENGINE_D,),
    "engine.metadata.before_move": (_ENGINE_D,),
    "engine.metadata.before_post": (_ENGINE_D,),
    "engine.send.before_post": (_ENGINE_P, replace(_ENGINE_P, on_hit=2)),
    "engine.verdict.before_ended": (
        Place(D, Victim.ENGINE, Play.DECODE_ABORTS, Expect.FAILED),
        Place(P, Victim.ENGINE, Play.PREFILL_ABORTS, Expect.FAILED),
    ),
    "engine.clear.after_slot": (
        Place(D, Victim.ENGINE, expect=Expect.SUCCESS),
        Place(P, Victim.ENGINE, expect=Expect.SUCCESS),
    ),
    "janitor.sweep.before_room": (
        Place(P, Victim.SUPERVISOR, Play.PREFILL_WORKER_DIES, Expect.FAILED),
    ),
    "janitor.bury.after_move": (
        Place(P, Victim.SUPERVISOR, Play.PREFILL_WORKER_DIES, Expect.FAILED),
    ),
    "janitor.settle.before_fence": (
        Place(D, Victim.SUPERVISOR, Play.PREFILL_WORKER_DIES, Expect.FAILED, "nixl"),
    ),
    "supervisor.exit.seen": (_RESTART,),
    "supervisor.bury.before_sweep": (_RESTART, replace(_RESTART, side=D)),
    "board.buried.before_sweep": (
        replace(_RESTART, play=Play.PREFILL_WORKER_DIES, expect=Expect.FAILED),
    ),
    "supervisor.bury.after_sweep": (_RESTART,),
    "supervisor.promote.half": (_RESTART, replace(_RESTART, side=D)),
    "supervisor.kill.sent": (replace(_RESTART, play=Play.LISTENER_HANGS),),
    "supervisor.launch.before_row": (_RESTART,),
}


def expected(place: Place, action: Action) -> Expect:
    """A process that only pauses for a moment costs nobody a room."""
    continued = place.victim in CONTINUED and action is Action.STOP
    slow = action is Action.DELAY or continued
    return Expect.SUCCESS if slow and place.play is Play.WHOLE else place.expect


def all_cells() -> list[Cell]:
    """One transport after the other, so that trees are shared."""
    cells = [
        Cell(
            point,
            action,
            place.side,
            place.victim,
            place.play,
            expected(place, action),
            place.transport,
            place.on_hit,
        )
        for point in POINTS
        for place in PLACES[point]
        for action in Action
    ]
    return sorted(cells, key=lambda cell: cell.transport)


#: In the default suite: a listener, a supervisor.  The trees cost more than the cells.
SUBSET = (
    "prefill.match.before_deliver-kill-prefill-listener-shm",
    "janitor.bury.after_move-raise-prefill-supervisor-shm",
)
