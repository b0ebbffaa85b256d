"""Workers restarted to make a room quiet, as the oracle of the cascades judges them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stress.cascades import plan, words
from stress.cascades.history import Kind
from stress.cascades.oracle.faults import Mode, Role
from tests.stress.book import (
    GENERATION,
    ROOM,
    SLOT,
    Book,
    ended,
    failed,
    hit,
    honest,
    opened,
    over,
    packed,
    row,
)

FAILED, UNQUIET = "untouched rooms failed", "rooms not quiet without a cause"
RESTARTED = "restarts without a cause"
WAITS = plan.room_of(1, 1)  # beside the room that fails with its worker
FOREIGN = plan.room_of(7, 1)  # between prefill 1 and decode 1
DECODE = 2000  # decode 0's table


def nothing(book: Book) -> None:
    """Nothing happened."""


def both(*befores: Callable[[Book], None]) -> Callable[[Book], None]:
    def before(book: Book) -> None:
        for each in befores:
            each(book)

    return before


def restarted(book: Book, table: int = DECODE, *, away_ms: int = 1, of: int = words.WORKER) -> None:
    row(book, 0, serves=False, table=table, of=of)
    book.now += away_ms * 1_000_000
    row(book, 2, serves=True, table=table, of=of)


def waited(
    before: Callable[[Book], None],
    *,
    earlier: Callable[[Book], None] = nothing,
    for_ms: int = 2050,
    room: int = WAITS,
    player: int = 2,
    table: int = DECODE,
    moves: bool = False,
    away_ms: int = 1,
) -> Book:
    """A room was given up, and was not quiet until a worker was restarted."""
    book = Book()
    opened(book)
    row(book, 1, serves=True, table=table)
    earlier(book)
    book.half(player, Kind.OPENED, GENERATION, SLOT + 1, room)
    before(book)
    book.half(player, Kind.ABORTED, plan.FIRST, words.ABORTED, room)
    at = {"table": player * 1000, "slot": SLOT + 1}
    book.word(packed(words.FAILED, reason=words.ABORTED), **at)
    book.half(player, Kind.VERDICT, words.FAILED, words.ABORTED, room)
    book.now += for_ms * 1_000_000
    if moves:
        book.records["watcher"].append(
            (book.now - 700_000_000, 0, packed(words.TRANSFERRING), SLOT, table, int(Kind.WORD))
        )
    restarted(book, table, away_ms=away_ms)
    book.word(packed(words.FAILED, quiet=True, reason=words.ABORTED), **at)
    return book


def fenced(book: Book) -> Book:
    """The other room moved in that worker."""
    ended(book, 0, words.FAILED, words.WORKER_FENCED)
    ended(book, 2, words.FAILED, words.WORKER_FENCED)
    over(book)
    return book


def done(book: Book) -> Book:
    """No room moved in it."""
    ended(book, 0, words.SUCCESS)
    ended(book, 2, words.SUCCESS)
    over(book)
    return book


CAUSES = [
    hit(Role.WORKER),
    hit(Role.TREE, tree=2),
    hit(Role.LISTENER, away_ms=600),
    hit(Role.WORKER, Mode.PAUSE, tree=2, away_ms=600),
    both(hit(Role.PLAYER), hit(Role.LISTENER, tree=2)),
]
NO_CAUSES = [
    nothing,
    hit(Role.WORKER, tree=1),  # of others
    hit(Role.WORKER, Mode.PAUSE, away_ms=1),
    hit(Role.LISTENER, away_ms=300),
    hit(Role.PLAYER),
    hit(Role.LISTENER, tree=2),
]


@pytest.mark.parametrize("before", CAUSES)
def test_a_room_whose_quiet_nobody_could_tell_is_a_fence_s_cause(
    before: Callable[[Book], None],
) -> None:
    findings = fenced(waited(before)).judge()
    assert findings.violations == []
    assert findings.counts["rooms not quiet for long"] == 1
    assert findings.counts["restarts that we did not play: worker"] == 1


@pytest.mark.parametrize("before", NO_CAUSES)
def test_a_room_that_is_not_quiet_has_a_cause_in_its_own_trees(
    before: Callable[[Book], None],
) -> None:
    findings = fenced(waited(before)).judge()
    assert (findings.found(UNQUIET), findings.found(RESTARTED)) == (1, 1)
    assert findings.found(FAILED) == 0, "the room that waited answers for it"


def rest(ms: int) -> Callable[[Book], None]:
    def before(book: Book) -> None:
        book.now += ms * 1_000_000

    return before


@pytest.mark.parametrize(
    ("worker", "listener", "rest_ms", "lawful"),
    [
        (0, 0, 900, True),
        (0, 0, 2000, False),  # by then decode knows
        (0, None, 900, False),
        (None, 0, 900, False),
        (1, 0, 900, False),
        (2, 2, 900, False),  # of prefill, that is
    ],
)
def test_a_decode_may_name_a_dead_listener_and_its_dead_worker_may_have_known(
    worker: int | None, listener: int | None, rest_ms: int, lawful: bool
) -> None:
    """Both of one prefill, the worker in that listener's time, and both before the room began."""
    earlier = both(
        nothing if worker is None else hit(Role.WORKER, tree=worker),
        rest(600),
        nothing if listener is None else hit(Role.LISTENER, tree=listener),
        rest(rest_ms),
    )
    findings = fenced(waited(nothing, earlier=earlier)).judge()
    assert findings.found(UNQUIET) == (not lawful)


