"""How a peer and a path are written into a slot: 64-bit numbers that survive the processes."""

from __future__ import annotations

import hashlib

TRANSPORT_CODES = ("", "nixl", "shm", "fake")  # position is the code in the slot; only ever append


def instance_digest(instance: str) -> int:
    """A 64-bit digest of an instance id; never 0, which means no peer."""
    return int.from_bytes(hashlib.blake2b(instance.encode(), digest_size=8).digest(), "little") or 1


def transport_code(name: str) -> int:
    return TRANSPORT_CODES.index(name)
