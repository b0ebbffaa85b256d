"""Engines that are not ours attach to a runtime that runs alone (--engine none) and move KV by
it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from numpy.typing import NDArray

from pdrt.cli.cluster import Cluster
from pdrt.engine.manager import KVManager
from pdrt.engine.room import KVRoom
from pdrt.errors import AttachFailed, BadRequest, IllegalMove, PeerLost, ProcessLost, RoomInUse
from pdrt.memory.aux import AuxRow
from pdrt.protocol.states import TERMINAL, KVPoll
from tests.e2e.conftest import QUICK, StartCluster
from tests.e2e.driver import rooms_of
from tests.waiting import wait_until

Pages = NDArray[np.int32]


@pytest.fixture(scope="module", params=["nixl", "shm"])
def cluster(start_cluster: StartCluster, request: pytest.FixtureRequest) -> Cluster:
    flags = ["--engine", "none", "--devices", "cpu:0,cpu:1", "--transport", request.param]
    return start_cluster(*flags, "--quiet-timeout", "3", *QUICK)


@pytest.fixture
def prefill(cluster: Cluster) -> Iterator[KVManager]:
    with closing(KVManager.attach(str(cluster.prefill.facts["attach"]), name="p")) as manager:
        yield manager


@pytest.fixture
def decode(cluster: Cluster) -> Iterator[KVManager]:
    with closing(KVManager.attach(str(cluster.decode.facts["attach"]), name="d")) as manager:
        yield manager


def peer_of(cluster: Cluster) -> str:
    return str(cluster.prefill.facts["control"])


def fill(manager: KVManager, pages: Pages, seed: int) -> None:
    chance = np.random.default_rng(seed)
    for rank, region in enumerate(manager.maps):
        kv = np.frombuffer(manager.kv(rank), dtype=np.uint8).reshape(region.pages_count, -1)
        kv[pages] = chance.integers(0, 256, kv[pages].shape, dtype=np.uint8)


def wait_for(room: KVRoom, states: set[KVPoll], *managers: KVManager) -> KVPoll:
    def reached() -> bool:
        for manager in managers:
            manager.tick()
        return room.poll() in states | TERMINAL

    wait_until(reached, 20, f"room {room.room} to be in {states}")
    return room.poll()


def test_bytes_cross_and_the_slots_are_free_again(
    cluster: Cluster, prefill: KVManager, decode: KVManager
) -> None:
    assert prefill.layout == decode.layout
    uses: set[int] = set()  # names of all ranks of a room, and of no two rooms
    for room in range(1, 21):
        source = np.arange(room, room + 5, dtype=np.int32)
        target = np.array([50, 7, 31, 8, 9], dtype=np.int32)
        fill(prefill, source, room)
        sender, receiver = prefill.sender(room), decode.receiver(room, peer_of(cluster))
        out, in_ = prefill.aux.reserve(), decode.aux.reserve()
        sender.init(5, out)
        receiver.init()
        assert wait_for(receiver, {KVPoll.WaitingForInput}, prefill, decode) not in TERMINAL
        receiver.send_metadata(target, in_)
        sender.send(source[:2])
        prefill.aux.write(out, AuxRow(room, 42, -0.5, 80, ((42, -0.5), (7, -1.0))))
        sender.send(source[2:], last=True)
        assert wait_for(receiver, set(), prefill, decode) is KVPoll.Success, receiver.failure()
        assert wait_for(sender, set(), prefill, decode) is KVPoll.Success
        assert decode.digest(target) == prefill.digest(source)
        assert decode.aux.read(in_, room).top == ((42, -0.5), (7, -1.0))
        named = {prefill.table.use(*handle[1:]) for handle in sender._handles}
        assert named == {decode.table.use(*receiver._handles[0][1:])}
        uses |= named
        with pytest.raises(RoomInUse):
            decode.receiver(room, peer_of(cluster))
        sender.clear()
        receiver.clear()
        prefill.aux.release(out)
        decode.aux.release(in_)
    assert len(uses - {0}) == 20
    assert rooms_of(cluster.prefill) == rooms_of(cluster.decode) == []


def test_an_abort_on_either_side_reaches_the_other_in_every_phase(
    cluster: Cluster, prefill: KVManager, decode: KVManager
) -> None:
    room = 1000
    for side in ("prefill", "decode"):
        for phase in ("bootstrapping", "waiting", "transferring"):
            room += 1
            sender, receiver = prefill.sender(room), decode.receiver(room, peer_of(cluster))
            sender.init(4, 0)
            receiver.init()
            if phase != "bootstrapping":
                wait_for(receiver, {KVPoll.WaitingForInput}, prefill, decode)
                receiver.send_metadata(np.arange(4, dtype=np.int32), 0)
            if phase == "transferring":
                sender.send(np.arange(2, dtype=np.int32))
                wait_for(sender, {KVPoll.Transferring}, prefill, decode)
            mine, other = (sender, receiver) if side == "prefill" else (receiver, sender)
            mine.abort()
            assert wait_for(other, set(), prefill, decode) is KVPoll.Failed, (side, phase)
            for each in (sender, receiver):
                wait_until(each.quiet, 10, f"{side} {phase} to be quiet")
                each.clear()
    assert rooms_of(cluster.prefill) == rooms_of(cluster.decode) == []


def test_a_declined_room_is_told_to_the_other_side_unless_it_is_open(
    cluster: Cluster, prefill: KVManager, decode: KVManager
) -> None:
    peer = peer_of(cluster)
    for room in (1500, 1501):  # the half that waits comes first, and then last
        receiver = decode.receiver(room, peer) if room == 1500 else None
        if receiver is not None:
            receiver.init()
            wait_for(receiver, {KVPoll.WaitingForInput}, prefill, decode)
        prefill.decline(room)
        if receiver is None:
            receiver = decode.receiver(room, peer)
            receiver.init()
        assert wait_for(receiver, set(), prefill, decode) is KVPoll.Failed
        assert "refused" in str(receiver.failure())
        receiver.clear()
    for room in (1510, 1511):
        sender = prefill.sender(room) if room == 1510 else None
        prefill.tick()
        decode.decline(room, peer)
        sender = sender or prefill.sender(room)
        assert wait_for(sender, set(), prefill, decode) is KVPoll.Failed
        sender.clear()
    sender, receiver = prefill.sender(1520), decode.receiver(1520, peer)
    receiver.init()
    prefill.decline(1520)
    decode.decline(1520, peer)
    sender.init(1, 0)
    wait_for(receiver, {KVPoll.WaitingForInput}, prefill, decode)
    receiver.send_metadata(np.array([3], dtype=np.int32), 0)
    prefill.aux.write(0, AuxRow(1520, 42))
    sender.send(np.array([5], dtype=np.int32), last=True)
    assert wait_for(receiver, set(), prefill, decode) is KVPoll.Success, receiver.failure()
    assert wait_for(sender, set(), prefill, decode) is KVPoll.Success
    sender.clear()
    receiver.clear()
    assert rooms_of(cluster.prefill) == rooms_of(cluster.decode) == []


@pytest.mark.parametrize("peer", ["", "host", "host:", "host:0", ":1", "h" * 5000 + ":1"])
def test_a_peer_without_an_address_is_refused_before_anything_is_sent(
    decode: KVManager, peer: str
) -> None:
    with pytest.raises(BadRequest, match="host:port"):
        decode.receiver(1600, peer)
    decode.decline(1600, peer)  # there is nobody to tell


def test_a_room_is_cleared_only_when_it_is_over(cluster: Cluster, decode: KVManager) -> None:
    receiver = decode.receiver(2000, peer_of(cluster))
    receiver.init()
    with pytest.raises(IllegalMove):
        receiver.clear()
    with pytest.raises(IllegalMove):
        decode.receiver(2001, peer_of(cluster)).send_metadata(np.arange(1, dtype=np.int32), 0)


ENGINE = """
import sys
import numpy as np
from pdrt.engine.manager import KVManager
manager = KVManager.attach(sys.argv[1], name="doomed")
for room in range(3000, 3016):
    sender = manager.sender(room)
    sender.init(4, 0)
    sender.send(np.arange(2, dtype=np.int32))
