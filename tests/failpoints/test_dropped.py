"""What fails midway is as good as not begun: the message comes again, the sweep looks again.

Law 8 drops a message whose handling raises.  Found by failpoints: of a chunk that was dropped
between its move and its write nothing was left, and the room succeeded without it; a destination
was noted before the table knew, so that its repeat was taken for one; rooms that a broken-off
introduction did not reach waited out their time; and a worker that was noted as restarted, before
the asking failed, was never restarted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from pdrt import shm_status
from pdrt.actors.base import Beating
from pdrt.actors.janitor import Janitor
from pdrt.clock import SECOND_NS
from pdrt.config import Timeouts
from pdrt.failpoints import Action, Failpoint
from pdrt.process_rows import Owner
from pdrt.protocol.states import Event, KVPoll, Reason, Role
from pdrt.shm_status import StatusTable
from tests.actors.world import World
from tests.failpoints.play import GIVES_UP
from tests.failpoints.strikes import Strikes, struck

ROOM = 1
WORKER = Owner(8, 1)
OPEN_MS = {KVPoll.Bootstrapping: 1000, KVPoll.WaitingForInput: 1000, KVPoll.Transferring: 1000}


def serve(strikes: Strikes, eager: bool) -> list[KVPoll | None]:
    """One room of two chunks between trees that have yet to meet: its verdicts.  `eager`: prefill
    sends them before the destination is known."""
    with World(polls=2) as world:
        with struck(world, strikes):
            world.both(ROOM, pages_count=4, chunks=2, pace_ms=10, eager=eager)
            world.run(100)
            world.settle()
        engines = [world.engine(name) for name in ("prefill", "decode0")]
        return [job.verdict for engine in engines for job in engine.history]


def hits(eager: bool) -> Iterator[Failpoint]:
    counted = Strikes()
    assert serve(counted, eager) == [KVPoll.Success, KVPoll.Success]
    for point, count in counted.hits.items():
        if not point.startswith("actor."):
            for on_hit in range(1, count + 1):
                yield Failpoint(point=point, action=Action.RAISE, on_hit=on_hit)


@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_message_that_is_dropped_midway_is_as_good_as_lost(eager: bool):
    """At every hit: the room succeeds all the same, unless the exception ended a process; and
    nothing is left behind."""
    dropped_count = 0
    for failpoint in hits(eager):
        strikes = Strikes(failpoint)
        verdicts = serve(strikes, eager)
        assert strikes.victim, failpoint
        if not strikes.died and failpoint.point not in GIVES_UP:
            dropped_count += 1
            assert verdicts == [KVPoll.Success, KVPoll.Success], (failpoint, strikes.victim)
    assert dropped_count > 10


@pytest.fixture
def table() -> Iterator[StatusTable]:
    fd = shm_status.create(
        Role.DECODE, rooms_max=4, instance=bytes(16), timeouts_ms=OPEN_MS, now_ns=1
    )
    made = StatusTable(fd, Owner(1, 1))
    yield made
    made.close()
    os.close(fd)


def test_a_restart_that_could_not_be_asked_for_is_asked_for_again(table: StatusTable):
    table.incarnate(*WORKER, 1, "worker0")
    handle = table.open(ROOM, 0, now_ns=1)
    for event in (Event.PEER_KNOWN, Event.DESTINATION_SENT, Event.FAULT):
        reason = Reason.ABORTED if event is Event.FAULT else Reason.NONE
        assert table.move(*handle[1:], event, now_ns=1, reason=reason, owner=WORKER)
    asked: list[int] = []

    def fence(row: int, reason: str) -> None:
        asked.append(row)
        if len(asked) == 1:
            raise OSError("no descriptor is left to ask with")

    janitor = Janitor(
        table=table,
        timeouts=Timeouts(),
        mapped=lambda peer, rank, epoch: False,
        fence=fence,
        wake=lambda row: None,
        beating=Beating(lambda: None),
    )
    with pytest.raises(OSError, match="no descriptor"):
        janitor.sweep(100 * SECOND_NS)
    for _ in range(3):
        janitor.sweep(100 * SECOND_NS)
    assert asked == [WORKER.row, WORKER.row], "asked again, and then only once"
