"""An engine that only moves rooms: a prefill or a decode that may be killed at any instant.

It opens the rooms of its lanes, drives each as its plan says, aborts where that says so, checks the
bytes, holds the pages of failed rooms under a pattern, and writes everything down.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from pathlib import Path
from time import monotonic_ns

import msgspec

from pdrt.engine.manager import KVManager
from pdrt.errors import AttachFailed, Refused
from stress.cascades import lanes, plan
from stress.cascades.clients import Door, address_of
from stress.cascades.history import Kind, Writer
from stress.cascades.lanes import DECODES, Lanes
from stress.cascades.part import Hand, Part, Purse
from stress.cascades.plan import Mix

WAIT_S = 0.004  # a lost wake-up costs no more than this
ATTACH_AGAIN_NS = 30_000_000
LIVES_MAX = 3  # of tables whose tree is gone, whose rooms are still to end


class Told(msgspec.Struct, frozen=True):
    """`peers`: prefills' control addresses.  `lanes_led`, `lanes_followed`: (lane, peer's index).
    `life` counts this player's processes, from 1."""

    player: int
    name: str
    attach: str
    peers: tuple[str, ...]
    lanes_led: tuple[tuple[int, int], ...]
    lanes_followed: tuple[tuple[int, int], ...]
    lanes_file: str
    history: str
    salt: int
    token: str
    life: int
    mix: Mix


class Life:
    """One attachment: a manager, and the rooms opened through it."""

    def __init__(self, told: Told, manager: KVManager, half: int, *, safe: bool) -> None:
        self.manager = manager
        self.hand = Hand(told.salt, manager, told.player)
        self.purse = Purse(manager, half, safe=safe, seed=told.salt ^ told.life)
        self.parts: dict[int, Part] = {}
        self.supervisor = os.pidfd_open(manager.table.supervisor_pid)

    def is_orphan(self) -> bool:
        return bool(select.select([self.supervisor], [], [], 0)[0])

    def close(self) -> None:
        os.close(self.supervisor)
        self.hand.let_go()
        self.manager.close()


