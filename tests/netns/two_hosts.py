"""Run by `test_two_hosts.py`, in namespaces of its own:

    left                     right
    prefill ═══ cable ══════ decode
       ╚═══════ near                     a decode on prefill's own host, which has no fault

Everything goes by TCP and by addresses that are not loopback.  Whatever happens to the cable, each
side gives its verdicts in time, the near decode is slowed by nothing, and once the cable is whole
rooms succeed without a restart.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.traffic import Phase, Route, Trip, all_over, finish, recover, run, succeed
from tests.faults.trees import make_model, stopped
from tests.netns.hosts import Cable, RemoteTree
from tests.waiting import wait_until

BETWEEN_HOSTS = {"UCX_TLS": "tcp,self"}  # one kernel knows quicker ways
FLAGS = (
    "--transport", "nixl", "--bootstrap-timeout", "3", "--waiting-timeout", "3",
    "--transfer-stall-timeout", "3", "--peer-timeout", "2.5", "--quiet-timeout", "4",
    "--pool-tokens", "4096",
)  # fmt: skip
OVER_S = 3 + 2.5 + 8  # the longest deadline, the peer's silence, slack for two busy cores
QUIET_S = 4 + 20  # a forced fence and the worker's new start
SYN_SENT = "02"


class Pair:
    def __init__(self, cable: Cable, folder: Path, stack: contextlib.ExitStack) -> None:
        self.cable = cable
        model = folder / "model"
        model.mkdir()
        flags = ["--model-path", str(make_model(model)), *FLAGS]

        def tree(role: str, host: int) -> RemoteTree:
            started = RemoteTree(role, folder, flags, cable.hosts[host], BETWEEN_HOSTS)
            stack.callback(started.stop)
            return started

        self.prefill, self.decode, self.near = (
            tree("prefill", 0),
            tree("decode", 1),
            tree("decode", 0),
        )
        for started in self.trees:
            started.wait_ready()
        p, d, n = (
            stack.enter_context(contextlib.closing(started.attach("test")))
            for started in self.trees
        )
        self.route = Route(p, d, self.prefill.control)
        self.healthy = Route(p, n, self.prefill.control, sources=self.route.sources)
        self.steady = self.lasting()

    @property
    def trees(self) -> list[RemoteTree]:
        return [self.prefill, self.decode, self.near]

    @property
    def routes(self) -> list[Route]:
        return [self.route, self.healthy]

    def everywhere(self) -> list[Trip]:
        """Rooms in every phase but the last."""
        trips = [self.route.open(p) for p in Phase for _ in range(2) if p < Phase.WHOLE]
        run(self.routes, lambda: all(t.reached for t in trips), 10, "rooms to be in every phase")
        assert not any(trip.over for trip in trips)
        return trips

    def bystanders(self) -> list[int]:
        return [pid for tree in (self.prefill, self.near) for pid in tree.pids().values()]

    def lasting(self) -> list[int]:
        """Everybody that no fault of the cable may end; decode's worker is its fence."""
        return [*self.bystanders(), self.decode.pids()["listener"]]

    def heal(self) -> None:
        """The cable is whole; nobody has to be restarted for rooms to succeed."""
        self.cable.heal()
        for trip in self.route.trips:
            trip.want = Phase.WHOLE
        finish(self.routes, OVER_S + QUIET_S, "every room to be over and quiet")
        recover(self.route, 15)
        succeed(self.route, 10)
        for tree in self.trees:
            wait_until(tree.is_empty, 10, f"{tree.role}'s table to be empty")
        assert self.lasting() == self.steady, [tree.log()[-3000:] for tree in self.trees]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        cable = stack.enter_context(Cable())
        made = Pair(cable, tmp_path_factory.mktemp("hosts"), stack)
        for route in made.routes:
            recover(route, 30)
        yield made


def carried_bytes(pair: Pair) -> int:
    with pair.cable.a.entered():
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    card = next(line for line in lines if pair.cable.a.card in line)
    return int(card.split(":")[1].split()[8])


def dialling(pair: Pair) -> bool:
    """Has prefill's host a connection under way that nobody answers?"""
    table = Path(f"/proc/{pair.cable.a.pid}/net/tcp").read_text().splitlines()[1:]
    return any(line.split()[3] == SYN_SENT for line in table)


def test_rooms_cross_the_cable(pair: Pair) -> None:
    before, page_bytes = carried_bytes(pair), pair.route.prefill.maps[0].page_bytes
    rooms = 20
    succeed(pair.route, rooms)
    assert carried_bytes(pair) - before > rooms * 4 * page_bytes
    for tree in pair.trees:
        assert tree.control.startswith("10.77.0."), tree.facts


