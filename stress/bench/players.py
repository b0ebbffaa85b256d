"""Pairs of engines in processes of their own, ours and stock ones, that are asked for rooms."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import psutil

from pdrt.cli.cluster import free_ports
from pdrt.config import environment_with
from stress.bench.player import Ask, Told
from stress.bench.trees import ROOT, Shape, Tree

START_S, ANSWER_S = 240.0, 120.0  # the stock components import for 10 s, on a busy host for minutes


class Engine:
    """One process that reads asks and writes answers."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("wb") as errors:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env=environment_with({"UCX_NET_DEVICES": "lo", "UCX_LOG_LEVEL": "error"}),
            )
        self._rest = b""

    def ask(self, what: Ask) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(msgspec.json.encode(what) + b"\n")
        self._popen.stdin.flush()

    def answer(self, limit_s: float) -> dict[str, Any]:
        """The next line.  Raises TimeoutError, RuntimeError with the log's tail."""
        assert self._popen.stdout is not None
        fd = self._popen.stdout.fileno()
        while b"\n" not in self._rest:
            if not select.select([fd], [], [], limit_s)[0]:
                raise TimeoutError(
                    f"{self.name} did not answer within {limit_s:g} s\n{self.tail()}"
                )
            data = os.read(fd, 1 << 20)
            if not data:
                raise RuntimeError(f"{self.name} ended:\n{self.tail()}")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]

    def signal(self, number: int) -> None:
        for process in (psutil.Process(self._popen.pid), *self._family()):
            process.send_signal(number)

    def _family(self) -> list[psutil.Process]:
        return psutil.Process(self._popen.pid).children(recursive=True)

    def close(self) -> None:
        family = self._family()
        self._popen.kill()
        self._popen.wait()
        for process in family:
            if process.is_running():
                process.kill()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                pipe.close()


@dataclass(frozen=True)
class Run:
    """One round of rooms."""

    rooms_per_s: float
    decode_ms: list[float]  # from asking to Success
    prefill_ms: list[float]  # from the first send to Success
    cpu_us: tuple[float, float]  # of the two engines, a room


class Players:
    """A prefill and a decode engine.  `freeze` those that use processor time while they idle."""

    def __init__(self, name: str, engines: tuple[Engine, Engine]) -> None:
        self.name = name
        self._engines = engines
        self._first = 1

    @classmethod
    def ours(cls, folder: Path, name: str, prefill: Tree, decode: Tree, shape: Shape) -> Self:
        engines = []
        for tree in (prefill, decode):
            told = msgspec.json.encode(Told(tree.attach, prefill.control, shape)).decode()
            command = [sys.executable, "-c", "from stress.bench.player import main; main()", told]
            engines.append(
                Engine(f"{name} {tree.name}", command, folder / f"{name}-{tree.name}.err")
            )
        return cls._when_there(name, (engines[0], engines[1]))

    @classmethod
    def stock(cls, folder: Path, python: Path, shape: Shape) -> Self:
        engines = []
        port = free_ports(1)[0]
        program = str(Path(__file__).parent / "stock_engine.py")
        for role in ("prefill", "decode"):
            told = {"role": role, "port": port, "shape": msgspec.to_builtins(shape)}
            log = folder / f"stock-{role}-{port}.err"
            engines.append(Engine(f"stock {role}", [str(python), program, json.dumps(told)], log))
        return cls._when_there("stock", (engines[0], engines[1]))

    @classmethod
    def _when_there(cls, name: str, engines: tuple[Engine, Engine]) -> Self:
        players = cls(name, engines)
        try:
            for engine in engines:
                engine.answer(START_S)
        except BaseException:
            players.close()
            raise
        return players

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, rooms: int, open_max: int, *, ahead: bool = False) -> Run:
        ask = Ask(rooms, open_max, self._first, ahead)
        self._first += rooms
        for engine in self._engines:
            engine.ask(ask)
        prefill, decode = (engine.answer(ANSWER_S) for engine in self._engines)
        return Run(
            rooms_per_s=rooms / decode["whole_s"],
            decode_ms=[1e3 * s for s in decode["seconds"]],
            prefill_ms=[1e3 * s for s in prefill["seconds"]],
            cpu_us=(1e6 * prefill["cpu_s"] / rooms, 1e6 * decode["cpu_s"] / rooms),
        )

    def freeze(self) -> None:
        for engine in self._engines:
            engine.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        for engine in self._engines:
            engine.signal(signal.SIGCONT)

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
