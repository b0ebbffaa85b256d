"""A small table and several views of it, as different processes have them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from pdrt.actors.base import Beating
from pdrt.actors.janitor import Janitor
from pdrt.clock import MILLISECOND_NS
from pdrt.config import Timeouts
from pdrt.process_rows import NOBODY, Owner
from pdrt.protocol.states import Event, KVPoll, Reason, Role
from pdrt.shm_status import Handle, StatusTable, create

TIMEOUTS_MS = {KVPoll.Bootstrapping: 100, KVPoll.WaitingForInput: 200, KVPoll.Transferring: 50}
START_MS = 1_000_000
INSTANCE = b"instance-of-test"
US, THEM = Owner(3, 5), Owner(9, 2047)


def ns(ms: int) -> int:
    return ms * MILLISECOND_NS


NOW = ns(START_MS)
LATE_NS = ns(START_MS + 10_000)


@contextmanager
def tables(
    count: int, *, rooms_max: int = 4, role: Role = Role.PREFILL, queue_ms: int = 1 << 40
) -> Iterator[list[StatusTable]]:
    """Several views of one new table, as different processes have them."""
    fd = create(
        role,
        rooms_max=rooms_max,
        instance=INSTANCE,
        timeouts_ms=TIMEOUTS_MS,
        now_ns=NOW,
        queue_ms=queue_ms,
    )
    views = [StatusTable(fd, me) for me in (US, THEM, NOBODY)[:count]]
    os.close(fd)
    try:
        yield views
    finally:
        for view in views:
            view.close()


ROUTES = {
    Role.PREFILL: (Event.PEER_KNOWN, Event.CHUNK_POSTED, Event.LANDED),
    Role.DECODE: (Event.PEER_KNOWN, Event.DESTINATION_SENT, Event.LANDED),
}


def bring(table: StatusTable, handle: Handle, state: KVPoll, *, now_ns: int = NOW) -> None:
    """Move a room that was just opened to `state`; Failed by way of Transferring, so not quiet."""
    route = ROUTES[table.role]
    events = (*route[:2], Event.FAULT) if state is KVPoll.Failed else route[: state - 1]
    for event in events:
        reason = Reason.ABORTED if event is Event.FAULT else Reason.NONE
        assert table.move(handle.slot, handle.generation, event, now_ns=now_ns, reason=reason)


def sweep(table: StatusTable, now_ns: int, times: int = 3) -> None:
    """As the janitor does where no room's pages are mapped any more."""
    janitor = Janitor(
        table=table,
        timeouts=Timeouts(),
        mapped=lambda *_: False,
        fence=lambda row, reason: None,
        wake=lambda row: None,
        beating=Beating(lambda: None),
    )
    for _ in range(times):
        janitor.sweep(now_ns)
