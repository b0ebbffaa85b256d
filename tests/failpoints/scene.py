"""Plays one cell: arm the victim, let the trees play, and hold everything against the laws."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from pdrt.failpoints import Action, Failpoint
from tests.crash.deal import BIG, Deal, succeed
from tests.crash.trees import START_S, TIMEOUTS, Victims
from tests.failpoints.cells import CONTINUED, Cell, Expect, Play, Victim
from tests.failpoints.engine import EngineProcess
from tests.failpoints.stage import SIDES, Stage

SLACK_S = 2.0
VERDICT_S = TIMEOUTS.bootstrap_s + TIMEOUTS.waiting_s + TIMEOUTS.quiet_s + 2 * SLACK_S
QUIET_S = 2 * (TIMEOUTS.quiet_s + TIMEOUTS.hang_s) + SLACK_S
NEXT_ROOMS = 6

#: First page and aux row of the touched room, and of those that come after it.
TOUCHED, NEXT = (0, 0), (240, 10)
CHUNKS = {Play.WHOLE: (4, 4), Play.MISMATCH: (4, 4)}
ABORTS = {Play.DECODE_ABORTS: "decode", Play.PREFILL_ABORTS: "prefill"}
KILLED = {
    Play.LISTENER_DIES: (None, "listener", signal.SIGKILL),
    Play.LISTENER_HANGS: (None, "listener", signal.SIGSTOP),
    Play.DECODE_WORKER_DIES: ("decode", "worker0", signal.SIGKILL),
    Play.PREFILL_WORKER_DIES: ("prefill", "worker0", signal.SIGKILL),
}


@dataclass
class Record:
    cell: str
    point: str
    action: str
    struck: bool = False
    verdict: dict[str, str] = field(default_factory=dict)  # side -> state
    reason: dict[str, str] = field(default_factory=dict)  # side -> code of the typed error
    passed: bool = False


def is_dead(pid: int) -> bool:
    """A zombie counts as dead."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


