"""Every victim, in every phase of a room, killed or frozen: see docs/crash-matrix.md.

The default suite runs SUBSET; `bin/test --all tests/crash` the whole matrix.
"""

from __future__ import annotations

import pytest

from tests.crash.cells import SUBSET, Cell, all_cells
from tests.crash.scene import Record, Scene
from tests.crash.stage import Stage, Stages


def play(stages: Stages[Stage], cell: Cell, records: list[Record]) -> None:
    stage = stages.get(cell.transport)
    scene = Scene(stage, cell)
    try:
        records.append(scene.record)
        scene.play()
    except BaseException:
        print("\n".join(tree.tail() for tree in stage.trees.values()))  # noqa: T201
        scene.close()
        stages.drop()
        raise
    scene.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("cell", SUBSET, ids=str)
def test_subset(stages: Stages[Stage], records: list[Record], cell: Cell) -> None:
    play(stages, cell, records)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("cell", [c for c in all_cells() if c not in SUBSET], ids=str)
def test_rest(stages: Stages[Stage], records: list[Record], cell: Cell) -> None:
    play(stages, cell, records)
