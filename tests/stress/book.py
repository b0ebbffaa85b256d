"""Histories of cascades written by hand: of one room that succeeds or fails, and what befell it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stress.cascades import plan, words
from stress.cascades.history import DTYPE, Kind
from stress.cascades.oracle.faults import Mode, Role, code
from stress.cascades.oracle.findings import Findings
from stress.cascades.oracle.judge import judge_histories
from stress.cascades.oracle.survey import What

SALT, MIX = 7, plan.Mix()
SIDES = (plan.PREFILL, plan.PREFILL, plan.DECODE, plan.DECODE)
ROOM = plan.room_of(1, 0)  # between prefill 0 and decode 0
SLOT, GENERATION, OWNER = 5, 9, 0x208
SECOND = 1_000_000_000
START, END = 1000 * SECOND, 1100 * SECOND


def packed(
    state: int, *, quiet: bool = False, reason: int = 0, generation: int = GENERATION
) -> int:
    return state | quiet << 4 | reason << 5 | OWNER << 13 | generation << 32


class Book:
    """Histories by name, written record by record at times that only grow."""

    def __init__(self) -> None:
        self.records: dict[str, list[tuple[int, ...]]] = {}
        self.now = START
        self.watching = ["watcher", "connector"]  # that end as they should

    def add(self, name: str, kind: Kind, room: int = 0, a: int = 0, b: int = 0, c: int = 0) -> None:
        self.now += 1_000_000
        self.records.setdefault(name, []).append((self.now, room, c, b, a, int(kind)))

    def half(self, player: int, kind: Kind, b: int = 0, c: int = 0, room: int = ROOM) -> None:
        self.add(f"player-{player}", kind, room, player, b, c)

    def word(self, word: int, *, table: int = 0, slot: int = SLOT) -> None:
        self.add("watcher", Kind.WORD, 0, table, slot, word)

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
        for name in self.watching:
            self.add(name, Kind.LEFT)
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


def hit(
    role: Role, mode: Mode = Mode.KILL, tree: int = 0, *, away_ms: int = 0
) -> Callable[[Book], None]:
    def before(book: Book) -> None:
        book.signal(tree, role, mode)
        book.now += away_ms * 1_000_000
        book.back(tree, role, mode)

    return before


def row(
    book: Book, incarnation: int, *, serves: bool, table: int = 0, of: int = words.WORKER
) -> None:
    identity = incarnation << 32 | (300 + incarnation if incarnation else 0)
    book.add("watcher", Kind.ROW, int(serves), table, of, identity)


def failed(reason: int, other: int, before: Callable[[Book], None]) -> Book:
    """Both halves fail; `before` says what happened."""
    book = Book()
    opened(book)
    before(book)
    ended(book, 0, words.FAILED, reason)
    ended(book, 2, words.FAILED, other)
    over(book)
    return book
