"""HTTP as a client of a router needs it, and as one that leaves in the middle: asyncio's streams.

Light enough that a killed client is back in a fraction of a second.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

HEAD_MAX = 64 << 10
CODE = re.compile(r"['\"]code['\"]:\s*['\"](\w+)['\"]")


class Broken(Exception):
    """The connection ended before the answer did."""


class Answer:
    """A POST whose answer is on its way."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._headers: dict[str, str] = {}
        self.status = 0

    @classmethod
    async def to(
        cls, port: int, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> Answer:
        """Connect and send.  Raises Broken."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=HEAD_MAX)
        except OSError as error:
            raise Broken(str(error)) from None
        data = json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", f"host: 127.0.0.1:{port}", "connection: close"]
        lines += ["content-type: application/json", f"content-length: {len(data)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        answer = cls(reader, writer)
        try:
            writer.write("\r\n".join([*lines, "", ""]).encode() + data)
            await writer.drain()
        except OSError as error:
            answer.leave()
            raise Broken(str(error)) from None
        return answer

    async def head(self) -> int:
        """The status.  Raises Broken."""
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError) as error:
            raise Broken(repr(error)) from None
        first, *lines = head.decode("latin-1").split("\r\n")
        self.status = int(first.split()[1])
        pairs = (line.partition(":") for line in lines if line)
        self._headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        return self.status

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it comes.  Raises Broken."""
        try:
            if "chunked" in self._headers.get("transfer-encoding", ""):
                async for part in self._chunks():
                    yield part
            elif "content-length" in self._headers:
                yield await self._reader.readexactly(int(self._headers["content-length"]))
            else:
                while part := await self._reader.read(HEAD_MAX):
                    yield part
        except (asyncio.IncompleteReadError, OSError, ValueError) as error:
            raise Broken(repr(error)) from None

    async def _chunks(self) -> AsyncIterator[bytes]:
        while True:
            size = int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16)
            part = await self._reader.readexactly(size + 2)
            if not size:
                return
            yield part[:-2]

    async def whole(self) -> bytes:
        return b"".join([part async for part in self.parts()])

    def leave(self) -> None:
        """At once, whatever is on its way."""
        self._writer.transport.abort()


async def post(port: int, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """A whole answer.  Raises Broken."""
    answer = await Answer.to(port, path, body)
    try:
        return await answer.head(), await answer.whole()
    finally:
        answer.leave()


class Events:
    """Server-sent events of a chat: text so far, how it ended, what went wrong."""

    def __init__(self) -> None:
        self.text = ""
        self.finish = ""
        self.error = ""
        self.done = False
        self._rest = b""

    def feed(self, part: bytes) -> None:
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip().decode("utf-8", "replace"))

    def _event(self, data: str) -> None:
        if data == "[DONE]":
            self.done = True
            return
        try:
            event = json.loads(data)
        except ValueError:  # a router that words it in its own way
            self.error = code_of(data)
            return
        if "error" in event:
            self.error = code_of(data)
            return
        for choice in event.get("choices", ()):
            self.text += choice.get("delta", {}).get("content") or ""
            self.finish = choice.get("finish_reason") or self.finish


def code_of(text: str) -> str:
    """Of an error, however it is worded."""
    found = CODE.search(text)
    return found[1] if found else "unreadable"
