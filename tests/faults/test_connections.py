"""Connections that come and go, break, carry wrong bits: nothing leaks, nobody else is slowed."""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
from functools import partial

import psutil
import pytest

from tests.faults.conftest import QUIET_S, Net
from tests.faults.proxy import BlackHole, Flip, Freeze
from tests.faults.traffic import Phase, Trip, all_over, finish, recover, run, succeed
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("healed")

SLACK = 4  # descriptors that may be under way when they are counted


def descriptors(net: Net) -> dict[str, int]:
    """Of every actor of every tree."""
    return {
        f"{number} {name}": psutil.Process(pid).num_fds()
        for number, tree in enumerate(net.trees)
        for name, pid in tree.pids().items()
    }


def wait_no_more(net: Net, before: dict[str, int]) -> None:
    def grown() -> dict[str, tuple[int, int]]:
        now = descriptors(net)
        return {
            name: (before[name], now[name]) for name in before if now[name] > before[name] + SLACK
        }

    wait_until(lambda: not grown(), 15, f"descriptors to be as few as before: {grown()}")


def connections(net: Net) -> int:
    return net.bootstrap.open + net.control.open


def connected(net: Net) -> tuple[int, int]:
    return net.bootstrap.accepted, net.control.accepted


def more_than(net: Net, before: tuple[int, int]) -> bool:
    now = connected(net)
    return now[0] > before[0] and now[1] > before[1]


def test_a_storm_of_reconnects_leaks_nothing(net: Net) -> None:
    before, usual = descriptors(net), connections(net)
    accepted = net.bootstrap.accepted
    cut_s, end_s = 0.0, time.monotonic() + 2
    trips: list[Trip] = []

    def storm() -> bool:
        nonlocal cut_s
        now = time.monotonic()
        if now - cut_s > 0.05:
            cut_s = now
            net.bootstrap.cut()
            net.control.cut()
            trips.append(net.route.open())
        return now > end_s

    run([net.route], storm, 10, "two seconds of cuts")
    assert net.bootstrap.accepted > accepted + 5
    run([net.route], lambda: all_over(trips), 20, "the rooms of the storm to be over")
    finish([net.route], QUIET_S, "the rooms of the storm to be quiet")
    recover(net.route, 10)
    succeed(net.route, 20)
    wait_no_more(net, before)
    wait_until(lambda: connections(net) <= usual, 10, "connections to be as few as before")
    assert not any(tree.unplanned_restarts() for tree in net.trees)


@pytest.mark.slow
def test_fifty_new_connections_leave_the_descriptors_flat(net: Net) -> None:
    before = descriptors(net)
    for number in range(50):
        accepted = connected(net)
        net.bootstrap.cut()
        net.control.cut()
        anew = partial(more_than, net, accepted)
        run([net.route], anew, 10, f"connection {number} to be made again")
        recover(net.route, 10)
    succeed(net.route, 20)
    wait_no_more(net, before)
    assert not any(tree.unplanned_restarts() for tree in net.trees)


def test_strangers_that_connect_and_say_nothing_are_shown_out(net: Net) -> None:
    before = descriptors(net)
    with contextlib.ExitStack() as talkers:
        with contextlib.ExitStack() as silent:
            for place in (net.prefill.place, net.decode.place):
                for _ in range(20):
                    silent.enter_context(socket.create_connection(place))
            succeed(net.route, 20)
            wait_no_more(net, before)  # though they have not hung up
        for place in (net.prefill.place, net.decode.place):
            for _ in range(20):
                talker = talkers.enter_context(socket.create_connection(place))
                talker.sendall(b"GET / HTTP/1.1\r\n\r\n")
        succeed(net.route, 20)
    # Who says something is taken for a very old ZMQ, which has no time to greet: it stays until it
    # hangs up.
    wait_no_more(net, before)
    assert not any(tree.unplanned_restarts() for tree in net.trees)


@pytest.mark.parametrize("hole", [BlackHole(), pytest.param(Freeze(), marks=pytest.mark.slow)])
def test_a_path_that_is_gone_slows_no_other(net: Net, hole: BlackHole | Freeze) -> None:
    usual = [statistics.median(succeed(route, 30)) for route in net.healthy]
    trips = [net.route.open(phase) for phase in Phase for _ in range(3) if phase < Phase.WHOLE]
    run([net.route], lambda: all(t.reached for t in trips), 10, "rooms to be in every phase")
    net.do("bootstrap", hole)  # prefill2 needs the control proxy, too
    trips += [net.route.open() for _ in range(10)]
    # The fence of the broken path's rooms ends decode's own worker, and its rooms of the moment.
    fenced: list[str] = []
    to_other = succeed(net.to_other, 30, others=[net.route], failed=fenced)
    net.do("both", hole)
    from_other = succeed(net.from_other, 30, others=[net.route])
    meanwhile = [statistics.median(to_other), statistics.median(from_other)]
    assert set(fenced) <= {"WORKER_FENCED"}
    assert any(net.route.trips)
    for before, now in zip(usual, meanwhile, strict=True):
        assert now < 5 * before + 0.05, (usual, meanwhile)
    net.heal()
    for trip in trips:  # those that outlived a short fault wait for their engines
        trip.want = Phase.WHOLE
    finish([net.route], 15 + QUIET_S, "the rooms on the broken path to be over")


@pytest.mark.slow
@pytest.mark.parametrize("every", [40, 400, 4000])
def test_wrong_bits_are_counted_and_kill_nobody(net: Net, every: int) -> None:
    """And no room succeeds with other bytes than its own: frames have a checksum."""

    def malformed() -> float:
        return sum(tree.total("pdrt_malformed_frames") for tree in (net.prefill, net.decode))

    before, counted, carried = descriptors(net), malformed(), net.bootstrap.carried
    net.do("both", Flip(every))
    trips: list[Trip] = []

    def enough() -> bool:
        if sum(not trip.over for trip in trips) < 20 and len(net.route.trips) < 30:
            trips.append(net.route.open())
        net.route.settle()
        return len(trips) >= 100 or net.bootstrap.carried - carried > 200_000

    with contextlib.suppress(AssertionError):  # with every frame wrong there is no traffic
        run([net.route], enough, 10, "a lot of traffic with wrong bits")
    if every == 400:
        assert malformed() > counted
    net.heal()
    finish([net.route], 15 + QUIET_S, "the rooms with wrong bits to be over")
    recover(net.route, 20)
    succeed(net.route, 20)
    wait_no_more(net, before)
    assert not any(tree.unplanned_restarts() for tree in net.trees)
    print(every, len(trips), malformed() - counted)  # noqa: T201
