"""A table full of rooms with one actor before it, and how much is done between two beats."""

from __future__ import annotations

import os
import sys
from collections import Counter as Tally
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import pdrt
from pdrt import shm_status
from pdrt.actors.base import Beating
from pdrt.actors.boot import FIRST_ENGINE_ROW, FIRST_WORKER_ROW, LISTENER_ROW, SUPERVISOR_ROW
from pdrt.actors.decode_listener import DecodeListener
from pdrt.actors.janitor import Janitor
from pdrt.actors.prefill_listener import PrefillListener
from pdrt.actors.transfer import TransferWorker
from pdrt.clock import MILLISECOND_NS, SECOND_NS
from pdrt.config import Timeouts
from pdrt.mail.mailbox import Address
from pdrt.process_rows import Owner
from pdrt.protocol.layout import RegionMap
from pdrt.protocol.messages import (
    Agent,
    AnyMessage,
    Chunk,
    Deliver,
    Destination,
    Hello,
    HelloReply,
    Introduced,
    Introduction,
    Opened,
    PeerUp,
    PeerWarm,
    WorkerUp,
)
from pdrt.protocol.states import OPEN, Event, Reason, Role
from pdrt.shm_status import Handle, StatusTable
from pdrt.transports.base import TransferState
from tests.actors.world import LAYOUT

ROOMS = 1000
ITEMS_A_BEAT = 8
TIMEOUTS = Timeouts()
OURS = os.path.dirname(pdrt.__file__)
PEER = ("control", b"x")
LINK = "prefill:p:1"
AGENT = Agent(0, 1, 1 << 20, 1 << 20, {"fake": b""})


class Stretches:
    """The lines that were run since the last beat, and the most often run one of all stretches."""

    def __init__(self) -> None:
        self.beats_count = 0
        self.worst: tuple[int, str] = (0, "")
        self._runs: Tally[tuple[CodeType, int]] = Tally()

    def beat(self) -> None:
        self.beats_count += 1
        if self._runs:
            (code, line), runs = self._runs.most_common(1)[0]
            where = f"{os.path.relpath(code.co_filename, OURS)}:{line} in {code.co_name}"
            self.worst = max(self.worst, (runs, where))
        self._runs.clear()

    def _enter(self, frame: FrameType, what: str, _: Any) -> Any:
        ours = frame.f_code.co_filename.startswith(OURS)
        return self._run if ours and what == "call" else None

    def _run(self, frame: FrameType, what: str, _: Any) -> Any:
        if what == "line":
            self._runs[frame.f_code, frame.f_lineno] += 1
        return self._run

    @contextmanager
    def watched(self) -> Iterator[None]:
        self.beats_count, self.worst = 0, (0, "")
        self._runs.clear()
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)
            self.beat()


class Desk:
    """A mailbox that keeps nothing."""

    def post(self, to: Address, message: AnyMessage, *, lazy: bool = False) -> None:
        pass

    def link(self, name: str, endpoint: str, *, from_peer: bool = False) -> None:
        pass

    def unlink(self, name: str) -> None:
        pass


class Still:
    """A transport whose writes never end."""

    name = "fake"

    def __init__(self) -> None:
        self._handles = 0

    def _next(self) -> int:
        self._handles += 1
        return self._handles

    def prepare(self, name: str | None, grids: object) -> int:
        return self._next()

    def connect(self, name: str, metadata: bytes) -> int:
        return 0

    def write(self, *_: object) -> int:
        return self._next()

    def fence(self, name: str) -> int:
        return self._next()

    def poll(self, handle: int) -> Any:
        return TransferState.PENDING if handle else TransferState.DONE

    def release(self, handle: int) -> None:
        pass

    def disconnect(self, name: str) -> None:
        pass

    def progress(self) -> None:
        pass

    def lost(self) -> list[str]:
        return []


class Scene:
    """A table full of rooms, and one actor."""

    def __init__(self, role: Role) -> None:
        self.now_ns = 1000 * SECOND_NS
        self.stretches = Stretches()
        self.beating = Beating(self.stretches.beat, ITEMS_A_BEAT)
        self._fd = shm_status.create(
            role,
            rooms_max=ROOMS + 8,
            instance=b"i".ljust(16, b"\0"),
            timeouts_ms=dict.fromkeys(OPEN, 60_000),
            now_ns=self.now_ns,
        )
        self._views: list[StatusTable] = []
        self.engine = self.view(FIRST_ENGINE_ROW)
        self.engine.incarnate(FIRST_ENGINE_ROW, 1, 1, "engine")
        self.worker = self.view(FIRST_WORKER_ROW)
        self.worker.incarnate(FIRST_WORKER_ROW, 1, 1, "worker0")
        self.handles: list[Handle] = []
        for room in range(ROOMS):
            handle = self.engine.open(room, 0, now_ns=self.now_ns, use=room + 1)
            assert handle is not None
            self.handles.append(handle)

    def view(self, row: int) -> StatusTable:
        self._views.append(StatusTable(self._fd, Owner(row, 1)))
        return self._views[-1]

    def later(self, later_ns: int = 30 * MILLISECOND_NS) -> int:
        self.now_ns += later_ns
        return self.now_ns

    def move(self, event: Event, reason: Reason = Reason.NONE, owner: Owner | None = None) -> None:
        for handle in self.handles:
            self.engine.move(*handle[1:], event, now_ns=self.now_ns, reason=reason, owner=owner)

    def fail(self) -> None:
        self.move(Event.FAULT, Reason.ENGINE_DIED)

    def close(self) -> None:
        for view in self._views:
            view.close()
        os.close(self._fd)


