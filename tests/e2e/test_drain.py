"""SIGTERM finishes what was started, refuses what is new, and leaves nothing."""

from __future__ import annotations

import asyncio
import signal

import httpx
import pytest

from pdrt.cli.cluster import Member
from tests.e2e.conftest import QUICK, StartCluster
from tests.e2e.driver import Driver, Outcome, series
from tests.waiting import wait_until

PROMPT = [5 + i % 400 for i in range(60)]


@pytest.mark.timeout(120)
def test_a_first_sigterm_drains_decode(start_cluster: StartCluster) -> None:
    cluster = start_cluster("--transport", "shm", *QUICK)
    driver = Driver(cluster)

    async def run() -> tuple[list[Outcome], httpx.Response, int]:
        long = [driver.body(PROMPT, max_new_tokens=250, ignore_eos=True) for _ in range(4)]
        asked = asyncio.create_task(driver.ask_async(long, 4))
        await asyncio.to_thread(wait_until, lambda: running(cluster.decode) == 4, 20, "4 to run")
        cluster.decode.popen.send_signal(signal.SIGTERM)
        async with httpx.AsyncClient(timeout=10) as client:
            while (health := await client.get(f"{cluster.decode.url}/health")).status_code == 200:
                assert not asked.done()
            late = driver.body(PROMPT, max_new_tokens=4)
            refused = await client.post(f"{cluster.decode.url}/generate", json=late)
        return await asked, refused, health.status_code

    try:
        outcomes, refused, health = asyncio.run(run())
        assert health == 503
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert all(outcome.succeeded for outcome in outcomes), outcomes
        assert [len(outcome.decode["output_ids"]) for outcome in outcomes] == [250] * 4
        wait_until(lambda: cluster.decode.popen.poll() is not None, 20, "decode to end")
        assert cluster.decode.popen.returncode == 0
    finally:
        cluster.stop()


def running(member: Member) -> int:
    return int(series(f"{member.url}/metrics")["pdrt_engine_running"])
