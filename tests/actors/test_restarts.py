"""What a listener that was restarted, or was not there, says of rooms that it never saw."""

from __future__ import annotations

import pytest

from pdrt.actors.decode_listener import DecodeListener
from pdrt.actors.decodes import COME_PEERS
from pdrt.actors.prefills import Stage
from pdrt.actors.transfer import TransferWorker
from pdrt.protocol.messages import (
    OLDEST,
    VERSION,
    Abort,
    AbortTaken,
    DestinationTaken,
    HelloReply,
    Opened,
)
from pdrt.protocol.peers import instance_digest
from pdrt.protocol.states import Event, KVPoll, Reason
from tests.actors.steps import (
    PHASES,
    moving,
    succeeds,
    to_phase,
    until_state,
    until_verdict,
    verdict,
)
from tests.actors.tree import control_of
from tests.actors.world import TIMEOUTS, World

BEAT_MS = int(1000 * TIMEOUTS.beat_s)


def listener_of(world: World) -> DecodeListener:
    listener = world.trees["decode0"].processes["listener"].actor
    assert isinstance(listener, DecodeListener)
    return listener


@pytest.mark.parametrize("side", ["prefill", "decode0"])
def test_a_room_that_opened_and_failed_while_there_was_no_listener_is_told(
    world: World, side: str
) -> None:
    succeeds(world, 0)
    other = "decode0" if side == "prefill" else "prefill"
    begin = {"prefill": world.send, "decode0": world.receive}
    begin[other](1)
    world.run(200)
    world.trees[side].kill("listener", again_ms=200)
    begin[side](1)
    world.run(10)
    world.abort(side, 1)
    world.until(lambda: world.job(side, 1).cleared, within_ms=50)
    until_verdict(world, 1, other, within_ms=600)
    assert world.job(other, 1).reason is Reason.PEER_ABORTED
    succeeds(world, 1)


@pytest.mark.parametrize("side", ["prefill", "decode0"])
def test_an_end_that_is_told_late_does_not_touch_the_next_use_of_the_id(
    world: World, side: str
) -> None:
    succeeds(world, 0)
    world.send(1)
    world.receive(1, pace_ms=500)
    until_state(world, "decode0", 1, KVPoll.WaitingForInput)
    world.trees[side].freeze("engine")  # so that it reads the verdict after its listener
    world.abort("prefill" if side == "decode0" else "decode0", 1)
    world.run(100)
    world.trees[side].thaw("engine")
    world.run(50)
    succeeds(world, 1)


@pytest.mark.parametrize("dead", [(), ("listener",), ("worker0", "listener")])
def test_a_room_that_prefill_does_not_know_is_quiet_if_listener_or_worker_was_there_all_along(
    world: World, dead: tuple[str, ...]
) -> None:
    succeeds(world, 0)
    world.receive(1)
    until_state(world, "decode0", 1, KVPoll.Transferring)
    world.run(50)
    for name in dead:
        world.trees["prefill"].kill(name)
        world.run(300)
    world.abort("decode0", 1)
    took_ms = world.until(lambda: world.job("decode0", 1).cleared, within_ms=3000)
    nobody_knows = len(dead) == 2
    assert world.trees["decode0"].forced == (["worker0"] if nobody_knows else [])
    assert nobody_knows or took_ms < 100


@pytest.mark.parametrize("side", ["prefill", "decode0"])
def test_an_abort_outlives_the_listener_that_heard_it(world: World, side: str) -> None:
    """Its room is cleared by then, so the table does not know it any more."""
    succeeds(world, 0)
    world.send(1)
    world.receive(1, pace_ms=10_000)
    until_state(world, "decode0", 1, KVPoll.WaitingForInput)
    world.run(100)
    world.post.weather.held_when_cut = 0.0
    world.post.cuts.add(frozenset(("prefill", "decode0")))
    world.abort(side, 1)
    world.until(lambda: world.job(side, 1).cleared)
    world.run(60)  # their listener has told them, in vain
    world.trees[side].kill("listener")
    world.run(20)
    world.post.mend("prefill", "decode0")
    other = "decode0" if side == "prefill" else "prefill"
    until_verdict(world, 1, other, within_ms=1500)
    assert world.job(other, 1).reason is Reason.PEER_ABORTED


