"""A runtime that serves attach requests, in a loop so small that a test can see all of it."""

from __future__ import annotations

import mmap
import os
import secrets
import selectors
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pdrt.attach import AttachReply, AttachRequest, request
from pdrt.errors import AttachFailed
from pdrt.memfd import memory_fd
from pdrt.protocol.layout import Layout, RegionMap
from pdrt.protocol.peers import instance_digest
from tests.attach.services import serve, turn
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
