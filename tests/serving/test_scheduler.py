"""Prefill and decode engines with a fake runtime between them, against one engine alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pdrt.errors import Aborted, BadRequest, CorruptAux, PromptTooLong, QueueFull, RoomInUse
from pdrt.protocol.states import KVPoll, Reason
from pdrt.serving.types import FinishReason, GenerationRequest, Rendezvous
from tests.serving.engines import Answer, Pair, Single, ask, ties_between
from tests.serving.tiny_model import VOCAB_SIZE

LENGTHS = (1, 2, 3, 4, 5, 8, 13, 16, 31, 32, 47, 64, 90)


def prompt(length: int, seed: int = 0) -> list[int]:
    tokens = np.random.default_rng([length, seed]).integers(3, VOCAB_SIZE, length)
    return [int(token) for token in tokens]


def requests(**sampling: object) -> list[GenerationRequest]:
    return [
        ask(prompt(length), f"r{length}", seed=length, ignore_eos=True, **sampling)
        for length in LENGTHS
    ]


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> Iterator[Single]:
    with Single(tiny_folder) as single:
        yield single


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.9, "top_p": 0.8}], ids=["greedy", "seeded"]
)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("page_size", "chunk"), [(4, 16), (4, 7), (16, 16), (3, 1000)])
def test_disaggregated_output_is_that_of_one_process(
    pair_of: Callable[..., Pair],
    reference: Single,
    capsys: pytest.CaptureFixture[str],
    sampling: dict[str, object],
    ranks: int,
    page_size: int,
    chunk: int,
) -> None:
    wanted = [reference.run([request])[0] for request in requests(**sampling)]
    pair = pair_of(page_size=page_size, ranks=ranks, pages_count=400, chunked_prefill_size=chunk)
    one_at_a_time = [pair.run([request])[1][0] for request in requests(**sampling)]
    firsts, together = pair.run(requests(**sampling))
    ties = ties_between(one_at_a_time, wanted) + ties_between(together, wanted)
    with capsys.disabled():
        if ties:
            print(f"\n{ties} of {2 * len(wanted)} answers part at a tie of logits")  # noqa: T201
    assert [answer.token_ids for answer in firsts] == [a.token_ids[:1] for a in together]
    assert pair.fakes.landed_count == 2 * len(wanted)
    assert pair.fakes.digests_differ == 0
    pair.assert_nothing_is_left()


def test_logprobs_of_the_first_token_travel(
    pair_of: Callable[..., Pair], reference: Single
) -> None:
    request = ask(prompt(9), logprobs=5, ignore_eos=True)
    (wanted,) = reference.run([request])
    firsts, (got,) = pair_of().run([request])
    assert got.logprobs[0].token_id == wanted.logprobs[0].token_id
    assert [token for token, _ in got.logprobs[0].top] == [t for t, _ in wanted.logprobs[0].top]
    assert got.logprobs[0].logprob == pytest.approx(wanted.logprobs[0].logprob, abs=1e-4)
    assert len(got.logprobs) == len(got.token_ids)
    assert all(len(each.top) == 5 for each in got.logprobs)
    assert firsts[0].logprobs == got.logprobs[:1]


def test_without_logprobs_none_come(pair_of: Callable[..., Pair]) -> None:
    _, (got,) = pair_of().run([ask(prompt(9), logprobs=None)])
    assert got.logprobs == []


def stopping_text(reference: Single) -> tuple[GenerationRequest, Answer, str]:
    """A request, its whole answer, and a piece of text from the middle of it."""
    for seed in range(50):
        request = ask(prompt(12, seed), max_tokens=24, ignore_eos=True)
        (answer,) = reference.run([request])
        text = answer.text
        middle = text[len(text) // 2 : len(text) // 2 + 3]
        if middle.isascii() and len(middle) == 3 and 0 < text.find(middle) < len(text) - 6:
            return request, answer, middle
    raise AssertionError("no answer with ASCII in the middle")


def test_a_stop_string_ends_the_answer_before_it(
    pair_of: Callable[..., Pair], reference: Single
) -> None:
    request, whole, stop = stopping_text(reference)
    stopped = ask(request.prompt_tokens, max_tokens=24, ignore_eos=True, stop=(stop, "never"))
    for answer in (reference.run([stopped])[0], pair_of().run([stopped])[1][0]):
        assert answer.text == whole.text[: whole.text.find(stop)]
        assert answer.finish is FinishReason.STOP
        assert answer.last is not None
        assert answer.last.meta["matched"] == stop
        assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]


def test_min_tokens_outlasts_stop_strings_and_stop_tokens(reference: Single) -> None:
    request, whole, stop = stopping_text(reference)
    (answer,) = reference.run(
        [ask(request.prompt_tokens, max_tokens=24, min_tokens=24, ignore_eos=True, stop=(stop,))]
    )
    assert len(answer.token_ids) == 24
    banned = whole.token_ids[0]
    (answer,) = reference.run(
        [ask(request.prompt_tokens, min_tokens=8, max_tokens=8, stop_token_ids=(banned,))]
    )
    assert banned not in answer.token_ids
    assert answer.finish is FinishReason.LENGTH


@pytest.mark.parametrize("at", [0, 3])
def test_a_stop_token_ends_the_answer_and_shows_no_text(
    pair_of: Callable[..., Pair], reference: Single, at: int
) -> None:
    request = ask(prompt(20), ignore_eos=True)
    (whole,) = reference.run([request])
    token = whole.token_ids[at]
    at = whole.token_ids.index(token)
    stopped = ask(prompt(20), ignore_eos=True, stop_token_ids=(token,))
    for answer in (reference.run([stopped])[0], pair_of().run([stopped])[1][0]):
        assert answer.token_ids == whole.token_ids[: at + 1]
        assert answer.finish is FinishReason.STOP
        assert answer.last is not None
        assert answer.last.meta["matched"] == token
        assert whole.text.startswith(answer.text)


def test_unseeded_requests_differ(reference: Single) -> None:
    answers = reference.run([ask(prompt(5), temperature=2.0, seed=None) for _ in range(8)])
    assert len({tuple(answer.token_ids) for answer in answers}) > 1


def test_prompts_that_cannot_fit_are_refused_at_once(
    pair_of: Callable[..., Pair], single_of: Callable[..., Single]
) -> None:
    pair = pair_of(pages_count=8)  # 32 tokens; the context has 256
    for engine in (pair.prefill, pair.decode):
        with pytest.raises(PromptTooLong, match="33 tokens"):
            engine.submit(ask(prompt(33)), print)
    with pytest.raises(PromptTooLong, match="256"):
        single_of().engine.submit(ask(prompt(256)), print)
    firsts, answers = pair.run([ask(prompt(32), ignore_eos=True)])  # the largest that fits
    assert len(answers[0].token_ids) == 1
    assert firsts[0].token_ids == answers[0].token_ids
    pair.assert_nothing_is_left()


def test_an_answer_ends_where_the_context_does(single_of: Callable[..., Single]) -> None:
    (answer,) = single_of().run([ask(prompt(250), max_tokens=50, ignore_eos=True)])
    assert len(answer.token_ids) == 6
    assert answer.finish is FinishReason.LENGTH


@pytest.mark.parametrize("tokens", [[], [VOCAB_SIZE], [-1]])
def test_prompts_without_or_with_foreign_tokens_are_refused(
    reference: Single, tokens: list[int]
) -> None:
    with pytest.raises(BadRequest):
        reference.engine.submit(ask(tokens), print)


def test_a_full_queue_is_refused(single_of: Callable[..., Single]) -> None:
    single = single_of(queue_max=2)
    first, _ = [single.engine.submit(ask(prompt(3)), lambda delta: None) for _ in range(2)]
    with pytest.raises(QueueFull):
        single.engine.submit(ask(prompt(3)), print)
    single.engine.abort(first)
    single.engine.iterate()
    single.engine.submit(ask(prompt(3)), lambda delta: None)
    with pytest.raises(QueueFull):
        single.engine.submit(ask(prompt(3)), print)


def test_a_room_cannot_be_used_twice(pair_of: Callable[..., Pair]) -> None:
    pair = pair_of()
    request = pair.with_room(ask(prompt(9)))
    answers = [Answer(), Answer()]
    for answer in answers:
        pair.prefill.submit(request, answer.add)
    pair.turn_until(lambda: answers[1].last is not None)
    assert answers[1].last is not None
    assert isinstance(answers[1].last.error, RoomInUse)
    assert answers[0].last is None


def test_decode_without_a_host_is_refused(pair_of: Callable[..., Pair]) -> None:
    pair, answer = pair_of(), Answer()
    lost = GenerationRequest(
        rid="r", prompt_tokens=(5,), sampling=ask([5]).sampling, rendezvous=Rendezvous(room=1)
    )
    pair.decode.submit(lost, answer.add)
    pair.turn()
    assert answer.last is not None
    assert isinstance(answer.last.error, BadRequest)
    pair.assert_nothing_is_left()


def test_a_foreign_aux_row_is_an_error_and_not_an_answer(pair_of: Callable[..., Pair]) -> None:
    pair, answer = pair_of(), Answer()
    request = pair.with_room(ask(prompt(9)))
    pair.decode.submit(request, answer.add)
    pair.prefill.submit(request, lambda delta: None)
    rooms = pair.fakes.decode.rooms
    pair.decode.iterate()
    room = next(iter(rooms.values()))
    pair.turn_until(lambda: room.aux_index >= 0)
    while room.state is not KVPoll.Success:
        pair.prefill.iterate()
        pair.fakes.pump()
    pair.fakes.decode.aux_row(0, room.aux_index)[:8] = (4711).to_bytes(8, "little")
    pair.turn_until(lambda: answer.last is not None)
    assert answer.last is not None
    assert isinstance(answer.last.error, CorruptAux)
    pair.assert_nothing_is_left()


@pytest.mark.parametrize("scarce", ["pages", "aux", "running"])
def test_scarce_memory_delays_and_wedges_nothing(pair_of: Callable[..., Pair], scarce: str) -> None:
    pair = pair_of(
        pages_count=30 if scarce == "pages" else 400,
        aux_rows=1 if scarce == "aux" else 64,
        running_max=1 if scarce == "running" else 32,
        chunked_prefill_size=16,
    )
    _, answers = pair.run(requests())
    assert all(len(answer.token_ids) == 8 for answer in answers)
    pair.assert_nothing_is_left()


def test_a_large_request_is_not_overtaken_for_ever(single_of: Callable[..., Single]) -> None:
    engine = single_of(pages_count=16).engine
    running, large, small = Answer(), Answer(), Answer()
    engine.submit(ask(prompt(9), max_tokens=20, ignore_eos=True), running.add)
    engine.submit(ask(prompt(50), ignore_eos=True), large.add)
    engine.submit(ask(prompt(2), max_tokens=1, ignore_eos=True), small.add)
    while not large.token_ids:
        assert not small.token_ids, "it would fit, but the large one came first"
        engine.iterate()
    assert running.last is not None


def test_a_peer_that_never_comes_holds_back_nobody(pair_of: Callable[..., Pair]) -> None:
    pair, lonely = pair_of(pages_count=30), Answer()
    pair.prefill.submit(pair.with_room(ask(prompt(90))), lonely.add)
    _, answers = pair.run(requests())
    assert all(answer.finish is FinishReason.LENGTH for answer in answers)
    assert lonely.last is None
    assert pair.prefill.stats()["pages_used"] == 0


def test_requests_alone_run_on_either_side(pair_of: Callable[..., Pair], reference: Single) -> None:
    pair = pair_of()
    (wanted,) = reference.run([ask(prompt(9))])
    answers = [Answer(), Answer()]
    pair.prefill.submit(ask(prompt(9)), answers[0].add)
    pair.decode.submit(ask(prompt(9)), answers[1].add)
    pair.turn_until(lambda: all(answer.last for answer in answers))
    assert [answer.token_ids for answer in answers] == [wanted.token_ids] * 2
    pair.assert_nothing_is_left()


@pytest.mark.parametrize("seed", range(12))
def test_aborts_at_random_moments_leave_nothing(pair_of: Callable[..., Pair], seed: int) -> None:
    dice = random.Random(seed)
    pair = pair_of(pages_count=60, aux_rows=6, chunked_prefill_size=8)
    plan = [pair.with_room(request) for request in requests()]
    answers = [(Answer(), Answer()) for _ in plan]
    handles = []
    for request, (first, answer) in zip(plan, answers, strict=True):
        handles.append((pair.prefill, pair.prefill.submit(request, first.add), first))
        handles.append((pair.decode, pair.decode.submit(request, answer.add), answer))
    dice.shuffle(handles)
    doomed = {id(answer) for _, _, answer in handles[::2]}
    for engine, active, _ in handles[::2]:
        for _ in range(dice.randrange(6)):
            pair.turn()
        engine.abort(active, Reason.CLIENT_GONE)
        engine.abort(active)  # twice does no harm
    pair.turn_until(lambda: all(first.last and answer.last for first, answer in answers))
    for first, answer in answers:
        for each in (first, answer):
            assert each.last is not None
            if each.last.error is not None:  # the other side gave it up
                assert isinstance(each.last.error, Aborted)
            elif each.finish is FinishReason.ABORT:
                assert id(each) in doomed
    pair.assert_nothing_is_left()


def test_an_abort_during_a_forward_reaches_the_peer_before_its_end(
    pair_of: Callable[..., Pair],
) -> None:
    pair, first, answer = pair_of(chunked_prefill_size=8), Answer(), Answer()
    request = pair.with_room(ask(prompt(90)))
    active = pair.prefill.submit(request, first.add)
    pair.decode.submit(request, answer.add)
    pair.turn_until(lambda: active.computed_tokens >= 16)
    computed = active.computed_tokens
    calls = 0

    def abort_in_the_middle() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:  # the first is the turn's own; this one stands between two layers
            pair.prefill.abort(active)

    pair.fakes.prefill.on_tick = abort_in_the_middle
    pair.prefill._attended_ns = 0
    clock = iter(range(0, 10**12, 10**9))  # every look at the clock is a second later
    pair.prefill._clock = lambda: next(clock)
    room = next(iter(pair.fakes.prefill.rooms.values()))
    pair.prefill.iterate()
    assert room.state is KVPoll.Failed
    assert active.computed_tokens == computed
    assert first.finish is FinishReason.ABORT
    pair.turn_until(lambda: answer.last is not None)
    pair.assert_nothing_is_left()


def test_pages_of_an_aborted_transfer_wait_for_quiet(pair_of: Callable[..., Pair]) -> None:
    pair, answer = pair_of(chunked_prefill_size=8), Answer()
    request = pair.with_room(ask(prompt(90)))
    pair.prefill.submit(request, lambda delta: None)
    active = pair.decode.submit(request, answer.add)
    pair.turn_until(lambda: bool(pair.fakes.decode.rooms) and len(active.pages) > 0)
    pair.decode.abort(active)
    pair.decode.iterate()
    assert answer.finish is FinishReason.ABORT
    assert pair.decode.stats()["pages_held"] > 0
    assert pair.decode.stats()["rooms_releasing"] == 1
    pair.assert_nothing_is_left()


def test_facts_of_the_room_come_with_the_last_delta(pair_of: Callable[..., Pair]) -> None:
    firsts, answers = pair_of(chunked_prefill_size=4).run([ask(prompt(12))])
    assert firsts[0].last is not None
    assert firsts[0].last.meta["chunks"] == 3
    assert answers[0].last is not None
    assert answers[0].last.meta["reason"] == "NONE"
