from __future__ import annotations

import mmap
import os
import secrets
import selectors
import socket
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdrt import attach
from pdrt.attach import Asking, AttachReply, AttachRequest, bind, request
from pdrt.errors import AttachFailed, PortInUse
from pdrt.protocol.layout import Layout, RegionMap
from pdrt.protocol.peers import instance_digest
from pdrt.shm_status import memory_fd
from tests.attach_services import serve, turn
from tests.waiting import wait_until

T = TypeVar("T")

WAIT_S = 10.0
ENGINE = AttachRequest(kind="engine", name="test")
PEER = instance_digest("peer")
LAYOUT = Layout(model="m", layers=2, kv_heads=1, head_dim=2, dtype="float32", page_size=1, ranks=2)
MAPS = tuple(RegionMap(layout=LAYOUT, rank=rank, pages_count=4, aux_rows=1) for rank in range(2))


def region_of(rank: int = 0, instance: str = "peer", epoch: int = 5) -> AttachRequest:
    return AttachRequest(kind="region", rank=rank, instance=instance, epoch=epoch)


class Tree:
    """A service in a loop so small that a test can see all of it, and its clients."""

    def __init__(self) -> None:
        self.address = f"@pdrt-test-{secrets.token_hex(8)}"
        self.selector = selectors.DefaultSelector()
        self.table_fd = memory_fd("table", 4096)
        self.regions = [memory_fd(f"region{rank}", 4096) for rank in range(2)]
        self.rows_left = 3
        self.epochs = {0: 5, 1: 5}  # of the workers that live
        self.gone: list[int] = []
        self.asked: list[tuple[AttachRequest, int]] = []
        self.lines: list[socket.socket] = []
        self.service = serve(
            self.address,
            self.selector,
            regions=self.regions,
            worker_epoch=lambda rank: self.epochs[rank],
            answer_engine=self._answer,
            engine_gone=self.gone.append,
        )
        self.pool = ThreadPoolExecutor(1)

    def _answer(self, ask: AttachRequest, pid: int) -> tuple[AttachReply, list[int]]:
        self.asked.append((ask, pid))
        if not self.rows_left:
            raise AttachFailed("all rows are taken")
        self.rows_left -= 1
        reply = AttachReply(row=3 - self.rows_left, incarnation=7, maps=MAPS, listener="here")
        return reply, [self.table_fd, *self.regions]

    @property
    def clients_count(self) -> int:
        return len(self.selector.get_map()) - 1

    def turn(self) -> None:
        turn(self.selector)

    def turn_until(self, is_so: Callable[[], T], what: str) -> T:
        def look() -> T:
            self.turn()
            return is_so()

        return wait_until(look, WAIT_S, what)

    def ask(self, what: AttachRequest) -> tuple[AttachReply, list[int], socket.socket]:
        """`request` from another thread while the loop turns.  The line closes with the test."""
        answer = self.pool.submit(request, self.address, what, timeout_s=WAIT_S)
        self.turn_until(answer.done, "the answer")
        reply, fds, line = answer.result()
        self.lines.append(line)
        return reply, fds, line

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        client.settimeout(WAIT_S)
        client.connect("\0" + self.address[1:])
        self.lines.append(client)
        return client

    def say(self, client: socket.socket, data: bytes) -> bytes:
        """Send raw bytes and wait for the raw answer; b"" if the connection was closed."""
        client.send(data)
        client.setblocking(False)
        answer: list[bytes] = []

        def answered() -> bool:
            try:
                answer.append(client.recv(65536))
            except BlockingIOError:
                return False
            except ConnectionResetError:
                answer.append(b"")
            return True

        self.turn_until(answered, "an answer")
        return answer[0]

    def close(self) -> None:
        self.pool.shutdown()
        for line in self.lines:
            line.close()
        if self.selector.get_map():
            self.service.close()
        self.selector.close()
        for fd in (self.table_fd, *self.regions):
            os.close(fd)


@pytest.fixture
def tree() -> Generator[Tree]:
    made = Tree()
    yield made
    made.close()


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def same_memory(one: int, other: int) -> bool:
    """Is what is written through one descriptor read through the other?"""
    with mmap.mmap(one, 4096) as written, mmap.mmap(other, 4096) as read:
        token = secrets.token_bytes(16)
        written[:16] = token
        return read[:16] == token


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- engines ---