@pytest.mark.parametrize(("between_ms", "lawful"), [(300, True), (2000, False)])
def test_a_worker_that_died_in_the_time_of_an_earlier_listener_is_known(
    between_ms: int, lawful: bool
) -> None:
    """Unless decode may still have named that earlier one."""
    steps = [hit(Role.WORKER), rest(600), hit(Role.LISTENER), rest(between_ms), hit(Role.LISTENER)]
    findings = fenced(waited(nothing, earlier=both(*steps, rest(900)))).judge()
    assert findings.found(UNQUIET) == (not lawful)


@pytest.mark.parametrize("away_ms", [1, 700])
def test_the_restart_that_a_room_led_to_is_not_its_cause(away_ms: int) -> None:
    findings = fenced(waited(nothing, away_ms=away_ms)).judge()
    assert findings.found(UNQUIET) == 1


@pytest.mark.parametrize(
    ("for_ms", "moves", "violations"),
    [
        (600, False, 2),
        (1000, False, 0),  # it was idle when that was decided, and so not for long
        (1000, True, 2),
        (2050, True, 0),
    ],
)
def test_who_fails_with_a_fence_needs_a_room_that_waited_for_it(
    for_ms: int, moves: bool, violations: int
) -> None:
    found = fenced(waited(hit(Role.WORKER), for_ms=for_ms, moves=moves)).judge()
    assert (found.found(FAILED), found.found(UNQUIET)) == (violations, 0)


def test_a_room_that_waited_in_other_trees_is_no_excuse() -> None:
    before = hit(Role.WORKER, tree=1)
    found = fenced(waited(before, room=FOREIGN, player=3)).judge()
    assert (found.found(FAILED), found.found(RESTARTED), found.found(UNQUIET)) == (2, 1, 0)


@pytest.mark.parametrize("tell_ms", [200, 3000])
@pytest.mark.parametrize("told", [True, False])
def test_a_half_may_hear_late_of_the_other_s_fence(told: bool, tell_ms: int) -> None:
    book = waited(hit(Role.WORKER))
    reason = words.WORKER_FENCED if told else words.WORKER_DIED
    book.half(2, Kind.VERDICT, words.FAILED, reason)
    book.now += tell_ms * 1_000_000
    ended(book, 0, words.FAILED, words.WORKER_FENCED)
    over(book)
    expected = not told and tell_ms > 1000
    found = {v for v in book.judge().violations if "worker fenced" in v.partition(";")[0]}
    assert bool(found) is expected


# --- restarts that nobody played ---


@pytest.mark.parametrize(
    ("for_ms", "player", "moves", "lawful"),
    [
        (1000, 2, False, True),  # decode's, and nothing moves there
        (1000, 2, True, False),
        (1000, 0, False, False),  # prefill's waits for two seconds
        (2050, 0, False, True),
        (2050, 2, True, True),
        (600, 2, False, False),
    ],
)
def test_an_idle_worker_of_decode_is_restarted_sooner(
    for_ms: int, player: int, moves: bool, lawful: bool
) -> None:
    table = player * 1000
    book = waited(hit(Role.WORKER), for_ms=for_ms, player=player, table=table, moves=moves)
    assert done(book).judge().found(RESTARTED) == (not lawful)


