"""Whatever is said at the socket: refused in words, within bounds, and nothing of it is kept."""

from __future__ import annotations

import os
import socket
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdrt import attach
from pdrt.attach import AttachReply, AttachRequest
from pdrt.errors import AttachFailed
from tests.attach.tree import (
    ENGINE,
    PEER,
    Tree,
    close_all,
    open_descriptors,
    region_of,
)

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
