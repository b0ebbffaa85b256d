"""One room has one use: its ranks come from one use of its id on the other side."""

from __future__ import annotations

import pytest

from stress.simulate import KNOWN, play_known
from tests.actors import schedule
from tests.actors.tally import Tally


@pytest.mark.xfail(strict=True, reason="open: docs/proof.md, What is open", raises=AssertionError)
@pytest.mark.parametrize("seed", sorted(KNOWN))
def test_the_ranks_of_a_room_come_from_one_use_of_its_id(seed: int) -> None:
    where = schedule.setting(seed)
    line = schedule.failure(where, schedule.schedule(where))
    assert line is None or "Success, and rank" not in line, line


@pytest.mark.parametrize("seed", sorted(KNOWN))
def test_what_is_known_to_fail_is_no_news_until_it_holds(seed: int) -> None:
    tally = Tally()
    assert play_known(seed, tally) is None
    assert list(tally.known) == [seed]


def test_what_was_known_to_fail_and_holds_is_said() -> None:
    found = play_known(0, Tally())
    assert found is not None
    assert "take it off" in found.line
