"""A process that shoots: told by JSON in its argument what at, it answers with what it fired.

A *volley* is one connection to one door, from its handshake to its end.  Most end politely, and
then every frame of them has been read; what is said on the others may be lost on the way, and is
counted apart.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
import urllib.request
from collections import Counter as Multiset
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdrt.errors import ProtocolError
from pdrt.protocol import codec
from pdrt.protocol.codec import FRAME_BYTES_MAX, Malformed
from pdrt.protocol.messages import PeerGone
from stress.bench.trees import tie_to_parent
from stress.fuzz.decoders import REPLY, REQUESTS
from stress.fuzz.hostile import Frames, Known, Names, hostile_instances, rng_of
from stress.fuzz.mutate import LIES, Mutator
from stress.fuzz.wire import GREETING, LONG, MORE, Connection, Place, frame, multipart, ready

FRESH = 300  # frames made for a volley, which are fired again and again
AGAIN = 8
CHUNK_BYTES = 64 << 10
TAKEN = "taken"  # frames that are messages
ASKS_A_VOLLEY, REQUESTS_A_VOLLEY = 40, 10
REPLY_S = 5.0


class Door(msgspec.Struct, frozen=True):
    """One thing to shoot at."""

    kind: str  # "control", "local", "attach", "http"
    tree: str
    host: str = ""  # or the name of an abstract socket, if there is no port
    port: int = 0

    @property
    def place(self) -> Place:
        return (self.host, self.port) if self.port else self.host


class Told(msgspec.Struct, frozen=True):
    seed: int
    frames: int
    until_s: float  # by this process's clock of monotonic time; 0: until all frames are fired
    doors: list[Door]
    weights: list[int]  # frames to each door, relative to the others
    supervisors: dict[str, str]  # URLs, by tree
    digest: bytes
    boot_id: str
    answering: str


#: How a volley ends, and what it has fired.
End = Callable[[Door, Connection, list[bytes]], Multiset[str]]


@dataclass
class Fired:
    """By tree and kind.  `lost_at_most`: of those, frames that may never have been read."""

    frames: dict[str, Multiset[str]] = field(default_factory=dict)
    lost_at_most: dict[str, Multiset[str]] = field(default_factory=dict)
    volleys: Multiset[str] = field(default_factory=Multiset)
    answers: Multiset[str] = field(default_factory=Multiset)  # of HTTP and of the attach socket
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    wrong: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(sum(kinds.values()) for kinds in self.frames.values())

    def add(self, tree: str, kinds: Multiset[str], *, surely: bool) -> None:
        self.frames.setdefault(tree, Multiset()).update(kinds)
        if not surely:
            self.lost_at_most.setdefault(tree, Multiset()).update(kinds)


def kind_of(data: bytes, *, from_peer: bool) -> str:
    """What a frame is to be counted as."""
    try:
        codec.decode(data, from_peer=from_peer)
    except ProtocolError as error:
        return error.kind
    return TAKEN


class Gun:
    def __init__(self, told: Told) -> None:
        self._told = told
        self._rng = rng_of(told.seed, "gun")
        self.fired = Fired()
        self._volleying = ""
        self._requests = Mutator(told.seed, REQUESTS)
        self._ends: list[tuple[int, End]] = [
            (40, self._politely),
            (2, self._reset),
            (2, self._half_a_frame),
            (2, self._unfinished_parts),
            (2, self._too_large),
            (1, self._large),
        ]

    def shoot(self) -> Fired:
        """Until enough was fired, or the time is over."""
        told = self._told
        while self.fired.count < told.frames:
            if told.until_s and time.monotonic() > told.until_s:
                break
            door = self._rng.choices(told.doors, told.weights)[0]
            begun_s = time.monotonic()
            try:
                self._volley(door)
            except OSError as error:
                where = f"{self._volleying} at {door.kind} of {door.tree}"
                self.fired.wrong.append(f"{where}: {error!r}")
                if len(self.fired.wrong) > 20:
                    break
            self.fired.seconds[door.kind] += time.monotonic() - begun_s
        for door in told.doors:
            if door.kind == "local":
                self._take_back(door)
        return self.fired

    def _take_back(self, door: Door) -> None:
        """A worker keeps its path to a decode until its own listener says that it is gone."""
        gone = [PeerGone(name) for name in hostile_instances()]
        connection = Connection(door.place)
        connection.shake()
        connection.send(frame(codec.encode(gone)))
        connection.finish()
        self.fired.add(door.tree, Multiset({TAKEN: 1}), surely=True)

    def _volley(self, door: Door) -> None:
        self._volleying = "volley"
        if door.kind == "attach":
            self._ask_for_memory(door)
        elif door.kind == "http":
            self._ask_over_http(door)
        elif self._rng.random() < 0.1:
            self._greet_wrongly(door)
        else:
            self._speak(door)

    # --- ZMQ's doors ---

    def _name(self, volley: str) -> None:
        self._volleying = volley.strip("_")
        self.fired.volleys[self._volleying] += 1

    def _speak(self, door: Door) -> None:
        rng = self._rng
        names = Names(
            rng,
            self._look(door.tree),
            self._told.digest,
            self._told.boot_id,
            self._told.answering,
        )
        make = Frames(rng.getrandbits(32), names, from_peer=door.kind == "control")
        frames = [make() for _ in range(FRESH)]
        # A name of its own: whose name is taken by another is not read any more.
        identity = rng.choice((b"", f"{os.getpid()}-{rng.getrandbits(60)}".encode()))
        connection = Connection(door.place)
        with contextlib.closing(connection.socket):
            connection.shake(identity)
            (end,) = rng.choices([e for _, e in self._ends], [w for w, _ in self._ends])
            self._name(end.__name__)
            kinds = end(door, connection, frames)
        self.fired.add(door.tree, kinds, surely=end in (self._politely, self._large))

    def _fire(self, door: Door, connection: Connection, frames: list[bytes]) -> Multiset[str]:
        """Each of them now and then, and some in parts."""
        rng, kinds = self._rng, Multiset[str]()
        from_peer = door.kind == "control"
        ready_ = [(frame(data), kind_of(data, from_peer=from_peer)) for data in frames]
        some = [[rng.choice(frames[:20]) for _ in range(parts)] for parts in (2, 3, 100)]
        ready_ += [(multipart(parts), PARTS) for parts in some]
        buffer = bytearray()
        for _ in range(AGAIN * len(frames)):
            data, kind = rng.choice(ready_)
            kinds[kind] += 1
            buffer += data
            if len(buffer) > CHUNK_BYTES:
                connection.send(bytes(buffer))
                buffer.clear()
        connection.send(bytes(buffer))
        return kinds

    def _politely(self, door: Door, to: Connection, frames: list[bytes]) -> Multiset[str]:
        kinds = self._fire(door, to, frames)
        to.finish()
        return kinds

    def _reset(self, door: Door, to: Connection, frames: list[bytes]) -> Multiset[str]:
        kinds = self._fire(door, to, frames[:20])
        to.break_off()
        return kinds

    def _half_a_frame(self, door: Door, to: Connection, frames: list[bytes]) -> Multiset[str]:
        kinds = self._fire(door, to, frames[:20])
        to.send(bytes([LONG]) + (1 << 20).to_bytes(8, "big") + b"half")
        to.break_off()
        return kinds

    def _unfinished_parts(self, door: Door, to: Connection, frames: list[bytes]) -> Multiset[str]:
        kinds = self._fire(door, to, frames[:20])
        to.send(frame(b"part", more=True) * 1000 + frame(bytes(1 << 20), more=True))
        to.break_off()
        return kinds

    def _too_large(self, door: Door, to: Connection, frames: list[bytes]) -> Multiset[str]:
        """Its header alone makes ZMQ hang up."""
        kinds = self._fire(door, to, frames[:20])
        size = self._rng.choice((2 * FRAME_BYTES_MAX + 1, 1 << 40, (1 << 63) - 1))
        to.send(bytes([LONG | self._rng.choice((0, MORE))]) + size.to_bytes(8, "big"))
        with contextlib.suppress(OSError):  # with a reset, if it had not read everything
            to.finish()
        return kinds

    def _large(self, door: Door, to: Connection, frames: list[bytes]) -> Multiset[str]:
        """Larger than a frame may be, and not so large that ZMQ hangs up."""
        to.send(frame(codec.MAGIC + bytes(FRAME_BYTES_MAX)))
        to.finish()
        return Multiset({Malformed.OVERSIZED.name: 1})

    def _greet_wrongly(self, door: Door) -> None:
        rng = self._rng
        whole = GREETING + ready()
        wrong = (
            b"",
            rng.randbytes(100),
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            GREETING[: rng.randrange(64)],
            GREETING + ready(kind=b"ROUTER"),
            GREETING + ready(kind=b"SUB"),
            GREETING + ready(identity=rng.randbytes(200)),
            GREETING + b"\x04\xff" + rng.randbytes(255),
            whole[: rng.randrange(len(whole))] + rng.randbytes(40),
            GREETING.replace(b"NULL", b"CURVE"),
        )
        self._name("greet_wrongly")
        connection = Connection(door.place)
        with contextlib.suppress(OSError):  # it may hang up before all is said
            connection.send(rng.choice(wrong))
        connection.break_off()

    # --- the others ---

    def _ask_for_memory(self, door: Door) -> None:
        """Requests for descriptors, with and without descriptors of our own."""
        rng = self._rng
        for _ in range(ASKS_A_VOLLEY):
            data = self._requests()[:4096] or b"x"
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
                client.settimeout(REPLY_S)
                client.connect("\0" + door.host)
                given = [client.fileno()] * rng.choice((0, 0, 0, 1, 253))
                self.fired.add(door.tree, Multiset({"attach": 1}), surely=True)
                try:
                    socket.send_fds(client, [data], given)
                    answer, fds, _, _ = socket.recv_fds(client, 1 << 16, 260)
                except TimeoutError:
                    self.fired.wrong.append(f"no answer to the attach request {data[:60]!r}")
                    continue
                except OSError:
                    self.fired.answers["attach: reset"] += 1
                    continue
                for fd in fds:
                    os.close(fd)
                self.fired.answers["attach: " + ("memory" if fds else "refused")] += 1
                assert answer or not data, "hung up without a word"

    def _ask_over_http(self, door: Door) -> None:
        rng = self._rng
        lines = (
            b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET /rooms?\xff HTTP/1.1\r\nHost: x\r\n\r\n",
            b"POST /ready HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n12345",
            b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET /live HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\nx",
            b"GET /live HTTP/1.1\r\n" + b"A: b\r\n" * 2000 + b"\r\n",
            b"\x16\x03\x01\x02\x00\x01",
            b"\0" * 300,
            rng.randbytes(300),
            GREETING,
        )
        for _ in range(REQUESTS_A_VOLLEY):
            data = rng.choice(lines)
            if rng.random() < 0.3:
                cut = rng.randrange(len(data))
                data = data[:cut] + rng.randbytes(2) + data[cut:]
            connection = Connection(door.place, timeout_s=REPLY_S)
            self.fired.add(door.tree, Multiset({"http": 1}), surely=True)
            with contextlib.closing(connection.socket) as client:
                with contextlib.suppress(OSError):
                    client.sendall(data)
                    client.shutdown(socket.SHUT_WR)
                try:
                    status = client.recv(64).partition(b"\r\n")[0][9:12].decode("latin-1")
                except TimeoutError:
                    self.fired.wrong.append(f"no answer and no end over HTTP to {data[:60]!r}")
                    continue
                except OSError:
                    status = "reset"
            self.fired.answers[f"http: {status or 'closed'}"] += 1
            if status == "500":
                self.fired.wrong.append(f"HTTP 500 to {data[:60]!r}")

    def _look(self, tree: str) -> Known:
        url = self._told.supervisors[tree]
        with urllib.request.urlopen(f"{url}/rooms", timeout=30) as answer:
            rooms = json.load(answer)
        with urllib.request.urlopen(f"{url}/info", timeout=30) as answer:
            info = json.load(answer)
        return Known(info["role"], info["instance"], 1, rooms)


PARTS = Malformed.PARTS.name


class Answering:
    """An attach socket that answers nonsense, to whoever was told to fetch memory from it."""

    def __init__(self, address: str, seed: int) -> None:
        self._rng = rng_of(seed, "answering")
        self._mutate = Mutator(seed, [REPLY])
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._server.bind("\0" + address.removeprefix("@"))
        self._server.listen(64)
        self.answered = 0

    def _nonsense(self) -> bytes:
        if self._rng.random() < 0.5:
            return b"\x81\xa1x" + self._rng.choice(LIES)  # in a field that is skipped
        return self._mutate() or b"x"

    def serve(self) -> None:
        """Until `stop`."""
        memory = os.memfd_create("hostile")
        os.truncate(memory, 4096)
        reading, writing = os.pipe()
        with self._server, contextlib.suppress(OSError):  # of the `accept` that `stop` ends
            while True:
                client, _ = self._server.accept()
                with client:
                    self._answer(client, memory, reading, writing)
        for fd in (memory, reading, writing):
            os.close(fd)

    def _answer(self, client: socket.socket, memory: int, reading: int, writing: int) -> None:
        given: tuple[list[int], ...] = ([], [], [memory], [reading], [memory] * 5, [writing] * 200)
        with contextlib.suppress(OSError):
            client.settimeout(0.1)
            client.recv(4096)
            socket.send_fds(client, [self._nonsense()], self._rng.choice(given))
            self.answered += 1

    def stop(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)


def main() -> None:
    tie_to_parent()
    told = msgspec.json.decode(sys.argv[1], type=Told)
    print(msgspec.json.encode(_record(Gun(told).shoot())).decode(), flush=True)


def _record(fired: Fired) -> dict[str, Any]:
    return {
        "frames": {tree: dict(kinds) for tree, kinds in fired.frames.items()},
        "lost_at_most": {tree: dict(kinds) for tree, kinds in fired.lost_at_most.items()},
        "volleys": dict(fired.volleys),
        "answers": dict(fired.answers),
        "seconds": {kind: round(s, 1) for kind, s in fired.seconds.items()},
        "wrong": fired.wrong[:20],
    }
