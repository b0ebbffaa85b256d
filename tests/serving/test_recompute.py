"""--on-transfer-failure: a room that a fault ended costs an error, or a prefill on decode."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdrt.engine.room import FAILURES
from pdrt.errors import CorruptAux, RoomInUse, TableFull, TransferError
from pdrt.protocol.states import KVPoll, Reason
from pdrt.serving.active import ActiveRequest, Phase
from pdrt.serving.scheduler import DECLINED_MAX
from pdrt.serving.types import Delta, FinishReason, GenerationRequest, Rendezvous
from tests.fakes import FakeRoom
from tests.serving.engines import Answer, Pair, Single, ask, ties_between
from tests.serving.test_scheduler import prompt, requests

DECISIONS = {Reason.ABORTED, Reason.CLIENT_GONE, Reason.PEER_ABORTED, Reason.SHUTDOWN}
FAULTS = [reason for reason in Reason if reason not in DECISIONS | {Reason.NONE}]
SEEDED = {"temperature": 0.9, "top_p": 0.8}

MakePair = Callable[..., Pair]


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> Iterator[Single]:
    with Single(tiny_folder) as single:
        yield single


class Trip:
    """One request on both engines of a pair."""

    def __init__(self, pair: Pair, request: GenerationRequest) -> None:
        self.pair = pair
        self.request = pair.with_room(request)
        assert self.request.rendezvous is not None
        self.number = self.request.rendezvous.room
        self.first, self.answer = Answer(), Answer()
        pair.prefill.submit(self.request, self.first.add)
        self.active: ActiveRequest = pair.decode.submit(self.request, self.answer.add)

    @property
    def room(self) -> FakeRoom:
        """Decode's half."""
        return self.pair.fakes.decode.rooms[self.number]

    def until(self, phase: Phase) -> None:
        self.pair.turn_until(lambda: self.active.phase is phase)

    def end(self) -> None:
        self.pair.turn_until(lambda: self.first.last and self.answer.last)

    @property
    def meta(self) -> dict[str, object]:
        assert self.answer.last is not None
        return self.answer.last.meta


def break_room(trip: Trip, where: str, reason: Reason) -> None:
    """End decode's half of a room by a fault, in one of its phases."""
    if where == "MEETING":
        trip.pair.decode.iterate()
    else:
        trip.until(Phase.LANDING)
        for _ in range(2):  # some chunks have landed, and others are on their way
            trip.pair.turn()
    trip.room.fault(reason)


def ended_by(trip: Trip, error: type[Exception], wanted: list[Answer] | None) -> None:
    """By what was wanted, computed on decode; or by the error, where nothing was."""
    assert trip.answer.last is not None
    if wanted is None:
        assert isinstance(trip.answer.last.error, error)
    else:
        assert ties_between([trip.answer], wanted) == 0
        assert trip.meta["recomputed"] is True


@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("where", ["MEETING", "LANDING"])
def test_the_answer_of_a_lost_room_is_that_of_one_process(
    pair_of: MakePair, reference: Single, where: str, sampling: dict[str, Any]
) -> None:
    request = ask(prompt(32), seed=7, ignore_eos=True, **sampling)
    (wanted,) = reference.run([request])
    pair = pair_of(recompute=True, chunked_prefill_size=8)
    for count, reason in enumerate(FAULTS, start=1):
        trip = Trip(pair, request)
        break_room(trip, where, reason)
        trip.end()
        assert ties_between([trip.answer], [wanted]) == 0
        assert trip.meta["recomputed"] is True
        assert trip.meta["reason"] == reason.name
        assert pair.decode.stats()["recomputed"] == count
    assert pair.prefill.stats()["recomputed"] == 0
    pair.assert_nothing_is_left()


