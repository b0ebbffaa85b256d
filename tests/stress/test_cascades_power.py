"""How often the oracle of the cascades would excuse a room that nothing befell."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stress.cascades import words
from stress.cascades.oracle.faults import Role
from stress.cascades.oracle.power import ASKED, EXCUSED
from stress.cascades.words import REASONS
from tests.stress.book import Book, ended, failed, hit, honest, opened, over


def succeeded(before: Callable[[Book], None]) -> Book:
    book = Book()
    opened(book)
    before(book)
    ended(book, 0, words.SUCCESS)
    ended(book, 2, words.SUCCESS)
    over(book)
    return book


def excused(book: Book) -> set[str]:
    findings = book.judge()
    assert findings.violations == []
    assert findings.counts[ASKED] == 1
    return {name for name in REASONS if findings.counts[EXCUSED + name]}


def test_beside_a_listener_that_dies_nothing_is_excused() -> None:
    assert excused(honest()) == set()


@pytest.mark.parametrize(
    ("role", "tree", "reasons"),
    [
        (Role.WORKER, 0, {"transfer stalled", "peer lost", "worker died", "transport failed"}),
        (Role.WORKER, 1, set()),
        (Role.PLAYER, 2, {"bootstrap timeout", "waiting timeout", "transfer stalled", "peer lost",
                          "engine died"}),
    ],
)  # fmt: skip
def test_what_happens_beside_a_room_would_excuse_it(
    role: Role, tree: int, reasons: set[str]
) -> None:
    assert excused(succeeded(hit(role, tree=tree))) == reasons


def test_only_rooms_that_succeeded_on_both_sides_are_asked() -> None:
    book = failed(words.WORKER_DIED, words.WORKER_DIED, hit(Role.WORKER))
    assert book.judge().counts[ASKED] == 0
