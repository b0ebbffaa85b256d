"""Late-landing bytes over NIXL on TCP: how many pages are overwritten after they got a new owner.

    python -m stress.late_bytes [--repeat N] [--write docs/reports/late-bytes.md]

Plays every trouble with every fence there is for it (tests/transports/late.py), then rooms through
two real trees (tests/transports/late_rooms.py), and prints the counts as Markdown.  Exits with 1 if
a page was overwritten behind a fence, or if none ever was without one.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from tests.crash.tree_process import PAGES_COUNT
from tests.transports.late import CUTS, FENCES, USER_TIMEOUT_S, Fence, Outcome, Trouble, pairs
from tests.transports.late_process import PAGE_BYTES
from tests.transports.late_rooms import Ending, rooms
from tests.transports.wire import missing

PAGES = 4096
SEEN = (Trouble.CUT_LONG,)  # nothing lands late there, fence or none: see the report's text

TEXT = """# Bytes that land late

A write that is given up goes on by itself: NIXL has no cancel
([decision 0003](../decisions/0003-quiet-and-fences.md)). Here its pages are filled with a pattern
as their next owner would fill them, at once or behind a fence, and the pages that no longer hold
the pattern afterwards are counted.

Command: `python -m stress.late_bytes --repeat {repeat}`, {date}.
Machine: {machine}. NIXL {nixl}, `UCX_TLS=tcp,self`.

## Two processes, one write of {pages} pages of {page_kib} KiB

| while the bytes move | before the pages are refilled | plays | still to land | overwritten |
| --- | --- | ---: | ---: | ---: |
{processes}

"Still to land" is what was missing when the write was given up, the least and the most of the
plays; "overwritten" the least and the most pages that a play lost. Black-holed: the processes are
in two network namespaces, and the frames between them go to an address that nobody has. UCX gives
a silent connection up after {user_timeout_s} s (`UCX_TCP_USER_TIMEOUT`); what had not arrived by
then never did here. A dead, stopped or cut-off writer has no fence to offer while it is so; a
stopped target can only be killed. Target: the process that owns the pages, decode's worker.

## Two trees, one room of {room_pages} pages of 256 KiB

| what ends the room on decode | decode's pages are refilled | rooms | still to land | overwritten |
| --- | --- | ---: | ---: | ---: |
{trees}

Both tables are as the machine's mood was; what must not vary is the 0 behind every fence, which
the script checks, as the tests do (`tests/transports/test_late_bytes.py`).
"""


def span(values: Sequence[int]) -> str:
    return f"{min(values)}" if len(set(values)) == 1 else f"{min(values)} to {max(values)}"


def line(first: str, second: str, outcomes: Sequence[Outcome]) -> str:
    missing_pages = span([outcome.outstanding for outcome in outcomes])
    lost = span([outcome.overwritten for outcome in outcomes])
    return f"| {first} | {second} | {len(outcomes)} | {missing_pages} | {lost} |"


class Report:
    """The lines of a table, and what is wrong with them."""

    def __init__(self) -> None:
        self.wrong: list[str] = []

    def add(
        self, first: str, second: str, outcomes: Sequence[Outcome], *, fenced: bool, seen: bool
    ) -> str:
        lost = [outcome.overwritten for outcome in outcomes]
        if fenced and any(lost):
            self.wrong.append(f"{first}, {second}: overwritten behind a fence: {lost}")
        if seen and not any(lost):
            self.wrong.append(f"{first}, {second}: no late byte was ever seen")
        text = line(first, second, outcomes)
        sys.stderr.write(text + "\n")
        return text

    def processes(self, repeat: int) -> Iterator[str]:
        with pairs(PAGES) as made:
            for trouble in Trouble:
                if trouble in CUTS and (why := missing()):
                    sys.stderr.write(f"{trouble}: left out: {why}\n")
                    continue
                for fence in FENCES[trouble]:
                    outcomes = [made.play_under_way(trouble, fence) for _ in range(repeat)]
                    bare = fence is Fence.NONE
                    name = "nothing is done" if bare else fence.value
                    yield self.add(
                        trouble, name, outcomes, fenced=not bare, seen=bare and trouble not in SEEN
                    )

    def trees(self, repeat: int) -> Iterator[str]:
        with (
            tempfile.TemporaryDirectory(prefix="pdrt-late-") as folder,
            rooms(Path(folder)) as made,
        ):
            for ending in Ending:
                for wait_quiet in (False, True):
                    outcomes = [made.play(ending, wait_quiet=wait_quiet) for _ in range(repeat)]
                    when = "once the room is quiet" if wait_quiet else "at the verdict"
                    seen = ending is Ending.ABORT and not wait_quiet
                    yield self.add(ending, when, outcomes, fenced=wait_quiet, seen=seen)


def machine() -> str:
    model = next(
        (
            text.partition(":")[2].strip()
            for text in Path("/proc/cpuinfo").read_text().splitlines()
            if text.startswith("model name")
        ),
        platform.machine(),
    )
    return f"{os.cpu_count()} cores ({model}), Linux {platform.release().partition('-')[0]}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=5, help="plays of each line")
    parser.add_argument("--write", type=Path, help="write the report here instead of printing it")
    options = parser.parse_args()
    report = Report()
    text = TEXT.format(
        repeat=options.repeat,
        date=datetime.date.today().isoformat(),
        machine=machine(),
        nixl=version("nixl-cu12"),
        pages=PAGES,
        page_kib=PAGE_BYTES >> 10,
        user_timeout_s=USER_TIMEOUT_S,
        room_pages=PAGES_COUNT,
        processes="\n".join(report.processes(options.repeat)),
        trees="\n".join(report.trees(options.repeat)),
    )
    if options.write:
        options.write.write_text(text)
    else:
        sys.stdout.write(text)
    for wrong in report.wrong:
        sys.stderr.write(f"late_bytes: {wrong}\n")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