class Scene:
    def __init__(self, stage: Stage, cell: Cell) -> None:
        self.stage, self.cell = stage, cell
        self.tree = stage.trees[cell.side]
        self.record = Record(str(cell), cell.point, cell.action)
        self._engine: EngineProcess | None = None
        if cell.victim is Victim.ENGINE:
            self._engine = EngineProcess(self.tree, str(stage.control.folder), cell.side)
        self._family = Victims.of(self.tree.all_pids() if cell.dies_whole else [])
        self.touched: Deal | None = None
        self._continued = self._acted = self._reborn = False

    def close(self) -> None:
        self.stage.control.disarm()
        self._family.close()
        if self._engine is not None:
            self._engine.close()

    def play(self) -> None:
        stage, cell = self.stage, self.cell
        if self._engine is not None:
            engine = self._engine
            stage.wait(lambda: engine.said.get("attached"), 20, "the engine to attach")
        failpoint = Failpoint(point=cell.point, action=cell.action, on_hit=cell.on_hit)
        name = "engine" if self._engine is not None else self.tree.name
        stage.control.arm(failpoint, tree=name, pids=self._pids())
        self._begin()
        stage.wait(self._is_over, VERDICT_S, f"{cell} to be over: {self.record}")
        self._see_struck()
        self._judge()
        self._quieten()
        stage.control.disarm()
        if self._reborn:
            self._start_again()
        for tree in stage.trees.values():
            stage.wait(tree.is_whole, START_S, f"{tree.name} to be whole: {tree.processes()}")
            stage.wait(tree.is_ready, START_S, f"{tree.name} to be ready")
        self._next_rooms()
        for tree in stage.trees.values():
            stage.wait(tree.has_no_rooms, 10, f"{tree.name}'s table to be empty: {tree.rooms()}")
            stage.wait(tree.is_ready, 10, f"{tree.name} to be ready")
        self.record.passed = True

    def _pids(self) -> tuple[int, ...]:
        match self.cell.victim:
            case Victim.NEXT:
                return ()
            case Victim.SUPERVISOR:
                return (self.tree.pid,)
            case Victim.ENGINE:
                assert self._engine is not None
                return (self._engine.pid,)
        return tuple(self.tree.processes()[self.cell.victim.value])

    # --- the play --------------------------------------------------------------------------------

    def _local(self) -> list[str]:
        """Sides whose engine is this process, and whose tree is the one it attached to."""
        gone = self._engine is not None or self._reborn
        return [side for side in SIDES if not (gone and side == self.cell.side)]

    def _begin(self) -> None:
        cell, stage = self.cell, self.stage
        if cell.expect is Expect.NOTHING:
            self._signal()
            return
        deal = self.touched = stage.deal(*TOUCHED, CHUNKS.get(cell.play, (BIG, 4)))
        stage.parties["prefill"].fill(deal.source, deal.room)
        pages = {"prefill": deal.source, "decode": deal.target}
        for side in SIDES:
            party, peer = stage.parties[side], deal.peer if side == "decode" else ""
            if side in self._local():
                party.open(deal.room, peer, len(deal.source), deal.aux)
                continue
            assert self._engine is not None
            abort_in = ["Transferring"] if ABORTS.get(cell.play) == side else []
            self._engine.ask(
                room=deal.room,
                peer=peer,
                pages=pages[side],
                aux=deal.aux,
                chunks=deal.chunks,
                abort_in=abort_in,
            )

    def _signal(self) -> None:
        side, name, number = KILLED[self.cell.play]
        (pid,) = self.stage.trees[side or self.cell.side].processes()[name]
        os.kill(pid, number)

    def _act(self, deal: Deal) -> None:
        """The engines' next steps, and what else the play wants."""
        local, play = self._local(), self.cell.play
        if play is Play.WHOLE:
            deal.go_on(prefill="prefill" in local, decode="decode" in local)
            return
        decode = "decode" in local
        if decode and not deal.told and deal.decode.poll(deal.room) == "WaitingForInput":
            short = 1 if play is Play.MISMATCH else 0
            deal.decode.metadata(deal.room, deal.target[short:], deal.aux)
            deal.told = True
        prefill = "prefill" in local
        first = deal.sent == 0 or play is Play.MISMATCH  # the others never send their last
        if prefill and first and deal.sent < len(deal.chunks):
            if deal.prefill.poll(deal.room) in ("WaitingForInput", "Transferring"):
                deal.send()
        moving = prefill and deal.prefill.peek(deal.room)["state"] == "Transferring"
        if play is Play.DECODE_ABORTS and not prefill:
            moving = deal.decode.peek(deal.room)["state"] == "Transferring"
        if not moving or self._acted or play is Play.MISMATCH:
            return
        self._acted = True
        if (side := ABORTS.get(play)) is None:
            self._signal()
        elif side in local:
            deal.sides()[side].abort(deal.room)

    def _is_over(self) -> bool:
        struck = self.stage.control.struck
        self._tend(struck)
        if self.touched is None:
            return bool(struck)
        self._act(self.touched)
        for side in self._local():
            party, room = self.touched.sides()[side], self.touched.room
            if side not in self.record.verdict and party.over(room):
                self.record.verdict[side] = party.poll(room)
                self.record.reason[side] = party.failure(room)
        judged = set(self._local()) <= self.record.verdict.keys()
        return judged and bool(struck) and self._engine_is_done()

    def _engine_is_done(self) -> bool:
        return self._engine is None or self._engine.dead or bool(self._engine.said.get("cleared"))

    def _tend(self, struck: int) -> None:
        """Continue whom nobody else would; start a tree again that has died."""
        cell = self.cell
        if not struck:
            return
        stops = cell.action is Action.STOP and cell.victim in CONTINUED
        if stops and not self._continued and "T (" in status(struck):
            self._continued = True
            os.kill(struck, signal.SIGCONT)
        if cell.dies_whole and not self._reborn and self._family.dead():
            self._reborn = True
            self.tree.launch()

    def _see_struck(self) -> None:
        """It was hit, and what was to happen did."""
        struck, cell = self.stage.control.struck, self.cell
        self.record.struck = True
        if cell.action is Action.DELAY:
            assert not is_dead(struck), "a delay is no death"
        elif cell.action is Action.STOP and cell.victim in CONTINUED:
            self.stage.wait(lambda: self._tended(struck)._continued, 10, "it to be continued")
        elif cell.action in (Action.KILL, Action.STOP):
            self.stage.wait(partial(is_dead, struck), 10, "the struck process to die")
        if cell.dies_whole:
            self.stage.wait(lambda: self._tended(struck)._reborn, 10, "the tree to die")

    def _tended(self, struck: int) -> Scene:
        self._tend(struck)
        return self

    # --- after it --------------------------------------------------------------------------------

    def _judge(self) -> None:
        deal, record, expect = self.touched, self.record, self.cell.expect
        if deal is None:
            return
        if self._engine is not None and (said := self._engine.said).get("verdict"):
            record.verdict[self.cell.side] = said["verdict"]
            record.reason[self.cell.side] = said["code"]
        found = set(record.verdict.values())
        assert found <= {"Success", "Failed"}, record
        if expect in (Expect.SUCCESS, Expect.FAILED):
            assert found == {expect.value}, record
        if expect is Expect.SAME:
            assert len(found) == 1, record
        for side, verdict in record.verdict.items():
            assert (verdict == "Failed") == bool(record.reason[side]), record
        if record.verdict.get("decode") == "Success":
            self._check_bytes(deal)

    def _check_bytes(self, deal: Deal) -> None:
        view = self.stage.deal(deal.first_page, deal.aux, tuple(deal.chunks))
        view.room = deal.room
        view.check_bytes()

    def _quieten(self) -> None:
        """The verdict is final, and the pages are free in time."""
        deal = self.touched
        if deal is None:
            return
        for side in self._local():
            party = deal.sides()[side]
            self.stage.wait(partial(party.quiet, deal.room), QUIET_S, f"{side}'s pages to be quiet")
            now = party.peek(deal.room)["state"]
            assert now == self.record.verdict[side], f"{side} became {now}: {self.record}"
            party.clear(deal.room)
        if self._engine is not None:
            self._engine.close()

    def _start_again(self) -> None:
        tree = self.tree
        tree.facts = self.stage.wait(tree.announced, START_S, f"{tree.name} to be back")
        self.stage.wait(tree.is_ready, START_S, f"{tree.name} to be ready")
        self.stage.attach(self.cell.side)

    def _next_rooms(self) -> None:
        first_page, first_aux = NEXT
        deals = [self.stage.deal(first_page + i, first_aux + i) for i in range(NEXT_ROOMS)]
        succeed(deals, self.stage.wait, "the next rooms")


def status(pid: int) -> str:
    """/proc/pid/status, "" if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/status").read_text()
    return ""
