"""A death is local: what was not in transit completes, the rest fails with a typed error in time,
and later requests succeed without anybody restarting anything by hand, on both sides."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import httpx
import pytest

from pdrt.cli.cluster import Cluster, Member
from tests.e2e.driver import Driver, Outcome, wait_idle
from tests.waiting import wait_until

PROMPT = [5 + i % 400 for i in range(700)]
TYPED = {
    "aborted",
    "peer_lost",
    "process_lost",
    "transport_failed",
    "rank_failed",
    "bootstrap_timeout",
    "waiting_timeout",
    "transfer_stalled",
}


def child_pid(member: Member, name: str) -> int:
    report = httpx.get(f"{member.supervisor_url}/health", timeout=5).json()
    return next(int(c["pid"] or 0) for c in report["children"] if c["name"] == name)


def is_ready(member: Member) -> bool:
    return httpx.get(f"{member.supervisor_url}/ready", timeout=5).status_code == 200


async def kill_midway(driver: Driver, kill: Callable[[], None], count: int) -> list[Outcome]:
    """Start `count` requests, kill once some have rooms, return all outcomes."""
    bodies = [driver.body(PROMPT, max_new_tokens=8, ignore_eos=True) for _ in range(count)]
    asked = asyncio.create_task(driver.ask_async(bodies, count))
    await asyncio.wait([asked], timeout=0.3)
    kill()
    return await asked


@pytest.mark.timeout(120)
@pytest.mark.parametrize("victim", ["listener", "worker0", "engine"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_killed_process_costs_only_what_it_moved(pair: Cluster, side: str, victim: str) -> None:
    driver = Driver(pair, timeout_s=60)
    member = pair.members[side]
    pid = child_pid(member, victim)
    outcomes = asyncio.run(kill_midway(driver, lambda: os.kill(pid, signal.SIGKILL), 16))
    for outcome in outcomes:
        broken = outcome.prefill_status == 0 or outcome.decode_status == 0
        if victim == "engine" and broken:
            continue  # the HTTP connection died with its server; the other leg's error is below
        assert outcome.succeeded or outcome.error_codes & TYPED, outcome
    if victim == "listener":
        assert all(outcome.succeeded for outcome in outcomes), "a listener moves no bytes"
    wait_until(lambda: child_pid(member, victim) not in (0, pid), 30, f"a new {victim}")
    wait_until(lambda: is_ready(pair.prefill) and is_ready(pair.decode), 60, "both ready")
    wait_idle(pair, 15)
    bodies = [driver.body(PROMPT, max_new_tokens=4) for _ in range(8)]
    later = driver.ask(*bodies, concurrency=8)
    assert all(outcome.succeeded for outcome in later), later


def test_health_answers_while_a_child_is_stopped(pair: Cluster) -> None:
    """Ready turns 503 and names the child; live stays 200; it comes back by itself.  The engine: a
    stopped listener or worker has been replaced by then."""
    pid = child_pid(pair.decode, "engine")
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: not is_ready(pair.decode), 10, "ready to turn 503")
        url = pair.decode.supervisor_url
        assert httpx.get(f"{url}/live", timeout=5).status_code == 200
        reasons = httpx.get(f"{url}/ready", timeout=5).json()["reasons"]
        assert any("engine" in reason for reason in reasons), reasons
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: is_ready(pair.decode), 30, "ready again")