def given_up_and_taken(world: World) -> None:
    """Decode gives room 1 up and prefill's listener knows; its half is still to be opened."""
    succeeds(world, 0)
    world.receive(1)
    until_state(world, "decode0", 1, KVPoll.Transferring)
    world.run(20)
    world.abort("decode0", 1)
    world.until(lambda: world.job("decode0", 1).cleared, within_ms=200)
    world.run(20)


def test_an_abort_outlives_the_listener_of_prefill_that_took_it(world: World) -> None:
    """Its half of the room is opened after that, so nobody there knows of it."""
    given_up_and_taken(world)
    world.trees["prefill"].kill("listener")
    world.send(1)
    until_verdict(world, 1, "prefill", within_ms=1000)
    assert world.job("prefill", 1).reason is Reason.PEER_ABORTED


def test_what_prefill_had_taken_is_not_said_again_of_an_id_that_means_another_room(
    world: World,
) -> None:
    given_up_and_taken(world)
    world.trees["prefill"].kill("listener")
    world.send(1)
    world.receive(1, pace_ms=300)  # so that its destination is no hint to whom the id belongs
    until_verdict(world, 1, "prefill", "decode0")
    assert verdict(world, "prefill", 1) is verdict(world, "decode0", 1) is KVPoll.Success


def test_another_instance_hears_nothing_of_what_its_predecessor_had_taken(world: World) -> None:
    given_up_and_taken(world)
    world.replace("prefill")
    world.both(2)
    until_verdict(world, 2, "decode0")
    succeeds(world, 3)
    world.send(1)  # by now this id is somebody else's
    world.run(300)
    assert verdict(world, "prefill", 1) is None
    world.abort("prefill", 1)


@pytest.mark.parametrize("phase", PHASES[2:])
def test_rooms_whose_prefill_was_replaced_while_there_was_no_listener_fail_at_once(
    world: World, phase: str
) -> None:
    """The new listener never saw the instance that its rooms are with; the table names it."""
    to_phase(world, phase)
    world.trees["decode0"].kill("listener", again_ms=100)
    world.replace("prefill")
    until_verdict(world, 1, "decode0", within_ms=500)
    assert world.job("decode0", 1).reason is Reason.PEER_RESTARTED
    succeeds(world, 2)


COME_MS = round(COME_PEERS * TIMEOUTS.peer_s * 1000)
assert COME_MS + 300 < TIMEOUTS.waiting_s * 1000


def test_rooms_whose_decode_went_while_prefill_had_no_listener_end_before_their_deadline(
    world: World,
) -> None:
    to_phase(world, "WaitingForInput")
    world.trees["prefill"].kill("listener", again_ms=100)
    world.replace("decode0")
    until_verdict(world, 1, "prefill", within_ms=COME_MS + 300)
    assert world.job("prefill", 1).reason is Reason.PEER_LOST
    succeeds(world, 2)


def test_who_lives_comes_to_a_new_listener_in_good_time(world: World) -> None:
    to_phase(world, "WaitingForInput")
    world.trees["prefill"].kill("listener", again_ms=100)
    world.run(COME_MS + 300)
    world.engine("prefill").unmute(1)
    until_verdict(world, 1, "prefill", "decode0")
    assert verdict(world, "prefill", 1) is verdict(world, "decode0", 1) is KVPoll.Success


def test_a_room_of_its_predecessor_that_is_heard_of_late_fails_when_it_is(world: World) -> None:
    """The prefill there has answered long ago, so nothing else would bring it up."""
    succeeds(world, 0)
    table, peer = world.trees["decode0"].table, world.trees["prefill"].control
    handle = table.open(1, 0, now_ns=world.clock())
    table.set_path(handle.slot, handle.generation, 0, instance_digest("another"))
    table.move(handle.slot, handle.generation, Event.PEER_KNOWN, now_ns=world.clock())
    listener_of(world).handle("engine", Opened(1, 0, *handle[1:], peer), world.clock())
    word = table.read(handle.slot, handle.generation)
    assert word is not None
    assert (word.state, word.reason) == (KVPoll.Failed, Reason.PEER_RESTARTED)
    table.clear(handle.slot, handle.generation)


