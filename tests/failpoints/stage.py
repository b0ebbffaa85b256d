"""One pair of trees of a transport, which the cells share and every process of which obeys."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.crash.deal import Deal
from tests.crash.party import Party
from tests.crash.trees import START_S, Spawner, Tree
from tests.failpoints.control import Control
from tests.waiting import wait_until

SIDES = ("prefill", "decode")


class ObedientTree(Tree):
    """`orders`: folder of the test's orders."""

    def __init__(
        self, spawner: Spawner, folder: Path, name: str, role: str, transport: str, orders: Path
    ) -> None:
        super().__init__(spawner, folder, name, role, transport)
        self._orders = orders

    def _main(self, settings: str) -> list[str]:
        main = "from tests.failpoints.tree_process import main; main()"
        return [main, settings, str(self._orders), self.name]


class Stage:
    def __init__(self, spawner: Spawner, folder: Path, transport: str) -> None:
        self.transport = transport
        orders = Path(tempfile.mkdtemp(prefix="orders-", dir=folder))
        self.control = Control(orders)
        self.trees = {
            side: ObedientTree(spawner, folder, f"{transport}-{side}", side, transport, orders)
            for side in SIDES
        }
        self.parties: dict[str, Party] = {}
        for tree in self.trees.values():
            tree.launch()
        for tree in self.trees.values():
            tree.wait_ready()
        for tree in self.trees.values():
            wait_until(tree.is_whole, START_S, f"{tree.name}'s standbys")
        for side in SIDES:
            self.attach(side)

    def attach(self, side: str) -> Party:
        if side in self.parties:
            self.parties.pop(side).close()
        self.parties[side] = Party(self.trees[side].attach, "failpoints")
        return self.parties[side]

    def deal(self, first_page: int, aux: int, chunks: tuple[int, ...] = (1,)) -> Deal:
        peer = self.trees["prefill"].control
        return Deal(self.parties["prefill"], self.parties["decode"], peer, first_page, aux, chunks)

    def wait(self, predicate: Callable[[], Any], deadline_s: float, what: str) -> Any:
        """wait_until, with the engines of this process ticking."""

        def asked() -> Any:
            for party in self.parties.values():
                party.tick()
            return predicate()

        return wait_until(asked, deadline_s, what)

    def tail(self) -> str:
        return "\n".join(tree.tail() for tree in self.trees.values())

    def close(self) -> None:
        for party in self.parties.values():
            party.close()
        self.parties.clear()
        for tree in self.trees.values():
            tree.stop()