def test_a_black_hole_ends_its_rooms_in_time_and_slows_no_other(pair: Pair) -> None:
    usual = statistics.median(succeed(pair.healthy, 30))
    trips = pair.everywhere()
    pair.cable.lose(1)
    trips += [pair.route.open() for _ in range(5)]
    meanwhile = statistics.median(succeed(pair.healthy, 60, others=[pair.route]))
    assert any(not trip.over for trip in trips)
    run(pair.routes, lambda: all_over(trips), OVER_S, "rooms in the hole to be over")
    assert not any(trip.succeeded for trip in trips)
    assert meanwhile < 2 * usual + 0.02, (usual, meanwhile)
    pair.heal()


def test_a_stopped_decode_that_bytes_are_on_their_way_to_slows_no_other(pair: Pair) -> None:
    """Its kernel takes what is sent, and nothing is ever done with it: not even a fence ends."""
    usual = succeed(pair.healthy, 30)
    trips = pair.everywhere()
    with stopped(pair.decode):
        for trip in trips:
            trip.want = Phase.WHOLE
        trips += [pair.route.open() for _ in range(3)]
        meanwhile: list[float] = []

        def all_failed() -> bool:
            meanwhile.extend(succeed(pair.healthy, 1, others=[pair.route]))
            return all_over(trips)

        wait_until(all_failed, OVER_S, "rooms with a stopped decode to be over")
        meanwhile += succeed(pair.healthy, 30, others=[pair.route])  # while fences wait
        assert pair.bystanders() == pair.steady[:-1], pair.prefill.log()[-3000:]
    assert statistics.median(meanwhile) < 2 * statistics.median(usual) + 0.02
    pair.heal()


def test_a_worker_that_dials_into_a_black_hole_serves_the_others(pair: Pair) -> None:
    """A firewall forgets nobody and lets nobody new out: prefill hears of a new agent, and dials
    it."""
    usual = statistics.median(succeed(pair.healthy, 30))
    pair.cable.a.open_nothing()
    os.kill(pair.decode.pids()["worker0"], signal.SIGKILL)
    trips = [pair.route.open() for _ in range(3)]
    run(pair.routes, lambda: dialling(pair), 10, "prefill's worker to dial")
    meanwhile = statistics.median(succeed(pair.healthy, 60, others=[pair.route]))
    assert meanwhile < 2 * usual + 0.02, (usual, meanwhile)
    run(pair.routes, lambda: all_over(trips), OVER_S, "rooms in the hole to be over")
    pair.heal()


@pytest.mark.slow
@pytest.mark.parametrize("end", [0, 1], ids=["prefill", "decode"])
def test_a_cable_is_pulled_and_plugged_in_again(pair: Pair, end: int) -> None:
    trips = pair.everywhere()
    pair.cable.hosts[end].unplug()
    trips += [pair.route.open() for _ in range(5)]
    run(pair.routes, lambda: all_over(trips), OVER_S, "rooms without a cable to be over")
    assert not any(trip.succeeded for trip in trips)
    pair.heal()


@pytest.mark.slow
def test_a_cable_with_a_loose_contact(pair: Pair) -> None:
    trips: list[Trip] = []
    for _ in range(8):
        pair.cable.b.unplug()
        trips += [pair.route.open() for _ in range(3)]
        succeed(pair.healthy, 20, others=[pair.route])
        pair.cable.b.plug()
        succeed(pair.healthy, 20, others=[pair.route])
    run(pair.routes, lambda: all_over(trips), 2 * OVER_S, "rooms over a loose contact to be over")
    pair.heal()


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.02, 0.2, 0.5])
def test_packets_are_lost(pair: Pair, part: float) -> None:
    trips = pair.everywhere()
    pair.cable.lose(part)
    for trip in trips:
        trip.want = Phase.WHOLE
    trips += [pair.route.open() for _ in range(10)]
    run(pair.routes, lambda: all_over(trips), 3 * OVER_S, f"rooms to be over with {part} lost")
    if part < 0.1:
        assert all(trip.succeeded for trip in trips)
    pair.heal()


@pytest.mark.slow
def test_a_narrower_end_of_the_cable(pair: Pair) -> None:
    for host, mtu in itertools.product(pair.cable.hosts, (576, 1500)):
        host.run(f"ip link set {host.card} mtu {mtu}")
        succeed(pair.route, 10)
    pair.heal()
