"""A decode without a tree: it speaks the real protocol over real sockets and owns a real region.

Each one is another instance at the same address, so a thousand restarts of a peer cost seconds.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pdrt.clock import monotonic_ns
from pdrt.mail.mailbox import Mailbox
from pdrt.memfd import memory_fd
from pdrt.protocol.layout import RegionMap
from pdrt.protocol.messages import (
    OLDEST,
    VERSION,
    Agent,
    AnyMessage,
    Destination,
    Heartbeat,
    Hello,
    HelloReply,
    Introduced,
    Introduction,
    Landed,
    NewsTaken,
    session_of,
)
from pdrt.transports.base import Region
from pdrt.transports.nixl import NixlTransport
from pdrt.transports.shm import ShmTransport
from tests.attach.services import serve
from tests.waiting import wait_until

DEADLINE_S = 10.0
LINK = "prefill"


class Site:
    """What outlives every instance: the address and the memory."""

    def __init__(self, region: RegionMap, prefill: str, transport: str) -> None:
        self.region, self.prefill, self.transport = region, prefill, transport
        self.server = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.server.setblocking(False)
        self.control = f"127.0.0.1:{self.server.getsockname()[1]}"
        self.fd = memory_fd("fake-decode", region.length_bytes)

    def close(self) -> None:
        self.server.close()
        os.close(self.fd)


class FakeDecode:
    """One instance.  Leaving the context is its death: it says good-bye to nobody."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.instance = secrets.token_hex(8)
        self.session = ""
        self.transport = ""
        self.landed: list[Landed] = []
        self.answers = True  # to Landed
        self._stack = contextlib.ExitStack()
        self._selector = self._stack.enter_context(contextlib.closing(selectors.DefaultSelector()))
        self._nixl: NixlTransport | None = None
        self._agent = self._open_agent()
        self._mailbox = Mailbox(self.instance.encode(), lambda *_: None)
        self._stack.callback(self._mailbox.close)
        door = os.dup(site.server.fileno())  # the mailbox closes it
        self._mailbox.open_door("control", f"tcp://{site.control}", door, from_peer=True)
        self._mailbox.link(LINK, f"tcp://{site.prefill}", from_peer=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open_agent(self) -> Agent:
        site, region = self._site, Region(self._site.fd, self._site.region.length_bytes)
        name, offset = f"{self.instance}.0#1", site.region.scratch_offset
        if site.transport == "nixl":
            self._nixl = NixlTransport()
            offers = {"nixl": self._nixl.open(name, region, offset)}
            self._stack.callback(self._nixl.close)
        else:
            address = f"@pdrt-fake-{self.instance}"
            self._serve_region(address)
            shm = ShmTransport(address=address, key="0#1", open_region=self._no_region)
            offers = {"shm": shm.open(name, region, offset)}
            self._stack.callback(shm.close)
        return Agent(0, 1, site.region.pages_count, site.region.aux_rows, offers)

    def _serve_region(self, address: str) -> None:
        service = serve(
            address, self._selector, regions=[self._site.fd], worker_epoch=lambda _rank: 1
        )
        self._stack.callback(service.close)

    @staticmethod
    def _no_region(_address: str, _key: str) -> Any:
        raise ConnectionRefusedError

    # --- what it says ----------------------------------------------------------------------------

    def say(self, message: AnyMessage) -> None:
        self._mailbox.post(LINK, message)

    def hello(self) -> None:
        self.say(Hello(VERSION, OLDEST, self.instance, 1, self._site.region.layout.digest))

    def introduce(self) -> None:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        control = self._site.control
        self.say(Introduction(self.instance, 1, control, boot_id, [self._agent], 1))

    def beat(self) -> None:
        self.say(Heartbeat(self.instance, 1))

    def ask(self, room: int, pages: NDArray[np.int32], slot: int = 0) -> None:
        self.say(
            Destination(
                room, 0, slot, 1, self.instance, 1, pages.astype("<i4").tobytes(), 0, self.session
            )
        )

    # --- what it hears ---------------------------------------------------------------------------

    def turn(self) -> None:
        self._mailbox.flush(monotonic_ns())
        for key, _ in self._selector.select(0):
            key.data()
        if self._nixl is not None:
            self._nixl.progress()
        for sender, message in self._mailbox.receive(1):
            match message:
                case HelloReply():
                    assert not message.refusal, message
                    self.session = session_of(message.instance, message.epoch)
                    self.introduce()
                case Introduced():
                    assert message.transport, message
                    self.transport = message.transport
                case Landed() if message.instance == self.instance:
                    self.landed.append(message)
                    if self.answers:
                        news = NewsTaken(message.slot, message.generation, self.instance)
                        self._mailbox.post(sender, news)
        self._mailbox.flush(monotonic_ns())

    def wait(self, condition: Callable[[], object], what: str) -> None:
        def turned() -> object:
            self.turn()
            return condition()

        wait_until(turned, DEADLINE_S, what)

    def meet(self) -> None:
        """The whole handshake."""
        self.hello()
        self.wait(lambda: self.transport, "the fake decode to be introduced")