@pytest.mark.parametrize("killed", [True, False])
def test_who_is_killed_before_its_pid_is_seen_is_asked_for(killed: bool) -> None:
    book = honest()
    row(book, 1, serves=True, table=DECODE, of=words.LISTENER)
    row(book, 0, serves=False, table=DECODE, of=words.LISTENER)
    book.add("watcher", Kind.ROW, 0, DECODE, words.LISTENER, 2 << 32)  # its pid is yet to come
    if killed:
        book.signal(2, Role.LISTENER, Mode.KILL, pid=999)
        book.back(2, Role.LISTENER, Mode.KILL, pid=999)
    row(book, 3, serves=True, table=DECODE, of=words.LISTENER)
    assert book.judge().found(RESTARTED) == 2 - killed


@pytest.mark.parametrize(("of", "role"), [(words.LISTENER, Role.LISTENER), (8, Role.WORKER)])
@pytest.mark.parametrize(
    ("mode", "stopped_ms", "lawful"),
    [
        (None, 0, False),
        (Mode.PAUSE, 1, False),
        (Mode.PAUSE, 300, True),
        (Mode.KILL, 0, True),  # as its standby, just promoted
    ],
)
def test_a_restart_that_nobody_played_is_a_violation(
    of: int, role: Role, mode: Mode | None, stopped_ms: int, lawful: bool
) -> None:
    book = honest()
    row(book, 1, serves=True, table=DECODE, of=of)
    standby = {Role.LISTENER: Role.LISTENER_STANDBY, Role.WORKER: Role.WORKER_STANDBY}[role]
    if mode is not None:
        book.signal(2, role if mode is Mode.PAUSE else standby, mode, pid=301)
        book.now += stopped_ms * 1_000_000
        book.add("driver", Kind.CONTINUED, 0, 2, 301)
    restarted(book, of=of)
    if mode is not None:
        book.back(2, role if mode is Mode.PAUSE else standby, mode, pid=301)
    assert book.judge().found(RESTARTED) == (not lawful)


@pytest.mark.parametrize(
    ("silent_ms", "until_then", "lawful"),
    [(210, True, True), (160, True, False), (210, False, False)],
)
def test_who_was_silent_until_it_was_gone_was_hung(
    silent_ms: int, until_then: bool, lawful: bool
) -> None:
    book = honest()
    row(book, 1, serves=True, table=DECODE)
    book.add("watcher", Kind.SILENT, silent_ms * 1_000_000, DECODE, words.WORKER)
    book.now -= 1_000_000 * until_then  # seen in the same look
    restarted(book)
    findings = book.judge()
    assert findings.found(RESTARTED) == (not lawful)
    assert findings.counts["restarts of who stood still by itself: worker"] == lawful


def test_a_room_that_waits_is_no_excuse_for_a_listener() -> None:
    book = waited(hit(Role.WORKER))
    row(book, 1, serves=True, table=DECODE, of=words.LISTENER)
    restarted(book, of=words.LISTENER)
    (text,) = done(book).judge().violations
    assert text.startswith("restarts without a cause: listener of tree 2")


def test_a_pause_that_is_long_over_explains_no_restart() -> None:
    book = honest()
    row(book, 1, serves=True, table=DECODE)
    book.signal(2, Role.WORKER, Mode.PAUSE, pid=301)
    book.now += 300_000_000
    book.add("driver", Kind.CONTINUED, 0, 2, 301)
    book.back(2, Role.WORKER, Mode.PAUSE, pid=301)
    book.now += 5_000_000_000
    restarted(book)
    assert book.judge().found(RESTARTED) == 1


def test_who_never_served_is_away_until_its_successor_serves() -> None:
    """And not for good: that would explain whatever fails afterwards."""

    def before(book: Book) -> None:
        row(book, 1, serves=True)
        for incarnation in (2, 3):
            row(book, incarnation, serves=False)
        row(book, 3, serves=True)
        book.now += 9_000_000_000
        book.half(0, Kind.OPENED, GENERATION, SLOT)

    found = failed(words.WAITING_TIMEOUT, words.ABORTED, before).judge()
    assert any(f"{ROOM:#x} of player 0" in text for text in found.violations)