@pytest.mark.parametrize("recompute", [False, True])
def test_a_typed_error_by_default_and_whenever_somebody_decided_it(
    pair_of: MakePair, recompute: bool
) -> None:
    pair = pair_of(recompute=recompute, chunked_prefill_size=8)
    for reason in sorted(DECISIONS if recompute else {*FAULTS, *DECISIONS}):
        trip = Trip(pair, ask(prompt(32)))
        break_room(trip, "LANDING", reason)
        trip.end()
        assert trip.answer.last is not None
        assert type(trip.answer.last.error) is FAILURES[reason][0]
        assert "recomputed" not in trip.meta
    assert pair.decode.stats()["recomputed"] == 0
    pair.assert_nothing_is_left()


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("damage", ["aux row", "digest"])
def test_kv_that_is_not_what_was_sent_is_not_used(
    pair_of: MakePair, reference: Single, damage: str, recompute: bool
) -> None:
    request = ask(prompt(40), ignore_eos=True)
    pair = pair_of(recompute=recompute, checksum=True)
    trip = Trip(pair, request)
    trip.until(Phase.LANDING)
    room = trip.room
    while room.state is not KVPoll.Success:
        pair.prefill.iterate()
        pair.fakes.pump()
    assert room.pages is not None
    if damage == "digest":
        pair.fakes.decode.page(0, int(room.pages[1]))[5] ^= 1
    else:
        pair.fakes.decode.aux_row(0, room.aux_index)[:8] = (4711).to_bytes(8, "little")
    trip.end()
    ended_by(trip, CorruptAux, reference.run([request]) if recompute else None)
    pair.assert_nothing_is_left()


def test_pages_of_the_lost_room_are_not_used_again_before_it_is_quiet(
    pair_of: MakePair, reference: Single
) -> None:
    """The pool has no other pages, so the request waits; until then late bytes land in them."""
    request = ask(prompt(64), ignore_eos=True)
    pair = pair_of(recompute=True, chunked_prefill_size=8, pages_count=18)  # of 4 tokens: exactly
    trip = Trip(pair, request)
    break_room(trip, "LANDING", Reason.PEER_LOST)
    room = trip.room
    pair.decode.iterate()
    assert trip.active.phase is Phase.WAITING
    assert pair.decode.stats()["pages_held"] == 18
    while not room.quiet():
        pair.decode.iterate()
        assert trip.active.phase is Phase.WAITING
        pair.fakes.pump()
    trip.end()
    assert ties_between([trip.answer], reference.run([request])) == 0
    pair.assert_nothing_is_left()


def test_it_takes_fresh_pages_where_there_are_some(pair_of: MakePair) -> None:
    pair = pair_of(recompute=True, chunked_prefill_size=8)
    trip = Trip(pair, ask(prompt(64), ignore_eos=True))
    break_room(trip, "LANDING", Reason.TRANSPORT_FAILED)
    lost = set(trip.active.pages.tolist())
    pair.decode.iterate()
    assert trip.active.phase is Phase.PREFILL
    assert lost.isdisjoint(trip.active.pages.tolist())


def test_its_chunks_share_the_forward_with_decoding_requests(pair_of: MakePair) -> None:
    pair = pair_of(recompute=True, chunked_prefill_size=8)
    other = Trip(pair, ask(prompt(5), max_tokens=60, ignore_eos=True))
    other.until(Phase.DECODING)
    trip = Trip(pair, ask(prompt(64), ignore_eos=True))
    break_room(trip, "MEETING", Reason.BOOTSTRAP_TIMEOUT)
    pair.turn_until(lambda: trip.active.phase is Phase.PREFILL)
    while trip.active.phase is Phase.PREFILL:
        told = len(other.answer.token_ids)
        computed = trip.active.computed_tokens
        pair.turn()
        assert len(other.answer.token_ids) == told + 1
        assert trip.active.computed_tokens - computed <= 8


def test_the_client_sees_the_deltas_of_a_request_that_had_no_trouble(
    pair_of: MakePair, reference: Single
) -> None:
    request = ask(prompt(30), ignore_eos=True)
    alone: list[Delta] = []
    reference.engine.submit(request, alone.append)
    while not alone or alone[-1].finish_reason is None:
        reference.engine.iterate()
    pair = pair_of(recompute=True, chunked_prefill_size=8)
    trip = Trip(pair, request)
    seen: list[Delta] = []
    trip.active._sink = seen.append
    break_room(trip, "LANDING", Reason.PEER_RESTARTED)
    pair.turn_until(lambda: trip.active.phase is Phase.OVER)
    parts = [[(d.text, d.token_ids, d.finish_reason) for d in deltas] for deltas in (seen, alone)]
    assert parts[0] == parts[1]


def test_a_client_that_leaves_meanwhile_is_let_go(pair_of: MakePair) -> None:
    pair = pair_of(recompute=True, chunked_prefill_size=8)
    trip = Trip(pair, ask(prompt(64)))
    break_room(trip, "LANDING", Reason.PEER_LOST)
    trip.until(Phase.PREFILL)
    pair.decode.abort(trip.active, Reason.CLIENT_GONE)
    trip.end()
    assert trip.answer.finish is FinishReason.ABORT
    pair.assert_nothing_is_left()


