"""Both sides of a room say, hear and do what the model of the two says.

The traces in `traces/` are for machines without spin; `python -m stress.models.replay_sides
--record` writes them anew, and without --record it replays hundreds more.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from pdrt.actors import decode_failing, past, prefill_failing
from pdrt.actors.decode_listener import DecodeListener
from pdrt.actors.news import News
from pdrt.actors.past import Past, theirs_of
from pdrt.actors.prefill_listener import PrefillListener
from pdrt.actors.transfer import TransferWorker
from pdrt.protocol.messages import Abort, Expect
from stress.models import check
from stress.models.replay_sides import (
    RECORDED,
    WORLDS,
    Told,
    parse,
    recorded,
    replay,
    simulate,
)
from stress.models.traces import Diverged
from tests.stress.damaged import DAMAGED, refuses

MODEL_MUTANTS = [
    ("patient", "LANDED_EARLY", 8),
    ("aborted", "REUSE_ON_VERDICT", 1),
    ("declined", "DECLINE_OPEN", 2),
    ("late", "QUIET_UNFENCED", 11),
    ("restarted", "QUIET_OF_UNKNOWN", 2),
    ("restarted", "QUIET_OF_ANOTHER", 10),
]
needs_spin = pytest.mark.skipif(bool(check.missing()), reason=check.missing())


def trace(world: str, seed: int) -> list[Told]:
    return parse(recorded(world, seed).read_text())


def test_both_sides_do_what_the_model_did():
    counts: Counter[str] = Counter()
    for world, seed in RECORDED:
        counts += replay(trace(world, seed))
    told = (
        "opens asks gives_up declines_it runs_out clears learns p_opens p_gives_up p_declines "
        "p_runs_out p_moves p_writes p_succeeds p_fences p_unfenced p_restarts lands"
    ).split()
    to_prefill = ("destination", "abort", "abort_taken", "news_taken")
    to_decode = ("destination_taken", "abort", "abort_taken", "landed")
    told += [f"p_hears {kind}" for kind in to_prefill] + [f"hears {kind}" for kind in to_decode]
    told += [f"{what} {kind}" for what in ("loses", "doubles") for kind in to_prefill + to_decode]
    told += ["says destination", "says abort", "p_says abort", "p_says landed", "turns abort"]
    assert not [what for what in told if not counts[what]]


def diverges(lines: list[Told]) -> bool:
    try:
        replay(lines)
    except Diverged:
        return True
    return False


advance, on_destination, on_landed = (
    TransferWorker._advance,
    PrefillListener._on_destination,
    DecodeListener._on_landed,
)
doubts, end, given_up = Past.doubts, Past._end, past.GivenUp


def nothing(*_: Any, **__: Any) -> None:
    pass


def is_heard_alone(self: DecodeListener, sender: Any, landed: Any, now_ns: int) -> None:
    mailbox, self._mailbox = self._mailbox, type("Mute", (), {"post": nothing})()
    on_landed(self, sender, landed, now_ns)
    self._mailbox = mailbox


def wait_for_one(self: TransferWorker, room: Any, now_ns: int) -> bool:
    moved = advance(self, room, now_ns)
    if room.last_queued and not room.pieces and len(room.inflight) == 2 and not room.ending:
        room.inflight = []
        return advance(self, room, now_ns)
    return moved


def settle_at_once(self: TransferWorker, room: Any) -> bool:
    self._settle(room, fenced=True)
    return True


def for_us_all_the_same(self: PrefillListener, sender: Any, message: Any, now_ns: int) -> None:
    on_destination(self, sender, replace(message, session=self._session), now_ns)


def at_any_answer(self: prefill_failing.Failing, taken: Any) -> None:
    if (room := self._by_theirs.get(theirs_of(taken))) is not None:
        room.abort_due_ns = 0


def at_any_word(self: decode_failing.Failing, sender: Any, said: Any) -> None:
    self.become_quiet(said.slot, said.generation)


def of_anybody(self: decode_failing.Failing, sender: Any, said: Any) -> None:
    if said.quiet:
        self.become_quiet(said.slot, said.generation)


def all_quiet(self: Past, key: Any, theirs: Any, reason: Any, *, quiet: bool) -> Any:
    return end(self, key, theirs, reason, quiet=True)


def but_of_aborts(self: Past, asked: Any, room: Any) -> bool:
    return not isinstance(asked, Abort) and doubts(self, asked, room)


def but_of_questions(self: Past, asked: Any, room: Any) -> bool:
    return not isinstance(asked, Expect) and doubts(self, asked, room)


def told_quiet(*given: Any) -> past.GivenUp:
    until_ns, theirs, reason, _ = given
    return given_up(until_ns, theirs, reason, True)


decode, prefill = decode_failing.Failing, prefill_failing.Failing
#: world, where, what, and what is there instead
MUTANTS: dict[str, tuple[str, object, str, Any]] = {
    "decode says its destination once": ("patient", DecodeListener, "_repeat", nothing),
    "decode says an abort once": ("aborted", decode, "repeat", nothing),
    "decode does not answer news": ("patient", DecodeListener, "_on_landed", is_heard_alone),
    "decode takes any word for quiet": ("aborted", decode, "hear", at_any_word),
    "decode believes an earlier prefill": ("restarted", decode, "hear", of_anybody),
    "prefill says an abort once": ("aborted", prefill, "repeat", nothing),
    "prefill takes any answer for its last": ("aborted", prefill, "taken", at_any_answer),
    "prefill forgets an early destination": ("patient", Past, "keep_early", nothing),
    "prefill takes another's destination": (
        "restarted",
        PrefillListener,
        "_on_destination",
        for_us_all_the_same,
    ),
    "whatever ended is quiet": ("aborted", Past, "_end", all_quiet),
    "a half that came too late is quiet": ("restarted", past, "GivenUp", told_quiet),
    "a half that is aborted is quiet": ("restarted", Past, "doubts", but_of_aborts),
    "a half that is asked for is quiet": ("restarted", Past, "doubts", but_of_questions),
    "the worker tells its news once": ("patient", News, "repeat", nothing),
    "the worker waits for one write": ("patient", TransferWorker, "_advance", wait_for_one),
    "the worker waits for no fence": ("aborted", TransferWorker, "_quieten", settle_at_once),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_actors_that_lack_a_guard_do_not(mutant, monkeypatch):
    world, *where = MUTANTS[mutant]
    monkeypatch.setattr(*where)
    assert any(diverges(trace(*recorded)) for recorded in RECORDED if recorded[0] == world)


@pytest.mark.parametrize(
    "lines",
    [
        "EV says destination 1 1 0 nothing 0 5 0 1 0 5 0 5 0",
        "EV asks nothing 1 0 0 nothing 0 3 0 1 0 5 0 5 0",
        "EV hears landed 1 1 0 news_taken 0 5 0 1 0 5 0 5 0",
        "EV lands nothing 1 1 1 nothing 0 5 0 1 1 5 0 5 0",
        "EV p_opens nothing 1 0 0 nothing 0 5 0 1 0 2 0 5 0",
        "EV opens nothing 1 0 0 nothing 0 0 1 1 0 5 0 5 0",
    ],
)
def test_a_trace_that_cannot_be_is_not_replayed(lines):
    assert parse(lines)
    assert diverges(parse(lines))


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_line_that_is_not_understood_is_not_passed_over(damaged):
    refuses(parse, recorded(*RECORDED[0]), damaged)


@needs_spin
@pytest.mark.parametrize(("world", "seed"), RECORDED)
def test_the_recorded_traces_are_what_spin_tells(world, seed):
    assert simulate(world, seed) == recorded(world, seed).read_text(), (
        "the model was changed: python -m stress.models.replay_sides --record"
    )


@needs_spin
@pytest.mark.parametrize(("world", "mutant", "seed"), MODEL_MUTANTS)
def test_they_do_not_what_a_mutant_of_the_model_does(world, mutant, seed):
    assert diverges(parse(simulate(world, seed, mutant=mutant)))


@needs_spin
@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_both_sides_do_what_hundreds_of_simulations_do(world):
    for seed in range(200, 400):
        replay(parse(simulate(world, seed)))
