"""FAILPOINTS: named places where a test makes this process die, stop, raise or dawdle.

    failpoints.hit("worker.post.after_move")

`POINTS` lists them all.  A hit costs a call into C that does nothing, until a test arms this
process: nothing in pdrt does, no message, no flag and no variable can.  Arming swaps `hit`, so call
it as above and never import the name.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

import msgspec

from pdrt.errors import BadConfig


class Point(NamedTuple):
    who: str  # the process that comes by
    here: str  # what is true at this point
    undone: str  # what a death here leaves undone, and who makes up for it


class Action(StrEnum):
    KILL = "kill"  # SIGKILL to this process, by itself
    STOP = "stop"  # SIGSTOP; somebody else continues it, or kills it for hanging
    RAISE = "raise"  # Injected
    DELAY = "delay"  # sleep, then go on


class Injected(RuntimeError):
    """An exception that nobody expects: of no type that any code of ours catches by name."""


class Failpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What to do where.  Raises BadConfig for a point that there is not."""

    point: str
    action: Action
    on_hit: int = 1  # the first, the second, ... time this process comes by
    delay_s: float = 0.1

    def __post_init__(self) -> None:
        if self.point not in POINTS:
            raise BadConfig(f"no failpoint is called {self.point!r}")
        if self.on_hit < 1 or not 0 <= self.delay_s <= DELAY_MAX_S:
            raise BadConfig(
                f"{self.point}: hits count from 1 (given {self.on_hit}), and a delay lasts from 0 "
                f"to {DELAY_MAX_S:g} s (given {self.delay_s:g})"
            )


class Once:
    """Chooses one failpoint, at one hit of its point, and none ever after."""

    def __init__(self, failpoint: Failpoint, claim: Callable[[], bool] = lambda: True) -> None:
        """`claim` is asked at that hit: whether this process may, of all that are armed alike."""
        self._failpoint, self._claim = failpoint, claim
        self._hits_count = 0

    def __call__(self, point: str) -> Failpoint | None:
        if point != self._failpoint.point:
            return None
        self._hits_count += 1
        due = self._hits_count == self._failpoint.on_hit and self._claim()
        return self._failpoint if due else None


#: What is to be done at a point, if anything.
Choose = Callable[[str], Failpoint | None]

DELAY_MAX_S = 60.0

# Of what one can call with a name and ignore, nothing costs less: it is C, and takes one argument.
_off: Callable[[str], object] = bool

hit: Callable[[str], object] = _off


def arm(choose: Choose) -> None:
    """For tests: from now on `choose` is asked at every hit of this process."""
    global hit

    def ask(point: str) -> None:
        failpoint = choose(point)
        if failpoint is not None:
            strike(failpoint)

    hit = ask


def disarm() -> None:
    global hit
    hit = _off


def strike(failpoint: Failpoint) -> None:
    """Do it, here and now."""
    match failpoint.action:
        case Action.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Action.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case Action.DELAY:
            time.sleep(failpoint.delay_s)
        case Action.RAISE:
            raise Injected(failpoint.point)


