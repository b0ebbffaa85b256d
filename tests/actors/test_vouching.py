"""What has landed is believed once it is sure that no other use of its id has its destination."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.actors import decodes, past
from pdrt.actors.past import Room
from pdrt.actors.transfer import TransferWorker
from pdrt.actors.vouching import Vouching, is_before
from pdrt.mail.mailbox import Address
from pdrt.protocol.messages import (
    Abort,
    AnyMessage,
    Destination,
    Expect,
    Landed,
    Recall,
    Recalled,
)
from pdrt.protocol.states import KVPoll, Reason
from pdrt.shm_status import Handle
from tests.actors.steps import until_state, until_verdict, verdict
from tests.actors.test_uses import landed_unheard
from tests.actors.world import World

SESSION, FORMER = "p#2", "p#1"
THEIRS = "d", 3, 5
ASKED = Destination(7, 0, 3, 5, "d", 1, b"", 0, SESSION, FORMER)


class Post:
    """Keeps what is posted."""

    def __init__(self) -> None:
        self.sent: list[tuple[Address, AnyMessage]] = []

    def post(self, to: Address, message: AnyMessage, *, lazy: bool = False) -> None:
        self.sent.append((to, message))

    def link(self, name: str, endpoint: str, *, from_peer: bool = False) -> None:
        raise NotImplementedError

    def unlink(self, name: str) -> None:
        raise NotImplementedError


class Decodes:
    """Knows one."""

    def get(self, instance: str) -> SimpleNamespace | None:
        return SimpleNamespace(address="decode") if instance == "d" else None


class Desk:
    """A listener's vouching, and its worker's answers."""

    def __init__(self) -> None:
        self.past = past.Past(SESSION, 0)
        self.open_rooms: dict[past.Key, Room] = {}
        self.post = Post()
        decodes = cast("decodes.Decodes", Decodes())
        self.vouching = Vouching(SESSION, 1, self.post, decodes, self.past, self.open_rooms)

    def ask(self, use: int, rank: int = 0) -> list[AnyMessage]:
        """What is posted for that."""
        del self.post.sent[:]
        self.vouching.ask("decode", Expect(7, rank, 3, 5, "d", True, FORMER, use))
        return [message for _, message in self.post.sent]

    def recalled(self, *, taken: bool = False, use: int = 0, since: int = 0) -> list[AnyMessage]:
        del self.post.sent[:]
        self.vouching.recalled(Recalled(3, 5, "d", taken, use, since))
        return [message for _, message in self.post.sent]


def landed(use: int) -> Landed:
    return Landed(7, 0, 3, 5, 0, 0, "d", use, SESSION)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_the_worker_is_asked_what_listeners_before_gave_away(desk: Desk) -> None:
    assert desk.ask(4) == desk.ask(4) == [Recall(3, 5, "d")], "it may have been lost"
    assert desk.recalled() == [landed(4)]
    assert desk.ask(4) == [landed(4)], "now we know"


def test_a_rank_that_is_none_is_asked_of_nobody(desk: Desk) -> None:
    assert desk.ask(4, rank=1) == []


@pytest.mark.parametrize("use", [4, 5, 0])
def test_what_has_landed_is_confirmed_unless_another_use_had_its_destination(
    desk: Desk, use: int
) -> None:
    """Of use 0 the worker does not know any more which it was."""
    desk.ask(4)
    answer = desk.recalled(taken=True, use=use)
    assert answer == ([landed(4)] if use == 4 else [desk.past.lost((7, 0), THEIRS)])


def test_an_open_room_of_another_use_that_has_the_destination_is_the_answer(desk: Desk) -> None:
    desk.open_rooms[7, 0] = room = Room(Handle(7, 1, 9), 0, use=5)
    desk.ask(4)
    assert desk.recalled(taken=True, use=5) == []
    assert desk.ask(5) == [landed(5)], "its own worker says so"
    desk = Desk()
    desk.open_rooms[7, 0] = room
    desk.ask(4)
    assert desk.recalled(taken=True, use=6) == [desk.past.lost((7, 0), THEIRS)], "it is another's"


@pytest.mark.parametrize("use", [4, 5])
def test_who_knows_that_a_room_has_landed_is_believed_if_nobody_has_said_how_it_ended(
    desk: Desk, use: int
) -> None:
    """Its slot was cleared before we looked, and the worker died with what it had to say to us."""
    room = Room(Handle(7, 1, 9), 0, 5, theirs=THEIRS, destination=ASKED)
    assert desk.past.taken.take(ASKED, room.handle, room.use)
    desk.past.lose(room)
    (answer,) = desk.ask(use)
    assert isinstance(answer, Landed if use == 5 else Abort)
    assert desk.past.over[room.theirs] == answer


def test_what_is_confirmed_is_given_to_nobody_any_more(desk: Desk) -> None:
    desk.past.keep_early((7, 0), ASKED, 0)
    desk.ask(4)
    assert desk.recalled() == [landed(4)]
    assert desk.past.take_questions((7, 0)) == (None, None)
    assert not desk.past.taken.take(ASKED, Handle(7, 1, 9), 6)
    assert desk.ask(6) == [landed(4)], "how it was, is the answer"


# --- is it quiet? ---------------------------------------------------------------------------------


def gave_up(first: str) -> Abort:
    return Abort(7, 0, 3, 5, "d", Reason.ABORTED, session=first)


def given_up(desk: Desk, first: str) -> list[AnyMessage]:
    """Decode gave up a room of which nothing is known; what the worker is asked for that."""
    abort = gave_up(first)
    desk.past.give_up((7, 0), abort, 0, opened=False)
    del desk.post.sent[:]
    desk.vouching.doubt(abort)
    return [message for _, message in desk.post.sent]


@pytest.mark.parametrize(
    ("taken", "since", "quiet"),
    [(False, 0, True), (False, 1, True), (False, 3, False), (False, 4, False), (True, 0, False)],
)
def test_what_the_worker_never_had_is_quiet_if_it_was_there_before_who_was_sent_it_first(
    taken: bool, since: int, quiet: bool
) -> None:
    desk = Desk()
    desk.past = desk.past.__class__("p#5", 0)
    desk.vouching = Vouching(
        "p#5", 1, desk.post, cast("decodes.Decodes", Decodes()), desk.past, desk.open_rooms
    )
    assert given_up(desk, "p#3") == [Recall(3, 5, "d")]
    said = desk.recalled(taken=taken, since=since)
    assert said == ([desk.past.over[THEIRS]] if quiet else [])
    over = desk.past.over[THEIRS]
    assert isinstance(over, Abort)
    assert over.quiet is quiet


@pytest.mark.parametrize("first", [SESSION, "another#1", "?", ""])
def test_of_what_another_tree_was_sent_first_the_worker_knows_nothing(first: str) -> None:
    """And of what this listener was sent first, it knows itself."""
    assert given_up(Desk(), first) == []


def test_what_this_listener_gave_away_itself_it_asks_nobody_about(desk: Desk) -> None:
    assert desk.past.taken.take(ASKED, Handle(7, 1, 9), 4)
    assert given_up(desk, SESSION) == []


def test_what_is_no_failed_room_or_is_quiet_already_is_not_asked_for(desk: Desk) -> None:
    desk.vouching.doubt(gave_up(FORMER))
    assert desk.post.sent == []
    given_up(desk, FORMER)
    desk.recalled()
    assert given_up(desk, SESSION) == []
    desk.vouching.doubt(gave_up(FORMER))
    assert desk.post.sent == []


def test_what_was_asked_longest_ago_is_forgotten_first(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past, "MEMORY_MAX", 2)
    for slot in range(5):
        desk.vouching.ask("decode", Expect(7, 0, slot, 5, "d", True, FORMER, 4))
    for slot in range(5):
        del desk.post.sent[:]
        desk.vouching.recalled(Recalled(slot, 5, "d", False))
        assert len(desk.post.sent) == (slot >= 3)


@given(st.integers(1, 2047), st.integers(1, 1000))
def test_incarnations_wrap(since: int, steps: int) -> None:
    later = (since + steps) % 2048
    assert is_before(since, later)
    assert not is_before(since, since)
    assert later == 0 or not is_before(later, since)


# --- whole trees ---------------------------------------------------------------------------------


def given_away_between(world: World, *, pace_ms: int) -> None:
    """The first use of room 1 has landed, which is unheard.  A second listener gives its
    destination to the second use, which moves; then decode hears of the first."""
    frame = landed_unheard(world)
    world.trees["prefill"].kill("worker0", again_ms=1)
    world.run(40)
    world.send(1, pages_count=4, chunks=4, pace_ms=pace_ms)
    until_state(world, "prefill", 1, KVPoll.Transferring)
    world.post._arrive(frame)
    world.run(30)
    assert verdict(world, "decode0", 1) is None, "the second listener knows better"


def test_a_third_listener_does_not_confirm_what_the_second_gave_away(world: World) -> None:
    given_away_between(world, pace_ms=300)
    world.trees["prefill"].kill("listener", again_ms=1)
    until_verdict(world, 1, "decode0", within_ms=3000)
    assert verdict(world, "decode0", 1) is verdict(world, "prefill", 1) is KVPoll.Success
    world.run(1500)
    world.settle()


def test_nor_if_what_has_it_is_over_before_it_looks(world: World) -> None:
    """The second use is given up half-way, while there is no listener."""
    given_away_between(world, pace_ms=60)
    world.trees["prefill"].kill("listener", again_ms=5)
    world.abort("prefill", 1)
    until_verdict(world, 1, "decode0", within_ms=3000)
    job = world.job("decode0", 1)
    assert (job.verdict, job.reason) == (KVPoll.Failed, Reason.PEER_LOST)
    world.settle()


def test_a_deliver_that_comes_after_the_question_is_refused(world: World) -> None:
    """A dead listener's order may still be on its way to the worker."""
    worker = world.trees["prefill"].processes["worker0"].actor
    assert isinstance(worker, TransferWorker)
    worker.handle("listener", Recall(3, 5, "d"), world.clock())
    destination = Destination(7, 0, 3, 5, "d", 1, b"", 0, FORMER, FORMER)
    assert not worker._taken.take(destination, Handle(7, 1, 9), 6)
