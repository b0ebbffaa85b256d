"""Replays traces of two_sides.pml against both sides of pdrt, message by message.

usage: python -m stress.models.replay_sides [--seeds N] [--steps N] [--record]

Listeners, transfer worker, KVSender and KVReceiver are pdrt's own, turn by turn in virtual time
(`sides`).  When the model says a message, the real side must say it anew, by one of its repeats;
what else it says is lost.  When a side of the model hears one, the real one hears that copy, and
must answer in the same turn what the model does.  Losses, repeats and overtaking are the trace's.
So are when a write lands, when a worker sees that it has, deadlines, and what engines decide.
After every line both halves of the room, their quiet, and the bytes in decode's pages must be what
the model has.

Not replayed: forced fences and restarts of decode, since a write to memory that is gone is an error
to the real worker and Success to the model's.  A restart is of prefill's whole tree, and between it
and the trace's saying that decode learns of it the two exchange nothing but messages about rooms.
Heartbeats are lost, since one that lists a room acknowledges its destination.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from pdrt.protocol.states import OPEN, KVPoll
from pdrt.transports.base import TransferState
from stress.models import traces
from stress.models.sides import DECODE, FOREVER_NS, PREFILL, Offer, Sides
from stress.models.traces import TRACES, Diverged
from tests.actors.tree import control_of

LINE = re.compile(r"EV (\w+) (\w+) (\d+) (\d+) (\d+) (\w+)((?: \d+){9})$")
NONE, FAILED = 5, 0  # of the model: no room; KVPoll.Failed
STEPS = 1000
OTHER = {PREFILL: DECODE, DECODE: PREFILL}
MANY = ("ROOMS=2", "RESTARTS=0", "LOSSES=6", "REPEATS=6", "CHANNEL=3")
NO_FORCE = ("NO_FORCED_FENCE", "ROOMS=2", "LOSSES=3", "REPEATS=3")
#: By messages alone; that, and either engine gives rooms up, or declines them; deadlines; restarts.
WORLDS: dict[str, tuple[str, ...]] = {
    "patient": (*MANY, "PATIENT", "ABORTS=0"),
    "aborted": (*MANY, "PATIENT", "ABORTS=2"),
    "declined": (*MANY, "PATIENT", "ABORTS=1", "DECLINES=2"),
    "late": (*NO_FORCE, "RESTARTS=0", "ABORTS=1"),
    "restarted": (*NO_FORCE, "NO_DEADLINE", "RESTARTS=2", "ABORTS=2", "REUSED"),
}
CALM_LINES_MAX = 70  # what ends rooms begins within so many lines, by the seed
#: Worlds and seeds of the tests' traces, chosen so that each kind of line is in one of them, and
#: each mutant of the tests gets to where it shows.
RECORDED = (
    ("patient", 22),
    ("aborted", 21),
    ("declined", 7),
    ("late", 22),
    ("late", 65),
    ("restarted", 3),
    ("restarted", 14),
    ("restarted", 20),
    ("restarted", 36),
    ("restarted", 50),
)


class Told(NamedTuple):
    """One line of a trace; in the model's numbers."""

    what: str
    kind: str  # of a message
    room: int
    s: int  # session; of what the network does, the direction
    q: int  # quiet; of a write, which of the two
    answer: str
    answer_quiet: int
    d: int
    d_quiet: int
    g: int
    placed: int
    p: tuple[int, int]
    p_quiet: tuple[int, int]


def parse(text: str) -> list[Told]:
    found = []
    for match in traces.understood(LINE, text):
        what, kind, room, s, q, answer, rest = match.groups()
        n = [int(number) for number in rest.split()]
        where = int(room), int(s), int(q)
        halves = (n[5], n[7]), (n[6], n[8])
        found.append(Told(what, kind, *where, answer, n[0], n[1], n[2], n[3], n[4], *halves))
    return found


