"""94 MB of random 6 KiB pages in one room, beside the same pages written by NIXL alone."""

from __future__ import annotations

import contextlib
import json
import mmap
import signal
import sys
import time
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import numpy as np

from stress.bench.bench import Bench
from stress.bench.figures import Goal, Result, summarise
from stress.bench.player import Ask
from stress.bench.players import Engine, Players
from stress.bench.trees import Cpu, Shape, pair, tie_to_parent

TITLE = "One room of 94 MB in 15,300 random pages of 6 KiB"
SHAPE = Shape(layers=1, item_bytes=3072, pages=15_300, chunks=1, pages_count=16_384, scattered=True)
ROUNDS, BUDGET_S = 12, 25.0
ROOMS = 2  # a round
GOAL = Goal("median", 1.05)


def measure(bench: Bench, result: Result) -> None:
    with contextlib.ExitStack() as stack:
        crews = {}
        for transport in bench.transports:
            trees = stack.enter_context(pair(bench.folder, SHAPE, transport=transport))
            players = Players.ours(bench.folder, transport, *trees, SHAPE)
            crews[transport] = stack.enter_context(players), trees
        raw = Raw(bench.folder)
        stack.callback(raw.close)
        sent: dict[str, list[float]] = {name: [] for name in ["raw NIXL", *crews]}
        whole: dict[str, list[float]] = {name: [] for name in crews}
        why = dict.fromkeys(crews, "")
        ratios: dict[str, list[float]] = {name: [] for name in crews}
        for round_index in bench.rounds(ROUNDS, BUDGET_S):
            alone_ms = raw.run(ROOMS)
            for name, (players, trees) in crews.items():
                before = Cpu.of(*trees)
                run = players.run(ROOMS, 1)
                why[name] = "CPU a room: " + Cpu.of(*trees).per_room(before, ROOMS)
                if round_index or bench.quick:  # the first touches every page
                    sent[name] += run.prefill_ms
                    whole[name] += run.decode_ms
                    ratios[name].append(
                        summarise(run.prefill_ms).median / summarise(alone_ms).median
                    )
            if round_index or bench.quick:
                sent["raw NIXL"] += alone_ms
    for name, samples in sent.items():
        suffix = "post to DONE" if name == "raw NIXL" else "prefill, send to Success"
        result.add(f"{name}: {suffix}", "ms", samples)
    for name in crews:
        result.add(f"{name}: decode, asking to Success", "ms", whole[name])
        goal = GOAL if name == "nixl" else None
        result.add(f"{name} / raw NIXL", "x", ratios[name], goal, why[name])
    result.notes.append(
        "raw NIXL: two agents as NIXL's Python makes them, whose progress threads never rest; "
        "asked while ours idle, frozen while ours move"
    )
    result.notes.append("staged transfers are not built, so nothing is held against their goal")


class Raw:
    """Two NIXL agents in processes of their own, frozen while ours move: each burns a core."""

    def __init__(self, folder: Path) -> None:
        program = [sys.executable, "-c", "from stress.bench.pages import main; main()"]
        self._engines: list[Engine] = []
        try:
            self._engines.append(Engine("target", [*program, "target"], folder / "target.err"))
            told = json.dumps(self._engines[0].answer(60))
            command = [*program, "initiator", told]
            self._engines.append(Engine("initiator", command, folder / "initiator.err"))
            self._engines[1].answer(60)
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def run(self, rooms: int) -> list[float]:
        self._signal(signal.SIGCONT)
        self._engines[1].ask(Ask(rooms, 1, 1))
        answer = self._engines[1].answer(60)
        self._signal(signal.SIGSTOP)
        return [1e3 * s for s in answer["seconds"]]

    def _signal(self, number: int) -> None:
        for engine in self._engines:
            engine.signal(number)

    def close(self) -> None:
        for engine in self._engines:
            engine.close()


class Agent:
    """One NIXL agent as its Python module makes it, over a pool of pages."""

    def __init__(self, name: str) -> None:
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self._memory = mmap.mmap(-1, SHAPE.pages_count * SHAPE.page_bytes)
        self.pool = np.frombuffer(self._memory, dtype=np.uint8)
        self.pool[:] = 1
        self.address = int(self.pool.ctypes.data)
        self.agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        self.agent.register_memory([(self.address, len(self.pool), 0, "")], "DRAM")

    def pages(self, owner: str, address: int) -> Any:
        """A prepared list of every page at an address."""
        spans = [
            (address + i * SHAPE.page_bytes, SHAPE.page_bytes, 0) for i in range(SHAPE.pages_count)
        ]
        return self.agent.prep_xfer_dlist(owner, np.array(spans, dtype=np.uint64), "DRAM")

    def write(self, mine: Any, theirs: Any, items: tuple[Any, Any]) -> float:
        """Seconds from making the request until it is DONE."""
        begun = time.perf_counter()
        request = self.agent.make_prepped_xfer("WRITE", mine, items[0], theirs, items[1])
        state = self.agent.transfer(request)
        while state == "PROC":
            state = self.agent.check_xfer_state(request)
        took_s = time.perf_counter() - begun
        assert state == "DONE", state
        request.release()  # type: ignore[no-untyped-call]
        return took_s


def main() -> None:
    """One of the two agents."""
    tie_to_parent()
    answers = sys.stdout
    sys.stdout = sys.stderr
    agent = Agent(sys.argv[1])
    if sys.argv[1] == "target":
        metadata = b64encode(agent.agent.get_agent_metadata()).decode()
        print(
            json.dumps({"metadata": metadata, "address": agent.address}), file=answers, flush=True
        )
        sys.stdin.read()
        return
    told = json.loads(sys.argv[2])
    agent.agent.add_remote_agent(b64decode(told["metadata"]))
    mine, theirs = agent.pages("", agent.address), agent.pages("target", told["address"])
    rng = np.random.default_rng(0)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(json.loads(line)["rooms"]):
            items = tuple(
                rng.permutation(SHAPE.pages_count)[: SHAPE.pages].astype(np.int32) for _ in "ab"
            )
            seconds.append(agent.write(mine, theirs, (items[0], items[1])))
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)