class Player:
    def __init__(self, told: Told) -> None:
        self._told = told
        self._lanes = Lanes(Path(told.lanes_file))
        self._writer = Writer(Path(told.history))
        self._life: Life | None = None
        self._orphans: list[Life] = []
        self._tried_ns = self._looked_ns = 0
        self._resumed = {lane: told.life == 1 for lane, _ in told.lanes_followed}
        self._done = 0
        self._door = Door(address_of(told.token, told.player))
        self._asked: dict[int, None] = {}  # rooms of clients, still to be opened
        self._opened_ns: dict[int, int] = {}

    # --- attaching -------------------------------------------------------------------------------

    def _attach(self, now_ns: int) -> None:
        if now_ns - self._tried_ns < ATTACH_AGAIN_NS:
            return
        self._tried_ns = now_ns
        told, shared = self._told, self._lanes
        try:
            manager = KVManager.attach(told.attach, name=told.name)
            half = 1 - shared.player(told.player, lanes.HALF)
            safe = bool(shared.player(told.player, lanes.SETTLED))
            self._life = Life(told, manager, half, safe=safe)
        except (AttachFailed, ProcessLookupError):
            return
        shared.set_player(told.player, lanes.SETTLED, 0)  # first: we may be killed between these
        shared.set_player(told.player, lanes.HALF, half)
        self._writer.append(
            Kind.ATTACHED, a=told.player, b=os.getpid(), c=int(manager.instance[:15], 16)
        )
        shared.set_player(told.player, lanes.LIFE, told.life)
        shared.set_player(told.player, lanes.SERVING_NS, monotonic_ns())

    def _look_at_tree(self, now_ns: int) -> None:
        if self._life is None or now_ns - self._looked_ns < 20_000_000:
            return
        self._looked_ns = now_ns
        if not self._life.is_orphan():
            return
        self._orphans.append(self._life)
        self._life = None
        self._lanes.set_player(self._told.player, lanes.SERVING_NS, 0)
        self._writer.append(Kind.DETACHED, a=self._told.player)
        while len(self._orphans) > LIVES_MAX:
            self._bury(self._orphans.pop(0))

    def _follow_orphans(self) -> None:
        """Rooms of a table whose tree is gone still end: we enforce their deadlines."""
        for life in list(self._orphans):
            for room, part in list(life.parts.items()):
                if part.has_ended(self._writer):
                    self._writer.append(Kind.GONE, room, self._told.player)
                    del life.parts[room]
            if not life.parts:
                self._orphans.remove(life)
                self._bury(life)

    def _bury(self, life: Life) -> None:
        for room in life.parts:
            self._writer.append(Kind.GONE, room, self._told.player)
        life.parts.clear()
        life.close()

    # --- rooms -----------------------------------------------------------------------------------

    def _open_led(self, life: Life, now_ns: int) -> None:
        shared = self._lanes
        window, pause_ns = shared.get(lanes.WINDOW), shared.get(lanes.PAUSE_US) * 1000
        for lane, peer in self._told.lanes_led:
            number = shared.lane(lane, lanes.NEXT)
            if number >= shared.lane(lane, lanes.GRANTED):
                continue
            if life.hand.open_in(lane) >= window:
                continue
            due_ns = self._opened_ns.get(lane, 0)
            if now_ns < due_ns:
                continue
            self._opened_ns[lane] = max(due_ns + pause_ns, now_ns - 10 * pause_ns)
            if not self._open(life, shared.room(lane, number), peer):
                return
            shared.set_lane(lane, lanes.NEXT, number + 1)

    def _open_followed(self, life: Life) -> None:
        shared = self._lanes
        for lane, peer in self._told.lanes_followed:
            number, end = shared.lane(lane, lanes.FOLLOWED), shared.lane(lane, lanes.NEXT)
            while number < end:
                room = shared.room(lane, number)
                fate = 0
                if not self._resumed[lane]:
                    fate = plan.spec(self._told.salt, room, self._told.mix).after_restart
                shared.set_lane(lane, lanes.FOLLOWED, number + 1)
                if fate == 1:
                    life.manager.decline(
                        room, self._told.peers[peer] if not life.hand.is_prefill else ""
                    )
                    self._writer.append(Kind.DECLINED, room, self._told.player)
                elif fate == 0 and not self._open(life, room, peer):
                    shared.set_lane(lane, lanes.FOLLOWED, number)
                    break
                number += 1
            else:
                self._resumed[lane] = True

    def _open(self, life: Life, room: int, peer: int) -> bool:
        spec = plan.spec(self._told.salt, room, self._told.mix)
        taken = life.purse.take(spec.pages_count)
        if taken is None:
            return False
        try:
            part = life.hand.open(room, spec, taken, self._told.peers[peer], self._writer)
        except Refused:
            life.purse.give(taken)
            self._writer.append(Kind.REFUSED, room, self._told.player)
            return False
        life.parts[room] = part
        return True

    def _serve_clients(self, life: Life) -> None:
        asked, gone = self._door.poll()
        self._asked.update(dict.fromkeys(asked))
        for room in gone:
            self._asked.pop(room, None)
            if room in life.parts:
                life.parts[room].lose_client(self._writer)
        for room in list(self._asked):
            if not self._open(life, room, (plan.lane_of(room) - 1) // (2 * DECODES)):
                break
            del self._asked[room]

    def turn(self) -> bool:
        """True if something moved."""
        now_ns = monotonic_ns()
        self._look_at_tree(now_ns)
        if self._orphans:
            self._follow_orphans()
        life = self._life
        if life is None:
            self._attach(now_ns)
            return False
        moved = False
        with life.manager.together():
            if self._lanes.get(lanes.PHASE) == lanes.RUN:
                self._open_led(life, now_ns)
            self._open_followed(life)
            self._serve_clients(life)
            for room, part in list(life.parts.items()):
                moved |= part.step(monotonic_ns(), self._writer)
                if part.over:
                    life.purse.give(part.taken)
                    del life.parts[room]
                    self._done += 1
        life.manager.tick()
        if life.purse.look_round(now_ns):
            self._lanes.set_player(self._told.player, lanes.SETTLED, 1)
        player, shared = self._told.player, self._lanes
        clients = sum(bool(room & plan.CLIENTS) for room in life.parts)
        shared.set_player(player, lanes.CLIENTS, clients)
        unquiet = sum(not part.quiet for part in life.parts.values())
        shared.set_player(player, lanes.UNQUIET, unquiet)
        shared.set_player(player, lanes.BUSY, len(life.parts) + len(self._orphans))
        shared.set_player(player, lanes.DONE, self._done)
        return moved

    def wait(self) -> None:
        """Until some room may have changed."""
        if self._life is None:
            time.sleep(0.002)
            return
        if select.select([self._life.manager.wake_fd], [], [], WAIT_S)[0]:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._life.manager.wake_fd)

    def run(self) -> None:
        while self._lanes.get(lanes.PHASE) != lanes.EXIT:
            if not self.turn():
                self.wait()
        if self._life is not None:
            self._life.close()
        for life in self._orphans:
            life.close()
        self._door.close()
        self._writer.append(Kind.LEFT, a=self._told.player)
        self._writer.close()


def main(told: Told) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Player(told).run()
