"""One room with both its engines, driven step by step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.crash.party import TOKEN, AnyParty

ROOMS = itertools.count(1)
BIG = 128  # pages of a chunk that takes tens of milliseconds over TCP
CHUNKS_COUNT = 4


@dataclass
class Deal:
    """`chunks`: pages in each.  Pages and aux row come from the purpose's own part of the pools."""

    prefill: AnyParty
    decode: AnyParty
    peer: str  # prefill's control address
    first_page: int
    aux: int
    chunks: Sequence[int] = (1,)
    room: int = field(default_factory=lambda: next(ROOMS))
    told: bool = False
    sent: int = 0

    @property
    def source(self) -> list[int]:
        return list(range(self.first_page, self.first_page + sum(self.chunks)))

    @property
    def target(self) -> list[int]:
        return self.source[::-1]

    def open(self) -> None:
        self.prefill.fill(self.source, self.room)
        self.prefill.open(self.room, "", sum(self.chunks), self.aux)
        self.decode.open(self.room, self.peer, 0, self.aux)

    def tell(self) -> None:
        self.decode.metadata(self.room, self.target, self.aux)
        self.told = True

    def send(self) -> None:
        start = sum(self.chunks[: self.sent])
        pages = self.source[start : start + self.chunks[self.sent]]
        self.sent += 1
        self.prefill.send(self.room, pages, self.sent == len(self.chunks), self.aux)

    def tick(self) -> None:
        self.prefill.tick()
        self.decode.tick()

    def sides(self) -> dict[str, AnyParty]:
        return {"prefill": self.prefill, "decode": self.decode}

    def state(self, side: str) -> str:
        return str(self.sides()[side].peek(self.room)["state"])

    def moved(self) -> int:
        return int(self.prefill.peek(self.room)["moved_bytes"])

    def go_on(self, *, prefill: bool = True, decode: bool = True) -> None:
        """What the engines' next step is, if there is one now."""
        if decode and not self.told and self.decode.poll(self.room) == "WaitingForInput":
            self.tell()
        may_send = ("WaitingForInput", "Transferring")
        if prefill and self.sent < len(self.chunks) and self.prefill.poll(self.room) in may_send:
            self.send()

    def over(self) -> bool:
        return bool(self.prefill.over(self.room)) and bool(self.decode.over(self.room))

    def check_bytes(self) -> None:
        assert self.prefill.digest(self.source) == self.decode.digest(self.target), self
        assert self.decode.token(self.room, self.aux) == TOKEN

    def check_success(self) -> None:
        for side, party in self.sides().items():
            state, code = party.poll(self.room), party.failure(self.room)
            assert state == "Success", f"room {self.room}: {side} is {state}, {code}"
        self.check_bytes()

    def clear(self) -> None:
        for party in self.sides().values():
            party.clear(self.room)


def succeed(
    deals: Sequence[Deal], wait: Callable[[Callable[[], Any], float, str], Any], what: str
) -> None:
    """Open rooms, all at once, and drive them to their end: Success with the right bytes."""
    for deal in deals:
        deal.open()

    def over() -> bool:
        for deal in deals:
            deal.go_on()
        return all(deal.over() for deal in deals)

    wait(over, 10, f"{what} to be over")
    for deal in deals:
        deal.check_success()
        deal.clear()