class Replay:
    """Has two trees do what a trace tells."""

    def __init__(self, sides: Sides) -> None:
        self.sides = sides
        self.under_way: dict[str, list[Offer]] = {PREFILL: [], DECODE: []}  # by whom it is for
        self.declined: dict[str, set[int]] = {PREFILL: set(), DECODE: set()}

    def act(self, told: Told) -> None:
        name = PREFILL if told.what.startswith("p_") else DECODE
        what = told.what.removeprefix("p_")
        match what:
            case "says":
                self._says(OTHER[name], told)
            case "hears":
                self._hears(name, told)
            case "loses" | "doubles" | "turns":
                self._pass_on(what, self.under_way[DECODE if told.s else PREFILL], told.kind)
            case "lands":
                self._land(told)
            case "moves" | "writes" | "succeeds" | "fences" | "unfenced":
                self._work(what, told)
            case "restarts":
                self.declined[PREFILL].clear()
                self.sides.restart_prefill()
            case "learns":
                self.sides.meet()
            case _:
                self._decide(name, what, told.room)
        self.sides.run()

    # --- engines ---------------------------------------------------------------------------------

    def _decide(self, name: str, what: str, room: int) -> None:
        sides, engine = self.sides, self.sides.engine(name)
        job = engine.jobs.get(room)
        if what == "opens":
            sides.plan(name, room)
        elif what in ("declines", "declines_it"):
            engine.decline(room, control_of(PREFILL) if name == DECODE else "")
            if job is None:
                self.declined[name].add(room)
        elif what == "clears" and room in self.declined[name]:
            self.declined[name].discard(room)
        elif job is None:
            raise Diverged("the room is not open")
        elif what == "asks":
            ready = KVPoll.WaitingForInput
            sides.wait(lambda: job.half.poll() is ready, "it may not say where bytes may land")
            engine.may[room] += 1
        elif what == "gives_up":
            engine.abort(room)
        elif what == "runs_out":
            sides.trees[name].table.poll(*job.handles[0][1:], FOREVER_NS * 2)
        else:
            assert what == "clears", what
            engine.may_clear.add(room)
            sides.wait(lambda: job.cleared, "it cannot be cleared")

    # --- messages --------------------------------------------------------------------------------

    def _says(self, to: str, told: Told) -> None:
        def fitting() -> list[Offer]:
            offers = self.sides.offered(to, told.kind, told.room)
            return [offer for offer in offers if self._fits(offer, told.s, told.q)]

        self.sides.forget(to, told.kind, told.room)  # that it was said before is not enough
        self.sides.wait(fitting, "it is not said")
        self.under_way[to].append(fitting()[-1])

    def _fits(self, offer: Offer, session: int, quiet: int) -> bool:
        """Has the message what the model's says beside its kind and room?  A room that decode
        declined never had pages, so nobody can say who was told of them first."""
        message = offer.message
        if getattr(message, "slot", 0) < 0:
            return True
        said = getattr(message, "session", "")
        ours = self.sides.sessions.index(said) + 1 if said else session
        return ours == session and bool(getattr(message, "quiet", quiet)) == bool(quiet)

    def _hears(self, name: str, told: Told) -> None:
        offer = self._head(self.under_way[name], told.kind)
        back = OTHER[name]
        self.sides.forget(back, told.answer, told.room)
        self.sides.hear(offer)
        if told.answer == "nothing":
            return
        session = len(self.sides.sessions) if name == PREFILL else told.s
        answers = [
            answer
            for answer in self.sides.offered(back, told.answer, told.room)
            if self._fits(answer, session, told.answer_quiet)
        ]
        if not answers and offer.frame is not None and not offer.frame.source.alive:
            answers = [Offer(back, told.answer, offer.message, None)]
        if not answers:
            said = [o.message for o in self.sides.wire.offers if o.to == back]
            raise Diverged(f"it does not answer that; it says {said[-3:]}")
        self.under_way[back].append(answers[-1])

    def _head(self, under_way: list[Offer], kind: str) -> Offer:
        if not under_way or under_way[0].kind != kind:
            raise Diverged(f"the channel has {[offer.kind for offer in under_way]}")
        return under_way.pop(0)

    def _pass_on(self, what: str, under_way: list[Offer], kind: str) -> None:
        offer = self._head(under_way, kind)
        if what == "doubles":
            under_way.insert(0, offer)
        if what != "loses":
            under_way.append(offer)

    # --- bytes -----------------------------------------------------------------------------------

    def _land(self, told: Told) -> None:
        what = told.room, told.s, told.q
        for write in self.sides.air:
            if (write.room, write.session, write.bit) == what:
                self.sides.air.land(write, self.sides.fabric)
                return
        raise Diverged("there is no such write")

    def _work(self, what: str, told: Told) -> None:
        sides, room = self.sides, told.room
        if what in ("moves", "writes"):
            engine = sides.engine(PREFILL)
            engine.may[room] += 1
            sides.run()
            job = engine.jobs.get(room)
            if job is None or job.pages is None:
                raise Diverged("it has nothing to send")
            if what == "moves":
                sides.sent.setdefault(room, []).append(sides.ledger.sent[job.use])
            elif (room, told.s, told.q) not in [(w.room, w.session, w.bit) for w in sides.air]:
                raise Diverged("it is not written")
            return
        operations = sides.operations(room)
        if not operations:
            raise Diverged("the worker has no such room")
        if sides.is_ending(room) is (what == "succeeds"):
            raise Diverged("there is a fence, or none is to be had")
        flying = [write.operation for write in sides.air]
        if what == "fences" and any(operation in flying for operation in operations):
            raise Diverged("a fence waits for the writes before it")
        state = TransferState.FAILED if what == "unfenced" else TransferState.DONE
        for operation in operations:
            done = operation not in flying or what == "unfenced"
            if done and operation.state is TransferState.PENDING:
                operation.state = state

    # --- what must be the same -------------------------------------------------------------------

    def compare(self, told: Told) -> None:
        ours = self._half(DECODE, told.g)
        if ours != (told.d, told.d_quiet if told.d == FAILED else 0):
            raise Diverged(f"decode's half is {ours}")
        for room, state, quiet in zip((1, 2), told.p, told.p_quiet, strict=True):
            ours = self._half(PREFILL, room)
            if ours == (NONE, 0) and state == FAILED:  # given up before it was opened
                self.sides.plan(PREFILL, room)
                self.sides.run()
                ours = self._half(PREFILL, room)
            if ours != (state, quiet if state == FAILED else 0):
                raise Diverged(f"prefill's half of room {room} is {ours}")
        placed = self.sides.placed(told.g)
        if placed is not None and placed != told.placed:
            raise Diverged(f"in decode's pages is {placed}")

    def _half(self, name: str, room: int) -> tuple[int, int]:
        """State and quiet, as the model has them."""
        if room in self.declined[name]:
            return FAILED, 1
        word = self.sides.word(name, room)
        if word is None:
            return NONE, 0
        state = int(word.state)
        if name == DECODE and word.state in OPEN:  # that the peer is known is nothing to the model
            state = max(state - 1, 1) if state < KVPoll.Transferring else state
        return state, int(word.quiet) if word.state is KVPoll.Failed else 0


