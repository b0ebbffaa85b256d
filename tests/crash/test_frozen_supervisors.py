"""Both supervisors are frozen, and with them the janitors: rooms end in time, pages become quiet,
new rooms succeed.  What waits is only what a supervisor alone can do."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.crash.deal import BIG, Deal
from tests.crash.party import FAILED, VERDICTS, AnyParty, Party
from tests.crash.trees import TIMEOUTS, Spawner, Tree, Victims
from tests.waiting import wait_until

SLACK_S = 6.0  # two busy cores
#: A half that waits for a peer's is told of its end, which may itself have been a deadline.
LONGEST_S = TIMEOUTS.bootstrap_s + TIMEOUTS.waiting_s + SLACK_S


class Two:
    """A prefill tree and a decode tree, and this process as both engines."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        spawner = Spawner()
        stack.callback(spawner.close)
        self.trees = [Tree(spawner, folder, role, role, "nixl") for role in ("prefill", "decode")]
        for tree in self.trees:
            tree.launch()
            stack.callback(tree.stop)
        for tree in self.trees:
            tree.wait_ready()
        self.prefill, self.decode = (
            stack.enter_context(contextlib.closing(Party(tree.attach, "unswept")))
            for tree in self.trees
        )
        self.supervisors = Victims.of([tree.pid for tree in self.trees])
        stack.callback(self.supervisors.close)
        stack.callback(self.supervisors.signal, signal.SIGCONT)

    def deal(self, first_page: int, aux: int, chunks: tuple[int, ...]) -> Deal:
        return Deal(self.prefill, self.decode, self.trees[0].control, first_page, aux, chunks)

    def wait(self, condition: Callable[[], object], deadline_s: float, what: str) -> None:
        """wait_until, with both engines ticking."""

        def turn() -> object:
            self.prefill.tick()
            self.decode.tick()
            return condition()

        wait_until(turn, deadline_s, what)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    pytest.importorskip("nixl_cu12")
    with contextlib.ExitStack() as stack:
        yield Two(tmp_path_factory.mktemp("frozen"), stack)


def reach(two: Two, deal: Deal, side: str, state: str) -> None:
    two.wait(lambda: deal.state(side) == state, 10, f"{deal} to be {state}")


def ended(deal: Deal, side: str) -> bool:
    return deal.state(side) in VERDICTS


def went_on(deal: Deal) -> bool:
    deal.go_on()
    return deal.over()


def quiet(party: AnyParty, room: int) -> bool:
    return bool(party.peek(room)["quiet"])


@pytest.mark.timeout(120)
def test_rooms_end_and_pages_become_quiet_though_no_supervisor_moves(two: Two) -> None:
    waiting, told, moving = (two.deal(200 + i, i, (1, 1)) for i in (1, 3, 5))
    aborted = two.deal(0, 0, (BIG, 1))
    deals = [waiting, told, moving]
    for deal in [*deals, aborted]:
        deal.open()
        reach(two, deal, "decode", "WaitingForInput")
    for deal in (told, moving, aborted):
        deal.tell()
        reach(two, deal, "prefill", "WaitingForInput")
    moving.send()
    reach(two, moving, "prefill", "Transferring")
    two.supervisors.signal(signal.SIGSTOP)

    # A room that ends while its bytes move: its worker lives to say that they are over.
    aborted.send()
    reach(two, aborted, "prefill", "Transferring")
    two.decode.abort(aborted.room)
    for side, party in aborted.sides().items():
        two.wait(partial(party.over, aborted.room), SLACK_S, f"{side}'s verdict")
        two.wait(partial(quiet, party, aborted.room), SLACK_S, f"{side} to be quiet")

    # Now the engines are as good as frozen, too: nobody ticks or polls, and `peek` only looks.
    for deal in deals:
        for side, party in deal.sides().items():
            wait_until(partial(ended, deal, side), LONGEST_S, f"{side} of {deal} to end")
            assert deal.state(side) == FAILED, deal
            wait_until(partial(quiet, party, deal.room), SLACK_S, f"{side} to be quiet")
    for deal in [*deals, aborted]:
        deal.clear()

    for deal in [two.deal(240 + i, 10 + i, (1,)) for i in range(5)]:
        deal.open()
        two.wait(partial(went_on, deal), SLACK_S, "a new room to be over")
        deal.check_success()
        deal.clear()

    two.supervisors.signal(signal.SIGCONT)
    for tree in two.trees:
        wait_until(tree.is_ready, SLACK_S, f"{tree.name} to be ready")
        wait_until(tree.has_no_rooms, SLACK_S, f"{tree.name}'s table to be empty")
