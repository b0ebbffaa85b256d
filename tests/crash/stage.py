"""Two prefill trees and two decode trees of one transport, shared by all its cells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from stress.cascades.logs import errors_in
from tests.crash.deal import Deal
from tests.crash.party import AnyParty, Party
from tests.crash.trees import START_S, Spawner, Tree
from tests.waiting import wait_until

ON_PURPOSE = ("fails on purpose", "pdrt.failpoints.Injected")
OTHER = {"prefill": "decode", "decode": "prefill"}


class Stage:
    def __init__(self, spawner: Spawner, folder: Path, transport: str) -> None:
        self.transport = transport
        self.trees = {
            (side, place): Tree(spawner, folder, f"{transport}-{side}-{place}", side, transport)
            for side in ("prefill", "decode")
            for place in ("main", "beside")
        }
        self.parties: dict[tuple[str, str], Party] = {}
        for tree in self.trees.values():
            tree.launch()
        for tree in self.trees.values():
            tree.wait_ready()
        for tree in self.trees.values():
            wait_until(tree.is_whole, START_S, f"{tree.name}'s standbys")
        for key in self.trees:
            self.attach(key)

    def attach(self, key: tuple[str, str]) -> Party:
        if key in self.parties:
            self.parties.pop(key).close()
        self.parties[key] = Party(self.trees[key].attach, f"crash-{key[1]}")
        return self.parties[key]

    def deal(
        self,
        first_page: int,
        aux: int,
        *,
        chunks: tuple[int, ...] = (1,),
        beside: str = "",
        party: tuple[str, AnyParty] | None = None,
    ) -> Deal:
        """Between the main trees; `beside`: this side's tree is the other one; `party`: this side
        is played by it."""
        places = {side: "beside" if side == beside else "main" for side in OTHER}
        players: dict[str, AnyParty] = {s: self.parties[s, places[s]] for s in OTHER}
        if party is not None:
            players[party[0]] = party[1]
        peer = self.trees["prefill", places["prefill"]].control
        return Deal(players["prefill"], players["decode"], peer, first_page, aux, chunks)

    def tick(self) -> None:
        for party in self.parties.values():
            party.tick()

    def wait(self, predicate: Callable[[], Any], deadline_s: float, what: str) -> Any:
        """wait_until, with every engine of this process ticking."""

        def asked() -> Any:
            self.tick()
            return predicate()

        return wait_until(asked, deadline_s, what)

    def complete(self, deal: Deal, deadline_s: float, what: str) -> None:
        """Drive a room that was opened to its end, which must be Success with the right bytes."""

        def over() -> bool:
            deal.go_on()
            return deal.over()

        self.wait(over, deadline_s, f"{what} (room {deal.room}) to be over")
        deal.check_success()
        deal.clear()

    def close(self) -> None:
        for party in self.parties.values():
            party.close()
        self.parties.clear()
        for tree in self.trees.values():
            tree.stop()


class AnyStage(Protocol):
    transport: str

    def close(self) -> None: ...


S = TypeVar("S", bound=AnyStage)


class Stages(Generic[S]):
    """At most one stage at a time; a cell that failed spoils its stage."""

    def __init__(self, folder: Path, make: Callable[[Spawner, Path, str], S]) -> None:
        self._folder, self._make = folder, make
        self._spawner = Spawner()
        self._stage: S | None = None

    def get(self, transport: str) -> S:
        if self._stage is None or self._stage.transport != transport:
            self.drop()
            self._stage = self._make(self._spawner, self._folder, transport)
        return self._stage

    def drop(self) -> None:
        if self._stage is not None:
            stage, self._stage = self._stage, None
            stage.close()

    def close(self) -> None:
        """Nothing in any tree may have failed by itself, whatever was done to it."""
        try:
            self.drop()
        finally:
            self._spawner.close()
        errors = errors_in(self._folder, "*.log")
        unmeant = [e for e in errors if not any(name in e for name in ON_PURPOSE)]
        assert not unmeant, unmeant
