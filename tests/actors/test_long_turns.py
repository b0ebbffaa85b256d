"""However many rooms there are, an actor that works shows that it does: it is not killed as hung in
the middle of what one message, or one tick, asks of it.

Nothing here is timed.  Between two beats no line of pdrt is run more often than the items between
them explain; a loop over all rooms that does not beat is one whose lines are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pdrt.actors.base import Beating
from pdrt.actors.boot import FIRST_ENGINE_ROW, FIRST_WORKER_ROW
from pdrt.clock import MILLISECOND_NS, SECOND_NS
from pdrt.process_rows import Owner
from pdrt.protocol.messages import (
    Expect,
    Heartbeat,
    HelloReply,
    Landed,
    PeerGone,
    Resync,
    WorkerUp,
)
from pdrt.protocol.peers import instance_digest
from pdrt.protocol.states import Event, Reason
from pdrt.shm_status import Handle
from tests.actors.scenes import (
    ITEMS_A_BEAT,
    LINK,
    PEER,
    ROOMS,
    DecodeScene,
    JanitorScene,
    PrefillScene,
    Scene,
    WorkerScene,
)
from tests.actors.world import LAYOUT

# How often one line may be run for one item: what is asked of a table is asked several times.
RUNS_AN_ITEM = 20
RUNS_MAX = ITEMS_A_BEAT * RUNS_AN_ITEM
assert 3 * RUNS_MAX < ROOMS

# --- what asks for much in one turn ---

Act = Callable[[], object]


def prefill_sees_them_first(scene: PrefillScene) -> Act:
    return lambda: scene.actor.handle("worker0", WorkerUp(0, 1, {}), scene.now_ns)


def prefill_ticks(scene: PrefillScene) -> Act:
    scene.match()
    return lambda: scene.actor.tick(scene.later())


def prefill_delivers_again(scene: PrefillScene) -> Act:
    scene.match()
    return lambda: scene.actor.tick(scene.later(1100 * MILLISECOND_NS))


def prefill_has_another_worker(scene: PrefillScene) -> Act:
    scene.match()
    return lambda: scene.say("worker0", WorkerUp(0, 2, {"fake": b""}))


def prefill_hears_that_all_wait(scene: PrefillScene) -> Act:
    scene.meet()
    waiting = np.arange(ROOMS, dtype="<u8").tobytes()
    return lambda: scene.say(PEER, Heartbeat("d", 1, waiting))


def prefill_hears_of_one_whom_it_serves(scene: PrefillScene) -> Act:
    scene.match()
    return lambda: scene.say(PEER, Heartbeat("d", 1, b""))


def prefill_loses_the_decode(scene: PrefillScene) -> Act:
    scene.match()
    for room in range(ROOMS, 2 * ROOMS):
        scene.say(PEER, scene.destination(room))
        scene.say(PEER, Expect(room + ROOMS, 0, room + ROOMS, 1, "d", False))
    scene.actor.tick(scene.later())
    return lambda: [scene.actor.tick(scene.later(150 * MILLISECOND_NS)) for _ in range(25)]


def prefill_misses_a_decode(scene: PrefillScene) -> Act:
    scene.meet()
    scene.actor._decodes.missing.lose("h:9", scene.now_ns)
    return lambda: scene.actor.tick(scene.later(10 * SECOND_NS))


def prefill_ends_the_orphans(scene: PrefillScene) -> Act:
    for handle in scene.handles:
        scene.engine.set_path(*handle[1:], 1, 12345)
    scene.actor.tick(scene.now_ns)
    return lambda: [scene.actor.tick(scene.later(150 * MILLISECOND_NS)) for _ in range(50)]


def prefill_reads_that_all_failed(scene: PrefillScene) -> Act:
    scene.match()
    scene.fail()
    return lambda: scene.actor.tick(scene.later())


def prefill_tells_of_the_failed_again(scene: PrefillScene) -> Act:
    scene.match()
    scene.move(Event.CHUNK_POSTED, owner=Owner(FIRST_WORKER_ROW, 1))
    scene.fail()
    scene.actor.tick(scene.later())
    return lambda: scene.actor.tick(scene.later(SECOND_NS))


def prefill_ends_the_late(scene: PrefillScene) -> Act:
    scene.actor.tick(scene.later())
    return lambda: scene.actor.tick(scene.later(61 * SECOND_NS))


def prefill_finds_them_cleared(scene: PrefillScene) -> Act:
    scene.match()
    scene.fail()
    scene.clear()
    return lambda: [scene.actor.tick(scene.later(200 * MILLISECOND_NS)) for _ in range(2)]


def decode_is_introduced(scene: DecodeScene) -> Act:
    scene.open()
    return lambda: scene.say(LINK, scene.introduced())


def decode_ticks_and_beats(scene: DecodeScene) -> Act:
    scene.open()
    scene.say(LINK, scene.introduced())
    return lambda: scene.actor.tick(scene.later())


def decode_sends_again(scene: DecodeScene) -> Act:
    scene.send()
    return lambda: scene.actor.tick(scene.later(600 * MILLISECOND_NS))


def decode_hears_that_all_are_served(scene: DecodeScene) -> Act:
    scene.send()
    pairs = np.array([handle[1:] for handle in scene.handles], dtype="<u8").tobytes()
    return lambda: scene.say(LINK, Heartbeat("p", 1, pairs))


def decode_meets_the_next_listener(scene: DecodeScene) -> Act:
    scene.send()
    scene.say(LINK, Resync("p", 2))
    scene.say(LINK, HelloReply(1, 1, "p", 2, LAYOUT.digest))
    return lambda: scene.say(LINK, scene.introduced())


def decode_meets_another_instance(scene: DecodeScene) -> Act:
    scene.send()
    return lambda: scene.say(LINK, HelloReply(1, 1, "q", 1, LAYOUT.digest))


def decode_forgets_what_another_knows_nothing_of(scene: DecodeScene) -> Act:
    scene.send()
    scene.fail()
    scene.actor.tick(scene.later())
    return lambda: scene.say(LINK, HelloReply(1, 1, "q", 1, LAYOUT.digest))


def decode_is_refused(scene: DecodeScene) -> Act:
    scene.open()
    refusal = HelloReply(1, 1, "p", 1, LAYOUT.digest, Reason.PEER_REFUSED, "no")
    return lambda: scene.say(LINK, refusal)


def decode_loses_the_prefill(scene: DecodeScene) -> Act:
    scene.send()
    scene.actor.tick(scene.later())
    return lambda: [scene.actor.tick(scene.later(150 * MILLISECOND_NS)) for _ in range(25)]


def decode_reads_that_all_failed(scene: DecodeScene) -> Act:
    scene.send()
    scene.fail()
    return lambda: scene.actor.tick(scene.later())


def decode_tells_of_the_failed_again(scene: DecodeScene) -> Act:
    scene.send()
    scene.fail()
    scene.actor.tick(scene.later())
    return lambda: scene.actor.tick(scene.later(SECOND_NS))


def decode_finds_those_that_failed_before_it(scene: DecodeScene) -> Act:
    scene.send()
    scene.fail()
    for handle in scene.handles:
        scene.engine.set_path(*handle[1:], 1, instance_digest("p"))
    scene.begin()
    scene.handles = [_opened(scene)]
    scene.open()
    return lambda: scene.say(LINK, scene.introduced())


def _opened(scene: Scene) -> Handle:
    handle = scene.engine.open(ROOMS, 0, now_ns=scene.now_ns)
    assert handle is not None
    return handle


def worker_ticks(scene: WorkerScene) -> Act:
    scene.take(opened=True)
    return lambda: scene.actor.tick(scene.later())


def worker_opens_the_path(scene: WorkerScene) -> Act:
    scene.take(opened=False)
    return lambda: scene.actor.tick(scene.now_ns)


def worker_loses_the_path(scene: WorkerScene) -> Act:
    scene.take(opened=True)
    return lambda: scene.say(PeerGone("d"))


def worker_fences(scene: WorkerScene) -> Act:
    scene.take(opened=True)
    scene.fail()
    return lambda: scene.actor.tick(scene.later())


def worker_repeats_its_news(scene: WorkerScene) -> Act:
    news = scene.actor._news
    for room, slot, generation in scene.handles:
        news.tell("peer:d", Landed(room, 0, slot, generation, 0, 1), scene.now_ns)
    return lambda: scene.actor.tick(scene.later(SECOND_NS))


def janitor_buries(scene: JanitorScene) -> Act:
    scene.engine.bury(FIRST_ENGINE_ROW)
    return lambda: scene.actor.sweep(scene.later())


def janitor_clears(scene: JanitorScene) -> Act:
    scene.engine.bury(FIRST_ENGINE_ROW)
    scene.actor.sweep(scene.later())
    return lambda: scene.actor.sweep(scene.later())


def janitor_settles(scene: JanitorScene) -> Act:
    scene.move(Event.PEER_KNOWN)
    scene.move(Event.CHUNK_POSTED, owner=Owner(FIRST_WORKER_ROW, 1))
    scene.fail()
    return lambda: scene.actor.sweep(scene.later())


def janitor_ends_the_late(scene: JanitorScene) -> Act:
    return lambda: scene.actor.sweep(scene.later(61 * SECOND_NS))


SCENES: dict[str, Callable[[], Scene]] = {
    "prefill": PrefillScene,
    "decode": DecodeScene,
    "worker": WorkerScene,
    "janitor": JanitorScene,
}
CASES: list[Callable[[Any], Act]] = [
    act for name, act in list(globals().items()) if name.partition("_")[0] in SCENES
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_no_turn_is_so_long_that_its_actor_looks_hung(case: Callable[[Any], Act]) -> None:
    scene = SCENES[case.__name__.partition("_")[0]]()
    try:
        act = case(scene)
        with scene.stretches.watched():
            act()
        runs, where = scene.stretches.worst
        assert runs <= RUNS_MAX, f"{where} was run {runs} times without a beat"
        assert scene.stretches.beats_count >= ROOMS // ITEMS_A_BEAT  # it did go through them
    finally:
        scene.close()


def test_many_short_loops_are_one_long_one() -> None:
    beats: list[int] = []
    beating = Beating(lambda: beats.append(1), 10)
    for _ in range(100):
        assert list(beating(range(3))) == [0, 1, 2]
    assert len(beats) == 29  # the first comes after ten


def test_who_stops_half_way_has_done_half_of_it_at_least() -> None:
    beats: list[int] = []
    beating = Beating(lambda: beats.append(1), 10)
    for _ in range(100):
        assert 1 in beating([0, 1, 2])
    assert 2 * 100 // 10 - 1 <= len(beats) <= 3 * 100 // 10
