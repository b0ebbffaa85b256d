"""Addresses, and whoever asks there: an answer, a refusal or a deadline, and nothing left."""

from __future__ import annotations

import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from pdrt import attach
from pdrt.attach import Asking, AttachReply, bind, request
from pdrt.errors import AttachFailed, PortInUse
from tests.attach.tree import (
    ENGINE,
    MAPS,
    PEER,
    Tree,
    close_all,
    open_descriptors,
    region_of,
    same_memory,
)


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
