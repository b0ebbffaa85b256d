"""Engines beyond the bound are refused, until one of those inside is gone."""

from __future__ import annotations

import pytest

from pdrt.actors.boot import ENGINES_MAX
from pdrt.attach import AttachRequest
from pdrt.errors import AttachFailed
from pdrt.runtime import Runtime
from tests.bounds.test_start import SETTINGS
from tests.crash.tree_process import LAYOUT

ASK = AttachRequest(kind="engine", name="one of many")


def test_engines_beyond_the_bound_are_refused_until_one_is_gone() -> None:
    with Runtime(SETTINGS, LAYOUT, None) as tree:  # nothing is launched

        def attach(pid: int) -> int:
            return tree._answer_engine(ASK, pid)[0].row

        rows = [attach(pid) for pid in range(1, ENGINES_MAX + 1)]
        assert len(set(rows)) == ENGINES_MAX
        with pytest.raises(AttachFailed, match=f"{ENGINES_MAX} engines are attached"):
            attach(99)
        tree._engine_gone(rows[3])
        assert attach(99) == rows[3]
