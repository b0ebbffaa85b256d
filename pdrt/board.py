"""The supervisor's board, kept in the status table: the only place where the two meet."""

from __future__ import annotations

import logging
from collections.abc import Callable

from pdrt import failpoints
from pdrt.process_rows import INCARNATION_MASK
from pdrt.shm_status import StatusTable

log = logging.getLogger("pdrt.runtime")


class TableBoard:
    """See `supervision.Board`."""

    def __init__(self, table: StatusTable, names: dict[int, str]) -> None:
        self._table = table
        self._names = names
        self.pids: dict[int, int] = {}  # row -> pid of the living child
        self.sweep: Callable[[], object] = lambda: None

    def incarnate(self, row: int, incarnation: int, pid: int) -> None:
        # 11 bits, and 0 means nobody.
        self._table.incarnate(row, (incarnation - 1) % INCARNATION_MASK + 1, pid, self._names[row])
        self.pids[row] = pid

    def ready(self, row: int) -> bool:
        return self._table.ready(row)

    def pulse(self, row: int) -> int:
        return self._table.pulse(row)

    def buried(self, row: int, incarnation: int) -> None:
        self._table.bury(row)
        self.pids.pop(row, None)
        failpoints.hit("board.buried.before_sweep")
        self.sweep()  # at once: whoever takes the row must not meet rooms of the dead

    def failed(self, row: int, detail: str) -> None:
        log.error("child row=%d has no process: %s", row, detail)
