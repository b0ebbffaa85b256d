"""A room as its transfer worker knows it, from the first message about it until it is over."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdrt.actors.paths import Path
from pdrt.protocol.messages import Chunk, Destination
from pdrt.shm_status import Handle
from pdrt.transports.base import Indices


@dataclass(slots=True)
class Room:
    handle: Handle
    chunks: list[Chunk] = field(default_factory=list)  # taken, not yet posted
    next_index: int = 0
    destination: Destination | None = None
    remote_pages: Indices | None = None
    path: Path | None = None  # since the first write
    inflight: list[tuple[int, int]] = field(default_factory=list)  # (transport handle, bytes)
    last_posted: bool = False
    moved_bytes: int = 0
    chunks_moved: int = 0  # counted when posted; read when all have landed
    fence: int | None = None
    ending: bool = False
    broken: bool = False  # a write FAILED: what of it landed, only a fence can settle
