"""Numbers given out for things a transport keeps: transfers, and prepared tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from pdrt.errors import QueueFull
from pdrt.transports.base import TransportError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdrt.transports.tables import Table

HANDLES_MAX = 65_536

Item = TypeVar("Item")
Side = TypeVar("Side")


class Handles(Generic[Item]):
    """Transfers by handle.  Handles are never used twice."""

    def __init__(self, handles_max: int = HANDLES_MAX) -> None:
        self._handles_max = handles_max
        self._items: dict[int, Item] = {}
        self._last = 0

    def check_room(self, elsewhere: int = 0) -> None:
        """Raise QueueFull at the limit; `elsewhere` transfers are kept by the caller itself."""
        if len(self._items) + elsewhere >= self._handles_max:
            raise QueueFull(f"{self._handles_max} transfers exist; release some")

    def add(self, item: Item) -> int:
        self._last += 1
        self._items[self._last] = item
        return self._last

    def get(self, handle: int) -> Item:
        """Raise TransportError for a handle that was released or never given."""
        try:
            return self._items[handle]
        except KeyError:
            raise TransportError(f"handle {handle} was released or never given") from None

    def pop(self, handle: int) -> Item:
        """Like `get`, and forget it."""
        item = self.get(handle)
        del self._items[handle]
        return item

    def values(self) -> Iterable[Item]:
        return self._items.values()

    def clear(self) -> None:
        self._items.clear()


class Tables(Generic[Side]):
    """Prepared tables by number, each over one peer's region (None: ours) with what the
    transport keeps beside it."""

    def __init__(self) -> None:
        self._tables: dict[int, tuple[str | None, Table, Side]] = {}
        self._last = 0

    def add(self, peer: str | None, table: Table, side: Side) -> int:
        self._last += 1
        self._tables[self._last] = (peer, table, side)
        return self._last

    def get(self, number: int, peer: str | None) -> tuple[Table, Side]:
        """Raise TransportError unless the table is over that peer's region."""
        prepared = self._tables.get(number)
        if prepared is None or prepared[0] != peer:
            whose = "our region" if peer is None else f"peer {peer!r}"
            raise TransportError(f"there is no table {number} over {whose}")
        return prepared[1], prepared[2]

    def drop(self, peer: str | None) -> list[Side]:
        """Forget the tables over that peer's region and return what was kept beside them."""
        numbers = [n for n, (owner, _, _) in self._tables.items() if owner == peer]
        return [self._tables.pop(n)[2] for n in numbers]
