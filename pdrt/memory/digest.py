"""A digest of KV pages, so that a receiver can tell that every byte is the sender's."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pdrt.protocol.layout import RegionMap


def kv_digest(
    regions: Sequence[memoryview], maps: Sequence[RegionMap], pages: NDArray[np.int32]
) -> int:
    """64 bits over the pages in their order, rank after rank; never 0.  About 1 GB/s a core."""
    digest = hashlib.blake2b(digest_size=8)
    for region, described in zip(regions, maps, strict=True):
        page_bytes = described.page_bytes
        for page in pages.tolist():
            digest.update(region[page * page_bytes : (page + 1) * page_bytes])
    return int.from_bytes(digest.digest(), "little") or 1
