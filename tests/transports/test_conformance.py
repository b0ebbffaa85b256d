"""The conformance suite over each transport, and what is promised by one of them alone."""

from __future__ import annotations

import os
import random
import select
import time
from typing import TYPE_CHECKING

import pytest

from pdrt.errors import QueueFull
from pdrt.transports.base import Region, TransferState, TransportError
from pdrt.transports.fake import FakeFabric, FakeTransport
from pdrt.transports.nixl import NixlTransport
from pdrt.transports.shm import ShmTransport
from tests.transports.conformance import (
    EVERY_PAGE,
    EVERY_SOURCE,
    PATTERN,
    Conformance,
    digest,
    expected,
    see_late_bytes_without_a_fence,
)
from tests.transports.peer_process import Fetched, no_region, sealed_memory
from tests.transports.rigs import OURS, PAGE_BYTES, THEIRS, fake_rig, nixl_rig, shm_rig

if TYPE_CHECKING:
    from collections.abc import Generator

    from pdrt.transports.base import Transport
    from tests.transports.rigs import Rig

DONE, FAILED, PENDING = TransferState.DONE, TransferState.FAILED, TransferState.PENDING
TCP = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}


class TestFake(Conformance):
    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls) -> Generator[Rig]:
        rig = fake_rig(polls=3)
        yield rig
        rig.close()

    def test_without_a_fence_late_bytes_land(self, rig):
        see_late_bytes_without_a_fence(rig)

    def test_a_write_that_fails_may_have_moved_bytes(self, rig):
        peer = rig.connected("failing")
        rig.transport._fabric.fail_next(peer.agent)
        assert rig.finish(rig.write("failing", [0, 1], [0, 1])) is FAILED
        assert digest(peer.memory[:PAGE_BYTES]) == digest(rig.memory[:PAGE_BYTES])
        assert rig.finish(rig.write("failing", [0, 1], [0, 1])) is DONE


class TestShm(Conformance):
    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls) -> Generator[Rig]:
        rig = shm_rig(budget_bytes=1 << 20)
        yield rig
        rig.close()

    def test_one_poll_copies_no_more_than_the_budget(self, rig):
        peer = rig.standing
        peer.memory[:] = PATTERN
        handle = rig.write("standing", EVERY_SOURCE, EVERY_PAGE)
        assert rig.transport.poll(handle) is PENDING
        landed = int((peer.memory.reshape(-1, 256) != PATTERN).any(axis=1).sum()) * 256
        assert 0 < landed <= 1 << 20
        assert rig.finish(handle) is DONE

    def test_release_and_disconnect_stop_the_copy(self, rig):
        """Stronger than the contract: here release is a cancel, so a fence is DONE at once."""
        peer = rig.connected("stopped")
        handle = rig.write("stopped", EVERY_SOURCE, EVERY_PAGE)
        assert rig.transport.poll(handle) is PENDING
        rig.transport.release(handle)
        assert rig.transport.poll(rig.transport.fence("stopped")) is DONE
        before = digest(peer.memory)
        rig.write("stopped", EVERY_SOURCE, EVERY_PAGE)
        rig.transport.disconnect("stopped")
        rig.transport.progress()
        assert digest(peer.memory) == before

    def test_a_small_write_is_done_on_return(self, rig):
        after = expected(rig, rig.standing, [5], [6])
        handle = rig.write("standing", [5], [6])
        assert digest(rig.standing.memory) == digest(after)
        assert rig.finish(handle) is DONE

    def test_a_region_that_does_not_come_holds_up_nothing_else(self, rig, monkeypatch):
        class Silent:
            answer: Exception | None = None
            closed = 0

            def poll(self) -> None:
                if self.answer is not None:
                    raise self.answer

            def close(self) -> None:
                self.closed += 1

        silent = Silent()
        monkeypatch.setattr(rig.transport, "_open_region", lambda address, key: silent)
        for _ in range(2):
            handle = rig.transport.connect("silent", rig.standing.metadata)
            assert rig.finish(rig.write("standing", [2], [2])) is DONE
            assert rig.transport.poll(handle) is PENDING
            with pytest.raises(TransportError):
                rig.transport.prepare("silent", THEIRS.pages)
            rig.transport.disconnect("silent")
            assert rig.finish(handle) is FAILED
        assert silent.closed == 2
        handle = rig.transport.connect("silent", rig.standing.metadata)
        released = rig.transport.connect("released", rig.standing.metadata)
        rig.transport.release(released)
        silent.answer = TransportError("too late")
        assert rig.finish(handle) is FAILED
        rig.transport.disconnect("released")
        assert silent.closed == 2

    def test_a_region_that_could_shrink_is_refused(self, rig, caplog):
        peer = rig.start()
        loose = os.memfd_create("loose")
        os.ftruncate(loose, THEIRS.length_bytes)
        reading, writing = os.pipe()
        transport = ShmTransport(
            address="@x", key="x", open_region=lambda address, key: Fetched(loose, reading)
        )
        fd = sealed_memory("ours", OURS.length_bytes)
        transport.open("x#1", Region(fd, OURS.length_bytes), OURS.scratch_offset)
        assert transport.poll(transport.connect("loose", peer.metadata)) is FAILED
        assert "sealed" in caplog.text
        for descriptor in (loose, reading):  # the transport closed both
            with pytest.raises(OSError, match="Bad file"):
                os.fstat(descriptor)
        transport.close()
        os.close(fd)
        os.close(writing)


