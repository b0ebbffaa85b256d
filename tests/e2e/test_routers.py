"""Unmodified routers drive the two servers: streaming or not, single, in lists, and n = 2."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import psutil
import pytest

from pdrt.cli.cluster import ROUTERS, Cluster
from tests.e2e.conftest import QUICK, StartCluster
from tests.e2e.driver import wait_idle

TOKENS_MAX = 8
KINDS = (
    "chat",
    "completion",
    "list",
    "n",
    "stream-chat",
    "stream-completion",
    "generate",
    "seeded",
)


def request_of(index: int) -> tuple[str, dict[str, Any]]:
    """Path and body of the index-th request: eight kinds in turn, a prompt of its own each."""
    kind = KINDS[index % len(KINDS)]
    prompt = f"room {index} is the id of one transfer and the river runs"
    common: dict[str, Any] = {"model": "tiny", "max_tokens": TOKENS_MAX, "temperature": 0}
    common["stream"] = kind.startswith("stream")
    chat = {"messages": [{"role": "user", "content": prompt}]}
    match kind:
        case "chat" | "stream-chat":
            return "/v1/chat/completions", {**common, **chat}
        case "completion" | "stream-completion":
            return "/v1/completions", {**common, "prompt": prompt}
        case "list":
            return "/v1/completions", {**common, "prompt": [prompt, prompt + " to the sea"]}
        case "n":
            return "/v1/chat/completions", {**common, **chat, "n": 2}
        case "seeded":
            return "/v1/completions", {**common, "prompt": prompt, "temperature": 1, "seed": index}
        case _:
            sampling = {"max_new_tokens": TOKENS_MAX, "temperature": 0}
            return "/generate", {"text": prompt, "sampling_params": sampling}


def texts(response: httpx.Response) -> list[str]:
    """The texts of an answer, by choice, streamed or not."""
    if response.headers["content-type"].startswith("text/event-stream"):
        lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        parts: dict[int, str] = {}
        for line in lines[:-1]:
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
                parts[choice["index"]] = parts.get(choice["index"], "") + piece
        return [parts[index] for index in sorted(parts)]
    body = response.json()
    if "choices" not in body:
        return [body["text"]]
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    return [c["text"] if "text" in c else c["message"]["content"] for c in choices]


async def ask_all(url: str, count: int, at_once: int) -> list[list[str]]:
    turns = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def one(index: int) -> list[str]:
            path, body = request_of(index)
            async with turns:
                response = await client.post(path, json=body)
            assert response.status_code == 200, (path, body, response.text)
            return texts(response)

        return await asyncio.gather(*(one(index) for index in range(count)))


def descriptors(cluster: Cluster) -> dict[str, int]:
    """Open descriptors of every process of both trees, by name."""
    counts: dict[str, int] = {}
    for member in (cluster.prefill, cluster.decode):
        tree = psutil.Process(member.popen.pid)
        for process in (tree, *tree.children(recursive=True)):
            counts[f"{member.name}:{process.cmdline()[-1]}"] = process.num_fds()
    return counts


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("router", "count"),
    [
        ("sglang-router", 56),
        ("smg", 8),
        pytest.param("sglang-router", 200, marks=pytest.mark.slow),
        pytest.param("smg", 200, marks=pytest.mark.slow),
    ],
)
def test_requests_through_a_router_are_right_and_leave_nothing(
    start_cluster: StartCluster, router: str, count: int
) -> None:
    assert router in ROUTERS
    cluster = start_cluster("--transport", "nixl", *QUICK, router=router)
    try:
        # The same servers without a room are one process each: what the answers must equal.
        expected = asyncio.run(ask_all(cluster.decode.url, count, 16))
        first = asyncio.run(ask_all(cluster.url, len(KINDS), 1))
        assert first == expected[: len(KINDS)]
        wait_idle(cluster, 5)
        before = descriptors(cluster)
        assert asyncio.run(ask_all(cluster.url, count, 16)) == expected
        wait_idle(cluster, 5)
        extra = {name: n - before[name] for name, n in descriptors(cluster).items()}
        # The router keeps idle connections to the engines' HTTP ports, one for each of 16 at once.
        idle_max = {"prefill:pdrt:engine": 16, "decode:pdrt:engine": 16}
        assert all(n <= idle_max.get(name, 0) for name, n in extra.items()), extra
    finally:
        cluster.stop()
