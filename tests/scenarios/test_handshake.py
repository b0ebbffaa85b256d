"""Trees that start in any order, late or slowly, and peers that die in the middle of a handshake.

F065 F066 F068 F073 F120 F132 F134.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pdrt.clock import to_ns
from pdrt.protocol.counters import Counter
from pdrt.protocol.states import KVPoll, Reason
from tests.actors.laws import leftovers
from tests.actors.steps import succeeds, until_state, until_verdict, verdict
from tests.actors.world import LAYOUT, TIMEOUTS, World

PATIENT = replace(TIMEOUTS, bootstrap_s=10.0)
WIDE = replace(LAYOUT, layers=8)


@pytest.mark.parametrize("tree", ["prefill", "decode0"])
def test_a_room_waits_until_the_last_rank_is_up(tree: str) -> None:
    """Decode asks from the beginning, and the ranks of one side come a second apart."""
    ranks = 4
    with World(ranks=ranks, layout=WIDE, timeouts=PATIENT) as world:
        for rank in range(ranks):
            world.trees[tree].kill(f"worker{rank}", again_ms=1000 * (rank + 1))
        world.both(1)
        world.run(1000 * ranks - 20, step_ms=10)
        assert world.job("decode0", 1).half.poll() is KVPoll.Bootstrapping
        assert until_verdict(world, 1, "prefill", "decode0") < 1000
        assert verdict(world, "decode0", 1) is KVPoll.Success
        world.settle()


@pytest.mark.parametrize("tree", ["prefill", "decode0"])
def test_workers_are_heard_by_a_listener_that_comes_a_minute_late(tree: str) -> None:
    with World(ranks=8, layout=WIDE) as world:
        world.run(20)  # and what they said first was heard by another
        world.trees[tree].kill("listener", again_ms=60_000)
        world.both(1)
        world.run(59_000, step_ms=100)
        assert verdict(world, "prefill", 1) is verdict(world, "decode0", 1) is KVPoll.Failed
        world.both(2)
        world.run(1000, step_ms=50)
        assert until_verdict(world, 2, "prefill", "decode0") < 1000
        assert verdict(world, "decode0", 2) is KVPoll.Success
        world.settle()


def test_a_prefill_that_dies_at_any_moment_of_the_handshake_is_noticed_in_time() -> None:
    deadlines_s = TIMEOUTS.bootstrap_s, TIMEOUTS.waiting_s, TIMEOUTS.peer_s
    reasons = set()
    for lived_ms in range(0, 40, 4):
        with World(lived_ms, polls=5) as world:
            world.both(1)
            world.run(lived_ms)
            world.trees["prefill"].stop()
            until_verdict(world, 1, "decode0", within_ms=int(1000 * max(deadlines_s)) + 500)
            job, decode = world.job("decode0", 1), world.trees["decode0"]
            if job.verdict is KVPoll.Failed:
                reasons.add(job.reason)
            world.until(lambda: not leftovers(decode))  # noqa: B023
    silent = {Reason.BOOTSTRAP_TIMEOUT, Reason.PEER_LOST}
    assert silent <= reasons <= silent | {Reason.TRANSPORT_FAILED, Reason.TRANSFER_STALLED}


@pytest.mark.parametrize("lost", ["_post_destination", "_deliver"])
def test_a_destination_that_never_arrives_ends_both_halves(
    monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """From decode to prefill's listener, or from there to the worker."""
    from pdrt.actors.decode_listener import DecodeListener
    from pdrt.actors.prefill_listener import PrefillListener

    with World() as world:
        succeeds(world, 0)
        with monkeypatch.context() as patch:
            actor = DecodeListener if lost == "_post_destination" else PrefillListener
            patch.setattr(actor, lost, lambda *args: None)
            world.both(1)
            longest_s = max(TIMEOUTS.bootstrap_s, TIMEOUTS.waiting_s, TIMEOUTS.stall_s)
            until_verdict(world, 1, "prefill", "decode0", within_ms=int(1000 * longest_s) + 500)
        for name in ("prefill", "decode0"):
            assert verdict(world, name, 1) is KVPoll.Failed
        succeeds(world, 2)
        world.settle()


class Starved(World):
    """Four times as many processes as CPUs: each runs in one of four steps."""

    quarter = 0

    def step(self, ms: int = 2) -> None:
        self.quarter += 1
        every = [p for tree in self.trees.values() for p in tree.running()]
        idle = [p for number, p in enumerate(every) if (number + self.quarter) % 4]
        for process in idle:
            process.frozen_ns = self.clock()
        super().step(ms)
        for process in idle:
            process.frozen_ns = 0


def lost_count(world: World) -> int:
    return sum(int(t.table.counters.sum(axis=0)[Counter.PEERS_LOST]) for t in world.trees.values())


def test_peers_on_a_starved_host_are_not_taken_for_dead() -> None:
    decodes = 16
    with Starved(decodes=decodes) as world:
        for number in range(decodes):
            world.both(number, f"decode{number}")
        world.until(lambda: len(world.ledger.landed) == decodes, step_ms=10)
        world.run(6000, step_ms=20)
        assert lost_count(world) == 0
        world.settle()


@pytest.mark.parametrize("tree", ["prefill", "decode0"])
def test_who_stood_still_itself_does_not_call_its_peers_silent(tree: str) -> None:
    """What they said is still in its socket when it goes on."""
    with World() as world:
        succeeds(world, 0)
        listener = world.trees[tree].processes["listener"].actor
        for _ in range(2):
            world.clock.now_ns += to_ns(2 * TIMEOUTS.peer_s)
            listener.tick(world.clock())
        assert lost_count(world) == 0
        succeeds(world, 1)
        for name in world.trees.keys() - {tree}:
            world.trees[name].stop()
        world.until(lambda: lost_count(world) > 0, within_ms=int(1000 * TIMEOUTS.peer_s) + 100)


def test_a_path_may_take_longer_to_open_than_a_peer_may_be_silent() -> None:
    with World(polls=1600) as world:
        world.both(1)
        until_state(world, "decode0", 1, KVPoll.WaitingForInput)
        assert world.now_ms - 10_000 > 2 * 1000 * TIMEOUTS.peer_s
        assert lost_count(world) == 0
        world.fabric.polls = 1
        until_verdict(world, 1, "prefill", "decode0")
        assert verdict(world, "decode0", 1) is KVPoll.Success
        world.settle()