def test_an_engine_that_closes_recomputes_nothing(pair_of: MakePair) -> None:
    pair = pair_of(recompute=True, chunked_prefill_size=8)
    trip = Trip(pair, ask(prompt(64)))
    break_room(trip, "LANDING", Reason.PEER_LOST)
    pair.fakes.decode.on_tick = pair.fakes.pump
    pair.decode.close()
    assert trip.answer.finish is FinishReason.ABORT
    assert pair.decode.stats()["recomputed"] == 0


@pytest.mark.parametrize("seed", range(4))
def test_rooms_lost_at_random_moments_change_no_answer(
    pair_of: MakePair, reference: Single, seed: int
) -> None:
    """Little memory, and half of the rooms lost, with every reason, somewhere on their way."""
    dice = random.Random(seed)
    plan = requests(**(SEEDED if seed % 2 else {}))
    pair = pair_of(recompute=True, pages_count=60, aux_rows=6, chunked_prefill_size=8)
    trips = [Trip(pair, request) for request in plan]
    doomed = dice.sample(trips, len(trips) // 2)
    while doomed:
        for _ in range(dice.randrange(6)):
            pair.turn()
        trip = doomed.pop()
        if (room := pair.fakes.decode.rooms.get(trip.number)) is not None:
            room.fault(dice.choice(FAULTS))
    pair.turn_until(lambda: all(t.first.last and t.answer.last for t in trips))
    wanted = [reference.run([request])[0] for request in plan]
    assert ties_between([trip.answer for trip in trips], wanted) <= 1
    assert pair.decode.stats()["recomputed"] == sum("recomputed" in t.meta for t in trips)
    pair.assert_nothing_is_left()


# --- rooms that are never opened ---


@pytest.mark.parametrize("recompute", [True, False])
def test_decode_without_a_free_slot(pair_of: MakePair, reference: Single, recompute: bool) -> None:
    """Refused or computed here, and prefill does not wait for it either way."""
    request = ask(prompt(40), ignore_eos=True)
    pair = pair_of(recompute=recompute)
    pair.fakes.decode.rooms_max = 0
    trip = Trip(pair, request)
    trip.end()
    assert trip.first.last is not None
    assert isinstance(trip.first.last.error, TransferError)
    ended_by(trip, TableFull, reference.run([request]) if recompute else None)
    pair.assert_nothing_is_left()


def test_prefill_without_a_free_slot_is_computed_on_decode(
    pair_of: MakePair, reference: Single
) -> None:
    request = ask(prompt(40), ignore_eos=True)
    pair = pair_of(recompute=True)
    pair.fakes.prefill.rooms_max = 0
    trip = Trip(pair, request)
    trip.end()
    assert trip.first.last is not None
    assert isinstance(trip.first.last.error, TableFull)
    assert ties_between([trip.answer], reference.run([request])) == 0


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_room_that_is_declined_is_told_to_the_peer(pair_of: MakePair, side: str) -> None:
    pair = pair_of()
    request = pair.with_room(ask(prompt(9)))
    assert request.rendezvous is not None
    refusing, other = (
        (pair.prefill, pair.decode) if side == "prefill" else (pair.decode, pair.prefill)
    )
    answer = Answer()
    other.submit(request, answer.add)
    refusing.decline(request.rendezvous)
    pair.turn_until(lambda: answer.last is not None)
    assert answer.last is not None
    assert type(answer.last.error) is FAILURES[Reason.PEER_REFUSED][0]


def test_declined_rooms_that_wait_for_the_loop_are_bounded(pair_of: MakePair) -> None:
    pair = pair_of()
    for room in range(2 * DECLINED_MAX):
        pair.prefill.decline(Rendezvous(room=room))
    pair.prefill.iterate()
    assert pair.fakes.prefill.declined == set(range(DECLINED_MAX))


def test_a_room_in_use_is_refused_and_the_first_one_goes_on(pair_of: MakePair) -> None:
    pair = pair_of()
    trip = Trip(pair, ask(prompt(9), ignore_eos=True))
    second = Answer()
    pair.decode.iterate()
    pair.decode.submit(trip.request, second.add)
    trip.end()
    assert second.last is not None
    assert isinstance(second.last.error, RoomInUse)
    assert trip.answer.finish is FinishReason.LENGTH
    assert not pair.fakes.decode.declined
