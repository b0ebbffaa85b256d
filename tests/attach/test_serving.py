"""What engines, and peers on the same host, are given, and for how long."""

from __future__ import annotations

import os
import socket

import msgspec
import pytest

from pdrt.attach import AttachReply, AttachRequest
from pdrt.errors import AttachFailed
from pdrt.protocol.peers import instance_digest
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


def test_who_maps_what_a_dead_worker_offered_is_asked_to_let_go_and_counted_until_then(
    tree: Tree,
) -> None:
    lines = []
    for rank in (0, 1):
        _, fds, line = tree.ask(region_of(rank))
        close_all(fds)
        line.setblocking(False)
        lines.append(line)

    def heard(line: socket.socket) -> bytes | None:
        try:
            return line.recv(1)
        except BlockingIOError:
            return None

    tree.service.recall()
    assert [heard(line) for line in lines] == [None, None]
    for living in (0, 6):
        tree.epochs[0] = living
        tree.service.recall()
        tree.turn()
        assert [heard(line) for line in lines] == [b"", None]
        assert tree.service.mapped(PEER, 0, 5)
    lines[0].close()
    tree.service.recall()
    tree.turn_until(lambda: not tree.service.mapped(PEER, 0, 5), "the end of its line")
    assert tree.service.mapped(PEER, 1, 5)


@pytest.mark.parametrize("ask", [region_of(2), region_of(255), region_of(0, "")])
def test_a_region_that_is_none_is_refused(tree: Tree, ask: AttachRequest) -> None:
    with pytest.raises(AttachFailed, match="no region of rank"):
        tree.ask(ask)
    assert not tree.service.mapped(PEER, 0, 5)
    assert tree.clients_count == 0
