"""A peer in a process of its own: owns its region, lets incoming traffic move, does nothing else.

What it says on the control connection: (descriptor number of its region, metadata), once.  It ends
when that connection says anything or closes, so it never outlives the test.
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

from pdrt.transports.base import Region, Transport
from pdrt.transports.nixl import NixlTransport
from pdrt.transports.shm import ShmTransport

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection

PROGRESS_EVERY_S = 0.0005


def sealed_memory(name: str, length_bytes: int) -> int:
    """A memfd of that length which cannot shrink; the caller closes it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, length_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


class Fetched:
    """A region that is there at once; see `pdrt.transports.shm.Fetch`."""

    def __init__(self, region_fd: int, connection_fd: int) -> None:
        self._fds = region_fd, connection_fd

    def poll(self) -> tuple[int, int]:
        return self._fds

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


def no_region(address: str, key: str) -> Fetched:
    raise ConnectionRefusedError(f"{address} {key}: this peer connects to nobody")


def serve(
    kind: str,
    agent: str,
    length_bytes: int,
    scratch_offset: int,
    environment: Mapping[str, str],
    control: Connection,
) -> None:
    """Entry of the process.  `environment` is set before the transport reads it."""
    os.environ.update(environment)
    fd = sealed_memory(agent, length_bytes)
    transport: Transport
    if kind == "nixl":
        transport = NixlTransport()
    else:
        transport = ShmTransport(address=f"@{agent}", key=agent, open_region=no_region)
    metadata = transport.open(agent, Region(fd, length_bytes), scratch_offset)
    control.send((fd, metadata))
    while not control.poll(PROGRESS_EVERY_S):
        transport.progress()
    transport.close()
