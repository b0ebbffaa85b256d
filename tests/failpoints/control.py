"""How a test arms a process that runs: one folder that it and all processes of its trees know.

An order is a file with a number of its own.  The number of the order that stands now is in a file
that every process maps and looks at whenever it comes by a failpoint, so that no signal is needed.
Who strikes leaves a file with its pid before it does; whoever makes that file first is the one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from pathlib import Path

import msgspec

from pdrt import failpoints
from pdrt.failpoints import Choose, Failpoint, Once

FOLDER, TREE = "PDRT_TEST_FAILPOINTS", "PDRT_TEST_FAILPOINTS_TREE"
NUMBER = struct.Struct("<Q")
NOW = "now"


class Order(msgspec.Struct, frozen=True):
    """`tree`: only its processes; `pids`: only these, if there are any."""

    failpoint: Failpoint
    tree: str = ""
    pids: tuple[int, ...] = ()


class Control:
    """The test's end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = 0
        (folder / NOW).write_bytes(NUMBER.pack(0))

    def arm(self, failpoint: Failpoint, *, tree: str = "", pids: tuple[int, ...] = ()) -> None:
        order = Order(failpoint, tree, pids)
        self._number += 1
        (self.folder / f"order-{self._number}").write_bytes(msgspec.json.encode(order))
        self._publish(self._number)

    def disarm(self) -> None:
        self._publish(0)

    def _publish(self, number: int) -> None:
        with (self.folder / NOW).open("r+b") as now:
            now.write(NUMBER.pack(number))

    @property
    def struck(self) -> int:
        """Pid of the process that was struck by the latest order; 0 if none was."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return int((self.folder / f"struck-{self._number}").read_text())
        return 0


class _Obedient:
    """A process's end: what `failpoints.arm` asks."""

    def __init__(self, folder: Path, tree: str) -> None:
        self._folder, self._tree = folder, tree
        with (folder / NOW).open("rb") as now:
            self._now = mmap.mmap(now.fileno(), NUMBER.size, prot=mmap.PROT_READ)
        self._seen = 0
        self._choose: Choose | None = None

    def __call__(self, point: str) -> Failpoint | None:
        (number,) = NUMBER.unpack_from(self._now)
        if number != self._seen:
            self._seen = number
            self._choose = self._read(number) if number else None
        return None if self._choose is None else self._choose(point)

    def _read(self, number: int) -> Choose | None:
        data = (self._folder / f"order-{number}").read_bytes()
        order = msgspec.json.decode(data, type=Order)
        if order.tree not in ("", self._tree) or (order.pids and os.getpid() not in order.pids):
            return None

        def claim() -> bool:
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
            try:
                fd = os.open(self._folder / f"struck-{number}", flags)
            except FileExistsError:
                return False
            os.write(fd, str(os.getpid()).encode())
            os.close(fd)
            return True

        return Once(order.failpoint, claim)


def obey() -> None:
    """In a process of a tree of the tests, which has the two variables of its supervisor."""
    failpoints.arm(_Obedient(Path(os.environ[FOLDER]), os.environ[TREE]))
