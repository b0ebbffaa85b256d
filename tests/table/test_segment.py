"""The memory of a table: sealed, and taken for nothing else."""

from __future__ import annotations

import mmap
import os
from itertools import product

import pytest

from pdrt.errors import AttachFailed, NoMemory
from pdrt.process_rows import HEADER_BYTES
from pdrt.protocol.states import Event, Role
from pdrt.shm_status import HEADER, LAYOUT_VERSION, MAGIC, StatusTable, create
from tests.table.views import INSTANCE, NOW, TIMEOUTS_MS, tables


def test_a_zero_page_reads_as_all_free(table: StatusTable) -> None:
    assert len(table.live_slots()) == 0
    assert not table.words.any()
    before = bytes(table.map)
    for slot, generation in product(range(table.rooms_max), (0, 1)):
        table.renew(slot, generation, NOW, 5)
        table.set_moved(slot, generation, 5)
        table.set_taken(slot, generation, 5)
        table.discard(slot, 0)
    for slot in range(table.rooms_max):
        assert table.read(slot, 1) is None
        assert not table.move(slot, 1, Event.FAULT, now_ns=NOW)
        assert not table.set_quiet(slot, 1)
        assert not table.clear(slot, 1)
    assert bytes(table.map) == before
    assert {table.open(room, 0, now_ns=NOW).generation for room in range(4)} == {1}


def test_mmap_of_the_whole_table_is_page_aligned() -> None:
    assert HEADER_BYTES % mmap.PAGESIZE == 0


def test_the_memory_can_neither_shrink_nor_grow_nor_be_unsealed() -> None:
    fd = create(Role.DECODE, rooms_max=4, instance=b"", timeouts_ms=TIMEOUTS_MS, now_ns=NOW)
    try:
        length_bytes = os.fstat(fd).st_size
        for other in (0, length_bytes - 4096, length_bytes + 4096):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, other)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", length_bytes)
        assert os.fstat(fd).st_size == length_bytes
        assert os.fstat(fd).st_blocks * 512 >= length_bytes, "sized, not reserved"
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_a_table_tells_who_made_it(table: StatusTable) -> None:
    assert table.role is Role.PREFILL
    assert table.supervisor_pid == os.getpid()
    assert table.started_ns == NOW
    assert table.instance == INSTANCE
    assert {s: ms for s, ms in table.timeouts_ms.items() if ms} == TIMEOUTS_MS


def header(**other: int) -> bytes:
    fields = {"magic": MAGIC, "version": LAYOUT_VERSION, "role": 1, "slots": 4}
    fields |= {"owners": 64, "counters": 128}
    return HEADER.pack(*(fields | other).values(), 1, 1, b"", *([0] * 5), 0)


OF_FOUR = HEADER_BYTES + 64 * (128 + 128 * 8) + 4 * 128  # bytes of a table of four rooms
FOREIGN = {
    "empty": (b"", 0),
    "short": (b"x", 100),
    "zeros": (b"", OF_FOUR),
    "another magic": (header(magic=MAGIC + 1), OF_FOUR),
    "another version": (header(version=1), OF_FOUR),
    "no role": (header(role=7), OF_FOUR),
    "fewer rows": (header(owners=32), OF_FOUR),
    "fewer counters": (header(counters=64), OF_FOUR),
    "cut off": (header(), HEADER_BYTES),
    "longer": (header(), OF_FOUR + 4096),
    "a room too many": (header(slots=5), OF_FOUR),
    "absurd": (header(slots=0xFFFFFFFF), HEADER_BYTES),
}


def test_a_whole_header_is_taken_for_a_table() -> None:
    """Without which the refusals below would prove nothing."""
    fd = os.memfd_create("like ours", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, OF_FOUR)
        os.pwrite(fd, header(), 0)
        StatusTable(fd).close()
    finally:
        os.close(fd)


@pytest.mark.parametrize("what", FOREIGN)
def test_foreign_memory_is_not_taken_for_a_table(what: str) -> None:
    data, length_bytes = FOREIGN[what]
    fd = os.memfd_create("foreign", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, length_bytes)
        os.pwrite(fd, data, 0)
        with pytest.raises(AttachFailed, match="not a status table"):
            StatusTable(fd)
    finally:
        os.close(fd)


def test_what_is_no_memory_is_not_taken_for_a_table() -> None:
    reading, writing = os.pipe2(os.O_CLOEXEC)
    own = create(Role.DECODE, rooms_max=4, instance=b"", timeouts_ms=TIMEOUTS_MS, now_ns=NOW)
    read_only = os.open(f"/proc/self/fd/{own}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for fd in (reading, writing, read_only):
            with pytest.raises(AttachFailed):
                StatusTable(fd)
    finally:
        for fd in (reading, writing, own, read_only):
            os.close(fd)


@pytest.mark.parametrize("rooms_max", [2**34, 2**45, 2**60])
def test_more_memory_than_there_is_is_refused_before_anything_is_taken(rooms_max: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NoMemory, match="lower --rooms-max"):
        create(Role.DECODE, rooms_max=rooms_max, instance=b"", timeouts_ms=TIMEOUTS_MS, now_ns=NOW)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_closed_view_may_be_closed_again_and_leaves_no_map() -> None:
    with tables(1) as [view]:
        view.close()
        view.close()
        assert view.map.closed
