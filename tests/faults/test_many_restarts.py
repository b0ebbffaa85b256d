"""A peer that is started again and again: prefill keeps nothing of those that are gone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import psutil
import pytest

from pdrt.engine.manager import KVManager
from pdrt.engine.sender import KVSender
from pdrt.memory.aux import AuxRow
from pdrt.protocol.states import TERMINAL, KVPoll
from tests.faults.conftest import Net
from tests.faults.fake_decode import FakeDecode, Site
from tests.faults.traffic import PAGES, ROOMS
from tests.waiting import wait_until

FDS_SLACK, THREADS_SLACK = 4, 1  # under way when they are counted
RSS_GROWTH_BYTES_MAX = 8 << 20


@dataclass(frozen=True)
class Held:
    """What one process has."""

    fds: int
    threads: int
    connections: int
    rss_bytes: int

    @staticmethod
    def by(process: psutil.Process) -> Held:
        with process.oneshot():
            established = [c for c in process.net_connections() if c.status != "LISTEN"]
            rss = process.memory_info().rss
            return Held(process.num_fds(), process.num_threads(), len(established), rss)

    def is_no_more_than(self, before: Held) -> bool:
        return (
            self.fds <= before.fds + FDS_SLACK
            and self.threads <= before.threads + THREADS_SLACK
            and self.connections <= before.connections + FDS_SLACK
            and self.rss_bytes <= before.rss_bytes + RSS_GROWTH_BYTES_MAX
        )


def held(net: Net) -> dict[str, Held]:
    return {name: Held.by(psutil.Process(pid)) for name, pid in net.prefill2.pids().items()}


class Restarts:
    """Rooms of one prefill engine with instance after instance."""

    def __init__(self, manager: KVManager, site: Site) -> None:
        self.manager, self.site = manager, site
        self.pages = np.arange(PAGES, dtype=np.int32)
        self.aux = manager.aux.reserve()
        self.left: list[KVSender] = []  # rooms whose decode died

    def _room(self, decode: FakeDecode) -> KVSender:
        room = next(ROOMS)
        sender = self.manager.sender(room)
        sender.init(PAGES, self.aux)
        self.manager.aux.write(self.aux, AuxRow(room, 7))
        decode.ask(room, self.pages[::-1])
        return sender

    def _wait(self, decode: FakeDecode, sender: KVSender, state: KVPoll) -> None:
        def there() -> bool:
            self.manager.tick()
            return sender.poll() is state

        decode.wait(there, f"the room to be {state.name}")

    def restart(self, number: int) -> None:
        """Another instance.  Every third dies with a room that waits, every fifth before it says
        that it heard of the end."""
        with FakeDecode(self.site) as decode:
            decode.answers = number % 5 > 0
            decode.meet()
            for old in self.left:
                decode.wait(lambda: old.poll() in TERMINAL, "the old room to fail")  # noqa: B023
                assert old.timeline().reason == "PEER_RESTARTED"
                decode.wait(old.quiet, "the old room to be quiet")
                old.clear()
            self.left.clear()
            sender = self._room(decode)
            self._wait(decode, sender, KVPoll.WaitingForInput)
            if number % 3 == 0:
                self.left.append(sender)
                return
            sender.send(self.pages, last=True)
            self._wait(decode, sender, KVPoll.Success)
            decode.wait(lambda: decode.landed, "Landed to arrive")
            sender.clear()


@contextlib.contextmanager
def restarts(net: Net, transport: str) -> Iterator[Restarts]:
    manager = net.to_other.prefill
    site = Site(manager.maps[0], net.prefill2.control, transport)
    try:
        made = Restarts(manager, site)
        yield made
        made.restart(1)  # takes the last one's place, and leaves no room
        manager.aux.release(made.aux)
    finally:
        site.close()


def leave_nothing(net: Net, transport: str, count: int) -> None:
    with restarts(net, transport) as peer:
        for number in range(20):  # what is allocated once
            peer.restart(number)
        pids, before = net.prefill2.pids(), held(net)
        for number in range(count):
            peer.restart(number)
        wait_until(
            lambda: all(now.is_no_more_than(before[name]) for name, now in held(net).items()),
            15,
            f"prefill to have no more than before: {before}",
        )
        assert net.prefill2.pids() == pids, net.prefill2.log()[-3000:]
    wait_until(net.prefill2.is_empty, 10, "prefill's table to be empty")


def test_restarts_of_a_peer_leave_nothing(net: Net) -> None:
    leave_nothing(net, "shm", 60)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_thousand_restarts_of_a_peer_leave_nothing(net: Net) -> None:
    leave_nothing(net, "shm", 1000)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_restarts_of_a_peer_over_nixl_leave_nothing(net: Net) -> None:
    pytest.importorskip("nixl_cu12")
    if net.prefill2.facts["transport"] != "nixl":
        pytest.skip("this prefill has no NIXL")
    leave_nothing(net, "nixl", 40)
