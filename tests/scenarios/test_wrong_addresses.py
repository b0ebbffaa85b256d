"""Addresses that lead to the wrong place, or to none.

F118.
"""

from __future__ import annotations

import pytest

from pdrt.config import Settings
from pdrt.errors import BadConfig
from pdrt.protocol.states import KVPoll, Reason
from tests.actors.engines import Plan
from tests.actors.steps import succeeds
from tests.actors.world import TIMEOUTS, World
from tests.scenarios.pairs import has_verdict


@pytest.mark.parametrize(
    ("host", "advertised"), [("0.0.0.0", ""), ("::", ""), ("127.0.0.1", "0.0.0.0"), ("::", "::")]
)
def test_an_address_that_nobody_can_dial_is_not_told_to_peers(host: str, advertised: str) -> None:
    with pytest.raises(BadConfig, match="--advertise-host"):
        Settings(role="decode", host=host, advertise_host=advertised)
    assert Settings(role="decode", host=host, advertise_host="decode-0").host == host
    assert Settings(role="prefill", host=host).host == host  # a router names prefill, not itself


@pytest.mark.parametrize("there", ["decode0", "decode1", "nowhere"])
def test_who_is_no_prefill_is_not_taken_for_one(there: str) -> None:
    """Itself, another decode, or nobody at all: that room fails and says so, and no other."""
    with World(decodes=2) as world:
        succeeds(world, 0)
        peer = world.trees[there].control if there in world.trees else f"{there}:8998"
        world.engine("decode0").plan(Plan(1, peer=peer))
        limit_ms = int(TIMEOUTS.bootstrap_s * 1000) + 500
        world.until(lambda: has_verdict(world, "decode0", 1), within_ms=limit_ms)
        job = world.job("decode0", 1)
        assert job.verdict is KVPoll.Failed
        assert job.reason in (Reason.BOOTSTRAP_TIMEOUT, Reason.PEER_LOST)
        succeeds(world, 2)
        succeeds(world, 3, "decode1")
        world.settle()
