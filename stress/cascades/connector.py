"""A client that does nothing but connect to control ports, whatever happens behind them."""

from __future__ import annotations

import selectors
import socket
import struct
import time
from pathlib import Path

import msgspec

from stress.cascades import lanes
from stress.cascades.history import Kind, Writer
from stress.cascades.lanes import Lanes

EVERY_S = 0.02  # each tree in turn
WAITING_MAX = 600  # the first of so many has waited for longer than the oracle lets any
RST = struct.pack("ii", 1, 0)  # linger 0: no port stays in TIME_WAIT
IN_PROGRESS = 115


class Told(msgspec.Struct, frozen=True):
    ports: tuple[int, ...]  # by tree
    lanes_file: str
    history: str


class Connector:
    def __init__(self, told: Told) -> None:
        self._told = told
        self._writer = Writer(Path(told.history))
        self._selector = selectors.DefaultSelector()
        self._waiting: dict[socket.socket, tuple[int, int]] = {}  # its number and its tree
        self._count = 0

    def connect(self) -> None:
        if len(self._waiting) >= WAITING_MAX:
            return
        tree = self._count % len(self._told.ports)
        self._count += 1
        self._writer.append(Kind.CONNECTING, self._count, tree)
        client = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
        code = client.connect_ex(("127.0.0.1", self._told.ports[tree]))
        self._waiting[client] = self._count, tree
        if code in (0, IN_PROGRESS):
            self._selector.register(client, selectors.EVENT_WRITE)
        else:
            self._end(client, Kind.TURNED_AWAY, code)

    def look(self, wait_s: float) -> None:
        for key, events in self._selector.select(wait_s):
            client = key.fileobj
            assert isinstance(client, socket.socket)
            number, tree = self._waiting[client]
            if events & selectors.EVENT_WRITE:
                code = client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    self._end(client, Kind.TURNED_AWAY, code)
                    continue
                self._writer.append(Kind.CONNECTED, number, tree)
                self._selector.modify(client, selectors.EVENT_READ)
                continue
            try:
                served = bool(client.recv(64))
            except OSError:
                served = False
            self._end(client, Kind.SERVED if served else Kind.RESET)

    def _end(self, client: socket.socket, kind: Kind, code: int = 0) -> None:
        number, tree = self._waiting.pop(client)
        self._writer.append(kind, number, tree, 0, code)
        if client in self._selector.get_map():
            self._selector.unregister(client)
        client.close()

    def close(self) -> None:
        for client in list(self._waiting):
            client.close()
        self._selector.close()
        self._writer.append(Kind.LEFT)
        self._writer.close()


def main(told: Told) -> None:
    connector, shared = Connector(told), Lanes(Path(told.lanes_file))
    due_s = time.monotonic()
    while shared.get(lanes.PHASE) != lanes.EXIT:
        now_s = time.monotonic()
        if now_s >= due_s:
            due_s = max(due_s + EVERY_S, now_s - 1)
            connector.connect()
        connector.look(max(0.0, due_s - time.monotonic()))
    connector.close()
