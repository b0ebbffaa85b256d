"""Engines whose layouts do not fit: refused at the handshake, by the name of the field, and nobody
else pays for it.

F084 F085 F088 F091.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pdrt.protocol.layout import Layout
from pdrt.protocol.states import KVPoll, Reason, Role
from tests.actors.steps import until_verdict
from tests.actors.world import LAYOUT, World
from tests.scenarios.pairs import has_verdict, plan_pair, verdict_of

REFUSED_MS = 1000
WIDE = replace(LAYOUT, layers=4)


@pytest.mark.parametrize(
    ("field", "prefill", "decode"),
    [
        ("ranks", 2, 1),
        ("ranks", 4, 1),
        ("ranks", 1, 4),
        ("ranks", 3, 2),
        ("kv_heads", 8, 4),  # more ranks than heads, as an engine that replicates heads sees it
        ("kv_heads", 1, 2),
        ("dtype", "float32", "bfloat16"),
    ],
)
def test_the_first_room_says_what_does_not_fit(field: str, prefill: object, decode: object) -> None:
    theirs = replace(WIDE, **{field: prefill})
    with World(
        layout=theirs, ranks=theirs.ranks, decode_layout=replace(WIDE, **{field: decode})
    ) as world:
        world.both(1)
        until_verdict(world, 1, "prefill", "decode0", within_ms=REFUSED_MS)
        job = world.job("decode0", 1)
        assert job.reason is world.job("prefill", 1).reason is Reason.LAYOUT_MISMATCH
        assert f"{field} {decode}/{prefill}" in job.detail
        world.settle()


def test_one_peer_that_does_not_fit_costs_the_others_nothing() -> None:
    other: Layout = replace(LAYOUT, page_size=2)
    with World() as world:
        world.add("prefill1", Role.PREFILL, other)
        for room in range(50):
            plan_pair(world, room, "prefill", "decode0", pages_count=1)
            if room == 25:
                plan_pair(world, 1000, "prefill1", "decode0", pages_count=1)
        world.until(lambda: has_verdict(world, "decode0", 1000), within_ms=REFUSED_MS)
        assert world.job("decode0", 1000).reason is Reason.LAYOUT_MISMATCH
        for room in range(50):
            world.until(lambda: has_verdict(world, "decode0", room), within_ms=REFUSED_MS)  # noqa: B023
            assert verdict_of(world, "decode0", room) is KVPoll.Success
        world.settle()
