"""Shared memory without a name: nothing to unlink, and gone with the last process that has it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from pdrt.errors import NoMemory

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def memory_fd(name: str, length_bytes: int) -> int:
    """A sealed memfd whose memory is reserved, not just sized.  Raises NoMemory."""
    available = available_bytes()
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Asked for more than there is, the kernel would not refuse but kill somebody on the way.
        if length_bytes > available:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        os.posix_fallocate(fd, 0, length_bytes)
    except OSError as error:
        os.close(fd)
        raise NoMemory(
            f"cannot reserve {length_bytes / 2**20:.0f} MiB of shared memory for {name}: "
            f"{error.strerror}; lower --rooms-max or --pool-tokens, or give the host more memory"
        ) from None
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def available_bytes() -> int:
    """Memory that can be had without hurting anybody: the machine's, or the control group's."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no limit, or another hierarchy
        limit = int((group / "memory.max").read_text())
        available = min(available, limit - int((group / "memory.current").read_text()))
    return available
