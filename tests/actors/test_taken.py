from __future__ import annotations

import pytest

from pdrt.actors import taken
from pdrt.actors.taken import Taken
from pdrt.protocol.messages import Destination, Recall
from pdrt.shm_status import Handle

OURS, OTHER = Handle(7, 0, 1), Handle(7, 1, 3)


def to(slot: int, generation: int, instance: str = "d") -> Destination:
    return Destination(7, 0, slot, generation, instance, 1, b"", 0)


def test_a_destination_is_for_one_room() -> None:
    memory = Taken()
    assert memory.take(to(2, 5), OURS)
    assert memory.take(to(2, 5), OURS)
    assert not memory.take(to(2, 5), OTHER)
    assert memory.take(to(3, 5), OTHER)
    assert memory.take(to(2, 5, "another decode"), OTHER)


def test_an_older_use_of_a_slot_is_over() -> None:
    memory = Taken()
    assert memory.take(to(2, 5), OURS)
    assert memory.take(to(2, 7), OTHER)
    assert not memory.take(to(2, 5), OURS)
    assert not memory.take(to(2, 3), OTHER)
    assert memory.take(to(2, 7), OTHER)


def test_what_was_used_longest_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taken, "SLOTS_MAX", 2)
    memory = Taken()
    for slot, generation in ((1, 1), (2, 1), (1, 3), (3, 1)):
        assert memory.take(to(slot, generation), OURS)
    assert not memory.take(to(1, 1), OTHER)
    assert memory.take(to(2, 1), OTHER)


@pytest.mark.parametrize(("ended", "asked", "over"), [(5, 5, True), (7, 5, False), (5, 3, False)])
def test_of_what_is_over_nothing_can_land(ended: int, asked: int, over: bool) -> None:
    memory = Taken()
    assert memory.take(to(2, 5), OURS)
    assert not memory.recall(Recall(2, 5, "d"), 1).over
    memory.end(to(2, ended))
    said = memory.recall(Recall(2, asked, "d"), 1)
    assert (said.taken, said.over) == (True, over)


def test_what_nobody_had_is_not_over_either() -> None:
    memory = Taken()
    memory.end(None)
    memory.end(to(2, 5))
    memory.spend("d", 2, 5)
    memory.end(to(2, 5))
    said = memory.recall(Recall(2, 5, "d"), 1)
    assert (said.taken, said.over) == (False, False)
