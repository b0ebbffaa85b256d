"""An engine in a process of its own that only moves rooms, as fast as the API lets it.

Told by JSON in its arguments what it is; then it reads asks, one JSON object a line, and answers
each with one.  stress/bench/stock_engine.py speaks the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from pdrt.engine.manager import KVManager
from pdrt.engine.receiver import KVReceiver
from pdrt.engine.sender import KVSender
from pdrt.memory.aux import AuxRow
from pdrt.protocol.states import KVPoll, Role
from stress.bench.trees import Shape, tie_to_parent

WAIT_S = 0.005  # a lost wake-up costs no more than this


class Told(msgspec.Struct, frozen=True):
    attach: str
    peer: str
    shape: Shape


class Ask(msgspec.Struct, frozen=True):
    """`ahead`: prefill sends before it knows the destination, as an engine does that computed
    first; else as the stock components demand, once the room is WaitingForInput."""

    rooms: int
    open: int
    first: int
    ahead: bool = False


@dataclass(eq=False)
class Moving:
    room: KVSender | KVReceiver
    aux: int
    place: int
    begun: float
    done_its_part: bool = False


class Player:
    def __init__(self, told: Told) -> None:
        self._told, self._shape = told, told.shape
        self.manager = KVManager.attach(told.attach, name="bench-player")
        self.prefill = self.manager.role is Role.PREFILL
        places = self._shape.pages_count // self._shape.pages
        if self._shape.scattered:
            order = np.random.default_rng(1 + self.prefill).permutation(self._shape.pages_count)
            pages = order[: places * self._shape.pages]
        else:
            pages = np.arange(places * self._shape.pages)
        self._pages = pages.astype(np.int32).reshape(places, self._shape.pages)
        self._free = list(range(places))

    def play(self, ask: Ask) -> list[float]:
        """Seconds of each room: from asking on decode, from the first send on prefill."""
        seconds: list[float] = []
        moving: dict[int, Moving] = {}
        opened = 0
        while len(seconds) < ask.rooms:
            moved = False
            with self.manager.together():
                while opened < ask.rooms and len(moving) < ask.open:
                    moving[ask.first + opened] = self._open(ask.first + opened, ask.ahead)
                    opened += 1
                for number, mine in list(moving.items()):
                    state = mine.room.poll()
                    assert state is not KVPoll.Failed, mine.room.failure()
                    if state is KVPoll.WaitingForInput and not mine.done_its_part:
                        self._go_on(mine)
                        moved = True
                    elif state is KVPoll.Success:
                        seconds.append(time.perf_counter() - mine.begun)
                        self._clear(number, moving.pop(number))
                        moved = True
            self.manager.tick()
            if not moved:
                self._wait()
        return seconds

    def _open(self, number: int, ahead: bool) -> Moving:
        begun, place, aux = time.perf_counter(), self._free.pop(), self.manager.aux.reserve()
        if not self.prefill:
            receiver = self.manager.receiver(number, self._told.peer)
            receiver.init()
            return Moving(receiver, aux, place, begun)
        sender = self.manager.sender(number)
        sender.init(self._shape.pages, aux)
        self.manager.aux.write(aux, AuxRow(number, 1))
        mine = Moving(sender, aux, place, begun)
        if ahead:
            self._go_on(mine)
        return mine

    def _go_on(self, mine: Moving) -> None:
        mine.done_its_part = True
        pages = self._pages[mine.place]
        if isinstance(mine.room, KVReceiver):
            mine.room.send_metadata(pages, mine.aux)
            return
        mine.begun = time.perf_counter()
        for index, part in enumerate(self._parts(pages), 1):
            mine.room.send(part, last=index == self._shape.chunks)

    def _parts(self, pages: NDArray[np.int32]) -> list[NDArray[np.int32]]:
        return np.array_split(pages, self._shape.chunks)

    def _clear(self, number: int, mine: Moving) -> None:
        if not self.prefill:
            assert self.manager.aux.read(mine.aux, number).first_token == 1
        mine.room.clear()
        self.manager.aux.release(mine.aux)
        self._free.append(mine.place)

    def _wait(self) -> None:
        """Until some room may have changed."""
        if select.select([self.manager.wake_fd], [], [], WAIT_S)[0]:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.manager.wake_fd)


def main() -> None:
    tie_to_parent()
    player = Player(msgspec.json.decode(sys.argv[1], type=Told))
    print("{}", flush=True)
    for line in sys.stdin:
        ask = msgspec.json.decode(line, type=Ask)
        begun, cpu = time.perf_counter(), time.process_time()
        seconds = player.play(ask)
        whole_s = time.perf_counter() - begun
        answer = {"whole_s": whole_s, "seconds": seconds, "cpu_s": time.process_time() - cpu}
        print(json.dumps(answer), flush=True)
    player.manager.close()
