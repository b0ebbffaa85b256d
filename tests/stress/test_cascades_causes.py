"""Law 7, as the oracle of the cascades judges it: which fault explains which failure."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from stress.cascades import plan, words
from stress.cascades.history import Kind
from stress.cascades.oracle.faults import Mode, Role, covered_s
from tests.stress.book import Book, ended, failed, hit, opened, over, row


def nothing(book: Book) -> None:
    """Nothing happened."""


def given_up(player: int) -> Callable[[Book], None]:
    def before(book: Book) -> None:
        book.half(player, Kind.ABORTED, plan.FIRST, words.ABORTED)

    return before


EXPLAINED = [
    (words.ABORTED, words.PEER_ABORTED, given_up(0)),
    (words.PEER_ABORTED, words.ABORTED, given_up(2)),
    (words.WORKER_DIED, words.WORKER_DIED, hit(Role.WORKER)),
    (words.TRANSPORT_FAILED, words.PEER_LOST, hit(Role.WORKER, Mode.HANG, tree=2)),
    (words.PEER_LOST, words.PEER_RESTARTED, hit(Role.TREE)),
    (words.PEER_RESTARTED, words.PEER_RESTARTED, hit(Role.TREE)),  # told by the other half
    (words.ENGINE_DIED, words.ENGINE_DIED, hit(Role.PLAYER, tree=2)),
    (words.STALLED, words.WAITING_TIMEOUT, hit(Role.PLAYER, Mode.PAUSE, away_ms=600)),
]
UNEXPLAINED = [
    (words.ABORTED, words.PEER_ABORTED, nothing),
    (words.PEER_ABORTED, words.PEER_ABORTED, nothing),
    (words.WORKER_DIED, words.WORKER_DIED, nothing),
    (words.WORKER_DIED, words.WORKER_DIED, hit(Role.LISTENER)),  # law 7 itself
    (words.PEER_LOST, words.BOOTSTRAP_TIMEOUT, hit(Role.LISTENER_STANDBY)),
    (words.BOOTSTRAP_TIMEOUT, words.ABORTED, given_up(2)),  # law 6: an abort is a message
    (words.WORKER_DIED, words.WORKER_DIED, hit(Role.WORKER, tree=1)),  # of others
    (words.BAD_DESTINATION, words.PEER_LOST, hit(Role.TREE)),
    (words.CORRUPT_AUX, words.PEER_LOST, hit(Role.TREE)),
    (words.NONE, words.NONE, hit(Role.TREE)),
    (words.SHUTDOWN, words.PEER_REFUSED, hit(Role.WORKER)),
    (words.STALLED, words.WAITING_TIMEOUT, hit(Role.PLAYER, Mode.PAUSE)),  # for a millisecond
    (words.WORKER_DIED, words.WORKER_DIED, hit(Role.WORKER, Mode.PAUSE, away_ms=600)),
    (words.TRANSPORT_FAILED, words.PEER_LOST, hit(Role.TREE, Mode.PAUSE, away_ms=600)),
    (words.PEER_RESTARTED, words.PEER_LOST, hit(Role.TREE)),  # its own
    (words.PEER_LOST, words.PEER_RESTARTED, hit(Role.TREE, Mode.PAUSE, away_ms=600)),
]


@pytest.mark.parametrize(("reason", "other", "before"), EXPLAINED)
def test_a_fault_explains_a_failure(
    reason: int, other: int, before: Callable[[Book], None]
) -> None:
    assert failed(reason, other, before).judge().violations == []


@pytest.mark.parametrize(("reason", "other", "before"), UNEXPLAINED)
def test_what_no_fault_explains_is_a_violation(
    reason: int, other: int, before: Callable[[Book], None]
) -> None:
    assert failed(reason, other, before).judge().found("untouched rooms failed") >= 1


@pytest.mark.parametrize(("away_ms", "explained"), [(100, False), (2000, True)])
def test_only_a_long_outage_explains_a_deadline(away_ms: int, explained: bool) -> None:
    def before(book: Book) -> None:
        row(book, 1, serves=True)
        row(book, 0, serves=False)
        book.now += away_ms * 1_000_000
        row(book, 2, serves=False)
        row(book, 2, serves=True)

    findings = failed(words.WAITING_TIMEOUT, words.WAITING_TIMEOUT, before).judge()
    assert findings.found("untouched rooms failed") == (0 if explained else 2)
    assert findings.counts["restarts that we did not play: worker"] == 1


@pytest.mark.parametrize(("away_ms", "explained"), [(200, False), (600, True)])
def test_outages_in_turn_explain_a_deadline_as_one_long_one_does(
    away_ms: int, explained: bool
) -> None:
    def before(book: Book) -> None:
        for table in (0, 2000):
            row(book, 1, serves=True, table=table)
            row(book, 0, serves=False, table=table)
            book.now += away_ms * 1_000_000
            row(book, 2, serves=True, table=table)
            book.now += 10_000_000

    findings = failed(words.WAITING_TIMEOUT, words.WAITING_TIMEOUT, before).judge()
    assert findings.found("untouched rooms failed") == (0 if explained else 2)


@pytest.mark.parametrize(("away_ms", "explained"), [(2000, False), (2600, True)])
def test_a_listener_that_is_away_for_long_is_a_lost_peer(away_ms: int, explained: bool) -> None:
    """The other half goes on, so its end explains nothing."""
    book = Book()
    opened(book)
    book.signal(2, Role.LISTENER, Mode.KILL, pid=70)
    book.now += away_ms * 1_000_000
    book.back(2, Role.LISTENER, Mode.KILL, pid=70)
    ended(book, 0, words.FAILED, words.PEER_LOST)
    over(book)
    assert book.judge().found("untouched rooms failed") == (not explained)


@pytest.mark.parametrize(("away_ms", "explained"), [(1000, False), (1300, True)])
def test_a_peer_may_have_been_silent_before_the_room_was_opened(
    away_ms: int, explained: bool
) -> None:
    book = Book()
    for pid in (70, 71):
        book.signal(2, Role.LISTENER, Mode.KILL, pid=pid)
        book.now += away_ms * 1_000_000
        book.back(2, Role.LISTENER, Mode.KILL, pid=pid)
        if pid == 70:
            book.now += 40_000_000
            opened(book)
    ended(book, 0, words.FAILED, words.PEER_LOST)
    over(book)
    assert book.judge().found("untouched rooms failed") == (not explained)


@pytest.mark.parametrize("dies", [True, False])
def test_a_half_without_a_verdict_may_have_told_the_other_why_it_failed(dies: bool) -> None:
    """Prefill's tree is new; its decode had met the one before, says so, and its engine dies."""
    book = Book()
    opened(book)
    hit(Role.TREE)(book)
    if dies:
        hit(Role.PLAYER, tree=2)(book)
    ended(book, 0, words.FAILED, words.PEER_RESTARTED)
    if not dies:
        ended(book, 2, words.FAILED, words.PEER_LOST)
    over(book)
    assert book.judge().found("untouched rooms failed") == (not dies)


def test_what_several_outages_cover_is_counted_once() -> None:
    spans = [(0.0, 2.0), (1.5, 3.0), (2.0, 2.5), (5.0, 6.0), (8.0, math.inf)]
    assert covered_s(spans, 1.0, 9.0) == 2.0 + 1.0 + 1.0
    assert covered_s([], 1.0, 9.0) == 0.0
