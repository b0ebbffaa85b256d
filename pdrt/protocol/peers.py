"""How a peer and a transport are written into a slot: small numbers that survive the processes."""

from __future__ import annotations

import hashlib
from functools import lru_cache

TRANSPORT_CODES = ("", "nixl", "shm", "fake")  # position is the code in the slot; only ever append


@lru_cache(maxsize=4096)
def instance_digest(instance: str) -> int:
    """A 32-bit digest of an instance id; never 0, which means no peer.  Two peers with one digest
    only make each other's memory quiet later."""
    return int.from_bytes(hashlib.blake2b(instance.encode(), digest_size=4).digest(), "little") or 1


def transport_code(name: str) -> int:
    return TRANSPORT_CODES.index(name)
