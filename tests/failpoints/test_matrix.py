"""Every failpoint, with every action, in real trees: see docs/failpoints.md.

The default suite runs SUBSET; `bin/test --all tests/failpoints` all of them.
"""

from __future__ import annotations

import pytest

from pdrt.failpoints import POINTS, Action
from tests.crash.stage import Stages
from tests.failpoints.cells import PLACES, SUBSET, Cell, all_cells
from tests.failpoints.scene import Record, Scene
from tests.failpoints.stage import Stage

CELLS = {str(cell): cell for cell in all_cells()}


def play(stages: Stages[Stage], cell: Cell, records: list[Record]) -> None:
    stage = stages.get(cell.transport)
    scene = Scene(stage, cell)
    records.append(scene.record)
    try:
        scene.play()
    except BaseException:
        print(stage.tail())  # noqa: T201
        scene.close()
        stages.drop()
        raise
    scene.close()


def test_every_point_is_played_with_every_action():
    assert PLACES.keys() == POINTS.keys()
    played = {(cell.point, cell.action) for cell in CELLS.values()}
    assert played == {(point, action) for point in POINTS for action in Action}
    assert len(CELLS) == len(all_cells()), "two cells have one name"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", SUBSET)
def test_subset(stages: Stages[Stage], records: list[Record], name: str) -> None:
    play(stages, CELLS[name], records)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [name for name in CELLS if name not in SUBSET])
def test_rest(stages: Stages[Stage], records: list[Record], name: str) -> None:
    play(stages, CELLS[name], records)