POINTS: dict[str, Point] = {
    # --- the status table, in whatever process writes to it ---
    "table.open.claimed": Point(
        "an engine",
        "a slot is claimed, and its fields are still those of the room before",
        "the claim; the sweep frees it once the engine is buried",
    ),
    "table.open.before_word": Point(
        "an engine",
        "the fields of a new room are published, its word is not",
        "the room; nobody has seen it, and the sweep frees the claim",
    ),
    "table.move.after_cas": Point(
        "any",
        "a room has moved; its times and counters have not, and nobody has been told",
        "the telling; whoever waits for it reads the table",
    ),
    # --- every actor ---
    "actor.start.before_ready": Point(
        "a listener or a worker",
        "doors and links are open, and the supervisor does not know it",
        "the start; it is a death like any other, and another child is launched",
    ),
    "actor.turn.before_flush": Point(
        "a listener or a worker",
        "a turn's work is done, and what it has to say has not left",
        "every message of the turn; each is repeated by somebody, or the table says it",
    ),
    "actor.turn.before_wake": Point(
        "a listener or a worker",
        "a turn's messages have left, and no engine has been woken",
        "the wake-ups, which are hints",
    ),
    "standby.promotion.read": Point(
        "a standby",
        "it knows whom it replaces, and has opened nothing",
        "the take-over; the row is that of a child that never became ready",
    ),
    # --- prefill's listener ---
    "prefill.match.before_move": Point(
        "prefill's listener",
        "room and destination have met, and the table does not know it",
        "the meeting; decode sends the destination again to the next listener",
    ),
    "prefill.match.before_deliver": Point(
        "prefill's listener",
        "the room is in WaitingForInput, and its worker has no destination",
        "the delivery; decode sends the destination again, and the next listener delivers it",
    ),
    "prefill.destination.before_taken": Point(
        "prefill's listener",
        "the worker has the destination, and decode does not know that it arrived",
        "the acknowledgement; decode sends the destination again",
    ),
    "prefill.fail.before_tell": Point(
        "prefill's listener",
        "a room is Failed in the table, and decode has not been told",
        "the telling; the next listener's first scan finds the room, and decode asks",
    ),
    "prefill.fenced.before_tell": Point(
        "prefill's listener",
        "nothing of a failed room can land any more, and decode has not been told",
        "the word of quiet; decode asks once a second, or fences by itself",
    ),
    "prefill.abort.before_answer": Point(
        "prefill's listener",
        "decode's abort has ended our half, and is not acknowledged",
        "the acknowledgement; decode says it again",
    ),
    "prefill.introduce.before_workers": Point(
        "prefill's listener",
        "a decode is known, and no worker connects to it",
        "the introduction; decode's heartbeat is answered with Resync",
    ),
    # --- decode's listener ---
    "decode.peer_known.before_move": Point(
        "decode's listener",
        "the path of a room is in its slot, its word still says Bootstrapping",
        "the move; the engine repeats the room to the next listener",
    ),
    "decode.destination.before_post": Point(
        "decode's listener",
        "a destination has come from the engine, and has not left for prefill",
        "the sending; the engine repeats it to the next listener",
    ),
    "decode.taken.before_mark": Point(
        "decode's listener",
        "prefill has the destination, and the table does not know it",
        "the mark; the engine repeats the destination, and so does the next listener",
    ),
    "decode.landed.before_move": Point(
        "decode's listener",
        "every byte is in place, and the room is still in Transferring",
        "the verdict; prefill's worker repeats Landed until it is acknowledged",
    ),
    "decode.landed.after_move": Point(
        "decode's listener",
        "the room is in Success; neither engine nor prefill's worker know it",
        "wake-up and acknowledgement; the engine polls, the worker repeats itself",
    ),
    "decode.abort.before_answer": Point(
        "decode's listener",
        "prefill's abort has ended our half, and is not acknowledged",
        "the acknowledgement; prefill says it again",
    ),
    "decode.fail.before_abort": Point(
        "decode's listener",
        "a room is Failed in the table, and prefill has not been told",
        "the abort; the next listener finds the failed room and says it",
    ),
    "decode.quiet.before_mark": Point(
        "decode's listener",
        "prefill has said that a failed room is quiet, and the table does not know it",
        "the mark; the next listener asks again, or the worker is fenced",
    ),
    # --- the transfer worker ---
    "worker.chunk.before_taken": Point(
        "prefill's worker",
        "a chunk is taken, and the engine does not know it",
        "the acknowledgement; the engine sends every chunk to the next worker",
    ),
    "worker.deliver.before_post": Point(
        "prefill's worker",
        "a destination is taken, and nothing is posted",
        "the room as the worker knew it; it only waited, and the next worker is told again",
    ),
    "worker.post.after_move": Point(
        "prefill's worker",
        "the room says Transferring, and no write is posted",
        "the writes; the room ends with its owner",
    ),
    "worker.write.after_post": Point(
        "prefill's worker",
        "a write is posted, and nobody follows it yet",
        "the following; what may land is fenced by the death, or by decode's own fence",
    ),
    "worker.landed.before_verdict": Point(
        "prefill's worker",
        "every byte has landed, and the room has no verdict",
        "the verdict; the room ends with its owner, on both sides",
    ),
    "worker.verdict.before_news": Point(
        "prefill's worker",
        "the room is in Success here, and decode does not know it",
        "the news; decode asks our listener, which reads the table",
    ),
    "worker.fault.before_tell": Point(
        "prefill's worker",
        "the worker has ended a room, and told nobody",
        "the telling; listener and engine read the table",
    ),
    "worker.fence.posted": Point(
        "prefill's worker",
        "the fence of a failed room is posted, and not followed",
        "the quiet; the death ends our reads, and decode fences by itself",
    ),
    "worker.fence.before_quiet": Point(
        "prefill's worker",
        "nothing of a failed room can land any more, and the table does not know it",
        "the quiet; as above",
    ),
    "worker.fence.before_fenced": Point(
        "prefill's worker",
        "the failed room is quiet here, and our listener does not know that decode's is, too",
        "the telling; decode fences by itself at the quiet bound",
    ),
    "worker.path.before_report": Point(
        "prefill's worker",
        "a path to a decode is open, and our listener does not know it",
        "the report; the next worker connects anew",
    ),
    # --- the engine's half ---
    "engine.receiver.before_opened": Point(
        "decode's engine",
        "a room is open in the table, and the listener has not been told",
        "the room; it ends with its engine, and prefill's half by deadline or by the sweep's word",
    ),
    "engine.metadata.before_move": Point(
        "decode's engine",
        "the room waits for its destination, and the engine is about to tell it",
        "the destination; the room ends with its engine",
    ),
    "engine.metadata.before_post": Point(
        "decode's engine",
        "the room says Transferring, and its destination has not left",
        "the destination; the room ends with its engine",
    ),
    "engine.send.before_post": Point(
        "prefill's engine",
        "a chunk is counted as sent, and has not left",
        "the chunk; the room ends with its engine",
    ),
    "engine.verdict.before_ended": Point(
        "an engine",
        "the engine has seen that its room failed, and told nobody",
        "the telling; the listener reads the table",
    ),
    "engine.clear.after_slot": Point(
        "an engine",
        "a slot is free, and the engine still counts the room as its own",
        "nothing: the room has its verdict and is quiet",
    ),
    # --- janitor and supervisor ---
    "janitor.sweep.before_room": Point(
        "supervisor",
        "the sweep has found rooms to deal with, and dealt with some of them",
        "the rest; the next sweep finds them again",
    ),
    "janitor.bury.after_move": Point(
        "supervisor",
        "a room of a dead process is ended, and its engine has not been woken",
        "the wake-up, which is a hint",
    ),
    "janitor.settle.before_fence": Point(
        "supervisor",
        "a worker is about to be restarted on purpose",
        "the restart; the next sweep asks again, and a supervisor's death ends the worker, too",
    ),
    "supervisor.exit.seen": Point(
        "supervisor",
        "a child's pidfd has fired and it is reaped; nothing else knows",
        "the burial; the whole tree goes with its supervisor",
    ),
    "supervisor.bury.before_sweep": Point(
        "supervisor",
        "a child is gone with all it forked, and its row still names it",
        "burial and sweep; the whole tree goes",
    ),
    "board.buried.before_sweep": Point(
        "supervisor",
        "a row is nobody's, and the rooms of its dead are not swept",
        "the sweep; the timer's next one does it",
    ),
    "supervisor.bury.after_sweep": Point(
        "supervisor",
        "the rooms of the dead are swept, and no successor is on its way",
        "the restart; the whole tree goes",
    ),
    "supervisor.promote.half": Point(
        "supervisor",
        "a standby has the row of a dead child, and does not know it",
        "the promotion; the standby goes with its supervisor",
    ),
    "supervisor.kill.sent": Point(
        "supervisor",
        "a hung child is killed, and not yet known to be dying",
        "the burial; the whole tree goes",
    ),
    "supervisor.launch.before_row": Point(
        "supervisor",
        "a child runs or is promoted, and its row has no process",
        "the child; it goes with its supervisor",
    ),
}
