"""Health says what is so now: each cause is named, each ask looks again, and no actor is asked.

F072 F096 F097 F098 F099 F102.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import httpx
import pytest

from pdrt.clock import MILLISECOND_NS, SECOND_NS, ManualClock
from pdrt.health import LATE_NS, LOOP_SILENT_NS, Health, HealthServer, build_app
from pdrt.process_rows import Owner
from pdrt.protocol.states import Event, KVPoll, Reason, Role
from pdrt.shm_status import StatusTable, create
from pdrt.supervision import ChildState, Phase

ROWS = {"listener": 2, "worker0": 8}
SILENT_NS = SECOND_NS
DEADLINE_MS = 3000


class Sick:
    """A tree of two children whose state a test sets; by and by the supervisor's loop turns."""

    def __init__(self) -> None:
        self.clock = ManualClock(10 * SECOND_NS)
        fd = create(
            Role.DECODE,
            rooms_max=64,
            instance=b"",
            timeouts_ms=dict.fromkeys(KVPoll, DEADLINE_MS),
            now_ns=self.clock(),
        )
        self.tables = {name: StatusTable(fd, Owner(row, 1)) for name, row in ROWS.items()}
        self.table = StatusTable(fd, Owner(1, 1))
        os.close(fd)
        self.phases = dict.fromkeys(ROWS, Phase.UP)
        self.silent: set[str] = set()
        self.stopping = False
        for name, row in ROWS.items():
            self.table.incarnate(row, 1, 1000 + row, name)
        self.health = Health(
            self.table,
            children=self.children,
            clock=self.clock,
            stopping=lambda: self.stopping,
            rows=ROWS,
            silent_ns=SILENT_NS,
        )
        self.turn(0)

    def children(self) -> list[ChildState]:
        return [
            ChildState(
                name=name,
                phase=phase,
                pid=None,
                incarnation=1,
                restarts=0,
                cause="ended by SIGKILL" if phase is not Phase.UP else "",
                uptime_s=1.0,
            )
            for name, phase in self.phases.items()
        ]

    def turn(self, ms: int) -> None:
        """Time passes; the loop turns, and whoever is not silent beats."""
        self.clock.now_ns += ms * MILLISECOND_NS
        self.health.turned_ns = self.clock()
        for name, table in self.tables.items():
            if name not in self.silent:
                table.beat(self.clock())

    def close(self) -> None:
        for table in (self.table, *self.tables.values()):
            table.close()


@pytest.fixture
def sick() -> Iterator[Sick]:
    made = Sick()
    yield made
    made.close()


def test_a_tree_in_order_is_ready(sick: Sick) -> None:
    assert sick.health.live() == sick.health.ready() == []


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.UP])
def test_readiness_is_that_every_child_is_up_now_and_not_that_it_once_was(
    sick: Sick, phase: Phase
) -> None:
    sick.phases["worker0"] = phase
    assert any("worker0" in reason and "SIGKILL" in reason for reason in sick.health.ready())
    assert bool(sick.health.live()) is (phase is Phase.QUARANTINED)
    sick.phases["worker0"] = Phase.UP
    assert sick.health.ready() == []


@pytest.mark.parametrize("name", ROWS)
def test_an_actor_that_stands_still_is_named_however_often_one_asks(sick: Sick, name: str) -> None:
    sick.silent.add(name)
    answers = []
    for _ in range(5):
        sick.turn(SILENT_NS // MILLISECOND_NS // 2)
        answers.append([reason for reason in sick.health.ready() if name in reason])
    assert [bool(answer) for answer in answers] == [False, False, True, True, True]
    assert sick.health.live() == []
    sick.silent.clear()
    sick.turn(0)
    assert sick.health.ready() == []


def test_a_room_past_its_deadline_is_a_fault_of_ours(sick: Sick) -> None:
    handle = sick.table.open(1, 0, now_ns=sick.clock())
    sick.turn(DEADLINE_MS)
    assert sick.health.ready() == []
    sick.turn(LATE_NS // MILLISECOND_NS + 1)
    assert sick.health.ready() == ["1 rooms are open past their deadline"]
    sick.table.poll(handle.slot, handle.generation, sick.clock())
    assert sick.health.ready() == []


def test_a_dead_peer_makes_nobody_but_itself_unready(sick: Sick) -> None:
    """Its rooms fail, and that is all: a probe would end a healthy tree for its sake."""
    for room in range(20):
        handle = sick.table.open(room, 0, now_ns=sick.clock())
        at = handle.slot, handle.generation
        sick.table.move(*at, Event.FAULT, now_ns=sick.clock(), reason=Reason.PEER_LOST)
    for _ in range(100):
        sick.turn(100)
        assert sick.health.live() == sick.health.ready() == []


def test_a_drain_is_not_ready_and_lives(sick: Sick) -> None:
    sick.stopping = True
    assert any("draining" in reason for reason in sick.health.ready())
    assert sick.health.live() == []


def test_all_of_it_is_answered_while_no_actor_and_no_loop_moves(sick: Sick) -> None:
    """By a thread that waits for nobody: here even this one stands still."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        server = HealthServer(build_app(sick.health, lambda: b"", {}), listening)
        server.start()
        try:
            sick.clock.now_ns += 2 * LOOP_SILENT_NS
            got = {path: ask(f"{url}/{path}") for path in ("live", "ready", "health", "rooms")}
            assert {path: answer.status_code for path, answer in got.items()} == {
                "live": 503,
                "ready": 503,
                "health": 503,
                "rooms": 200,
            }
            reasons = got["ready"].json()["reasons"]
            for name in ("the supervisor's loop", *ROWS):
                assert any(reason.startswith(name) for reason in reasons), reasons
            assert all("4.0 s" in reason for reason in reasons)  # how old the last sign of life is
            sick.turn(0)
            assert ask(f"{url}/ready").status_code == 200
        finally:
            server.stop()


def ask(url: str) -> httpx.Response:
    return httpx.get(url, timeout=10)
