"""Processes of the stock stacks that do as they are told, one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stress.bench.players import Engine

START_S = 900.0  # importing a stack takes 10 s, on a busy host minutes
LANES = "UCX_TLS=tcp,self"  # on one host UCX's default copies inside the call: nothing is under way


class Puppet(Engine):
    """Its answers are objects; one with `error` is raised here."""

    def __init__(self, name: str, folder: Path, python: Path, module: str, **told: Any) -> None:
        told["name"] = name
        command = ["env", LANES, *told.pop("environment", ())]
        command += [str(python), "-m", module, json.dumps(told)]
        super().__init__(name, command, folder / f"{name}.err")

    def wait_ready(self) -> dict[str, Any]:
        return self._answered(self.answer(START_S))

    def tell(self, do: str, **what: Any) -> None:
        """Ask without waiting; the answer is read by `hear`."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps({"do": do, **what}).encode() + b"\n")
        self._popen.stdin.flush()

    def hear(self, limit_s: float) -> Any:
        return self._answered(self.answer(limit_s))["answer"]

    def do(self, do: str, *, within_s: float = 60.0, **what: Any) -> Any:
        self.tell(do, **what)
        return self.hear(within_s)

    def _answered(self, answer: dict[str, Any]) -> dict[str, Any]:
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}\n{self.tail()}")
        return answer

    @contextlib.contextmanager
    def stopped(self) -> Iterator[Callable[[], None]]:
        """SIGSTOPped until the end, or until what is yielded is called."""
        self.signal(signal.SIGSTOP)
        try:
            yield lambda: self.signal(signal.SIGCONT)
        finally:
            self.signal(signal.SIGCONT)


@contextlib.contextmanager
def started(*puppets: Puppet) -> Iterator[None]:
    """Waits until each is there; ends all on the way out."""
    try:
        for puppet in puppets:
            puppet.wait_ready()
        yield
    finally:
        for puppet in puppets:
            puppet.close()
