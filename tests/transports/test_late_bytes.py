"""Late bytes over NIXL on TCP: seen without a fence, and none with one.  See late.py.

The default suite plays what one pair of processes can; stress/late_bytes.py plays all, many times,
and writes docs/reports/late-bytes.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from stress.late_bytes import Report
from tests.transports.late import CUTS, FENCES, Fence, Outcome, Trouble, pairs
from tests.transports.late_rooms import Ending, Rooms, rooms
from tests.transports.wire import missing

PAGES = 4096  # 64 MiB: some of it is still under way when the write is given up
TRIES = 5

#: Plays that one pair of processes goes through, one after the other; a last one may spoil it.
QUICK = {
    "alive and stopped": (
        (Trouble.NONE, Fence.NONE),
        (Trouble.NONE, Fence.WRITER),
        (Trouble.TARGET_STOPPED, Fence.NONE),
        (Trouble.TARGET_STOPPED, Fence.WRITER),
        (Trouble.WRITER_STOPPED, Fence.NONE),
        (Trouble.WRITER_STOPPED, Fence.AGENT),
    ),
    "killed": ((Trouble.WRITER_KILLED, Fence.NONE),),
    "cut": ((Trouble.CUT, Fence.NONE), (Trouble.CUT, Fence.WRITER)),
}
PLAYED = {play for plays in QUICK.values() for play in plays}
#: Once UCX has given a connection up nothing was ever seen to land, so there is nothing to show.
SILENT = (Trouble.CUT_LONG, Fence.NONE)
REST = [(t, f) for t in Trouble for f in FENCES[t] if (t, f) not in PLAYED and (t, f) != SILENT]


def check(plays: Sequence[tuple[Trouble, Fence]]) -> None:
    pytest.importorskip("nixl_cu12")
    if plays[0][0] in CUTS and (why := missing()):
        pytest.skip(why)
    with pairs(PAGES) as made:
        for trouble, fence in plays:
            outcome = made.play_under_way(trouble, fence)
            if fence is Fence.NONE:
                assert outcome.overwritten > 0, f"{trouble}: late bytes are invisible: {outcome}"
            else:
                assert outcome.overwritten == 0, f"{trouble}, {fence}: {outcome}"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", QUICK)
def test_bytes_land_late_without_a_fence_and_never_with_one(name: str) -> None:
    check(QUICK[name])


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("trouble", "fence"), REST, ids=lambda value: value.name.lower())
def test_other_troubles_and_fences(trouble: Trouble, fence: Fence) -> None:
    check([(trouble, fence)])


# --- through real trees ---


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rooms]:
    pytest.importorskip("nixl_cu12")
    with rooms(tmp_path_factory.mktemp("late")) as made:
        yield made


@pytest.mark.timeout(120)
def test_pages_of_an_aborted_room_stay_their_next_owners_once_it_is_quiet(trees: Rooms) -> None:
    """And the verdict alone is no permission: refilled at it, some are overwritten."""
    plays = (trees.play(Ending.ABORT, wait_quiet=False) for _ in range(TRIES))
    assert any(outcome.overwritten for outcome in plays), "late bytes are invisible here"
    for ending in (Ending.ABORT, Ending.DECODE_STOPPED):
        outcome = trees.play(ending, wait_quiet=True)
        assert outcome.overwritten == 0, f"{ending}: {outcome}"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("ending", Ending, ids=lambda ending: ending.name.lower())
def test_pages_are_their_next_owners_whatever_ended_the_room(trees: Rooms, ending: Ending) -> None:
    assert trees.play(ending, wait_quiet=True).overwritten == 0


# --- the report ---


@pytest.mark.parametrize(
    ("overwritten", "fenced", "seen", "words"),
    [
        ((0, 1), True, False, "overwritten behind a fence: [0, 1]"),
        ((0, 0), False, True, "no late byte was ever seen"),
    ],
)
def test_the_report_says_what_must_not_be(
    overwritten: tuple[int, ...], fenced: bool, seen: bool, words: str
) -> None:
    report = Report()
    fine = [Outcome(10, 5, 0 if fenced else 4)] * 2
    report.add("trouble", "fence", fine, fenced=fenced, seen=seen)
    assert report.wrong == []
    plays = [Outcome(10, 5, count) for count in overwritten]
    row = report.add("trouble", "fence", plays, fenced=fenced, seen=seen)
    assert [line for line in report.wrong if words in line] == report.wrong != []
    assert row.startswith("| trouble | fence | 2 | 5 | 0")
