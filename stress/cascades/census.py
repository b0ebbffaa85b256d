"""What is left when all is over, counted from outside: it becomes part of the driver's history."""

from __future__ import annotations

import time

import psutil

from stress.cascades.history import Kind
from stress.cascades.oracle.survey import What
from stress.cascades.rig import Rig
from stress.cascades.trees import ACTORS

WHOLE_S, EMPTY_S = 30.0, 10.0


def before(rig: Rig) -> None:
    for tree in rig.trees:
        count = psutil.Process(tree.pid).num_fds()
        rig.writer.append(Kind.CENSUS, 0, tree.index, What.DESCRIPTORS_BEFORE, count)


def after(rig: Rig) -> None:
    """Once everything is drained, and before the trees stop."""
    writer = rig.writer
    for tree in rig.trees:
        whole = rig.until(tree.is_whole, WHOLE_S, 0.02)
        writer.append(Kind.CENSUS, 0, tree.index, What.NOT_WHOLE, int(not whole))
        writer.append(Kind.CENSUS, 0, tree.index, What.UNFINISHED, rig.busy(tree.index))
        end_s = time.monotonic() + EMPTY_S
        while tree.view.live_count() and time.monotonic() < end_s:
            time.sleep(0.02)
        writer.append(Kind.CENSUS, 0, tree.index, What.SLOTS, tree.view.live_count())
    rig.reap()
    for tree in rig.trees:
        family = psutil.Process(tree.pid).children(recursive=True)
        surplus = max(0, len(family) - len(ACTORS))
        writer.append(Kind.CENSUS, 0, tree.index, What.SURPLUS, surplus)
        count = psutil.Process(tree.pid).num_fds()
        writer.append(Kind.CENSUS, 0, tree.index, What.DESCRIPTORS_AFTER, count)
