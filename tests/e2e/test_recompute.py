"""A decode with --on-transfer-failure recompute answers, whatever becomes of its prefill."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest

from pdrt.cli.cluster import Cluster
from tests.e2e.conftest import QUICK, StartCluster
from tests.e2e.driver import Driver, Outcome, held, series, wait_idle, watching
from tests.e2e.test_crashes import child_pid, is_ready
from tests.waiting import wait_until

COUNT = 4
PROMPTS = [[5 + (i * (2 * n + 1)) % 400 for i in range(400 + n)] for n in range(COUNT)]
ROOM_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


def bodies(driver: Driver) -> list[dict[str, Any]]:
    """Half of them greedy, half of them seeded."""
    samplings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "sampling_seed": 4711},
    ]
    return [
        driver.body(prompt, max_new_tokens=8, ignore_eos=True, **samplings[n % 2])
        for n, prompt in enumerate(PROMPTS)
    ]


async def texts_alone(cluster: Cluster, asked: list[dict[str, Any]]) -> list[str]:
    """What decode answers to bodies without a room: a single process."""
    async with httpx.AsyncClient(timeout=60) as client:

        async def one(body: dict[str, Any]) -> str:
            alone = {name: value for name, value in body.items() if name not in ROOM_FIELDS}
            response = await client.post(f"{cluster.decode.url}/generate", json=alone)
            return str(response.json()["text"])

        return await asyncio.gather(*(one(body) for body in asked))


async def kill_in_transit(driver: Driver, cluster: Cluster, kill: Callable[[], None]) -> list[Any]:
    """Ask, kill once bytes of some room move, and return all outcomes."""
    with watching(cluster.prefill, "Transferring") as moving:

        def strike() -> bool:
            """At once, in the thread that sees it: a room is through in a few milliseconds."""
            if not moving():
                return False
            kill()
            return True

        asked = asyncio.create_task(driver.ask_async(bodies(driver), COUNT))
        await asyncio.to_thread(wait_until, strike, 30, "bytes to move")
    return await asked


def recomputed(cluster: Cluster) -> float:
    return series(f"{cluster.decode.url}/metrics")["pdrt_engine_recomputed_total"]


def check(outcomes: list[Outcome], expected: list[str]) -> int:
    """Every answer is right; returns how many were recomputed."""
    assert [outcome.decode_status for outcome in outcomes] == [200] * COUNT, outcomes
    assert [outcome.decode["text"] for outcome in outcomes] == expected
    return sum(outcome.decode["meta_info"].get("recomputed", False) for outcome in outcomes)


@pytest.mark.timeout(180)
def test_decode_answers_whatever_becomes_of_its_prefill(start_cluster: StartCluster) -> None:
    """Its worker dies in the middle of four transfers, then the whole tree, then nobody is there.
    The text is always that of a single process."""
    cluster = start_cluster(
        "--transport", "nixl", "--chunked-prefill-size", "4", "--quiet-timeout", "3",
        *QUICK,
        decode=("--on-transfer-failure", "recompute"),
    )  # fmt: skip
    driver = Driver(cluster, timeout_s=60)
    expected = asyncio.run(texts_alone(cluster, bodies(driver)))
    assert recomputed(cluster) == 0
    assert check(driver.ask(*bodies(driver), concurrency=COUNT), expected) == 0

    lost, tries = 0, 0
    while lost == 0:  # it may have been between two rooms
        tries += 1
        assert tries <= 10, "no kill met a room that moved"
        wait_until(lambda: is_ready(cluster.prefill), 60, "prefill to be ready")
        worker = child_pid(cluster.prefill, "worker0")
        outcomes = asyncio.run(
            kill_in_transit(driver, cluster, partial(os.kill, worker, signal.SIGKILL))
        )
        lost = check(outcomes, expected)
    assert lost == recomputed(cluster)
    codes = [outcome.error_codes for outcome in outcomes if outcome.prefill_status != 200]
    assert codes, "prefill's clients are told as ever"
    wait_until(lambda: is_ready(cluster.prefill), 60, "prefill to be ready again")
    wait_idle(cluster, 15)

    tree = cluster.prefill.popen
    lost += check(asyncio.run(kill_in_transit(driver, cluster, tree.kill)), expected)
    tree.wait(10)
    assert lost == recomputed(cluster)

    lost += check(driver.ask(*bodies(driver), concurrency=COUNT), expected)
    assert lost == recomputed(cluster) >= COUNT
    wait_until(lambda: not held(cluster.decode), 15, "decode to hold nothing")
    cluster.stop()
