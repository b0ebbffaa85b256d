"""What a transport is: a mover of bytes between regions.  It knows no room, request or model.

Every implementation passes `tests/transports/conformance.py`, the fake included.  Guarantees:

* No call blocks on the peer.  `connect`, `write` and `fence` return a handle that `poll` finishes.
* DONE of a write: all its bytes are in the peer's region.
* DONE of a fence: no byte of any write to that peer made before it can land any more, released
  handles included.  Only then is memory quiet.
* `release` gives the handle back.  It is not a cancel: without a fence its bytes may still land.
* One thread calls one transport.

Assumption: both ends describe their regions with the grids the peer expects (the hello compares
layouts first); a transport checks bounds, not meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pdrt.errors import PdrtError

Indices = NDArray[np.int32]


class TransferState(Enum):
    PENDING = auto()
    DONE = auto()
    FAILED = auto()


class TransportError(PdrtError):
    """The transport cannot do what was asked: unknown peer, bad metadata, index out of bounds."""

    code = "transport_failed"


@dataclass(frozen=True)
class Region:
    """Memory shared by engine and worker, and the descriptor that another process can map."""

    fd: int
    length_bytes: int


@dataclass(frozen=True)
class Grid:
    """`count` equal items in a region: item i lies at offset + i * stride, all in bytes.

    A table is a sequence of grids; its items are numbered through, grid after grid.
    """

    offset: int
    item_bytes: int
    stride_bytes: int
    count: int


class Transport(Protocol):
    """Moves bytes from this process's region to a peer's.  See the module for the guarantees."""

    name: str

    def open(self, agent: str, region: Region, scratch_offset: int) -> bytes:
        """Register the region under the agent's name (which carries an epoch) and return the
        metadata that a peer needs to `connect`.  The 64 bytes at `scratch_offset` belong to the
        transport: warm-ups and fences read and write there."""

    def connect(self, peer: str, metadata: bytes) -> int:
        """Make `peer` reachable and warm the path.  Returns a handle; usable once it is DONE.
        Raises TransportError on metadata that is not this transport's."""

    def disconnect(self, peer: str) -> None:
        """Forget the peer.  Not a fence.  Unknown peers are ignored."""

    def prepare(self, peer: str | None, grids: Sequence[Grid]) -> int:
        """Prepare a table over the peer's region (None: our own) and return its number.
        A peer's tables end with `disconnect`."""

    def write(
        self, peer: str, local: int, local_items: Indices, remote: int, remote_items: Indices
    ) -> int:
        """Post one write of local_items[i] -> remote_items[i] for each i; returns a handle.
        Raises TransportError if an item is out of bounds or sizes differ."""

    def fence(self, peer: str) -> int:
        """Post a fence; returns a handle.  See the module."""

    def poll(self, handle: int) -> TransferState:
        """Where the handle is.  Final states repeat until it is released."""

    def release(self, handle: int) -> None:
        """Give the handle back.  Not a cancel."""

    def lost(self) -> Sequence[str]:
        """Connected peers that are known to be dead, until they are disconnected.  Whoever is not
        named may be dead too."""

    def progress(self) -> None:
        """Let incoming traffic move.  Cheap; called from the worker's loop."""

    def close(self) -> None:
        """Release everything.  Afterwards no byte can land in our region through this transport,
        except by a peer that mapped it (see `shm`)."""