def test_an_engine_gets_a_row_and_maps_the_same_memory(tree: Tree) -> None:
    reply, fds, _ = tree.ask(ENGINE)
    try:
        assert reply == AttachReply(row=1, incarnation=7, maps=MAPS, listener="here")
        assert tree.asked == [(ENGINE, os.getpid())]
        ours = [tree.table_fd, *tree.regions]
        assert [same_memory(*two) for two in zip(ours, fds, strict=True)] == [True] * 3
        assert not same_memory(fds[0], fds[1])
        assert not any(os.get_inheritable(fd) for fd in fds)
    finally:
        close_all(fds)


def test_the_connection_is_the_life_line_of_an_engine(tree: Tree) -> None:
    lines = []
    for row in (1, 2):
        reply, fds, line = tree.ask(ENGINE)
        close_all(fds)
        lines.append(line)
        assert reply.row == row
    assert tree.gone == []
    lines[1].close()
    tree.turn_until(lambda: tree.gone, "the end of row 2")
    assert tree.gone == [2]
    tree.service.close()
    assert tree.gone == [2, 1]


def test_an_engine_that_is_gone_before_the_answer_leaves_no_row(tree: Tree) -> None:
    client = tree.connect()
    tree.turn_until(lambda: tree.clients_count == 1, "the connection")
    client.send(msgspec.msgpack.encode(ENGINE))
    client.close()
    tree.turn_until(lambda: tree.clients_count == 0, "its end")
    assert tree.gone == [1]


def test_an_engine_that_never_reads_the_answer_leaves_no_row(tree: Tree) -> None:
    client = tree.connect()
    client.send(msgspec.msgpack.encode(ENGINE))
    tree.turn_until(lambda: tree.asked, "the request")
    assert tree.clients_count == 1
    client.close()  # with the answer in it: the service's side reads a reset
    tree.turn_until(lambda: tree.clients_count == 0, "its end")
    assert tree.gone == [1]


def test_a_refused_engine_is_told_why(tree: Tree) -> None:
    tree.rows_left = 0
    before = open_descriptors()
    with pytest.raises(AttachFailed, match="all rows are taken"):
        tree.ask(ENGINE)
    assert tree.clients_count == 0
    assert tree.gone == []
    assert open_descriptors() <= before


# --- peers on the same host ---


def test_a_region_is_mapped_for_as_long_as_one_connection_of_that_peer_is_open(tree: Tree) -> None:
    def mapped() -> list[bool]:
        return [tree.service.mapped(PEER, rank, 5) for rank in (0, 1)]

    assert mapped() == [False, False]
    lines = []
    for rank in (0, 1):
        reply, fds, line = tree.ask(region_of(rank))
        assert reply == AttachReply()
        assert len(fds) == 1
        assert same_memory(tree.regions[rank], fds[0])
        close_all(fds)  # the mapping may outlive its descriptor; the connection counts
        lines.append(line)
    assert mapped() == [True, True]
    assert not tree.service.mapped(instance_digest("another peer"), 0, 5)
    assert not tree.service.mapped(PEER, 0, 6)
    lines[0].close()
    tree.turn_until(lambda: tree.clients_count == 1, "the end of one")
    assert mapped() == [False, True]
    lines[1].close()
    tree.turn_until(lambda: tree.clients_count == 0, "the end of the other")
    assert mapped() == [False, False]
    assert tree.gone == []


def test_a_dead_workers_region_is_not_given_out_and_stays_counted(tree: Tree) -> None:
    _, fds, line = tree.ask(region_of(0, epoch=5))
    close_all(fds)
    for living in (0, 6):
        tree.epochs[0] = living
        for epoch in (0, 5):
            with pytest.raises(AttachFailed, match=f"epoch {epoch} is gone"):
                tree.ask(region_of(0, epoch=epoch))
        assert tree.service.mapped(PEER, 0, 5)
    _, fds, _ = tree.ask(region_of(0, epoch=6))
    close_all(fds)
    line.close()
    tree.turn_until(lambda: not tree.service.mapped(PEER, 0, 5), "the end of the old")
    assert tree.service.mapped(PEER, 0, 6)


@pytest.mark.parametrize("ask", [region_of(2), region_of(255), region_of(0, "")])
def test_a_region_that_is_none_is_refused(tree: Tree, ask: AttachRequest) -> None:
    with pytest.raises(AttachFailed, match="no region of rank"):
        tree.ask(ask)
    assert not tree.service.mapped(PEER, 0, 5)
    assert tree.clients_count == 0


# --- strangers ---

GARBAGE = [b"\0", b"GET / HTTP/1.1", b"\x91" * 3000, b"\xc1", b"x" * attach.REQUEST_BYTES_MAX * 2]


