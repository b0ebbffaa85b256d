"""An engine that is not ours, one call at a time: in this process, or in one that may be killed."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from pdrt.engine.manager import KVManager
from pdrt.engine.receiver import KVReceiver
from pdrt.engine.room import KVRoom
from pdrt.engine.sender import KVSender
from pdrt.memory.aux import AuxRow
from pdrt.protocol.states import TERMINAL, KVPoll, Role
from tests.crash.bad import Bug
from tests.waiting import wait_until

TOKEN = 42


class Party:
    """Arguments and answers are plain, so that `RemoteParty` can carry them."""

    def __init__(self, attach: str, name: str) -> None:
        self._manager = KVManager.attach(attach, name=name)
        self._rooms: dict[int, KVRoom] = {}

    def open(self, room: int, peer: str, pages_count: int, aux: int) -> None:
        if self._manager.role is Role.PREFILL:
            sender = self._manager.sender(room)
            sender.init(pages_count, aux)
            self._rooms[room] = sender
            self._manager.tick()
        else:
            receiver = self._manager.receiver(room, peer)
            receiver.init()
            self._rooms[room] = receiver

    def metadata(self, room: int, pages: Sequence[int], aux: int) -> None:
        receiver = self._rooms[room]
        assert isinstance(receiver, KVReceiver)
        receiver.send_metadata(np.array(pages, dtype=np.int32), aux)

    def send(self, room: int, pages: Sequence[int], last: bool, aux: int) -> None:
        sender = self._rooms[room]
        assert isinstance(sender, KVSender)
        if last:
            self._manager.aux.write(aux, AuxRow(room, TOKEN, -0.5, len(pages)))
        sender.send(np.array(pages, dtype=np.int32), last=last)

    def peek(self, room: int) -> dict[str, Any]:
        """The slot as it is, without ending or concluding anything."""
        slot, generation = self._rooms[room]._handles[0][1:]
        word = self._manager.table.read(slot, generation)
        assert word is not None, f"room {room} was cleared by somebody else"
        return {
            "state": word.state.name,
            "reason": word.reason.name,
            "quiet": bool(word.quiet),
            "moved_bytes": self._manager.table.moved_bytes(slot, generation),
        }

    def poll(self, room: int) -> str:
        return self._rooms[room].poll().name

    def over(self, room: int) -> bool:
        return self._rooms[room].poll() in TERMINAL

    def failure(self, room: int) -> str:
        """Code of the typed error, "" without one."""
        error = self._rooms[room].failure()
        return "" if error is None else error.code

    def token(self, room: int, aux: int) -> int:
        return self._manager.aux.read(aux, room).first_token

    def quiet(self, room: int) -> bool:
        return self._rooms[room].quiet()

    def abort(self, room: int) -> None:
        self._rooms[room].abort()

    def clear(self, room: int) -> None:
        self._rooms.pop(room).clear()

    def fill(self, pages: Sequence[int], seed: int) -> None:
        """Every page its own bytes."""
        kv = np.frombuffer(self._manager.kv(0), dtype=np.uint64)
        kv = kv.reshape(self._manager.maps[0].pages_count, -1)
        base = np.random.default_rng(seed).integers(0, 1 << 62, kv.shape[1], dtype=np.uint64)
        for page in pages:
            kv[page] = base + np.uint64(page)

    def digest(self, pages: Sequence[int]) -> int:
        return self._manager.digest(np.array(pages, dtype=np.int32))

    def worker_incarnation(self) -> int:
        """0 while there is none."""
        return self._manager.table.incarnation(self._manager.actor_rows["worker0"])

    def tick(self) -> None:
        self._manager.tick()

    def close(self) -> None:
        self._manager.close()


class RemoteParty:
    """The same in a process of its own.  `popen.pid` may be stopped or killed."""

    def __init__(self, attach: str, name: str) -> None:
        main = "from tests.crash.party import main; main()"
        self.popen = subprocess.Popen(
            [sys.executable, "-c", main, attach, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer(20) == "attached"

    def _answer(self, deadline_s: float) -> Any:
        stdout = self.popen.stdout
        assert stdout is not None
        wait_until(lambda: select.select([stdout], [], [], 0)[0], deadline_s, "the engine's answer")
        line = stdout.readline()
        assert line, "the engine's process ended"
        return json.loads(line)

    def _ask(self, *call: Any) -> Any:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(call) + "\n")
        self.popen.stdin.flush()
        return self._answer(10)

    def __getattr__(self, name: str) -> Any:
        if name not in Party.__dict__:
            raise AttributeError(name)
        return lambda *arguments: self._ask(name, *arguments)

    def tick(self) -> None:
        """It ticks by itself."""

    def close(self) -> None:
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.popen.kill()
        self.popen.wait(10)
        self.popen.stdin.close()
        self.popen.stdout.close()


def main() -> None:
    party, bug = Party(sys.argv[1], sys.argv[2]), Bug()
    bug.arm()
    sys.stdout.write('"attached"\n')
    sys.stdout.flush()
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], 0.005)
        if ready:
            line = sys.stdin.readline()
            if not line:
                break
            name, *arguments = json.loads(line)
            answer = getattr(party, name)(*arguments)
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
        party.tick()
        bug.strike()
    party.close()


AnyParty = Party | RemoteParty
VERDICTS = {state.name for state in TERMINAL}
SUCCESS, FAILED = KVPoll.Success.name, KVPoll.Failed.name
