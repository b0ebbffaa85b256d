"""One end of a write that is given up: a process with a NIXL agent that does as it is told.

Run as a program, with the number of a connected socket.  A command is (name, *arguments), the
answer one object.  It ends with the connection, so it never outlives whoever started it.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from pdrt.transports.base import Grid, Region
from pdrt.transports.nixl import NixlTransport
from tests.transports.peer_process import PROGRESS_EVERY_S, sealed_memory

PAGE_BYTES = 16 << 10
SCRATCH_BYTES = 4096
PEER = "peer"


class End:
    def __init__(self, agent: str, pages_count: int) -> None:
        self._pages_count = pages_count
        scratch_offset = pages_count * PAGE_BYTES
        self._length_bytes = scratch_offset + SCRATCH_BYTES
        self.fd = sealed_memory(agent, self._length_bytes)
        self._transport = NixlTransport()
        region = Region(self.fd, self._length_bytes)
        self.metadata = self._transport.open(agent, region, scratch_offset)
        self._grid = [Grid(0, PAGE_BYTES, PAGE_BYTES, pages_count)]
        self._handle = 0
        self.is_open = True

    def progress(self) -> None:
        if self.is_open:
            self._transport.progress()

    def fill(self, value: int) -> None:
        os.pwrite(self.fd, bytes([value]) * (self._pages_count * PAGE_BYTES), 0)

    def connect(self, metadata: bytes) -> None:
        self._handle = self._transport.connect(PEER, metadata)
        while self.poll() == "PENDING":
            self.progress()
        assert self.release() == "DONE"
        self._local = self._transport.prepare(None, self._grid)
        self._remote = self._transport.prepare(PEER, self._grid)

    def write(self) -> None:
        """All pages, in one write."""
        items = np.arange(self._pages_count, dtype=np.int32)
        self._handle = self._transport.write(PEER, self._local, items, self._remote, items)

    def release(self) -> str:
        """Give the write, or the fence, up; what it was."""
        state = self.poll()
        self._transport.release(self._handle)
        return state

    def fence(self) -> None:
        self._handle = self._transport.fence(PEER)

    def poll(self) -> str:
        return self._transport.poll(self._handle).name

    def close(self) -> None:
        """Destroy the agent; the process and the memory stay."""
        self._transport.close()
        self.is_open = False


def main() -> None:
    control: Connection[Any, Any] = Connection(int(sys.argv[1]))
    end = End(sys.argv[2], int(sys.argv[3]))
    control.send((end.fd, end.metadata))
    while True:
        if control.poll(PROGRESS_EVERY_S):
            try:
                name, *arguments = control.recv()
            except EOFError:
                break
            control.send(getattr(end, name)(*arguments))
        end.progress()
    if end.is_open:
        end.close()


if __name__ == "__main__":
    main()
