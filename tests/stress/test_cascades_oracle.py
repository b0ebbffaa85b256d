"""The oracle of the cascades: an honest history has no fault, and each planted one is found."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stress.cascades import plan, words
from stress.cascades.history import RECORD, STEP_BYTES, Kind, Writer, read
from stress.cascades.oracle.faults import Mode, Role, code
from stress.cascades.oracle.findings import KINDS
from stress.cascades.oracle.survey import What
from tests.stress.book import (
    END,
    GENERATION,
    ROOM,
    SALT,
    SECOND,
    SLOT,
    Book,
    honest,
    packed,
)

FOLDER = Path(__file__).parents[2] / "stress" / "cascades"
#: The oracle and all that it takes from elsewhere.
INDEPENDENT = {"oracle", "history", "plan", "words"}


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


def nobody_watches(book: Book) -> None:
    book.watching.remove("watcher")


def nobody_connects(book: Book) -> None:
    book.watching.remove("connector")
    del book.records["connector"]


def turned_away(book: Book) -> None:
    book.add("connector", Kind.TURNED_AWAY, 2, 0, 0, 111)


def never_served(book: Book) -> None:
    book.add("connector", Kind.CONNECTING, 9, 1)
    book.now = END


def served_late(book: Book) -> None:
    book.add("connector", Kind.CONNECTING, 9, 1)
    book.now += 9 * SECOND
    book.add("connector", Kind.CONNECTED, 9, 1)
    book.now += 2 * SECOND
    book.add("connector", Kind.SERVED, 9, 1)


def dropped(book: Book) -> None:
    """As the listener of another tree was killed, and long after that of its own."""
    book.now += SECOND
    book.signal(0, Role.LISTENER, Mode.KILL)
    book.add("connector", Kind.CONNECTING, 9, 1)
    book.add("connector", Kind.CONNECTED, 9, 1)
    book.add("connector", Kind.RESET, 9, 1)
    book.back(0, Role.LISTENER, Mode.KILL)


def dropped_before_its_listener_died(book: Book) -> None:
    book.add("connector", Kind.CONNECTING, 9, 1)
    book.add("connector", Kind.RESET, 9, 1)
    book.now += SECOND
    book.signal(1, Role.LISTENER, Mode.KILL)
    book.back(1, Role.LISTENER, Mode.KILL)


def dropped_after_it(book: Book) -> None:
    book.signal(1, Role.TREE, Mode.KILL)
    book.back(1, Role.TREE, Mode.KILL)
    book.now += SECOND
    book.add("connector", Kind.CONNECTING, 9, 1)
    book.add("connector", Kind.RESET, 9, 1)


def dropped_in_a_pause(book: Book) -> None:
    book.signal(1, Role.TREE, Mode.PAUSE)
    book.now += SECOND
    book.add("connector", Kind.CONNECTING, 9, 1)
    book.add("connector", Kind.RESET, 9, 1)
    book.back(1, Role.TREE, Mode.PAUSE)


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
    (nobody_watches, "players that died by themselves"),
    (nobody_connects, "players that died by themselves"),
    (turned_away, "refused connects"),
    (never_served, "connects never served"),
    (served_late, "connects never served"),
    (dropped, "connects reset without a cause"),
    (dropped_before_its_listener_died, "connects reset without a cause"),
    (dropped_after_it, "connects reset without a cause"),
    (dropped_in_a_pause, "connects reset without a cause"),
    (survives_sigkill, "processes not dead"),
    (never_back, "roles not back"),
    (a_slot_is_left, "leaks"),
    (a_process_too_many, "leaks"),
    (descriptors_grow, "leaks"),
]

#: By the tests of causes and of fences.
ELSEWHERE = {
    "untouched rooms failed",
    "rooms not quiet without a cause",
    "restarts without a cause",
}


@pytest.mark.parametrize(("plant", "kind"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_a_planted_fault_is_found(plant: Callable[[Book], None], kind: str) -> None:
    book = honest()
    plant(book)
    findings = book.judge()
    assert findings.found(kind) == 1, findings.violations
    assert {k for k in KINDS if findings.found(k)} == {kind}


def test_each_kind_of_violation_is_planted_at_least_once() -> None:
    assert {kind for _, kind in PLANTED} | ELSEWHERE == set(KINDS)


def test_a_refused_connect_is_nothing_while_the_whole_tree_is_away() -> None:
    book = honest()
    book.signal(0, Role.SUPERVISOR, Mode.KILL, pid=70)
    book.add("connector", Kind.TURNED_AWAY, 2, 0, 0, 111)
    book.back(0, Role.SUPERVISOR, Mode.KILL, pid=70)
    assert book.judge().violations == []


@pytest.mark.parametrize("role", [Role.LISTENER, Role.TREE])
def test_a_connect_is_reset_by_the_death_of_who_took_it(role: Role) -> None:
    book = honest()
    book.add("connector", Kind.CONNECTING, 9, 1)
    book.add("connector", Kind.CONNECTED, 9, 1)
    book.signal(1, role, Mode.KILL)
    book.add("connector", Kind.RESET, 9, 1)
    book.back(1, role, Mode.KILL)
    assert book.judge().violations == []


def test_only_pages_that_somebody_writes_are_trials_of_late_bytes() -> None:
    book = honest()
    for player, pages in ((0, 3), (2, 5)):
        book.half(player, Kind.LOOKED, pages)
    counts = book.judge().counts
    assert counts["pages looked at again"] == counts["pages of successes looked at again"] == 5
    assert counts["prefill's pages looked at again"] == 3


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


def test_what_is_written_down_is_no_memory_of_the_process_that_writes(tmp_path: Path) -> None:
    """Else a soak would see a leak of its own making."""
    writer = Writer(tmp_path / "a.history")
    for _ in range(4 * STEP_BYTES // RECORD.size + 1):
        writer.append(Kind.OPENED)
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split()[0].split("-") for line in maps if line.endswith(str(writer.path))]
    assert sum(int(end, 16) - int(begin, 16) for begin, end in mapped) == STEP_BYTES
    writer.close()
    assert len(read(writer.path)) == 4 * STEP_BYTES // RECORD.size + 1


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
