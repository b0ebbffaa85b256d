"""`agents`: thirty chat clients on the real model, through a real router, who die and leave.

Clients hold conversations of several turns.  Their processes are killed, singly and all at one
instant, and started again; they disconnect, and have requests aborted; listeners and workers of
both trees are killed and stopped meanwhile.  Afterwards nothing may be in flight, for a while, and
a request must be answered as it was before.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec

from pdrt.cli.cluster import Cluster
from pdrt.config import cache_folder
from pdrt.serving.convert import model_folder
from stress.bench.trees import ROOT
from stress.cascades import words
from stress.cascades.agents import client, oracle
from stress.cascades.agents.watch import Both, Side
from stress.cascades.agents.words import FIRST_PROMPTS, FIRST_TOKENS, Kind
from stress.cascades.history import Writer, read_all
from stress.cascades.piece import Outcome, Piece, Share
from stress.cascades.trees import Held

NAME = "agents"
LIMIT_S = 3600.0
QUICK = Share(pieces=1, cycles=1_000_000, seconds=25.0)
RELEASE = Share(pieces=2, cycles=1_000_000, seconds=900.0)

PROCESSES, CLIENTS = 6, 5  # in each
BOUND_S, HANG_S = 60.0, 90.0  # for one request, whatever happens to pdrt meanwhile
ZERO_S, WELL_S, GONE_S = 30.0, 60.0, 10.0
STEADY_S, STEADY_QUICK_S = 20.0, 3.0
KILL_CLIENTS_S, STRIKE_S = (0.8, 3.0), (4.0, 9.0)
AGAIN_S = 1.0  # until a killed process of clients is started again, at most
MASS, LAST = 0.12, 0.5  # how often all clients at once; how many at the very end
ROWS = {
    words.LISTENER: 5,
    words.WORKER: 5,
    words.LISTENER_STANDBY: 1,
    words.WORKER_STANDBY: 1,
}
STOPPED = 0.25  # of the strikes; a supervisor ends who hangs
LOOK_S, LOOK_CLOSELY_S, TURN_S = 1.0, 0.1, 0.02
FLAGS = (
    *("--threads", "1", "--kv-checksum", "--chunked-prefill-size", "64"),
    *("--pool-tokens", "16384", "--rooms-max", "1024"),
    *("--bootstrap-timeout", "8", "--waiting-timeout", "8", "--transfer-stall-timeout", "8"),
    *("--queue-timeout", "30", "--quiet-timeout", "3"),
)
#: A router that tries again, or shuts a role out for a minute, would hide what one try comes to.
ROUTER_FLAGS = ("--disable-retries", "--disable-circuit-breaker")
ENVIRONMENT = {"UCX_NET_DEVICES": "lo", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


@dataclass
class Crowd:
    """The processes of clients."""

    piece: Piece
    told: client.Told  # of all; what differs is put in
    writer: Writer
    popens: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    lives: list[int] = field(default_factory=lambda: [0] * PROCESSES)
    due_s: dict[int, float] = field(default_factory=dict)  # when one is started again

    @property
    def stop_file(self) -> Path:
        return Path(self.told.stop_file)

    def start(self, index: int) -> None:
        self.lives[index] += 1
        name = f"clients-{index}-{self.lives[index]}"
        told = msgspec.structs.replace(
            self.told,
            first=index * CLIENTS,
            life=self.lives[index],
            history=str(self.piece.histories / f"{name}.history"),
        )
        command = "from stress.cascades.agents.client import main; main()"
        with (self.piece.folder / f"{name}.log").open("wb") as log:
            self.popens[index] = subprocess.Popen(
                [sys.executable, "-c", command, msgspec.json.encode(told).decode()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
            )

    def kill(self, indices: list[int]) -> None:
        """All at one instant."""
        doomed = [i for i in indices if i in self.popens and self.popens[i].poll() is None]
        for index in doomed:
            self.popens[index].kill()
        for index in doomed:
            popen = self.popens.pop(index)
            self.writer.append(Kind.KILLED, a=index, b=self.lives[index], c=popen.pid)
            popen.wait()

    def turn(self, now_s: float) -> None:
        for index, due_s in list(self.due_s.items()):
            if now_s >= due_s:
                del self.due_s[index]
                self.start(index)

    def wait(self, limit_s: float) -> bool:
        """Until all have ended by themselves."""
        end_s = time.monotonic() + limit_s
        for popen in self.popens.values():
            try:
                popen.wait(max(0.0, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        return True

    def close(self) -> None:
        for popen in self.popens.values():
            popen.kill()
            popen.wait()


@dataclass
class Strike:
    side: Side
    row: int
    held: Held
    identity: int
    at_ns: int


class Storm:
    """What is done to clients and trees, drawn from the seed."""

    def __init__(self, piece: Piece, both: Both, crowd: Crowd, outcome: Outcome) -> None:
        self._both, self._crowd, self._outcome = both, crowd, outcome
        self._chance: random.Random = piece.random("storm")
        self._end_s = time.monotonic() + piece.seconds
        self._begun_s = piece.begun_s
        self._strikes: list[Strike] = []
        self._served = {(s.index, row): s.view.identity(row) for s in both.sides for row in ROWS}
        self.cycles = 0

    def run(self) -> None:
        clients_s, strike_s, look_s = (
            time.monotonic() + self._chance.uniform(*span)
            for span in (KILL_CLIENTS_S, STRIKE_S, (0.0, 0.1))
        )
        while (now_s := time.monotonic()) < self._end_s:
            self._crowd.turn(now_s)
            self._follow()
            self._see_restarts()
            if now_s >= clients_s:
                clients_s = now_s + self._chance.uniform(*KILL_CLIENTS_S)
                self._kill_clients(now_s)
            if now_s >= strike_s:
                strike_s = now_s + self._chance.uniform(*STRIKE_S)
                self._strike()
            if now_s >= look_s:
                look_s = now_s + LOOK_S
                self._look()
            time.sleep(TURN_S)

    def finish(self) -> None:
        """No request begins any more; half of the clients do not live to see the end of theirs."""
        self._crowd.stop_file.touch()
        self._crowd.writer.append(Kind.STOP)
        every = list(range(PROCESSES))
        self._crowd.kill(self._chance.sample(every, int(LAST * PROCESSES)))

    def _kill_clients(self, now_s: float) -> None:
        self.cycles += 1
        every = list(range(PROCESSES))
        doomed = every if self._chance.random() < MASS else [self._chance.choice(every)]
        doomed = [index for index in doomed if index not in self._crowd.due_s]
        self._crowd.kill(doomed)
        for index in doomed:
            self._crowd.due_s[index] = now_s + self._chance.random() * AGAIN_S

    def _strike(self) -> None:
        self.cycles += 1
        side = self._chance.choice(self._both.sides)
        row = self._chance.choices(list(ROWS), list(ROWS.values()))[0]
        number = signal.SIGSTOP if self._chance.random() < STOPPED else signal.SIGKILL
        held = side.hold(row)
        if held is None:
            return
        identity, at_ns = side.view.identity(row), time.monotonic_ns()
        held.signal(number)
        self._crowd.writer.append(Kind.STRUCK, row, side.index, held.pid, number, at_ns)
        self._strikes.append(Strike(side, row, held, identity, at_ns))

    def _follow(self) -> None:
        for strike in list(self._strikes):
            if strike.held.dead() and strike.side.view.serves(strike.row, strike.identity):
                took_ns = time.monotonic_ns() - strike.at_ns
                writer = self._crowd.writer
                writer.append(Kind.SERVES, strike.row, strike.side.index, c=took_ns)
                strike.held.close()
                self._strikes.remove(strike)
                self._served[strike.side.index, strike.row] = strike.side.view.identity(strike.row)

    def _see_restarts(self) -> None:
        """Of those that we did not strike."""
        struck = {(strike.side.index, strike.row) for strike in self._strikes}
        for side in self._both.sides:
            for row in (words.LISTENER, words.WORKER):
                key, identity = (side.index, row), side.view.identity(row)
                if key not in struck and side.view.serves(row, self._served[key]):
                    self._crowd.writer.append(Kind.RESTARTED, row, side.index)
                    self._served[key] = identity

    def settle(self, limit_s: float) -> list[str]:
        """Sentences on roles that did not come back."""
        end_s = time.monotonic() + limit_s
        while self._strikes and time.monotonic() < end_s:
            self._follow()
            self._see_restarts()
            time.sleep(TURN_S)
        left = [f"{s.side.name}: row {s.row} is not back" for s in self._strikes]
        for strike in self._strikes:
            strike.held.close()
        return left

    def _look(self) -> None:
        at_s = round(time.monotonic() - self._begun_s, 2)
        for side in self._both.sides:
            with contextlib.suppress(httpx.HTTPError):
                pages = side.gauges().get("pages_used", 0.0)
                self._outcome.series.setdefault(f"pages of {side.name}", []).append((at_s, pages))
            rooms = float(side.rooms())
            self._outcome.series.setdefault(f"rooms of {side.name}", []).append((at_s, rooms))


def until(ready: Callable[[], object], limit_s: float) -> bool:
    end_s = time.monotonic() + limit_s
    while not ready():
        if time.monotonic() > end_s:
            return False
        time.sleep(LOOK_CLOSELY_S)
    return True


def first_answers(cluster: Cluster) -> list[str]:
    """Of every first prompt, one after another, with nothing else going on."""
    texts = []
    for prompt in FIRST_PROMPTS:
        body = {
            "model": cluster.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": FIRST_TOKENS,
        }
        answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=BOUND_S)
        answer.raise_for_status()
        texts.append(str(answer.json()["choices"][0]["message"]["content"]))
    return texts


@contextlib.contextmanager
def crowd_of(piece: Piece, cluster: Cluster, both: Both, texts: list[str]) -> Iterator[Crowd]:
    prefill, decode = both.sides
    told = client.Told(
        router_port=int(cluster.url.rpartition(":")[2]),
        engine_ports=(prefill.port, decode.port),
        model=cluster.model,
        seed=piece.seed,
        first=0,
        clients=CLIENTS,
        life=0,
        history="",
        stop_file=str(piece.folder / "stop"),
        hang_s=HANG_S,
        references=tuple(map(client.digest, texts)),
    )
    crowd = Crowd(piece, told, piece.history("driver"))
    try:
        for index in range(PROCESSES):
            crowd.start(index)
        yield crowd
    finally:
        crowd.close()
        crowd.writer.close()


def watch_zero(piece: Piece, both: Both, crowd: Crowd, begun_ns: int) -> list[str]:
    """Everything in flight ends within its time, and stays away.  Sentences if not."""
    if not until(lambda: not both.in_flight(), ZERO_S):
        return [f"in flight {ZERO_S:g} s after the last request: {both.in_flight()}"]
    crowd.writer.append(Kind.ZERO, c=time.monotonic_ns() - begun_ns)
    end_s = time.monotonic() + (STEADY_QUICK_S if piece.quick else STEADY_S)
    while time.monotonic() < end_s:
        if found := both.in_flight():
            return [f"in flight again when nobody had asked: {found}"]
        time.sleep(LOOK_CLOSELY_S)
    return []


def play(piece: Piece, cluster: Cluster, outcome: Outcome) -> None:
    with contextlib.closing(Both(cluster)) as both:
        texts = first_answers(cluster)
        until(lambda: not both.faults(), WELL_S)  # standbys warm up last
        with crowd_of(piece, cluster, both, texts) as crowd:
            storm = Storm(piece, both, crowd, outcome)
            storm.run()
            storm.finish()
            begun_ns = time.monotonic_ns()
            if not crowd.wait(HANG_S + 10.0):
                outcome.violations.append("clients did not end")
            outcome.violations += storm.settle(WELL_S)
            outcome.violations += watch_zero(piece, both, crowd, begun_ns)
            outcome.cycles = storm.cycles
        if not until(lambda: not both.faults(), WELL_S):
            outcome.violations.append(f"not well {WELL_S:g} s afterwards: {both.faults()}")
        after = first_answers(cluster)
        outcome.none("answers that differ afterwards", int(after != texts), "pieces")
        if after != texts:
            outcome.violations.append(f"answers differ afterwards: {texts} became {after}")
        if not until(lambda: not both.in_flight(), ZERO_S):
            outcome.violations.append(f"in flight after the last answers: {both.in_flight()}")
        cluster.members["router"].stop()
        for side in both.sides:
            if not until(lambda at=side: not at.connections(), GONE_S):  # type: ignore[misc]
                left = side.connections()
                outcome.violations.append(f"{side.name}: {left} connections, and the router ended")


def run(piece: Piece) -> Outcome:
    outcome = Outcome(cascade=NAME, seed=piece.seed)
    folder = model_folder(None, cache=cache_folder())
    flags = ("--model-path", str(folder), "--transport", "nixl", *FLAGS)
    with Cluster(
        piece.folder, both=flags, router_flags=ROUTER_FLAGS, environment=ENVIRONMENT
    ) as cluster:
        cluster.start()
        piece.begun_s = time.monotonic()
        play(piece, cluster, outcome)
    outcome.count("pieces")
    oracle.judge(read_all(piece.histories), BOUND_S, outcome)
    outcome.rooms = outcome.counts["requests"]
    outcome.took_s = piece.spent_s()
    return outcome