class TestNixl(Conformance):
    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls) -> Generator[Rig]:
        pytest.importorskip("nixl_cu12")
        rig = nixl_rig({})
        yield rig
        rig.close()

    def test_an_idle_agent_costs_next_to_nothing(self, rig):
        """NIXL's own default takes a whole core for its progress thread."""
        rig.finish(rig.write("standing", [0], [0]))
        busy, wall = time.process_time(), time.monotonic()
        _wait_idle(0.5)
        busy, wall = time.process_time() - busy, time.monotonic() - wall
        assert busy < 0.05 * wall


class TestNixlOverTcp(Conformance):
    """The lanes between two hosts: nothing is copied inside `write`."""

    @pytest.fixture(scope="class")
    @classmethod
    def rig(cls) -> Generator[Rig]:
        pytest.importorskip("nixl_cu12")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in TCP.items():
                patch.setenv(name, value)
            rig = nixl_rig(TCP)
        yield rig
        rig.close()

    def test_without_a_fence_late_bytes_land(self, rig):
        see_late_bytes_without_a_fence(rig)

    def test_a_fence_does_not_end_while_the_peer_is_frozen(self, rig):
        peer = rig.connected("frozen")
        peer.freeze()
        rig.transport.release(rig.write("frozen", EVERY_SOURCE, EVERY_PAGE))
        fence = rig.transport.fence("frozen")
        assert not rig.happens(lambda: rig.transport.poll(fence) is not PENDING, within_s=0.3)
        peer.thaw()
        assert rig.finish(fence) is DONE

    def test_writes_given_up_at_any_moment_are_kept_until_they_end(self, rig):
        """NIXL has no cancel: to give a request back while it moves would be a use after free."""
        chance, parked = random.Random(44), 0
        for number in range(1000):
            handle = rig.write("standing", [number % 8], [number % 8])
            for _ in range(chance.choice([0, 0, 1, 2, 5])):
                rig.transport.poll(handle)
            rig.transport.release(handle)
            parked = max(parked, len(rig.transport._abandoned))
            if number % 50 == 0:
                rig.transport.progress()
        assert parked > 1, "every write was over before it was given up"
        assert rig.finish(rig.transport.fence("standing")) is DONE
        rig.transport.progress()
        rig.wait_for(lambda: not rig.transport._abandoned)
        assert rig.finish(rig.write("standing", [1], [2])) is DONE


@pytest.fixture(params=["nixl", "shm", "fake"])
def unopened(request: pytest.FixtureRequest) -> Generator[Transport]:
    """A transport with room for two handles that was not opened."""
    transport: Transport
    if request.param == "nixl":
        pytest.importorskip("nixl_cu12")
        transport = NixlTransport(handles_max=2)
    elif request.param == "shm":
        transport = ShmTransport(address="@x", key="x", open_region=no_region, handles_max=2)
    else:
        transport = FakeTransport(FakeFabric(), handles_max=2)
    yield transport
    transport.close()


def test_nothing_works_before_open_and_close_is_always_allowed(unopened):
    for call in (
        lambda: unopened.connect("peer", b""),
        lambda: unopened.prepare(None, OURS.pages),
        lambda: unopened.fence("peer"),
        lambda: unopened.poll(1),
        lambda: unopened.release(1),
    ):
        with pytest.raises(TransportError):
            call()
    unopened.close()


def test_open_refuses_a_region_or_scratch_that_is_not_there(unopened):
    fd = sealed_memory("short", OURS.length_bytes)
    with pytest.raises(TransportError):
        unopened.open("x#1", Region(fd, OURS.length_bytes + 1), OURS.scratch_offset)
    with pytest.raises(TransportError):
        unopened.open("x#1", Region(fd, OURS.length_bytes), OURS.length_bytes - 63)
    os.close(fd)
    with pytest.raises(TransportError):
        unopened.open("x#1", Region(fd, OURS.length_bytes), OURS.scratch_offset)


def test_handles_are_bounded():
    fabric = FakeFabric()
    fd = sealed_memory("both", OURS.length_bytes)
    region = Region(fd, OURS.length_bytes)
    ours, theirs = FakeTransport(fabric, handles_max=2), FakeTransport(fabric)
    ours.open("ours#1", region, OURS.scratch_offset)
    first = ours.connect("peer", theirs.open("theirs#1", region, OURS.scratch_offset))
    ours.fence("peer")
    with pytest.raises(QueueFull):
        ours.fence("peer")
    ours.release(first)
    ours.fence("peer")
    for transport in (ours, theirs):
        transport.close()
    os.close(fd)


def test_close_gives_back_threads_and_descriptors():
    """A worker that restarts its agent must not lose any."""
    pytest.importorskip("nixl_cu12")
    counts = []
    for epoch in range(3):
        transport = NixlTransport()
        fd = sealed_memory("closing", OURS.length_bytes)
        transport.open(f"closing#{epoch}", Region(fd, OURS.length_bytes), OURS.scratch_offset)
        os.close(fd)
        transport.close()
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    assert counts[1] == counts[2]


def _wait_idle(duration_s: float) -> None:
    """Let time pass without using a CPU: poll a pipe that nobody writes to."""
    reading, writing = os.pipe()
    select.select([reading], [], [], duration_s)
    os.close(reading)
    os.close(writing)
