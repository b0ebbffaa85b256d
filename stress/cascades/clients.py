"""Clients of players: each has one room, on both sides, for as long as it lives.

A player aborts the room of a client that is gone, as a server does whose HTTP client disconnects.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from pathlib import Path

import msgspec

from stress.cascades import lanes
from stress.cascades.lanes import Lanes

ROOM = struct.Struct("<Q")


class Told(msgspec.Struct, frozen=True):
    addresses: tuple[str, ...]  # of both players, without the leading zero
    room: int
    lanes_file: str
    turn: int  # asks once the shared page says so, that all ask at once


def address_of(token: str, player: int) -> str:
    """`token`: of the run, since the names are the machine's."""
    return f"pdrt-cascade-{token}-{player}"


def main(told: Told) -> None:
    """A client: asks for its room, and lives until somebody ends it."""
    connections = []
    for address in told.addresses:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect("\0" + address)
        connections.append(connection)
    shared = Lanes(Path(told.lanes_file))
    while shared.get(lanes.ASK) < told.turn:
        time.sleep(0.005)
    for connection in connections:
        connection.send(ROOM.pack(told.room))
    select.select(connections, [], [])  # nothing is ever said to it


class Door:
    """A player's side.  `poll` never blocks."""

    def __init__(self, address: str) -> None:
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.bind("\0" + address)
        self._server.listen(128)
        self._server.setblocking(False)
        self._poller = select.poll()
        self._poller.register(self._server, select.POLLIN)
        self._clients: dict[int, socket.socket] = {}
        self._rooms: dict[int, int] = {}

    def poll(self) -> tuple[list[int], list[int]]:
        """Rooms that are asked for, and rooms whose client is gone."""
        asked, gone = [], []
        for fd, _ in self._poller.poll(0):
            if fd == self._server.fileno():
                with contextlib.suppress(BlockingIOError):
                    client, _address = self._server.accept()
                    client.setblocking(False)
                    self._clients[client.fileno()] = client
                    self._poller.register(client, select.POLLIN)
                continue
            data = b""
            with contextlib.suppress(ConnectionError):
                data = self._clients[fd].recv(ROOM.size)
            if data:
                self._rooms[fd] = ROOM.unpack(data)[0]
                asked.append(self._rooms[fd])
            else:
                self._poller.unregister(fd)
                self._clients.pop(fd).close()
                if fd in self._rooms:
                    gone.append(self._rooms.pop(fd))
        return asked, gone

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._server.close()
