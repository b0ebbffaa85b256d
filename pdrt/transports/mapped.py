"""A region mapped into this process.  Shared by the transports; knows nothing of peers."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

from pdrt.transports.base import TransportError

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Mapped:
    """`length_bytes` of a descriptor, mapped for reading and writing until `close`.

    view: [length_bytes] uint8 over the mapping; every slice of it must be gone before `close`.
    """

    def __init__(self, fd: int, length_bytes: int) -> None:
        """Raise TransportError if the descriptor is shorter than that or cannot be mapped.

        The descriptor may be closed afterwards."""
        try:
            held_bytes = os.fstat(fd).st_size
            # Checked before use: a page beyond the end of the file is a SIGBUS, not an error.
            if not 0 < length_bytes <= held_bytes:
                raise TransportError(f"region of {length_bytes} bytes, descriptor of {held_bytes}")
            self._mapping = mmap.mmap(fd, length_bytes)
        except OSError as error:
            raise TransportError(f"cannot map the region: {error}") from error
        self.view: NDArray[np.uint8] = np.frombuffer(self._mapping, np.uint8)

    @property
    def address(self) -> int:
        """Where the region begins in this process."""
        return self.view.ctypes.data

    def close(self) -> None:
        """Unmap.  The view must not be used afterwards."""
        self.view = np.zeros(0, np.uint8)
        self._mapping.close()
