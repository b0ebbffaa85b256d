"""Behind a router, a client has its error within two seconds when either leg fails at once.

sglang-router waits for both legs whatever one of them says, so each server has to hear from the
other that its half of the room will not come.  Waiting for the deadline would take a minute here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Any

import httpx
import pytest

from pdrt.cli.cluster import ROUTERS, Cluster, Member
from tests.e2e.conftest import StartCluster
from tests.e2e.driver import Driver, wait_idle

#: The promise is 2 s on an idle machine; tests share theirs with everything else that runs.
LOAD = 5
BOUND_S = 2.0 * LOAD
QUEUE_MAX = 4
SHORT, LONG = "the river runs", "the river runs to the sea " * 45  # LONG does not fit into prefill


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.slow] if name == "smg" else []) for name in ROUTERS
    ],
)
def cluster(start_cluster: StartCluster, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Small limits, so that each side can be made to refuse; deadlines as shipped.  A router that
    tries again would hide how long one try takes."""
    started = start_cluster(
        "--transport", "shm", "--queue-max", str(QUEUE_MAX), "--chunked-prefill-size", "8",
        prefill=("--pool-tokens", "256"),
        router=request.param,
        router_flags=("--disable-retries", "--disable-circuit-breaker"),
    )  # fmt: skip
    yield started
    started.stop()


class Client:
    def __init__(self, cluster: Cluster, http: httpx.AsyncClient) -> None:
        self.cluster = cluster
        self.http = http

    async def refused(self, *, stream: bool, **more: Any) -> str:
        """Ask the router for a completion that cannot be; returns its error."""
        failed, text = await self.asks(stream=stream, **more)
        assert failed, text
        return text

    async def asks(self, *, stream: bool, **more: Any) -> tuple[bool, str]:
        """Ask the router for a completion; returns whether it failed, and what came."""
        body = {"model": "tiny", "prompt": SHORT, "max_tokens": 8, "temperature": 0}
        asked = self.http.post(
            f"{self.cluster.url}/v1/completions", json={**body, "stream": stream, **more}
        )
        try:
            async with asyncio.timeout(BOUND_S):
                response = await asked
        except httpx.HTTPError as error:
            return True, repr(error)
        return response.status_code >= 400 or '"abort"' in response.text, response.text

    async def succeeds(self) -> None:
        body = {"model": "tiny", "prompt": SHORT, "max_tokens": 8, "temperature": 0}
        response = await self.http.post(f"{self.cluster.url}/v1/completions", json=body)
        assert response.status_code == 200, response.text

    async def abort_all(self, members: Sequence[Member]) -> None:
        for member in members:
            await self.http.post(f"{member.url}/abort_request", json={"abort_all": True})

    @contextlib.asynccontextmanager
    async def full(self, member: Member) -> AsyncIterator[None]:
        """The queue of one side is full of requests whose other half never comes."""
        body = partial(Driver(self.cluster).body, [5], max_new_tokens=4)
        url = f"{member.url}/generate"
        lonely: list[asyncio.Task[httpx.Response]] = []
        try:
            while await self.running(member) < QUEUE_MAX:
                # One is refused itself while the last request of before has yet to leave.
                missing = QUEUE_MAX - sum(not task.done() for task in lonely)
                lonely += [
                    asyncio.create_task(self.http.post(url, json=body())) for _ in range(missing)
                ]
                await asyncio.wait(lonely, timeout=0.05)
            yield
        finally:
            await self.abort_all([member])
            await asyncio.gather(*lonely)

    async def running(self, member: Member) -> int:
        facts = (await self.http.get(f"{member.url}/server_info")).json()["internal_states"][0]
        return int(facts["running"]) + int(facts["waiting"])


@contextlib.asynccontextmanager
async def client_of(cluster: Cluster) -> AsyncIterator[Client]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as http:
        yield Client(cluster, http)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("stream", [False, True])
