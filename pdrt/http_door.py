"""HTTP connections at their bounds: so many at once, and none that only holds its place.

uvicorn takes every connection and waits for its first request for ever.  A stranger that connects
and says nothing, or half a request, would hold a descriptor until it likes to hang up.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from pdrt.mail.doorkeeper import connections_max

HEAD_S = 20.0  # from the first byte, or from the connect, to the end of a request's head
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"connection: close\r\n\r\n"
    b'{"error": {"message": "too many connections", "type": "server_error", "param": null, '
    b'"code": "connections_max"}}'
)


class HttpDoor(H11Protocol):
    """One connection.  Give it to `uvicorn.Config(http=...)`."""

    _silence: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > connections_max():
            transport.write(REFUSAL)
            transport.close()
            return
        self._silence = self.loop.call_later(HEAD_S, self._give_up)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        cycle: Any = self.cycle  # None before the first request, whatever its type says
        if cycle is not None and not cycle.response_complete:
            self._be_patient()  # a request is served: how long that takes is the app's business
        elif self._silence is None:
            self._silence = self.loop.call_later(HEAD_S, self._give_up)

    def on_response_complete(self) -> None:
        self._be_patient()  # what follows is uvicorn's own keep-alive
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._be_patient()
        super().connection_lost(exc)

    def _be_patient(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def _give_up(self) -> None:
        self._silence = None
        if not self.transport.is_closing():
            self.transport.close()