class PrefillScene(Scene):
    def __init__(self) -> None:
        super().__init__(Role.PREFILL)
        self.actor = PrefillListener(
            instance="p",
            boot_id="b",
            layout=LAYOUT,
            table=self.view(LISTENER_ROW),
            mailbox=Desk(),
            timeouts=TIMEOUTS,
            wake=lambda row: None,
            nobody_listens=lambda peer, now_ns: False,
            beating=self.beating,
        )

    def meet(self) -> None:
        self.actor.tick(self.now_ns)
        self.say("worker0", WorkerUp(0, 1, {"fake": b""}))
        self.say(PEER, Hello(1, 1, "d", 1, LAYOUT.digest))
        self.say(PEER, Introduction("d", 1, "h:1", "b", [AGENT], 1))
        self.say("worker0", PeerWarm("d", 0, 1, "fake"))

    def match(self) -> None:
        self.meet()
        for room in range(ROOMS):
            self.say(PEER, self.destination(room))

    def destination(self, room: int) -> Destination:
        return Destination(room, 0, room, 1, "d", 1, bytes(4), room, "p#1")

    def say(self, sender: Address, message: AnyMessage) -> None:
        self.actor.handle(sender, message, self.now_ns)

    def clear(self) -> None:
        for handle in self.handles:
            assert self.engine.clear(*handle[1:])


class DecodeScene(Scene):
    def __init__(self) -> None:
        super().__init__(Role.DECODE)
        self.serial = 1
        self.begin()

    def begin(self) -> None:
        """A listener that knows nothing yet."""
        self.actor = DecodeListener(
            instance="d",
            boot_id="b",
            control="h:2",
            layout=LAYOUT,
            maps=(RegionMap(layout=LAYOUT, rank=0, pages_count=ROOMS, aux_rows=ROOMS),),
            table=self.view(LISTENER_ROW),
            mailbox=Desk(),
            timeouts=TIMEOUTS,
            wake=lambda row: None,
            nobody_listens=lambda peer, now_ns: False,
            beating=self.beating,
        )

    def open(self) -> None:
        self.say(("local", b""), WorkerUp(0, 1, {"fake": b""}))
        for handle in self.handles:
            _, slot, generation = handle
            opened = Opened(handle.room, 0, slot, generation, "p:1", slot, generation)
            self.say(("local", b""), opened)
        self.say(LINK, HelloReply(1, 1, "p", 1, LAYOUT.digest))

    def introduced(self) -> Introduced:
        return Introduced("d", self.serial, "fake")

    def send(self) -> None:
        self.open()
        self.say(LINK, self.introduced())
        self.move(Event.DESTINATION_SENT, owner=Owner(FIRST_WORKER_ROW, 1))
        for handle in self.handles:
            whose = handle.room, 0, *handle[1:]
            self.say(("local", b""), Destination(*whose, "d", 1, bytes(4), 1))

    def say(self, sender: Address, message: AnyMessage) -> None:
        self.actor.handle(sender, message, self.now_ns)


class WorkerScene(Scene):
    def __init__(self) -> None:
        super().__init__(Role.PREFILL)
        transport: Any = Still()
        self.actor = TransferWorker(
            region=RegionMap(layout=LAYOUT, rank=0, pages_count=ROOMS, aux_rows=ROOMS),
            transports={"fake": (transport, b"")},
            preferred="fake",
            table=self.worker,
            mailbox=Desk(),
            timeouts=TIMEOUTS,
            clock=lambda: self.now_ns,
            wake=lambda row: None,
            listener_row=LISTENER_ROW,
            beating=self.beating,
        )
        self.move(Event.PEER_KNOWN)

    def take(self, *, opened: bool) -> None:
        """All rooms have what they need but, unless `opened`, the path."""
        up = PeerUp("d", "h:1", AGENT, False)
        if opened:
            self.say(up)
            self.actor.tick(self.later())
        for handle in self.handles:
            room, slot, generation = handle
            to = Destination(room, 0, slot, 1, "d", 1, bytes(4), 1, "p#1")
            self.say(Deliver(slot, generation, to))
            self.say(Chunk(room, slot, generation, 0, 0, bytes(4), True, 1))
        self.say(up)

    def say(self, message: AnyMessage) -> None:
        self.actor.handle("listener", message, self.now_ns)


class JanitorScene(Scene):
    def __init__(self) -> None:
        super().__init__(Role.PREFILL)
        self.actor = Janitor(
            table=self.view(SUPERVISOR_ROW),
            timeouts=TIMEOUTS,
            mapped=lambda peer, rank, epoch: False,
            fence=lambda row, reason: None,
            wake=lambda row: None,
            beating=self.beating,
        )
