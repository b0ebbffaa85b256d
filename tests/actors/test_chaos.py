"""Seeded chaos: rooms, aborts, deaths, freezes and cut links; every law at every change.

A failure prints its seed and a shrunk schedule.  Replay one with PDRT_WORLD_SEED=17 pytest ...;
look at more with PDRT_WORLD_SEEDS=1000, or over all cores with `python -m stress.simulate`.
"""

from __future__ import annotations

import os

import pytest

from tests.actors import schedule

SEEDS_A_TEST = 30
ONE = os.environ.get("PDRT_WORLD_SEED")
COUNT = int(os.environ.get("PDRT_WORLD_SEEDS", "90"))
FIRSTS = [int(ONE)] if ONE else range(0, COUNT, SEEDS_A_TEST)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", FIRSTS)
def test_the_laws_hold_whatever_breaks(first: int) -> None:
    for seed in range(first, first + (1 if ONE else SEEDS_A_TEST)):
        setting = schedule.setting(seed)
        acts = schedule.schedule(setting)
        if schedule.failure(setting, acts) is None:
            continue
        fewer = schedule.shrink(setting, acts, tries_max=100)
        line = schedule.failure(setting, fewer)
        listed = "\n  ".join(map(str, fewer))
        pytest.fail(f"PDRT_WORLD_SEED={seed}: {line}\n{setting}\n  {listed}", pytrace=False)


def test_a_seed_gives_the_same_world_twice() -> None:
    setting = schedule.setting(4)
    acts = schedule.schedule(setting)
    first, second = (schedule.run(setting, acts) for _ in range(2))
    assert (first.now_ms, first.post.carried) == (second.now_ms, second.post.carried)
    assert first.ledger.landed == second.ledger.landed != set()
