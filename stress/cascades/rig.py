"""Two prefills, two decodes, an engine in each, and those who watch: where cascades are played."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Set
from types import TracebackType
from typing import Self

from pdrt.child import prctl
from stress.bench.trees import wait
from stress.cascades import connector, lanes, plan, player, watcher
from stress.cascades.history import Kind
from stress.cascades.lanes import DECODES, PREFILLS, Lanes, lane_number
from stress.cascades.nursery import Nursery
from stress.cascades.piece import Piece
from stress.cascades.plan import Mix
from stress.cascades.trees import Held, Tree

UNLIMITED = 1 << 40
DRAIN_S = 40.0
PR_SET_CHILD_SUBREAPER = 36


def salt_of(piece: Piece) -> int:
    return plan.mix64(piece.seed)


def transport_of(piece: Piece) -> str:
    """NIXL twice as often; it is the one that writes late."""
    return "shm" if piece.seed % 3 == 2 else "nixl"


class Rig:
    """A context manager.  What is signalled is held by pidfd and written down."""

    def __init__(self, piece: Piece, mix: Mix) -> None:
        self.piece, self.mix = piece, mix
        self.folder = piece.folder
        self.token = secrets.token_hex(6)
        self.writer = piece.history("driver")
        self.lanes = Lanes(piece.folder / "lanes")
        sides = [("prefill", i) for i in range(PREFILLS)] + [("decode", i) for i in range(DECODES)]
        transport = transport_of(piece)
        self.trees = [
            Tree(number, piece.folder, side, f"{side}{i}", transport)
            for number, (side, i) in enumerate(sides)
        ]
        self.nursery = Nursery(piece.folder)
        self.players: list[Held | None] = [None] * len(self.trees)
        self.lives = [0] * len(self.trees)
        self.helpers: list[Held] = []

    # --- start and stop --------------------------------------------------------------------------

    def __enter__(self) -> Self:
        adopt_orphans()
        try:
            for tree in self.trees:
                tree.launch()
            for tree in self.trees:
                tree.wait_whole()
            self._start_helpers()
            for number in range(len(self.trees)):
                self.start_player(number)
            wait(self._all_serve, 30.0, "the players to attach")
        except BaseException:
            self.close()
            raise
        return self

    def _start_helpers(self) -> None:
        lanes_file = str(self.folder / "lanes")
        histories = self.piece.histories
        told = watcher.Told(
            tuple(tree.attach for tree in self.trees),
            lanes_file,
            str(histories / "watcher.history"),
        )
        self.helpers.append(Held(self.nursery.bear("watcher", "watcher", told)))
        ports = tuple(int(tree.control.rpartition(":")[2]) for tree in self.trees)
        knock = connector.Told(ports, lanes_file, str(histories / "connector.history"))
        self.helpers.append(Held(self.nursery.bear("connector", "connector", knock)))

    def _all_serve(self) -> bool:
        return all(self.player_serves(n) for n in range(len(self.trees)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.lanes.set(lanes.PHASE, lanes.EXIT)
        for held in (*self.players, *self.helpers):
            if held is not None:
                held.signal(signal.SIGCONT)
                with contextlib.suppress(TimeoutError):
                    wait(held.dead, 10.0, "a helper to end")
                held.signal(signal.SIGKILL)
                held.close()
        for tree in self.trees:
            tree.stop()
        self.nursery.close()
        self.reap()
        self.writer.close()

    def reap(self) -> None:
        """Everybody who died, orphans of a killed supervisor included."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    # --- players ---------------------------------------------------------------------------------

    def start_player(self, number: int) -> None:
        tree = self.trees[number]
        self.lives[number] += 1
        name = f"player-{tree.name}-{self.lives[number]}"
        led, followed = self._lanes_of(tree)
        told = player.Told(
            player=number,
            name=f"player-{tree.name}",
            attach=tree.attach,
            peers=tuple(t.control for t in self.trees[:PREFILLS]),
            lanes_led=led,
            lanes_followed=followed,
            lanes_file=str(self.folder / "lanes"),
            history=str(self.piece.histories / f"{name}.history"),
            salt=salt_of(self.piece),
            token=self.token,
            life=self.lives[number],
            mix=self.mix,
        )
        self.players[number] = Held(self.nursery.bear("player", f"player-{tree.name}", told))

    def _lanes_of(
        self, tree: Tree
    ) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """Led and followed: (lane, index of the prefill)."""
        found: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        for prefill in range(PREFILLS):
            for decode in range(DECODES):
                mine = prefill if tree.is_prefill else decode + PREFILLS
                if mine != tree.index:
                    continue
                for leader in (plan.PREFILL, plan.DECODE):
                    lane = lane_number(prefill, decode, leader)
                    found[(leader == plan.PREFILL) == tree.is_prefill].append((lane, prefill))
        return tuple(found[True]), tuple(found[False])

    def player_serves(self, number: int) -> bool:
        """Has its latest life attached to a tree that is there?"""
        return (
            self.lanes.player(number, lanes.LIFE) == self.lives[number]
            and self.lanes.player(number, lanes.SERVING_NS) != 0
        )

    def check_players(self, but: Set[int]) -> None:
        """Raises RuntimeError if one has died that nobody hit."""
        for number, held in enumerate(self.players):
            if held is not None and number not in but and held.dead():
                raise RuntimeError(f"the player of {self.trees[number].name} died by itself")

    # --- load ------------------------------------------------------------------------------------

    def all_lanes(self) -> range:
        return range(1, 1 + PREFILLS * DECODES * 2)

    def load(self, window: int, rooms_per_s: float) -> None:
        """From now on: so many open rooms in a lane, at most so many new ones a second in all."""
        count = len(self.all_lanes())
        self.lanes.set(lanes.WINDOW, window)
        self.lanes.set(lanes.PAUSE_US, int(1e6 * count / rooms_per_s))

    def grant(self, each: int, *, calm: bool = False) -> None:
        """So many more rooms in each lane; nobody gives up `calm` ones.  Those before are over."""
        for lane in self.all_lanes():
            now = self.lanes.lane(lane, lanes.GRANTED)
            if calm:
                self.lanes.set_lane(lane, lanes.CALM_FROM, now)
                self.lanes.set_lane(lane, lanes.CALM_END, now + each)
            self.lanes.set_lane(lane, lanes.GRANTED, now + each)  # last: players look at it first

    def rooms_opened(self) -> int:
        return sum(self.lanes.lane(lane, lanes.NEXT) for lane in self.all_lanes())

    def all_granted_are_over(self) -> bool:
        shared = self.lanes
        for lane in self.all_lanes():
            granted = shared.lane(lane, lanes.GRANTED)
            if not granted == shared.lane(lane, lanes.NEXT) == shared.lane(lane, lanes.FOLLOWED):
                return False
        return not any(shared.player(n, lanes.UNQUIET) for n in range(len(self.trees)))

    def busy(self, number: int) -> int:
        """Rooms a player has not let go of."""
        return self.lanes.player(number, lanes.BUSY)

    def is_idle(self) -> bool:
        """Has every player let go of every room?"""
        return not any(self.busy(number) for number in range(len(self.trees)))

    def _is_drained(self) -> bool:
        shared = self.lanes
        level = all(
            shared.lane(lane, lanes.NEXT) == shared.lane(lane, lanes.FOLLOWED)
            for lane in self.all_lanes()
        )
        return level and self.is_idle()

    def drain(self) -> bool:
        """No new rooms; True once all are over, False if that takes too long."""
        self.writer.append(Kind.END)
        self.lanes.set(lanes.PHASE, lanes.DRAIN)
        return self.until(self._is_drained, DRAIN_S)

    def until(self, ready: Callable[[], bool], limit_s: float, pause_s: float = 0.005) -> bool:
        end_s = time.monotonic() + limit_s
        while not ready():
            self.reap()
            if time.monotonic() > end_s:
                return False
            time.sleep(pause_s)
        return True


def adopt_orphans() -> None:
    """Children of a killed supervisor become ours, so that they are reaped."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
