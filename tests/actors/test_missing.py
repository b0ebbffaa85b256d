"""A decode tree that is gone takes prefill's half of its requests with it, asked for or not."""

from __future__ import annotations

import pytest

from pdrt.actors.missing import GREETED_NS, MISSED_NS, MISSING_MAX, Missing
from pdrt.actors.past import Room
from pdrt.clock import MILLISECOND_NS
from pdrt.protocol.states import KVPoll, Reason
from pdrt.shm_status import Handle
from tests.actors.steps import succeeds, to_phase, until_verdict, verdict
from tests.actors.world import TIMEOUTS, World

BEATS_MS = round(2 * TIMEOUTS.beat_s * 1000)
BOOTSTRAP_MS = round(TIMEOUTS.bootstrap_s * 1000)
assert 2 * BEATS_MS < TIMEOUTS.peer_s * 1000 < BOOTSTRAP_MS


@pytest.mark.parametrize("phase", ["Bootstrapping", "WaitingForInput", "Transferring"])
def test_rooms_of_a_decode_that_is_gone_end_before_its_silence_would(phase: str) -> None:
    with World() as world:
        to_phase(world, phase)
        world.desert("decode0")
        until_verdict(world, 1, "prefill", within_ms=BEATS_MS + 50)
        assert world.job("prefill", 1).reason is Reason.PEER_LOST


def test_a_request_whose_other_half_a_dead_decode_was_sent_ends() -> None:
    with World() as world:
        succeeds(world, 0)
        world.desert("decode0")
        world.send(1)
        until_verdict(world, 1, "prefill", within_ms=2 * BEATS_MS + 100)
        assert world.job("prefill", 1).reason is Reason.PEER_LOST
        world.send(2)  # it is known by now
        until_verdict(world, 2, "prefill", within_ms=BEATS_MS + 50)


def test_the_living_keep_their_requests() -> None:
    with World(decodes=2) as world:
        succeeds(world, 0, "decode0")
        succeeds(world, 1, "decode1")
        world.desert("decode0")
        world.run(3 * BEATS_MS)
        world.send(2)
        world.run(BEATS_MS // 2)  # not at once, but in good time
        world.receive(2, "decode1", pace_ms=2 * BEATS_MS)
        world.send(3)
        until_verdict(world, 2, "prefill", "decode1")
        assert verdict(world, "prefill", 2) is verdict(world, "decode1", 2) is KVPoll.Success
        until_verdict(world, 3, "prefill", within_ms=BEATS_MS)


def test_a_router_that_asks_prefill_first_gives_decodes_the_time_that_they_take() -> None:
    late_ms = 4 * BEATS_MS
    with World(decodes=2) as world:
        for room, decode in enumerate(["decode0", "decode1"]):
            world.send(room)
            world.run(late_ms)
            world.receive(room, decode)
            until_verdict(world, room, "prefill", decode)
        world.desert("decode0")
        world.run(3 * BEATS_MS)
        world.send(2)
        world.run(late_ms)
        world.receive(2, "decode1")
        until_verdict(world, 2, "prefill", "decode1")
        assert verdict(world, "prefill", 2) is KVPoll.Success


@pytest.mark.parametrize("quiet_ms", [0, 1500], ids=["at once", "when rooms wait for it"])
def test_a_decode_that_came_back_is_waited_for(quiet_ms: int) -> None:
    with World() as world:
        succeeds(world, 0)
        control = world.trees["decode0"].control
        world.post.deserted.add(control)
        world.trees["decode0"].freeze("listener")  # stands for a tree that is gone
        world.send(1)
        until_verdict(world, 1, "prefill")
        world.post.deserted.clear()
        world.replace("decode0")
        world.run(quiet_ms)
        world.send(2)
        world.receive(2)
        until_verdict(world, 2, "prefill", "decode0")
        assert verdict(world, "prefill", 2) is KVPoll.Success
        world.send(3)
        world.run(BOOTSTRAP_MS - 100)
        assert verdict(world, "prefill", 3) is None


def test_a_silent_decode_whose_port_is_open_keeps_its_rooms_as_long_as_ever() -> None:
    with World() as world:
        to_phase(world, "WaitingForInput")
        world.trees["decode0"].freeze("listener")
        world.run(round(TIMEOUTS.peer_s * 1000) - 100)
        assert verdict(world, "prefill", 1) is None


# --- the arithmetic alone ---


def room(seen_ns: int) -> Room:
    return Room(Handle(1, 0, 1), 0, seen_ns)


def test_nobody_is_missing_at_first_nor_after_a_while() -> None:
    missing, late = Missing(1.0), room(0)
    assert missing.rooms([late], MISSED_NS) == []
    missing.lose("a:1", 0)
    assert missing.rooms([late], MISSED_NS - 1) == [late]
    assert missing.rooms([late], MISSED_NS) == []


def test_whoever_says_hello_may_be_the_one() -> None:
    missing, late = Missing(0.5), room(0)
    missing.lose("a:1", 0)
    missing.greet("d", GREETED_NS)
    assert missing.rooms([late], 2 * GREETED_NS - 1) == []
    assert missing.rooms([late], 2 * GREETED_NS) == [late]
    missing.find("d", "a:1")
    assert missing.rooms([late], 2 * GREETED_NS) == []


def test_patience_fades_but_never_below_two_beats() -> None:
    missing = Missing(0.5)
    missing.lose("a:1", 0)
    missing.claim(room(0), 3000 * MILLISECOND_NS)
    waits = [room(0)]
    assert missing.rooms(waits, 5999 * MILLISECOND_NS) == []
    assert missing.rooms(waits, 6001 * MILLISECOND_NS) == waits
    for _ in range(2000):
        missing.claim(room(0), 0)
    assert missing.rooms(waits, 1000 * MILLISECOND_NS) == []
    assert missing.rooms(waits, 1001 * MILLISECOND_NS) == waits


def test_a_room_that_was_asked_for_is_not_taken() -> None:
    missing, late = Missing(0.5), room(0)
    missing.lose("a:1", 0)
    missing.claim(late, 1)
    assert missing.rooms([late], MISSED_NS - 1) == []


def test_the_missing_are_bounded() -> None:
    missing = Missing(0.5)
    for i in range(2 * MISSING_MAX):
        missing.lose(f"a:{i}", i)
        missing.greet(f"d{i}", i)
    assert len(missing._since_ns) == len(missing._greeted_ns) == MISSING_MAX