@pytest.mark.parametrize("data", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_answered_with_an_error_and_the_connection_closed(
    tree: Tree, data: bytes
) -> None:
    client = tree.connect()
    reply = msgspec.msgpack.decode(tree.say(client, data), type=AttachReply)
    assert reply.error.startswith("not an attach request")
    assert client.recv(10) == b""
    assert tree.clients_count == 0
    assert tree.asked == []


plain = st.recursive(
    st.none() | st.integers(-(2**63), 2**63) | st.text(max_size=80) | st.binary(max_size=8),
    lambda inner: st.dictionaries(
        st.sampled_from(["version", "kind", "name", "rank", "instance", "epoch"]), inner
    ),
    max_leaves=6,
)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.binary(min_size=1, max_size=100) | plain.map(msgspec.msgpack.encode))
def test_any_request_gets_one_answer(tree: Tree, data: bytes) -> None:
    client = tree.connect()
    msgspec.msgpack.decode(tree.say(client, data), type=AttachReply)
    client.close()
    tree.turn_until(lambda: tree.clients_count == 0, "the end of the connection")
    tree.rows_left = 3


def test_another_version_is_refused_by_name(tree: Tree) -> None:
    with pytest.raises(AttachFailed, match="attach version 2; this runtime speaks 1"):
        tree.ask(AttachRequest(version=2, kind="engine"))


@pytest.mark.parametrize("ask", [ENGINE, region_of()])
def test_a_second_request_on_a_connection_ends_it(tree: Tree, ask: AttachRequest) -> None:
    _, fds, line = tree.ask(ask)
    close_all(fds)
    assert tree.say(line, msgspec.msgpack.encode(ENGINE)) == b""
    assert tree.clients_count == 0
    assert not tree.service.mapped(PEER, 0, 5)
    assert tree.gone == ([1] if ask is ENGINE else [])
    assert len(tree.asked) == (1 if ask is ENGINE else 0)


def test_descriptors_that_a_client_sends_are_not_kept(tree: Tree) -> None:
    client = tree.connect()
    tree.turn_until(lambda: tree.clients_count == 1, "the connection")
    before = open_descriptors()
    socket.send_fds(client, [b"garbage"], [tree.table_fd] * 10)
    tree.turn_until(lambda: tree.clients_count == 0, "its end")
    assert open_descriptors() < before


