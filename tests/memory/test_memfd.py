"""Shared memory is reserved, not just sized, and refused where there is none."""

from __future__ import annotations

import mmap
import os
import resource

import pytest

from pdrt import memfd
from pdrt.errors import NoMemory
from pdrt.memfd import available_bytes, memory_fd


def test_memory_that_others_use_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken all the same, it would be somebody's life: the kernel kills to find it."""
    monkeypatch.setattr(memfd, "available_bytes", lambda: 2 << 20)
    with pytest.raises(NoMemory, match="Cannot allocate memory"):
        memory_fd("pool", (2 << 20) + 1)
    os.close(memory_fd("pool", 2 << 20))


def test_what_is_available_is_less_than_there_is() -> None:
    assert 0 < available_bytes() < os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE


def test_memory_that_the_kernel_refuses_is_no_memory() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(NoMemory, match=r"cannot reserve 2 MiB of shared memory for pool: File"):
            memory_fd("pool", 2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