def test_an_instance_is_not_believed_that_rooms_of_its_predecessor_are_quiet(world: World) -> None:
    """A room fails while decode has no listener.  The one that comes cannot say who was sent the
    destination first, and the prefill that is there by now has a half of that id, too."""
    to_phase(world, "WaitingForInput")
    decode = world.trees["decode0"]
    decode.kill("listener", again_ms=100)
    world.abort("decode0", 1)
    world.replace("prefill")
    world.send(1)
    until_verdict(world, 1, "prefill", within_ms=500)
    assert world.job("prefill", 1).reason is Reason.PEER_ABORTED
    assert world.job("prefill", 1).cleared
    world.run(300)
    word = decode.table.read(*world.job("decode0", 1).handles[0][1:])
    assert word is not None
    assert not word.quiet
    world.until(lambda: world.job("decode0", 1).cleared, within_ms=5000)
    assert decode.forced == ["worker0"]


def test_a_failure_outlives_the_listener_that_was_to_tell_it(world: World) -> None:
    """Not only what somebody chose: of a worker's death, too, the other side knows by us alone."""
    succeeds(world, 0)
    world.send(1)
    world.receive(1, pace_ms=100)
    until_state(world, "decode0", 1, KVPoll.WaitingForInput)
    world.trees["decode0"].freeze("listener")
    until_state(world, "decode0", 1, KVPoll.Transferring)
    world.trees["decode0"].kill("worker0")
    until_verdict(world, 1, "decode0", within_ms=100)
    assert world.job("decode0", 1).reason is Reason.WORKER_DIED
    world.run(30)  # where nothing can land without that worker, the slot is cleared by now
    world.trees["decode0"].kill("listener")
    until_verdict(world, 1, "prefill", within_ms=1000)
    assert world.job("prefill", 1).reason is Reason.WORKER_DIED


@pytest.mark.parametrize("side", ["prefill", "decode0"])
def test_an_abort_said_again_is_not_the_end_of_the_ids_next_room(world: World, side: str) -> None:
    """An engine says to a new listener what it gave up lately; the id may mean another room."""
    succeeds(world, 0)
    world.send(1)
    world.receive(1, pace_ms=10_000)
    until_state(world, "decode0", 1, KVPoll.WaitingForInput)
    world.abort(side, 1)
    world.until(lambda: world.job("prefill", 1).cleared and world.job("decode0", 1).cleared)
    moving(world, 1)
    world.trees[side].kill("listener")
    until_verdict(world, 1, "prefill", "decode0")
    assert verdict(world, "prefill", 1) is verdict(world, "decode0", 1) is KVPoll.Success


def test_a_destination_that_never_left_is_quiet_though_nobody_says_so(world: World) -> None:
    succeeds(world, 0)
    world.receive(1, pace_ms=100)
    until_state(world, "decode0", 1, KVPoll.WaitingForInput)
    world.run(60)
    world.post.cuts.add(frozenset(("prefill", "decode0")))
    world.trees["decode0"].kill("worker0")  # a new one is to be introduced first
    until_state(world, "decode0", 1, KVPoll.Transferring)
    world.abort("decode0", 1)
    world.until(lambda: world.job("decode0", 1).cleared, within_ms=100)
    world.post.mend("prefill", "decode0")


