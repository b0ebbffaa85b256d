"""An engine in a process of its own that serves one room by itself, so that it may die at it.

It says on its output what became of the room: where it is, then how it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from typing import Any

from tests.crash.party import Party
from tests.crash.trees import ROOT, Tree
from tests.failpoints import control

SOURCE = "from tests.failpoints.engine import main; main()"


class EngineProcess:
    """Our end.  `ask` makes it serve a room; `said` is what we heard of it."""

    def __init__(self, tree: Tree, folder: str, side: str) -> None:
        environment = {**os.environ, control.FOLDER: folder, control.TREE: "engine"}
        self._popen = subprocess.Popen(
            [sys.executable, "-c", SOURCE, tree.attach, side],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # of one that raises, the traceback is what we asked for
            cwd=ROOT,
            env=environment,
        )
        assert self._popen.stdout is not None
        os.set_blocking(self._popen.stdout.fileno(), False)
        self._heard = b""
        self.pid = self._popen.pid

    def ask(self, **job: Any) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(json.dumps(job).encode() + b"\n")
            self._popen.stdin.flush()

    @property
    def said(self) -> dict[str, Any]:
        assert self._popen.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._popen.stdout.fileno(), 4096):
                self._heard += data
        found: dict[str, Any] = {}
        for line in self._heard.splitlines(keepends=True):
            if line.endswith(b"\n"):
                found |= json.loads(line)
        return found

    @property
    def dead(self) -> bool:
        return self._popen.poll() is not None

    def close(self) -> None:
        self._popen.kill()
        self._popen.wait(10)
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class _Half:
    """The room as this engine drives it."""

    def __init__(self, party: Party, side: str, job: dict[str, Any]) -> None:
        self._party, self._side, self._job = party, side, job
        self._sent = 0
        self._told = self._aborted = False
        party.open(job["room"], job["peer"], sum(job["chunks"]), job["aux"])
        _say(opened=True)

    def go_on(self) -> bool:
        """True once the room is over and cleared."""
        party, job, room = self._party, self._job, self._job["room"]
        state = party.poll(room)
        if party.over(room):
            if not party.quiet(room):
                return False
            _say(verdict=state, code=party.failure(room))
            party.clear(room)
            _say(cleared=True)
            return True
        if state in job["abort_in"] and not self._aborted:
            self._aborted = True
            party.abort(room)
        elif self._side == "decode" and state == "WaitingForInput" and not self._told:
            self._told = True
            party.metadata(room, job["pages"], job["aux"])
        elif self._side == "prefill" and state in ("WaitingForInput", "Transferring"):
            if self._sent < len(job["chunks"]):
                first = sum(job["chunks"][: self._sent])
                pages = job["pages"][first : first + job["chunks"][self._sent]]
                self._sent += 1
                party.send(room, pages, self._sent == len(job["chunks"]), job["aux"])
        return False


def main() -> None:
    control.obey()
    party, half = Party(sys.argv[1], "failpoints-victim"), None
    _say(attached=True)
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], 0.005)
        if ready:
            line = sys.stdin.readline()
            if not line:
                break
            half = _Half(party, sys.argv[2], json.loads(line))
        if half is not None and half.go_on():
            half = None
        party.tick()
    party.close()
