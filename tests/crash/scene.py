"""Plays one cell: reach the phase, signal the victim, and hold everything against the laws."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from functools import partial

from tests.crash.bad import RAISE, SPIN
from tests.crash.cells import Cell, Expect, Phase, Signal, Victim, typed_codes
from tests.crash.deal import BIG, CHUNKS_COUNT, Deal, succeed
from tests.crash.party import SUCCESS, VERDICTS, AnyParty, RemoteParty
from tests.crash.stage import OTHER, Stage
from tests.crash.trees import TIMEOUTS, Victims

SLACK_S = 2.0
CHILDREN_GONE_S = 2.0
NEXT_ROOMS = 20

NUMBERS = {
    Signal.KILL: signal.SIGKILL,
    Signal.STOP: signal.SIGSTOP,
    Signal.RAISE: RAISE,
    Signal.SPIN: SPIN,
}

#: First page and aux row of each purpose.
TOUCHED, COMPANION, WAITING, BESIDE, NEXT = (0, 0), (200, 1), (210, 2), (220, 3), (240, 10)


@dataclass
class Record:
    """What was measured; seconds are from the signal."""

    cell: str
    expect: str
    verdict: dict[str, str] = field(default_factory=dict)  # side -> state
    reason: dict[str, str] = field(default_factory=dict)  # side -> code of the typed error
    verdict_s: dict[str, float] = field(default_factory=dict)
    quiet_s: float | None = None
    children_gone_s: float | None = None
    next_rooms_s: float | None = None
    passed: bool = False


class Scene:
    def __init__(self, stage: Stage, cell: Cell) -> None:
        self.stage = stage
        self.cell = cell
        self.key = (cell.side, "main")
        self.tree = stage.trees[self.key]
        self.record = Record(str(cell), cell.expect.value)
        self._remote: RemoteParty | None = None
        if cell.victim is Victim.ENGINE:
            self._remote = RemoteParty(self.tree.attach, "crash-victim")
        self.victims = Victims.of(self._victim_pids())
        self.touched: Deal | None = None
        self._worker_before = self._worker_incarnation()
        self._continued = False
        self._signalled_s = 0.0

    def _victim_pids(self) -> list[int]:
        match self.cell.victim:
            case Victim.WORKER:
                return self.tree.processes()["worker0"]
            case Victim.ENGINE:
                assert self._remote is not None
                return [self._remote.popen.pid]
            case Victim.SUPERVISOR:
                return [self.tree.pid]
            case Victim.TREE:
                return self.tree.all_pids()
        return self.tree.processes()[self.cell.victim.value]

    def close(self) -> None:
        self.victims.signal(signal.SIGCONT)
        self.victims.close()
        if self._remote is not None:
            self._remote.close()

    def play(self) -> None:
        stage, cell = self.stage, self.cell
        bystander = stage.deal(*WAITING, beside=cell.side)
        bystander.open()
        self._wait_state(bystander, "decode", "WaitingForInput")
        companion = self._companion()
        self._reach()
        orphans = self._children() if cell.dies_whole else None

        self.victims.signal(NUMBERS[cell.signal])
        self._signalled_s = time.monotonic()
        at_once = stage.deal(*BESIDE, beside=cell.side)
        at_once.open()
        stage.complete(at_once, 5, "a room between other parties")
        if orphans is not None:
            self._bury_orphans(orphans)
        self._judge()
        if companion is not None:
            stage.wait(self._may_tell, 10, "decode's new worker to have its number")
            stage.complete(companion, 10, "a room of the same tree that only waited")
        if cell.dies_whole:
            self._start_again()
        stage.complete(bystander, 10, "a waiting room between other parties")
        self._next_rooms()
        self._clear_touched()
        self._nothing_left()
        self.record.passed = True

    # --- before the signal -----------------------------------------------------------------------

    def _wait_state(self, deal: Deal, side: str, *states: str) -> None:
        def reached() -> bool:
            now = deal.state(side)
            assert now in states or now not in VERDICTS, f"{side} is {now}: {deal}"
            return now in states

        self.stage.wait(reached, 10, f"{side} of room {deal.room} to be in {states}")

    def _companion(self) -> Deal | None:
        """A room of the same tree that only waits, where the law says that it survives."""
        cell = self.cell
        whole = cell.victim is Victim.TREE or cell.dies_whole
        if whole:
            return None
        deal = self.stage.deal(*COMPANION)
        deal.open()
        self._wait_state(deal, "decode", "WaitingForInput")
        if cell.side == "prefill" and not cell.fences_decode:
            deal.tell()
            self._wait_state(deal, "prefill", "WaitingForInput")
        return deal

    def _reach(self) -> None:
        cell = self.cell
        phase = cell.phase
        if phase is Phase.IDLE:
            return
        first = BIG if phase in (Phase.FIRST, Phase.ABORTING) else 4
        player: tuple[str, AnyParty] | None = None
        if self._remote is not None:
            player = (cell.side, self._remote)
        chunks = (first, *[4] * (CHUNKS_COUNT - 1))
        deal = self.touched = self.stage.deal(*TOUCHED, chunks=chunks, party=player)
        deal.open()
        if phase is Phase.BOOTSTRAPPING and cell.side == "decode":
            return  # at once: a living prefill agrees within milliseconds
        self._wait_state(deal, "decode", "WaitingForInput")
        if phase is Phase.BOOTSTRAPPING or (phase is Phase.WAITING and cell.side == "decode"):
            return
        deal.tell()
        self._wait_state(deal, "prefill", "WaitingForInput")
        if phase is Phase.WAITING:
            return
        count = {Phase.MIDDLE: 2, Phase.LAST: CHUNKS_COUNT - 1, Phase.UNREAD: CHUNKS_COUNT}
        for _ in range(count.get(phase, 1)):
            deal.send()
        if phase is Phase.UNREAD:
            self._wait_state(deal, "prefill", SUCCESS)
            self._wait_state(deal, "decode", SUCCESS)
            return
        self._wait_state(deal, "prefill", "Transferring")
        if phase is Phase.ABORTING:
            deal.sides()[OTHER[cell.side]].abort(deal.room)
        elif phase is not Phase.FIRST:
            page_bytes = 256 << 10
            sent_bytes = sum(chunks[: deal.sent]) * page_bytes
            self.stage.wait(lambda: deal.moved() == sent_bytes, 10, "the chunks to land")

    def _children(self) -> Victims:
        return Victims.of(self.tree.all_pids())

    # --- after it --------------------------------------------------------------------------------

    def _since_s(self) -> float:
        return round(time.monotonic() - self._signalled_s, 3)

    def _bury_orphans(self, orphans: Victims) -> None:
        """No child outlives its supervisor; then a new tree starts at the same address."""
        try:
            self.stage.wait(orphans.dead, CHILDREN_GONE_S, "the supervisor's children to die")
        finally:
            orphans.close()
        self.record.children_gone_s = self._since_s()
        self.tree.launch()

    def _living(self) -> dict[str, bool]:
        """Can this side's engine be asked now?"""
        gone = self._remote is not None
        return {side: not (gone and side == self.cell.side) for side in OTHER}

    def _bound_s(self) -> float:
        """The deadlines a room can go through from here, and slack."""
        return TIMEOUTS.bootstrap_s + TIMEOUTS.waiting_s + SLACK_S

    def _worker_incarnation(self) -> int:
        return self.stage.parties["decode", "main"].worker_incarnation()

    def _may_tell(self) -> bool:
        """A destination names decode's worker: one that is dead, and not yet known to be, takes the
        room with it."""
        if self.cell.victim is not Victim.WORKER or self.cell.side != "decode":
            return True
        spared = self._continued and not self.victims.dead()
        return spared or self._worker_incarnation() not in (0, self._worker_before)

    def _continue(self) -> None:
        self.victims.signal(signal.SIGCONT)
        self._continued = True

    def _judge(self) -> None:
        deal, cell = self.touched, self.cell
        if deal is None:
            if cell.pauses:
                self._outlast()
            return
        living = self._living()

        def over() -> bool:
            if cell.goes_on:
                tell = living["decode"] and self._may_tell()
                deal.go_on(prefill=living["prefill"], decode=tell)
            for side, party in deal.sides().items():
                if living[side] and side not in self.record.verdict and party.over(deal.room):
                    self._note(side)
            return len(self.record.verdict) == sum(living.values())

        self.stage.wait(over, self._bound_s(), f"the verdict of {deal}, have {self.record}")
        if cell.pauses:
            self._continue()
            for side, party in deal.sides().items():
                if not living[side]:
                    self.stage.wait(partial(party.over, deal.room), 5, "the engine to go on")
                    self._note(side)
        self._check_verdict(deal)
        self._wait_quiet(deal)

    def _outlast(self) -> None:
        """Nothing waits for a verdict: freeze until a hung child is replaced, then go on."""
        hung = TIMEOUTS.hang_s + SLACK_S
        replaced = self.cell.is_replaced
        until_s = time.monotonic() + (hung + 4 if replaced else 1.0)
        self.stage.wait(
            lambda: self.victims.dead() or time.monotonic() > until_s, 60, "the freeze to be over"
        )
        assert self.victims.dead() or not replaced, "a frozen child was not killed"
        self._continue()

    def _note(self, side: str) -> None:
        assert self.touched is not None
        party, room = self.touched.sides()[side], self.touched.room
        self.record.verdict[side] = party.poll(room)
        self.record.reason[side] = party.failure(room)
        self.record.verdict_s[side] = self._since_s()

    def _check_verdict(self, deal: Deal) -> None:
        expected = self.cell.expect.value
        assert set(self.record.verdict.values()) == {expected}, self.record
        if self.cell.expect is Expect.FAILED:
            codes = set(self.record.reason.values())
            assert codes <= typed_codes(self.cell), self.record
            return
        # Pages are looked at through engines that live, whoever held the room.
        view = Deal(
            self.stage.parties["prefill", "main"],
            self.stage.parties["decode", "main"],
            deal.peer,
            deal.first_page,
            deal.aux,
            deal.chunks,
            deal.room,
        )
        view.check_bytes()

    def _askable(self, deal: Deal) -> dict[str, AnyParty]:
        """Engines whose slot is still there: not a killed one's."""
        dead = self._remote is not None and self.cell.dies
        return {s: p for s, p in deal.sides().items() if not (dead and s == self.cell.side)}

    def _wait_quiet(self, deal: Deal) -> None:
        bound_s = 2 * (TIMEOUTS.quiet_s + TIMEOUTS.hang_s) + SLACK_S
        for side, party in self._askable(deal).items():
            if self.cell.dies_whole and side == self.cell.side:
                continue  # nobody is left to say so; its engine attaches to the new tree
            self.stage.wait(partial(party.quiet, deal.room), bound_s, f"{side}'s pages to be quiet")
        self.record.quiet_s = self._since_s()
        if self.cell.may_fence_decode:
            # Rooms told to a worker that is being restarted on purpose would fail with it.
            tree = self.stage.trees["decode", "main"]
            self.stage.wait(tree.is_ready, 10, f"{tree.name}'s worker to be back")

    def _start_again(self) -> None:
        self.tree.facts = self.stage.wait(self.tree.announced, 20, f"{self.tree.name} to be back")
        self.stage.wait(self.tree.is_ready, 20, f"{self.tree.name} to be ready")
        if self.touched is not None:
            self._check_final(self.touched, self.cell.side)
        self.stage.attach(self.key)

    def _next_rooms(self) -> None:
        first_page, first_aux = NEXT
        deals = [self.stage.deal(first_page + i, first_aux + i) for i in range(NEXT_ROOMS)]
        succeed(deals, self.stage.wait, "the next rooms")
        self.record.next_rooms_s = self._since_s()

    def _check_final(self, deal: Deal, side: str) -> None:
        now = deal.state(side)
        assert now == self.record.verdict[side], f"{side} became {now}: {self.record}"

    def _clear_touched(self) -> None:
        """The verdict is what it was, in the table too."""
        if self.touched is None:
            return
        for side, party in self._askable(self.touched).items():
            if self.cell.dies_whole and side == self.cell.side:
                continue
            self._check_final(self.touched, side)
            party.clear(self.touched.room)

    def _nothing_left(self) -> None:
        for tree in self.stage.trees.values():
            self.stage.wait(tree.has_no_rooms, 10, f"{tree.name}'s table to be empty")
            self.stage.wait(tree.is_ready, 10, f"{tree.name} to be ready")
            self.stage.wait(tree.is_whole, 20, f"{tree.name} to be whole: {tree.processes()}")
