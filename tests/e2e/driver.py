"""Sends requests to both halves of a cluster as a router does, and reads how both sides stand."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from pdrt.cli.cluster import Cluster, Member
from tests.waiting import wait_until

ROOMS = random.Random()


@dataclass
class Outcome:
    """What the two servers answered to one request.  Status 0: the connection broke."""

    prefill_status: int
    prefill: dict[str, Any]
    decode_status: int
    decode: dict[str, Any]

    @property
    def succeeded(self) -> bool:
        return self.prefill_status == self.decode_status == 200

    @property
    def error_codes(self) -> set[str]:
        bodies = (self.prefill, self.decode)
        return {body["error"]["code"] for body in bodies if "error" in body}


class Driver:
    def __init__(self, cluster: Cluster, *, timeout_s: float = 120.0) -> None:
        self._cluster = cluster
        self._timeout_s = timeout_s

    def body(
        self, prompt: Sequence[int], *, room: int | None = None, **sampling: Any
    ) -> dict[str, Any]:
        """A /generate body with a room of its own."""
        return {
            "input_ids": list(prompt),
            "sampling_params": sampling,
            "return_logprob": True,
            "top_logprobs_num": 2,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self._cluster.bootstrap_port,
            "bootstrap_room": ROOMS.getrandbits(62) if room is None else room,
        }

    def ask(self, *bodies: dict[str, Any], concurrency: int = 1) -> list[Outcome]:
        """Each body to both servers, at most `concurrency` bodies at once, answers in order."""
        return asyncio.run(self.ask_async(bodies, concurrency))

    async def ask_async(self, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[Outcome]:
        turns = asyncio.Semaphore(concurrency)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=self._timeout_s, limits=limits) as client:

            async def one(body: dict[str, Any]) -> Outcome:
                async with turns:
                    prefill, decode = await asyncio.gather(
                        post(client, self._cluster.prefill, body),
                        post(client, self._cluster.decode, body),
                    )
                return Outcome(*prefill, *decode)

            return await asyncio.gather(*(one(body) for body in bodies))


async def post(
    client: httpx.AsyncClient, member: Member, body: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    try:
        response = await client.post(f"{member.url}/generate", json=body)
    except httpx.HTTPError as error:
        return 0, {"broken": repr(error)}
    return response.status_code, response.json()


def rooms_of(member: Member) -> list[dict[str, Any]]:
    """Rooms in the member's table now."""
    return list(httpx.get(f"{member.supervisor_url}/rooms", timeout=5).json())


@contextmanager
def watching(member: Member, state: str) -> Iterator[Callable[[], bool]]:
    """Asks whether a room of the member is in that state, fast: a room may be through in a moment,
    and a client of its own for every question takes longer than that on a busy machine."""
    with httpx.Client(base_url=member.supervisor_url, timeout=5) as client:

        def seen() -> bool:
            return any(room["state"] == state for room in client.get("/rooms").json())

        seen()
        yield seen


def series(url: str) -> dict[str, float]:
    """Sum over labels of each series, by name."""
    totals: dict[str, float] = {}
    for line in httpx.get(url, timeout=5).text.splitlines():
        if not line.startswith("#"):
            name = line.partition("{")[0].partition(" ")[0]
            totals[name] = totals.get(name, 0.0) + float(line.rpartition(" ")[2])
    return totals


def held(member: Member) -> dict[str, float]:
    """What a side still holds: nothing, when all is over."""
    now = series(f"{member.url}/metrics")
    names = ("pages_used", "pages_held", "aux_used", "rooms_open", "rooms_releasing")
    left = {name: now[f"pdrt_engine_{name}"] for name in names if now[f"pdrt_engine_{name}"]}
    if rooms := rooms_of(member):
        left["rooms"] = len(rooms)
    return left


def holds_nothing(member: Member) -> bool:
    return not held(member)


def wait_idle(cluster: Cluster, deadline_s: float) -> None:
    """Both sides back to zero rooms, pages and aux rows within the deadline."""
    for member in (cluster.prefill, cluster.decode):
        wait_until(partial(holds_nothing, member), deadline_s, f"{member.name} to hold nothing")
