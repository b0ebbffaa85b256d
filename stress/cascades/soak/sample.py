"""What the processes of a soak hold at one moment, from /proc and from their tables.

A replaced process is a new one, so samples go by the role: tree and name.  `heap` is anonymous
memory by its proportional share; RSS and PSS go into the plot, where shared pages make them jump.

Shared memory is reserved when it is made and counts in PSS once it is touched, so it is judged by
what is reserved: of all memfds that a process has open, or mapped.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from stress.cascades.soak.judge import Tolerance

MIB = 1 << 20
TICKS_S = os.sysconf("SC_CLK_TCK")

#: What may rise, by what is measured.  Without an entry: for the plot alone.
TOLERANCES = {
    "heap": Tolerance(1.5, 0.03, "MiB"),
    "descriptors": Tolerance(1.5, 0.01),
    "threads": Tolerance(1.0),
    "pss but shared memory": Tolerance(4.0, 0.03, "MiB"),
    "memfd bytes": Tolerance(0.5, 0.01, "MiB"),
    "memfds": Tolerance(1.0),
    "/dev/shm bytes": Tolerance(0.5, 0.0, "MiB"),
    "/dev/shm names": Tolerance(1.0),
    "processes": Tolerance(1.0),
    "rooms in the table": Tolerance(4.0, 0.25),
    "rooms not quiet": Tolerance(2.0, 0.25),
    "rooms with an engine": Tolerance(4.0, 0.25),
}
YOUNG_S = 3.0  # a process younger than this is hardly what its role is


@dataclass
class Series:
    """Curves by name: "what: role"."""

    begun_s: float = field(default_factory=time.monotonic)
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, what: str, role: str, value: float) -> None:
        at_s = time.monotonic() - self.begun_s
        self.curves[f"{what}: {role}"].append((round(at_s, 2), round(value, 3)))


def tolerance_of(name: str) -> Tolerance | None:
    return TOLERANCES.get(name.partition(": ")[0])


@dataclass(frozen=True)
class Held:
    """By one process."""

    rss: float
    pss: float
    heap: float
    pss_file: float
    pss_shmem: float
    descriptors: int
    threads: int
    memfds: dict[int, int]  # inode -> bytes it takes, of those that are open or mapped
    age_s: float


def held_by(pid: int) -> Held | None:
    """None if it is gone, or on its way."""
    folder = Path(f"/proc/{pid}")
    try:
        sizes = _rollup((folder / "smaps_rollup").read_text())
        numbers = os.listdir(folder / "fd")
        stat = (folder / "stat").read_text().rpartition(")")[2].split()
        memfds = mapped_memfds((folder / "maps").read_text())
        for number in numbers:
            with contextlib.suppress(OSError):
                memfds |= _memfd(f"{folder}/fd/{number}")
    except (OSError, KeyError):
        return None
    if stat[0] == "Z":
        return None
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(stat[19]) / TICKS_S
    return Held(
        sizes["Rss"],
        sizes["Pss"],
        sizes["Pss_Anon"],
        sizes["Pss_File"],
        sizes["Pss_Shmem"],
        len(numbers),
        int(stat[17]),
        memfds,
        age_s,
    )


def _rollup(text: str) -> dict[str, float]:
    """MiB by name."""
    fields = (line.split() for line in text.splitlines()[1:])
    return {name[:-1]: int(amount) * 1024 / MIB for name, amount, _ in fields}


def mapped_memfds(maps: str) -> dict[int, int]:
    """Bytes by inode, at least: how large a memfd is that nobody has open, nobody says."""
    found: dict[int, int] = {}
    for line in maps.splitlines():
        if " /memfd:" in line:
            span, _, _, _, inode, _ = line.split(maxsplit=5)
            begin, end = (int(address, 16) for address in span.split("-"))
            found[int(inode)] = max(found.get(int(inode), 0), end - begin)
    return found


def _memfd(path: str) -> dict[int, int]:
    if not os.readlink(path).startswith("/memfd:"):
        return {}
    found = os.stat(path)
    return {found.st_ino: found.st_blocks * 512}


def family_of(supervisor: int) -> dict[str, list[int]]:
    """Processes of a tree by role, the supervisor included."""
    found: dict[str, list[int]] = defaultdict(list)
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(supervisor)
        found["supervisor"].append(supervisor)
        for child in root.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                words = child.cmdline()
                if words:
                    found[words[-1].removeprefix("pdrt:").strip()].append(child.pid)
    return found


def sample(
    series: Series, families: dict[str, dict[str, list[int]]], starting: Container[int] = ()
) -> None:
    """One look at everything.  `families`: tree -> role -> pids.  Those that are `starting` have
    not yet what their role has; they count for the whole alone."""
    memfds: dict[int, int] = {}
    pss = pss_file = pss_shmem = 0.0
    count = 0
    for tree, family in families.items():
        for role, pids in family.items():
            helds = [held for held in map(held_by, pids) if held is not None]
            count += len(helds)
            for held in helds:
                for inode, taken_bytes in held.memfds.items():
                    memfds[inode] = max(memfds.get(inode, 0), taken_bytes)
                pss += held.pss
                pss_file += held.pss_file
                pss_shmem += held.pss_shmem
            grown = all(held.age_s > YOUNG_S for held in helds)
            if len(helds) == 1 and grown and pids[0] not in starting:
                _add_role(series, f"{tree} {role}", helds[0])
    series.add("pss but shared memory", "trees", pss - pss_shmem)
    series.add("pss of files", "trees", pss_file)
    series.add("pss of shared memory", "trees", pss_shmem)
    series.add("processes", "trees", count)
    series.add("memfd bytes", "trees", sum(memfds.values()) / MIB)
    series.add("memfds", "trees", len(memfds))
    files = _shared_memory()
    series.add("/dev/shm bytes", "host", sum(files) / MIB)
    series.add("/dev/shm names", "host", len(files))


def _add_role(series: Series, role: str, held: Held) -> None:
    series.add("rss", role, held.rss)
    series.add("pss", role, held.pss)
    series.add("heap", role, held.heap)
    series.add("descriptors", role, held.descriptors)
    series.add("threads", role, held.threads)


def _shared_memory() -> list[int]:
    sizes = []
    for entry in _entries("/dev/shm"):
        with contextlib.suppress(OSError):
            sizes.append(entry.stat().st_blocks * 512)
    return sizes


def _entries(folder: str) -> Iterable[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)
