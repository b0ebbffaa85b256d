"""Clients connect to a control port without a pause while its listener is killed repeatedly."""

from __future__ import annotations

import json
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field

import msgspec

from stress.bench.bench import Bench
from stress.bench.crashes import successor_ns
from stress.bench.figures import Goal, Result
from stress.bench.trees import ROOT, SMALL, Tree, pair, tie_to_parent
from stress.bench.trips import Route

TITLE = "Connects to a control port while its listener is killed"
KILLS, BUDGET_S = 20, 38.0
EVERY_S = 0.002
CONNECTS_MAX_S = 120.0  # it ends by itself, whatever became of who started it
SLOW_S = 10.0  # a connection that is served no sooner counts as lost
RST = struct.pack("ii", 1, 0)  # linger 0: no port stays in TIME_WAIT


class Tally(msgspec.Struct):
    """What became of the connects."""

    connected_ms: list[float] = msgspec.field(default_factory=list)
    greeted_ms: list[float] = msgspec.field(default_factory=list)  # until the listener speaks
    refused: int = 0
    reset: int = 0  # accepted by a listener that died before it spoke
    lost: int = 0


def measure(bench: Bench, result: Result) -> None:
    with pair(bench.folder, first_deaths=True) as (prefill, decode):
        Route(prefill, decode, SMALL).whole()
        for tree in (prefill, decode):
            _bombard(bench, result, tree)


def _bombard(bench: Bench, result: Result, tree: Tree) -> None:
    client = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from stress.bench.connects import main; main()",
            str(tree.control_port),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    kills = 0
    assert client.stdout is not None
    try:
        assert client.stdout.readline() == b"there\n"
        for _ in bench.rounds(KILLS, BUDGET_S):
            tree.settle(but="listener")
            before = tree.table.incarnation(tree.row("listener"))
            tree.kill("listener", signal.SIGKILL)
            successor_ns(tree, "listener", before)
            kills += 1
        out, _ = client.communicate(b"\n", timeout=3 * SLOW_S)
    finally:
        client.kill()
        client.wait()
    tally = msgspec.json.decode(out, type=Tally)
    what = f"{tree.name}, {kills} kills, {len(tally.connected_ms)} connects"
    none = Goal("max", 0)
    result.add(f"{what}: refused", "", [tally.refused], none)
    result.add(f"{what}: never served", "", [tally.lost], none, f"within {SLOW_S:g} s")
    result.add(f"{what}: reset by a listener's death", "", [tally.reset])
    result.add(f"{tree.name}: connect", "ms", tally.connected_ms)
    result.add(f"{tree.name}: connect until the listener's greeting", "ms", tally.greeted_ms)


@dataclass
class Client:
    port: int
    tally: Tally = field(default_factory=Tally)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    begun: dict[socket.socket, float] = field(default_factory=dict)

    def connect(self) -> None:
        mine = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
        self.begun[mine] = time.perf_counter()
        code = mine.connect_ex(("127.0.0.1", self.port))
        if code in (0, 115):  # EINPROGRESS
            self.selector.register(mine, selectors.EVENT_WRITE)
        else:
            self.tally.refused += 1
            self._drop(mine)

    def look(self, wait_s: float) -> None:
        for key, events in self.selector.select(wait_s):
            mine = key.fileobj
            assert isinstance(mine, socket.socket)
            since_ms = 1e3 * (time.perf_counter() - self.begun[mine])
            if events & selectors.EVENT_WRITE:
                if mine.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    self.tally.refused += 1
                    self._drop(mine)
                    continue
                self.tally.connected_ms.append(since_ms)
                self.selector.modify(mine, selectors.EVENT_READ)
                continue
            try:
                greeted = bool(mine.recv(64))
            except OSError:
                greeted = False
            if greeted:
                self.tally.greeted_ms.append(since_ms)
            else:
                self.tally.reset += 1
            self._drop(mine)

    def expire(self) -> None:
        end = time.perf_counter() - SLOW_S
        for mine in [mine for mine, begun in self.begun.items() if begun < end]:
            self.tally.lost += 1
            self._drop(mine)

    def _drop(self, mine: socket.socket) -> None:
        if mine in self.selector.get_map():
            self.selector.unregister(mine)
        del self.begun[mine]
        mine.close()


def main() -> None:
    """Connect every 2 ms until a line comes in, then wait for what is under way."""
    tie_to_parent()
    client = Client(int(sys.argv[1]))
    due, said = time.perf_counter(), False
    end = due + CONNECTS_MAX_S
    while due < end and not select.select([sys.stdin], [], [], 0)[0]:
        while due <= time.perf_counter():
            due += EVERY_S
            client.connect()
        client.look(max(0.0, due - time.perf_counter()))
        client.expire()
        if not said and client.tally.greeted_ms:
            said = True
            print("there", flush=True)
    while client.begun:
        client.look(0.1)
        client.expire()
    print(json.dumps(msgspec.to_builtins(client.tally)), flush=True)
