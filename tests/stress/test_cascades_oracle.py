"""The oracle of the cascades: an honest history has no fault, and each planted one is found."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stress.cascades import plan, words
from stress.cascades.history import DTYPE, RECORD, STEP_BYTES, Kind, Writer, read
from stress.cascades.oracle.faults import Mode, Role, code, covered_s
from stress.cascades.oracle.findings import KINDS, Findings
from stress.cascades.oracle.judge import judge_histories
from stress.cascades.oracle.survey import What

SALT, MIX = 7, plan.Mix()
SIDES = (plan.PREFILL, plan.PREFILL, plan.DECODE, plan.DECODE)
ROOM = plan.room_of(1, 0)  # between prefill 0 and decode 0
SLOT, GENERATION, OWNER = 5, 9, 0x208
SECOND = 1_000_000_000
START, END = 1000 * SECOND, 1100 * SECOND
FOLDER = Path(__file__).parents[2] / "stress" / "cascades"
#: The oracle and all that it takes from elsewhere.
INDEPENDENT = {"oracle", "history", "plan", "words"}


def packed(
    state: int, *, quiet: bool = False, reason: int = 0, generation: int = GENERATION
) -> int:
    return state | quiet << 4 | reason << 5 | OWNER << 13 | generation << 32


class Book:
    """Histories by name, written record by record at times that only grow."""

    def __init__(self) -> None:
        self.records: dict[str, list[tuple[int, ...]]] = {}
        self.now = START

    def add(self, name: str, kind: Kind, room: int = 0, a: int = 0, b: int = 0, c: int = 0) -> None:
        self.now += 1_000_000
        self.records.setdefault(name, []).append((self.now, room, c, b, a, int(kind)))

    def half(self, player: int, kind: Kind, b: int = 0, c: int = 0, room: int = ROOM) -> None:
        self.add(f"player-{player}", kind, room, player, b, c)

    def word(self, word: int) -> None:
        self.add("watcher", Kind.WORD, 0, 0, SLOT, word)

    def signal(self, tree: int, role: Role, mode: Mode, pid: int = 99) -> None:
        self.add("driver", Kind.SIGNAL, 3, tree, pid, code(mode, role))

    def back(self, tree: int, role: Role, mode: Mode, pid: int = 99) -> None:
        self.add("driver", Kind.DEAD, 0, 0, pid)
        self.add("driver", Kind.BACK, 5_000_000, tree, code(mode, role), pid)

    def replace(self, player: int, kind: Kind, **fields: int) -> None:
        """Change the one record of a kind."""
        names = ("ns", "room", "c", "b", "a", "kind")
        records = self.records[f"player-{player}"]
        at = next(i for i, record in enumerate(records) if record[-1] == kind)
        changed = dict(zip(names, records[at], strict=True)) | fields
        records[at] = tuple(changed[name] for name in names)

    def slip_in(self, player: int, before: Kind, kind: Kind, b: int, c: int) -> None:
        records = self.records[f"player-{player}"]
        at = next(i for i, record in enumerate(records) if record[-1] == before)
        records.insert(at, (records[at][0], ROOM, c, b, player, int(kind)))

    def drop(self, player: int, kind: Kind) -> None:
        records = self.records[f"player-{player}"]
        self.records[f"player-{player}"] = [r for r in records if r[-1] != kind]

    def judge(self) -> Findings:
        arrays = {n: np.array(r, dtype=DTYPE) for n, r in self.records.items()}
        return judge_histories(arrays, SIDES, SALT, MIX)


def ended(book: Book, player: int, state: int, reason: int = 0) -> None:
    book.half(player, Kind.VERDICT, state, reason)
    if state == words.SUCCESS and SIDES[player] == plan.DECODE:
        count = plan.spec(SALT, ROOM, MIX).pages_count
        book.half(player, Kind.BYTES, 1, plan.digest(SALT, ROOM, count))
        book.half(player, Kind.TOKEN, 0, plan.token(SALT, ROOM))
    book.half(player, Kind.AGAIN, state, reason)
    book.half(player, Kind.QUIET)
    book.half(player, Kind.CLEARED)


def opened(book: Book) -> None:
    for player in (0, 2):
        book.half(player, Kind.ATTACHED, b=50 + player, room=0)
        book.half(player, Kind.OPENED, GENERATION, SLOT)
    book.half(2, Kind.TOLD, 2)
    for state in (words.CLAIMED, words.BOOTSTRAPPING, words.WAITING, words.TRANSFERRING):
        book.word(packed(state))


def over(book: Book) -> None:
    book.add("driver", Kind.END)
    for player in (0, 2):
        book.half(player, Kind.LEFT, room=0)


def honest() -> Book:
    """A room that succeeds, beside a listener that is killed and a client that connects."""
    book = Book()
    opened(book)
    book.signal(0, Role.LISTENER, Mode.KILL)
    book.back(0, Role.LISTENER, Mode.KILL)
    book.add("connector", Kind.CONNECTED, 1, 0)
    book.add("connector", Kind.SERVED, 1, 0)
    ended(book, 0, words.SUCCESS)
    ended(book, 2, words.SUCCESS)
    book.word(packed(words.SUCCESS, quiet=True))
    book.word(packed(0, generation=GENERATION + 1))
    book.add("driver", Kind.CENSUS, 0, 0, What.SLOTS, 0)
    over(book)
    return book


def failed(reason: int, other: int, before: Callable[[Book], None]) -> Book:
    """Both halves fail; `before` says what happened."""
    book = Book()
    opened(book)
    before(book)
    ended(book, 0, words.FAILED, reason)
    ended(book, 2, words.FAILED, other)
    over(book)
    return book


def test_an_honest_history_has_no_fault() -> None:
    findings = honest().judge()
    assert findings.violations == []
    assert findings.counts["rooms"] == 1
    assert findings.counts["verdicts read again"] == 2
    assert findings.times_s == {"listener killed": [0.005]}


# --- one planted fault for each kind ---


def changes_its_verdict(book: Book) -> None:
    book.replace(0, Kind.AGAIN, b=words.FAILED, c=words.ABORTED)


def another_reason_later(book: Book) -> None:
    book.word(packed(words.FAILED, quiet=True, reason=3, generation=GENERATION + 2))
    book.word(packed(words.FAILED, quiet=True, reason=4, generation=GENERATION + 2))


def success_becomes_failure(book: Book) -> None:
    book.word(packed(words.SUCCESS, quiet=True, generation=GENERATION + 2))
    book.word(packed(words.FAILED, quiet=True, reason=1, generation=GENERATION + 2))


def runs_backwards(book: Book) -> None:
    book.word(packed(words.TRANSFERRING, generation=GENERATION + 2))
    book.word(packed(words.WAITING, generation=GENERATION + 2))


def quiet_is_taken_back(book: Book) -> None:
    book.word(packed(words.FAILED, quiet=True, generation=GENERATION + 2))
    book.word(packed(words.FAILED, generation=GENERATION + 2))


def quiet_and_open(book: Book) -> None:
    book.word(packed(words.TRANSFERRING, quiet=True, generation=GENERATION + 2))


def no_such_state(book: Book) -> None:
    book.word(packed(7, generation=GENERATION + 2))


def another_owner(book: Book) -> None:
    book.word(packed(words.TRANSFERRING, generation=GENERATION + 2))
    book.word(packed(words.TRANSFERRING, generation=GENERATION + 2) ^ 1 << 22)


def an_older_generation(book: Book) -> None:
    book.word(packed(words.SUCCESS, quiet=True))


def open_too_long(book: Book) -> None:
    book.add("watcher", Kind.LATE, 2 * SECOND, 0, SLOT, GENERATION)


def never_ends(book: Book) -> None:
    for kind in (Kind.VERDICT, Kind.BYTES, Kind.TOKEN, Kind.AGAIN):
        book.drop(2, kind)


def foreign_bytes(book: Book) -> None:
    book.replace(2, Kind.BYTES, c=plan.digest(SALT, ROOM + 1, 2))


def torn_pages(book: Book) -> None:
    book.replace(2, Kind.BYTES, b=0)


def foreign_token(book: Book) -> None:
    book.replace(2, Kind.TOKEN, c=plan.token(SALT, ROOM + 1))


def success_of_a_failed_prefill(book: Book) -> None:
    book.slip_in(0, Kind.VERDICT, Kind.ABORTED, plan.LAST, words.ABORTED)
    book.replace(0, Kind.VERDICT, b=words.FAILED, c=words.ABORTED)
    book.replace(0, Kind.AGAIN, b=words.FAILED, c=words.ABORTED)


def late_bytes(book: Book) -> None:
    book.slip_in(2, Kind.LEFT, Kind.LOOKED, 2, 1)


def dies_by_itself(book: Book) -> None:
    book.drop(2, Kind.LEFT)


def turned_away(book: Book) -> None:
    book.add("connector", Kind.TURNED_AWAY, 2, 0, 0, 111)


def never_served(book: Book) -> None:
    book.records["connector"].append((START, 9, 0, 0, 1, int(Kind.CONNECTED)))
    book.now = END
    book.records["driver"] = [r for r in book.records["driver"] if r[-1] != Kind.END]
    book.add("driver", Kind.END)


def survives_sigkill(book: Book) -> None:
    book.signal(1, Role.WORKER, Mode.KILL, pid=77)
    book.add("driver", Kind.BACK, 1, 1, code(Mode.KILL, Role.WORKER), 77)


def never_back(book: Book) -> None:
    book.signal(1, Role.WORKER, Mode.KILL, pid=77)
    book.add("driver", Kind.DEAD, 0, 0, 77)


def a_slot_is_left(book: Book) -> None:
    book.add("driver", Kind.CENSUS, 0, 1, What.SLOTS, 2)


def a_process_too_many(book: Book) -> None:
    book.add("driver", Kind.CENSUS, 0, 1, What.SURPLUS, 1)


def descriptors_grow(book: Book) -> None:
    book.add("driver", Kind.CENSUS, 0, 1, What.DESCRIPTORS_BEFORE, 30)
    book.add("driver", Kind.CENSUS, 0, 1, What.DESCRIPTORS_AFTER, 90)


PLANTED: list[tuple[Callable[[Book], None], str]] = [
    (changes_its_verdict, "changed verdicts"),
    (another_reason_later, "changed verdicts"),
    (success_becomes_failure, "changed verdicts"),
    (runs_backwards, "impossible moves"),
    (quiet_is_taken_back, "impossible moves"),
    (quiet_and_open, "impossible moves"),
    (no_such_state, "impossible moves"),
    (another_owner, "impossible moves"),
    (an_older_generation, "stale generations"),
    (open_too_long, "open past deadline"),
    (never_ends, "rooms without a verdict"),
    (foreign_bytes, "wrong bytes"),
    (torn_pages, "wrong bytes"),
    (foreign_token, "wrong bytes"),
    (success_of_a_failed_prefill, "success against failure"),
    (late_bytes, "late bytes"),
    (dies_by_itself, "players that died by themselves"),
    (turned_away, "refused connects"),
    (never_served, "connects never served"),
    (survives_sigkill, "processes not dead"),
    (never_back, "roles not back"),
    (a_slot_is_left, "leaks"),
    (a_process_too_many, "leaks"),
    (descriptors_grow, "leaks"),
]


@pytest.mark.parametrize(("plant", "kind"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_a_planted_fault_is_found(plant: Callable[[Book], None], kind: str) -> None:
    book = honest()
    plant(book)
    findings = book.judge()
    assert findings.found(kind) == 1, findings.violations
    assert {k for k in KINDS if findings.found(k)} == {kind}


def test_each_kind_of_violation_is_planted_at_least_once() -> None:
    assert {kind for _, kind in PLANTED} | {"untouched rooms failed"} == set(KINDS)


# --- law 7: what may explain a failure ---


def nothing(book: Book) -> None:
    """Nothing happened."""


def hit(role: Role, mode: Mode = Mode.KILL, tree: int = 0) -> Callable[[Book], None]:
    def before(book: Book) -> None:
        book.signal(tree, role, mode)
        book.back(tree, role, mode)

    return before


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
    (words.ENGINE_DIED, words.ENGINE_DIED, hit(Role.PLAYER, tree=2)),
    (words.STALLED, words.WAITING_TIMEOUT, hit(Role.PLAYER, Mode.PAUSE)),
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


def test_a_refused_connect_is_nothing_while_the_whole_tree_is_away() -> None:
    book = honest()
    book.signal(0, Role.SUPERVISOR, Mode.KILL, pid=70)
    book.add("connector", Kind.TURNED_AWAY, 2, 0, 0, 111)
    book.back(0, Role.SUPERVISOR, Mode.KILL, pid=70)
    assert book.judge().violations == []


def test_a_killed_engine_owes_no_verdict() -> None:
    book = honest()
    never_ends(book)
    dies_by_itself(book)
    book.signal(2, Role.PLAYER, Mode.KILL, pid=52)
    book.back(2, Role.PLAYER, Mode.KILL, pid=52)
    assert book.judge().violations == []


# --- its own tools ---


@given(st.integers(0, (1 << 64) - 1))
def test_a_word_is_taken_apart_without_a_rest(word: int) -> None:
    found = words.decode(word)
    parts = found.state | found.quiet << 4 | found.reason << 5 | found.owner << 13
    assert parts | found.generation << 32 == word


@given(st.integers(0, 1 << 62), st.integers(1, 64))
def test_a_digest_is_that_of_the_pages(room: int, count: int) -> None:
    first = np.uint64(plan.first_word(SALT, room))
    steps = np.arange(count, dtype=np.uint64) * np.uint64(plan.STEP)
    weights = np.arange(1, 2 * count, 2, dtype=np.uint64)
    with np.errstate(over="ignore"):
        assert int(((first + steps) * weights).sum()) == plan.digest(SALT, room, count)


def test_what_was_written_before_a_kill_is_read(tmp_path: Path) -> None:
    """The file is as a killed process leaves it: longer than what is in it."""
    writer = Writer(tmp_path / "a.history")
    count = STEP_BYTES // RECORD.size + 3
    for room in range(count):
        writer.append(Kind.OPENED, room, 1, 2, 3, ns=room + 1)
    found = read(tmp_path / "a.history")
    assert found["room"].tolist() == list(range(count))
    assert (tmp_path / "a.history").stat().st_size > count * RECORD.size
    torn = bytearray((tmp_path / "a.history").read_bytes())
    torn[(count - 1) * RECORD.size + 30 : count * RECORD.size] = bytes(2)  # its kind is missing
    (tmp_path / "b.history").write_bytes(torn)
    assert len(read(tmp_path / "b.history")) == count - 1
    writer.close()
    assert read(tmp_path / "a.history")["room"].tolist() == list(range(count))


def test_the_oracle_shares_no_code_with_pdrt() -> None:
    files = [*(FOLDER / "oracle").glob("*.py"), *(FOLDER.glob("*.py"))]
    mine = [file for file in files if {file.parent.name, file.stem} & INDEPENDENT]
    assert len(mine) >= 10, "they have moved"
    for file in mine:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for imported in names:
                path = imported.split(".")
                assert path[0] != "pdrt", f"{file.name} imports {imported}"
                own = path[:2] == ["stress", "cascades"]
                assert not own or path[2] in INDEPENDENT, f"{file.name} imports {imported}"


def row(book: Book, incarnation: int, *, serves: bool, table: int = 0) -> None:
    identity = incarnation << 32 | (300 + incarnation if incarnation else 0)
    book.add("watcher", Kind.ROW, int(serves), table, words.WORKER, identity)


@pytest.mark.parametrize(("away_ms", "explained"), [(100, False), (2000, True)])
def test_only_a_long_outage_explains_a_deadline(away_ms: int, explained: bool) -> None:
    def before(book: Book) -> None:
        row(book, 1, serves=True)
        row(book, 0, serves=False)
        book.now += away_ms * 1_000_000
        row(book, 2, serves=False)
        row(book, 2, serves=True)

    findings = failed(words.WAITING_TIMEOUT, words.WAITING_TIMEOUT, before).judge()
    assert (findings.violations == []) is explained
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
    assert (findings.violations == []) is explained


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


def test_what_several_outages_cover_is_counted_once() -> None:
    spans = [(0.0, 2.0), (1.5, 3.0), (2.0, 2.5), (5.0, 6.0), (8.0, math.inf)]
    assert covered_s(spans, 1.0, 9.0) == 2.0 + 1.0 + 1.0
    assert covered_s([], 1.0, 9.0) == 0.0


@pytest.mark.parametrize(("tree", "explained"), [(0, True), (2, False)])
def test_a_fence_needs_a_cause_that_is_not_the_fence(tree: int, explained: bool) -> None:
    """A restart in a prefill may leave rooms of decode unquiet; decode's own is the fence."""

    def before(book: Book) -> None:
        for table in {tree * 1000, 2000}:
            row(book, 1, serves=True, table=table)
            row(book, 0, serves=False, table=table)
            row(book, 2, serves=True, table=table)

    found = failed(words.WORKER_DIED, words.WORKER_FENCED, before).judge()
    assert (found.violations == []) is explained


@pytest.mark.parametrize("listener", [True, False])
@pytest.mark.parametrize("player", [True, False])
def test_a_fence_may_be_for_a_room_that_an_engine_left_and_a_listener_forgot(
    player: bool, listener: bool
) -> None:
    def before(book: Book) -> None:
        row(book, 8, serves=True, table=2000)
        if player:
            book.signal(0, Role.PLAYER, Mode.KILL)
            book.back(0, Role.PLAYER, Mode.KILL)
        if listener:
            book.signal(2, Role.LISTENER, Mode.KILL)
            book.back(2, Role.LISTENER, Mode.KILL)

    found = failed(words.WORKER_FENCED, words.WORKER_FENCED, before).judge()
    assert (found.violations == []) is (player and listener)