manager.tick()
print("opened", flush=True)
sys.stdin.read()
"""


def test_the_death_of_an_engine_ends_its_rooms_on_both_sides(
    cluster: Cluster, decode: KVManager
) -> None:
    command = [sys.executable, "-c", ENGINE, str(cluster.prefill.facts["attach"])]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "opened\n"
        receivers = [decode.receiver(room, peer_of(cluster)) for room in range(3000, 3016)]
        for number, receiver in enumerate(receivers):
            receiver.init()
            if number % 2:
                wait_for(receiver, {KVPoll.WaitingForInput}, decode)
                receiver.send_metadata(np.arange(4, dtype=np.int32), 0)
        os.kill(engine.pid, signal.SIGKILL)
    for receiver in receivers:
        assert wait_for(receiver, set(), decode) is KVPoll.Failed
        assert isinstance(receiver.failure(), ProcessLost | PeerLost), receiver.failure()
        wait_until(receiver.quiet, 15, "the landing pages to be quiet")
        receiver.clear()
    wait_until(lambda: not rooms_of(cluster.prefill), 10, "prefill's table to be empty")
    assert rooms_of(cluster.decode) == []


def test_nobody_answers_at_a_wrong_address() -> None:
    with pytest.raises(AttachFailed, match="no pdrt runtime answers"):
        KVManager.attach("@pdrt-nobody", name="lost")
