"""News that a decode has not acknowledged: rooms of ours that landed.

Sent again with a pause that doubles, until `NewsTaken` or the time after which the decode has given
the room up.  Lost with the worker; then decode asks our listener (`Expect`).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from pdrt.actors.base import Beating
from pdrt.clock import MILLISECOND_NS, to_ns
from pdrt.config import Timeouts
from pdrt.mail.mailbox import Address, Postman
from pdrt.protocol.counters import Counter
from pdrt.protocol.messages import Landed, NewsTaken
from pdrt.shm_status import StatusTable

NEWS_MAX = 65536  # the oldest is dropped, its peer will ask
PAUSE_MAX_NS = 1000 * MILLISECOND_NS


@dataclass(slots=True)
class _Item:
    landed: Landed
    due_ns: int
    until_ns: int
    pause_ns: int


class News:
    def __init__(
        self, table: StatusTable, mailbox: Postman, timeouts: Timeouts, beating: Beating
    ) -> None:
        self._table = table
        self._mailbox = mailbox
        self._beating = beating
        self._pause_ns = to_ns(timeouts.resend_s)
        self._keep_ns = to_ns(timeouts.stall_s)
        # By link, decode's slot, generation.
        self._items: OrderedDict[tuple[Address, int, int], _Item] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def tell(self, link: str, landed: Landed, now_ns: int) -> None:
        if len(self._items) >= NEWS_MAX:
            self._items.popitem(last=False)
            self._table.count(Counter.FORGOTTEN)
        self._items[link, landed.slot, landed.generation] = _Item(
            landed, now_ns + self._pause_ns, now_ns + self._keep_ns, self._pause_ns
        )
        self._mailbox.post(link, landed)

    def taken(self, sender: Address, taken: NewsTaken) -> None:
        key = sender, taken.slot, taken.generation
        item = self._items.get(key)
        if item is not None and taken.instance == item.landed.instance:
            del self._items[key]

    def repeat(self, now_ns: int) -> None:
        for key, item in self._beating(list(self._items.items())):
            if now_ns >= item.until_ns:
                del self._items[key]
            elif now_ns >= item.due_ns:
                item.due_ns = now_ns + item.pause_ns
                item.pause_ns = min(2 * item.pause_ns, PAUSE_MAX_NS)
                self._mailbox.post(key[0], item.landed)
                self._table.count(Counter.RESENDS)