def test_an_old_listener_is_believed_that_a_room_failed_and_not_that_it_is_quiet(
    world: World,
) -> None:
    succeeds(world, 0)
    world.receive(1)
    until_state(world, "decode0", 1, KVPoll.Transferring)
    world.run(20)  # and its destination has left
    listener, instance = listener_of(world), world.trees["decode0"].instance
    link = f"prefill:{world.trees['prefill'].control}"
    handle = world.job("decode0", 1).handles[0]
    theirs = (1, 0, handle.slot, handle.generation, instance)
    session = f"{world.trees['prefill'].instance}#0"
    listener.handle(link, Abort(*theirs, Reason.ABORTED, True, session), world.clock())
    listener.handle(link, AbortTaken(*theirs, True, session), world.clock())
    word = world.trees["decode0"].table.read(*handle[1:])
    assert word is not None
    assert (word.state, word.quiet) == (KVPoll.Failed, False)


def test_what_is_said_to_another_instance_is_not_heard(world: World) -> None:
    succeeds(world, 0)
    world.receive(1)
    until_state(world, "decode0", 1, KVPoll.Transferring)
    handle = world.job("decode0", 1).handles[0]
    taken = DestinationTaken(handle.slot, handle.generation, "another")
    listener_of(world).handle("anybody", taken, world.clock())
    assert verdict(world, "decode0", 1) is None
    assert not world.trees["decode0"].table.taken(*handle[1:])


def test_a_late_answer_of_an_old_listener_keeps_no_room_from_its_prefill(world: World) -> None:
    succeeds(world, 0)
    world.trees["prefill"].kill("listener")
    succeeds(world, 1)
    tree, listener = world.trees["prefill"], listener_of(world)
    digest = tree.shape.layout.digest
    late = HelloReply(VERSION, OLDEST, tree.instance, 1, digest)
    listener.handle(f"prefill:{tree.control}", late, world.clock())
    world.both(2)
    assert until_verdict(world, 2, "prefill", "decode0", within_ms=500) < 200
    assert verdict(world, "decode0", 2) is KVPoll.Success


@pytest.mark.parametrize("sweeps", [True, False])
def test_a_successor_never_goes_on_with_a_room_that_the_dead_worker_moved(
    world: World, sweeps: bool
) -> None:
    """It is there before anybody has swept, and the engine sends it every chunk again.  Its own
    bytes would be right, and Success too soon: the dead one's may land after it."""
    moving(world)
    tree = world.trees["prefill"]
    tree.sweeps = sweeps
    tree.kill("worker0", again_ms=1)
    world.run(40)
    worker = tree.processes["worker0"].actor
    assert isinstance(worker, TransferWorker)
    world.run(30)
    assert not worker._rooms
    assert verdict(world, "decode0", 1) is not KVPoll.Success
    tree.sweeps = True
    until_verdict(world, 1, "prefill", "decode0")
    assert world.job("prefill", 1).reason is Reason.WORKER_DIED
    assert verdict(world, "decode0", 1) is KVPoll.Failed
    succeeds(world, 2)


@pytest.mark.parametrize("side", ["prefill", "decode0"])
def test_a_new_listener_hears_of_its_workers_at_once(world: World, side: str) -> None:
    """Not when they next say by themselves that they are up, every 250 ms."""
    succeeds(world, 0)
    for room in range(1, 5):
        world.run(300 + 70 * room)
        world.trees[side].kill("listener", again_ms=1)
        world.both(room)
        assert until_verdict(world, room, "prefill", "decode0") < 150
        assert verdict(world, "decode0", room) is KVPoll.Success


@pytest.mark.parametrize("whole", [True, False], ids=["tree", "listener"])
def test_a_prefill_that_is_replaced_before_it_is_introduced_is_not_taken_for_its_predecessor(
    world: World, whole: bool
) -> None:
    """Its predecessor answered our hello; it has our introduction, and knows us by that."""
    prefill = listener_of(world)._prefills.dial(control_of("prefill"), world.clock())
    world.until(lambda: prefill.stage is Stage.INTRODUCING)
    predecessor = prefill.session
    if whole:
        world.replace("prefill")
    else:
        world.trees["prefill"].kill("listener")
    world.until(lambda: prefill.ready)
    world.run(3 * BEAT_MS)
    assert prefill.session != predecessor
    succeeds(world, 1)