def test_a_side_that_refuses(cluster: Cluster, stream: bool) -> None:
    async def run() -> None:
        async with client_of(cluster) as client:
            for member in (cluster.prefill, cluster.decode):
                async with client.full(member):
                    await client.refused(stream=stream)
                await client.succeeds()

    asyncio.run(run())
    wait_idle(cluster, 15)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("n", [1, 2])
def test_a_request_that_only_prefill_finds_wrong(cluster: Cluster, n: int) -> None:
    async def run() -> None:
        async with client_of(cluster) as client:
            for stream in (False, True):
                await client.refused(stream=stream, prompt=LONG, n=n)
            await client.succeeds()

    asyncio.run(run())
    wait_idle(cluster, 15)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("legs", ["prefill", "decode", "both"])
def test_an_engine_that_aborts(cluster: Cluster, legs: str) -> None:
    members = [m for m in (cluster.prefill, cluster.decode) if legs in (m.name, "both")]
    more = {"prompt": LONG[:400], "ignore_eos": True}
    # Decode is met while it generates; prefill's part may be over between two aborts.
    more["max_tokens"], tries_max = (8, 50) if legs == "prefill" else (1500, 1)

    async def is_met(client: Client, stream: bool) -> bool:
        asked = asyncio.create_task(client.asks(stream=stream, **more))
        while not asked.done():
            await client.abort_all(members)
            await asyncio.wait([asked], timeout=0.01)
        return (await asked)[0]

    async def run() -> None:
        async with client_of(cluster) as client:
            for stream in (False, True):
                for _ in range(tries_max):
                    if await is_met(client, stream):
                        break
                else:
                    pytest.fail("no abort met the request")

    asyncio.run(run())
    wait_idle(cluster, 15)


@pytest.fixture(scope="module")
def refused_while_dead(cluster: Cluster) -> list[str]:
    """What clients hear, streaming or not, while decode is dead.  It is back afterwards; a fixture,
    since it outlives the test."""

    async def run() -> list[str]:
        async with client_of(cluster) as client:
            await client.succeeds()
            cluster.decode.popen.kill()
            cluster.decode.popen.wait(10)
            heard = [await client.refused(stream=stream) for stream in (False, True)]
            await asyncio.to_thread(cluster.start_again, "decode")
            return heard

    return asyncio.run(run())


@pytest.mark.timeout(240)
def test_a_decode_that_is_dead_and_back(cluster: Cluster, refused_while_dead: list[str]) -> None:
    """Prefill is asked for its half, and nobody will ever say whose the other one was."""

    async def run() -> None:
        async with client_of(cluster) as client:
            await client.succeeds()

    assert len(refused_while_dead) == 2
    asyncio.run(run())
    wait_idle(cluster, 15)


@pytest.mark.timeout(240)
def test_last_a_prefill_that_drains_and_one_that_is_dead(cluster: Cluster) -> None:
    """The end of this cluster's prefill, so no test comes after it."""

    prefill = cluster.prefill

    async def draining(client: Client) -> bool:
        return (await client.http.get(f"{prefill.url}/health")).status_code != 200

    async def run() -> None:
        async with client_of(cluster) as client:
            body = Driver(cluster).body([5], max_new_tokens=4)  # nobody else ever comes for it
            lonely = asyncio.create_task(client.http.post(f"{prefill.url}/generate", json=body))
            while await client.running(prefill) == 0:
                await asyncio.wait([lonely], timeout=0.05)
            prefill.popen.terminate()  # it drains as long as that one waits
            while not await draining(client):
                await asyncio.wait([lonely], timeout=0.05)
            for stream in (False, True):
                await client.refused(stream=stream)
            prefill.popen.kill()
            prefill.popen.wait(10)
            for stream in (False, True):
                await client.refused(stream=stream)
            await asyncio.gather(lonely, return_exceptions=True)

    asyncio.run(run())
