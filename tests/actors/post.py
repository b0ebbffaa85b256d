"""The postal network of the world: mailboxes of actors that share one thread and one clock.

A `Box` is what an actor sees of it (`Postman`).  Its frames go through the real codec.  Between two
boxes the order is kept; a frame to a dead process is lost if it was on its way when the process
died, and waits for the successor if it was sent later, since the supervisor owns the door.  Frames
between trees may also be lost, repeated, late or overtaken; a link that is cut, in one direction or
in both, loses or delays all of them.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

from pdrt.clock import MILLISECOND_NS
from pdrt.mail.mailbox import Address, Envelope
from pdrt.protocol import codec
from pdrt.protocol.messages import AnyMessage

NEVER_NS = 1 << 62
WAITING_MAX = 1024  # frames that wait for a door to open


@dataclass
class Weather:
    """How peer links behave.  Local links only ever lose what a death takes with it."""

    loss: float = 0.0
    repeat: float = 0.0
    overtaken: float = 0.0  # of the frames, these come late, as over a connection of before
    delay_ms: tuple[int, int] = (1, 3)
    held_when_cut: float = 0.5  # of the frames sent into a cut, these arrive when it is mended


LATE_MS_MAX = 300  # how late a repeated or overtaken frame may be

#: A link between two trees, both ways; or one way, from the first to the second.
Cut = frozenset[str] | tuple[str, str]


@dataclass(slots=True, eq=False)
class Frame:
    source: Box
    endpoint: str  # of the door that it leaves from or goes to
    link: str  # name of the link at the dialling box
    target: Box | None  # None: whoever owns the endpoint
    data: bytes


class Post:
    """Carries frames.  `clock_ns` is set by the world."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.weather = Weather()
        self.now_ns = 0
        self.cuts: set[Cut] = set()
        self.deserted: set[str] = set()  # host:port where nobody listens any more
        self.carried = 0
        self._number = 0
        self._flying: list[tuple[int, int, Frame]] = []  # when it arrives, its number; a heap
        self._held: list[Frame] = []
        self._waiting: dict[str, list[Frame]] = {}
        self._last_due: dict[tuple[Box, str, Box | None], int] = {}
        self.doors: dict[str, Box] = {}
        self.boxes: dict[bytes, Box] = {}

    def send(self, source: Box, endpoint: str, link: str, target: Box | None, data: bytes) -> None:
        """Put a frame on its way.  `target` is set for an answer through a door."""
        rng, weather = self.rng, self.weather
        low, high = 0, 1
        late_ms = [0]
        if endpoint.startswith("tcp://"):
            low, high = weather.delay_ms
            if rng.random() < weather.loss:
                return
            if rng.random() < weather.repeat:
                late_ms.append(rng.randrange(1, LATE_MS_MAX))
            if weather.overtaken and rng.random() < weather.overtaken:
                late_ms[0] = rng.randrange(1, LATE_MS_MAX)
        frame = Frame(source, endpoint, link, target, data)
        lane = source, endpoint, target
        for extra_ms in late_ms:
            due_ns = self.now_ns + rng.randint(low, high) * MILLISECOND_NS
            if extra_ms:
                due_ns += extra_ms * MILLISECOND_NS
            else:
                due_ns = self._last_due[lane] = max(due_ns, self._last_due.get(lane, 0))
            self._number += 1
            heapq.heappush(self._flying, (due_ns, self._number, frame))

    @property
    def due_ns(self) -> int:
        """When the next frame arrives."""
        return self._flying[0][0] if self._flying else NEVER_NS

    def deliver(self, now_ns: int) -> None:
        self.now_ns = now_ns
        while self._flying and self._flying[0][0] <= now_ns:
            self._arrive(heapq.heappop(self._flying)[2])

    def _is_cut(self, a: str, b: str) -> bool:
        return frozenset((a, b)) in self.cuts or (a, b) in self.cuts

    def _arrive(self, frame: Frame) -> None:
        target = frame.target or self.doors.get(frame.endpoint)
        if target is None:
            waiting = self._waiting.setdefault(frame.endpoint, [])
            if len(waiting) < WAITING_MAX:
                waiting.append(frame)
            return
        if self.cuts and self._is_cut(frame.source.tree, target.tree):
            if self.rng.random() < self.weather.held_when_cut:
                self._held.append(frame)
            return
        self.carried += 1
        peer = frame.endpoint.startswith("tcp://")
        messages = codec.decode(frame.data, from_peer=peer)
        if frame.target is None:
            sender: Address = (target.door_names[frame.endpoint], frame.source.identity)
        else:
            if not target.alive or target.links.get(frame.link) != frame.endpoint:
                return
            sender = frame.link
        target.inbox.extend([(sender, message) for message in messages])
        target.due_ns = 0

    def mend(self, a: str, b: str) -> None:
        self.cuts -= {frozenset((a, b)), (a, b), (b, a)}
        held, self._held = self._held, []
        for frame in held:
            self._arrive(frame)

    def open_door(self, box: Box, name: str, endpoint: str) -> None:
        self.doors[endpoint] = box
        box.door_names[endpoint] = name
        for frame in self._waiting.pop(endpoint, []):
            self._arrive(frame)

    def bury(self, box: Box) -> None:
        """The process is gone, and what was on its way to it."""
        box.alive = False
        box.inbox.clear()
        endpoints = {e for e, owner in self.doors.items() if owner is box}
        for endpoint in endpoints:
            del self.doors[endpoint]
        self.boxes.pop(box.identity, None)

        def lost(frame: Frame) -> bool:
            return frame.target is box or (frame.target is None and frame.endpoint in endpoints)

        self._flying = [entry for entry in self._flying if not lost(entry[2])]
        heapq.heapify(self._flying)
        self._held = [frame for frame in self._held if not lost(frame)]


class Box:
    """The mailbox of one process; see `pdrt.mail.mailbox.Postman`."""

    def __init__(self, post: Post, tree: str, name: str) -> None:
        self._post = post
        self.tree = tree
        self.name = name
        self.identity = name.encode()
        self.alive = True
        self.due_ns = 0  # when its process turns next: at once if something has arrived
        self.links: dict[str, str] = {}
        self.door_names: dict[str, str] = {}
        self.inbox: list[Envelope] = []
        self._outgoing: dict[Address, list[AnyMessage]] = {}
        post.boxes[self.identity] = self

    def post(self, to: Address, message: AnyMessage, *, lazy: bool = False) -> None:
        self._outgoing.setdefault(to, []).append(message)

    def link(self, name: str, endpoint: str, *, from_peer: bool = False) -> None:
        self.links[name] = endpoint

    def unlink(self, name: str) -> None:
        self.links.pop(name, None)
        self._outgoing.pop(name, None)

    def flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, {}
        for to, messages in outgoing.items():
            data = codec.encode(messages)
            if isinstance(to, str):
                if (endpoint := self.links.get(to)) is not None:
                    self._post.send(self, endpoint, to, None, data)
                continue
            door, identity = to
            target = self._post.boxes.get(identity)
            endpoint = next(e for e, name in self.door_names.items() if name == door)
            if target is None:
                continue
            for link, dialled in target.links.items():
                if dialled == endpoint:
                    self._post.send(self, endpoint, link, target, data)
                    break

    def receive(self) -> list[Envelope]:
        inbox, self.inbox = self.inbox, []
        return inbox
