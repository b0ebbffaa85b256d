"""A client that leaves, at any moment, on either side, ends its room on both and frees every
page."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from pdrt.cli.cluster import Cluster, Member
from tests.e2e.driver import Driver, held, wait_idle
from tests.waiting import wait_until

CLIENTS = 40
PROMPT = [5 + i % 400 for i in range(600)]


async def leave(
    client: httpx.AsyncClient, pair: Cluster, body: dict[str, Any], legs: str, after_s: float
) -> None:
    """Send a body to both servers, stay `after_s`, then close the connections in `legs`."""
    urls = {"p": pair.prefill.url, "d": pair.decode.url}
    tasks = {
        leg: asyncio.create_task(client.post(f"{url}/generate", json=body))
        for leg, url in urls.items()
    }
    await asyncio.wait(tasks.values(), timeout=after_s)
    for leg in legs:
        tasks[leg].cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("legs", ["pd", "p", "d"])
def test_forty_clients_that_leave_at_random_moments_leave_nothing(pair: Cluster, legs: str) -> None:
    driver = Driver(pair)
    chance = random.Random(legs)
    assert driver.ask(driver.body(PROMPT, max_new_tokens=4))[0].succeeded

    async def storm() -> None:
        async with httpx.AsyncClient(
            timeout=30, limits=httpx.Limits(max_connections=None)
        ) as client:
            await asyncio.gather(
                *(
                    leave(
                        client,
                        pair,
                        driver.body(
                            PROMPT[: chance.randrange(1, 600)], max_new_tokens=200, ignore_eos=True
                        ),
                        legs,
                        chance.random() * 1.5,
                    )
                    for _ in range(CLIENTS)
                )
            )

    asyncio.run(storm())
    wait_idle(pair, 2)
    assert all(o.succeeded for o in driver.ask(*[driver.body(PROMPT, max_new_tokens=4)] * 1))


def test_abort_request_ends_the_room_on_both_sides(pair: Cluster) -> None:
    driver = Driver(pair)
    body = driver.body(PROMPT, max_new_tokens=1000, ignore_eos=True) | {"rid": "to-abort"}

    async def run() -> Any:
        async with httpx.AsyncClient(timeout=30) as client:
            asked = asyncio.create_task(driver.ask_async([body], 1))
            url = f"{pair.decode.url}/abort_request"
            while not asked.done():
                await client.post(url, json={"rid": "to-abort"})
                await asyncio.wait([asked], timeout=0.05)
            return asked.result()[0]

    outcome = asyncio.run(run())
    assert outcome.decode["meta_info"]["finish_reason"]["type"] == "abort", outcome
    wait_idle(pair, 2)


def test_a_prefill_without_its_decode_ends_at_its_deadline(pair: Cluster) -> None:
    """And the other way round; each with a typed error that says which half was missing."""
    driver = Driver(pair)

    def ask(member: Member) -> httpx.Response:
        body = driver.body(PROMPT[:20], max_new_tokens=4)
        return httpx.post(f"{member.url}/generate", json=body, timeout=30)

    with ThreadPoolExecutor(2) as pool:
        responses = list(pool.map(ask, (pair.prefill, pair.decode)))
    for response in responses:
        assert response.status_code == 503, response.text
        error = response.json()["error"]
        assert error["code"] in ("bootstrap_timeout", "waiting_timeout", "transfer_stalled"), error
    wait_until(lambda: not held(pair.prefill) and not held(pair.decode), 5, "nothing held")