def replay(trace: Iterable[Told]) -> Counter[str]:
    """Have both sides do what a trace tells.  Raises Diverged."""
    counts: Counter[str] = Counter()
    with Sides() as sides:
        player = Replay(sides)
        for number, told in enumerate(trace, 1):
            name = told.what if told.kind == "nothing" else f"{told.what} {told.kind}"
            counts[name] += 1
            try:
                player.act(told)
                player.compare(told)
            except (Diverged, AssertionError) as error:  # a law of `tests.actors`, or the trace
                raise Diverged(f"line {number}, {told}: {error}") from error
    return counts


def simulate(world: str, seed: int, steps: int = STEPS, mutant: str = "") -> str:
    """The lines of one random run of the model, or of a mutant of it.  Raises Unusable."""
    calm = f"CALM_LINES={seed * 7 % CALM_LINES_MAX}"
    defines = ("TELL", calm, *WORLDS[world], *([mutant] if mutant else []))
    return traces.simulate("two_sides.pml", defines, seed, steps, mutant=bool(mutant))


def recorded(world: str, seed: int) -> Path:
    return TRACES / f"sides_{world}_{seed}.txt"


def main(arguments: list[str]) -> int:
    return traces.play(
        "replay_sides",
        __doc__,
        arguments,
        worlds=WORLDS,
        recorded=[(recorded(world, seed), world, seed) for world, seed in RECORDED],
        simulated=simulate,
        replayed=lambda world, text: replay(parse(text)),
        seeds=100,
        steps=STEPS,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