def test_clients_beyond_the_limit_are_turned_away(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are told why, and served as soon as there is a place."""
    monkeypatch.setattr(attach, "CLIENTS_MAX", 2)
    served = [tree.ask(ENGINE) for _ in range(2)]
    with pytest.raises(AttachFailed, match="2 connections are attached already"):
        tree.ask(ENGINE)
    assert len(tree.asked) == tree.clients_count == 2
    served[0][2].close()
    tree.turn_until(lambda: tree.clients_count == 1, "the end of one")
    served.append(tree.ask(ENGINE))
    for _, fds, _ in served:
        close_all(fds)


def test_those_that_only_hold_a_place_make_room(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "CLIENTS_MAX", 3)
    squatters = [tree.connect() for _ in range(5)]
    for count in (2, 1, 0):
        _, fds, _ = tree.ask(ENGINE)
        close_all(fds)
        assert tree.clients_count == 3
        assert sum(client not in tree.service._rows for client in tree.service._clients) == count
    for squatter in squatters:
        assert squatter.recv(1) == b""


def test_a_silent_client_keeps_nobody_waiting(tree: Tree) -> None:
    silent = tree.connect()
    _, fds, _ = tree.ask(ENGINE)
    close_all(fds)
    tree.service._ready(next(iter(tree.service._clients)))  # woken for nothing
    assert tree.clients_count == 2
    silent.close()
    tree.service.accept()  # ... likewise


def test_descriptors_that_find_no_place_here_are_a_refusal_and_none_is_kept(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel drops those for which there is no room, and only a flag says so."""
    received = socket.recv_fds

    def cut_short(*arguments: Any) -> Any:
        data, fds, flags, address = received(*arguments)
        os.close(fds.pop())
        return data, fds, flags | socket.MSG_CTRUNC, address

    before = open_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(socket, "recv_fds", cut_short)
        with pytest.raises(AttachFailed, match="Too many open files"):
            tree.ask(ENGINE)
    tree.turn_until(lambda: tree.clients_count == 0, "its end")
    assert open_descriptors() == before
    _, fds, _ = tree.ask(ENGINE)
    close_all(fds)


# --- addresses ---


def test_an_address_in_use_is_refused_with_a_hint(tree: Tree) -> None:
    before = open_descriptors()
    with pytest.raises(PortInUse, match="is this role running already"):
        bind(tree.address)
    assert open_descriptors() == before


def test_a_path_works_as_an_address(tmp_path: Path) -> None:
    address = str(tmp_path / "attach")
    server = bind(address)
    with server, pytest.raises(PortInUse):
        bind(address)


@pytest.mark.parametrize("address", ["@pdrt-test-nobody", "/nowhere/attach", "x" * 200])
def test_nobody_at_an_address_is_no_runtime(address: str) -> None:
    before = open_descriptors()
    with pytest.raises(AttachFailed, match="no pdrt runtime answers"):
        request(address, ENGINE)
    assert open_descriptors() == before


def test_a_runtime_that_does_not_answer_is_given_up_in_time() -> None:
    address = f"@pdrt-test-{secrets.token_hex(8)}"
    before = open_descriptors()
    with bind(address), pytest.raises(AttachFailed, match="timed out"):
        request(address, ENGINE, timeout_s=0.05)
    assert open_descriptors() == before


def test_asking_never_waits(tree: Tree) -> None:
    now_ns = 0
    asking = Asking(tree.address, region_of(), timeout_s=1.0, clock=lambda: now_ns)
    assert asking.poll() is None
    answer = tree.turn_until(asking.poll, "the answer")
    assert answer is not None
    reply, fds, line = answer
    assert reply == AttachReply()
    assert same_memory(tree.regions[0], fds[0])
    assert tree.service.mapped(PEER, 0, 5)
    close_all(fds)
    line.close()
    tree.turn_until(lambda: not tree.service.mapped(PEER, 0, 5), "its end")


def test_asking_ends_at_its_deadline_and_by_a_refusal(tree: Tree) -> None:
    before, now_ns = open_descriptors(), 0
    asking = Asking(tree.address, region_of(), timeout_s=1.0, clock=lambda: now_ns)
    assert asking.poll() is None
    now_ns = 1_000_000_000
    with pytest.raises(AttachFailed, match="does not answer"):
        asking.poll()
    refused = Asking(tree.address, region_of(epoch=4), timeout_s=9.0)
    with pytest.raises(AttachFailed, match="epoch 4 is gone"):
        tree.turn_until(refused.poll, "the answer")
    with pytest.raises(AttachFailed, match="no pdrt runtime answers"):
        Asking("@pdrt-test-nobody", region_of(), timeout_s=9.0).poll()
    tree.turn_until(lambda: tree.clients_count == 0, "the end of both")
    assert open_descriptors() <= before


def test_a_path_is_taken_over_from_a_dead_owner_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "attach.sock"
    bind(str(path)).close()  # as SIGKILL leaves it
    with bind(str(path)), pytest.raises(PortInUse):
        bind(str(path))
    assert path.is_socket()
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    with pytest.raises(PortInUse):
        bind(str(other))
    assert other.read_text() == "mine"


def test_asking_waits_for_a_place_in_the_backlog_too() -> None:
    address = f"@pdrt-test-{secrets.token_hex(8)}"
    with bind(address) as server:
        server.listen(0)
        many = [Asking(address, region_of(), timeout_s=9.0) for _ in range(4)]
        for asking in many:
            assert asking.poll() is None
            asking.close()


WITHOUT_LAYERS = msgspec.to_builtins(AttachReply(maps=MAPS))
WITHOUT_LAYERS["maps"][0]["layout"]["layers"] = 0


@pytest.mark.parametrize(
    "answer",
    [b"", b"garbage", msgspec.msgpack.encode(WITHOUT_LAYERS), msgspec.msgpack.encode([1])],
    ids=["hangs up", "garbage", "impossible layout", "not a reply"],
)
def test_an_answer_that_is_none_leaves_no_descriptor_behind(answer: bytes) -> None:
    address = f"@pdrt-test-{secrets.token_hex(8)}"
    before = open_descriptors()
    with bind(address) as server, ThreadPoolExecutor(1) as pool:
        server.setblocking(True)
        asked = pool.submit(request, address, ENGINE)
        with server.accept()[0] as client:
            client.recv(4096)
            if answer:
                socket.send_fds(client, [answer], [server.fileno()] * 3)
            else:
                client.close()
            with pytest.raises(AttachFailed, match="no pdrt runtime answers"):
                asked.result()
    assert open_descriptors() == before


def test_a_client_that_is_turned_away_before_it_asks_reads_why() -> None:
    """Its request finds nobody, or is never read: either error stands before the answer."""
    for asks_first in (True, False):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            if asks_first:
                attach._send(ours, b"request")
            theirs.send(msgspec.msgpack.encode(AttachReply(error="full")))
            theirs.close()
            attach._send(ours, b"request")
            assert attach._read_answer(ours)[0].error == "full"
