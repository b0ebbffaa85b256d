"""The main job, shown once: a real model, prefill and decode apart, a real router, real text.

Run by bin/demo.  Exit code 0 only if what came through the router equals what the same model says
in one process.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import httpx
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from pdrt.cli.cluster import ROUTERS, Cluster
from pdrt.config import cache_folder
from pdrt.errors import PdrtError

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = (
    "The lighthouse keeper walked down the stone stairs before dawn and lit the old lamp. "
    "In the market square, traders from the north sold wool, honey and iron nails. "
    "When the storm ended, the fishermen"
)
TOKENS_MAX = 24
WIDTH_MIN = 132  # columns; the table is cut otherwise where no terminal is

app = App(name="bin/demo", help="Serve one chat and one stream with prefill and decode apart.")


@app.default
def main(
    *,
    keep: Annotated[bool, Parameter(help="Leave it serving and print how to call it.")] = False,
    router: Annotated[str, Parameter(help="sglang-router or smg.")] = "sglang-router",
    transport: Annotated[str, Parameter(help="nixl or shm.")] = "nixl",
    devices: Annotated[str, Parameter(help="One transfer worker each.")] = "cpu:0",
) -> int:
    from pdrt.serving.convert import model_folder

    console = Console(highlight=False, width=max(Console().width, WIDTH_MIN))
    if router not in ROUTERS:
        console.print(f"--router must be one of {', '.join(ROUTERS)}")
        return 2
    folder = model_folder(None, cache=cache_folder())
    with tempfile.TemporaryDirectory(prefix="pdrt-demo-") as logs:
        flags = ["--model-path", str(folder), "--transport", transport, "--devices", devices]
        with Cluster(Path(logs), both=flags, router=router) as cluster:
            with console.status("starting"):
                cluster.start(say=console.print)
            served = ask(cluster)
            show(console, cluster, served)
            equal = compare(console, folder, served)
            if keep:
                wait_until_interrupted(console, cluster)
    console.print("stopped; nothing is left")
    return 0 if equal else 1


def ask(cluster: Cluster) -> dict[str, str]:
    """One chat completion and one streamed completion, through the router."""
    common = {"model": cluster.model, "max_tokens": TOKENS_MAX, "temperature": 0}
    chat = httpx.post(
        f"{cluster.url}/v1/chat/completions", json={**common, "messages": CHAT}, timeout=120
    )
    chat.raise_for_status()
    text = ""
    body = {**common, "prompt": PROMPT, "stream": True}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=120) as stream:
        stream.raise_for_status()
        for line in stream.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line.removeprefix("data: "))
                text += "".join(choice["text"] for choice in event["choices"])
    return {"chat": chat.json()["choices"][0]["message"]["content"], "stream": text}


def show(console: Console, cluster: Cluster, served: dict[str, str]) -> None:
    console.print(f"\n[bold]chat[/]    {CHAT[0]['content']}\n        {served['chat']!r}")
    console.print(f"[bold]stream[/]  ...{PROMPT[-40:]}\n        {served['stream']!r}\n")
    table = Table(title="what happened to each room")
    for title in ("room", "side", "state", "Bootstrapping", "WaitingForInput", "Transferring"):
        table.add_column(title, justify="left" if title in ("side", "state") else "right")
    for title in ("bytes", "chunks", "transport"):
        table.add_column(title, justify="right")
    for member in (cluster.prefill, cluster.decode):
        for room in httpx.get(f"{member.url}/rooms", timeout=5).json()["finished"]:
            table.add_row(*row_of(member.name, room))
    console.print(table)


def row_of(side: str, room: dict[str, Any]) -> list[str]:
    def milliseconds(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds * 1e3:.2f} ms"

    return [
        str(room["room"]),
        side,
        room["state"],
        milliseconds(room["bootstrapping_s"]),
        milliseconds(room["waiting_s"]),
        milliseconds(room["transferring_s"]),
        f"{room['moved_bytes']:,}",
        str(room["chunks"]),
        room["transport"],
    ]


def compare(console: Console, folder: Path, served: dict[str, str]) -> bool:
    """The same two requests in this process, without rooms."""
    from pdrt.serving.local import LocalEngine
    from pdrt.serving.types import SamplingParams

    with console.status("running the same model in one process"), LocalEngine(folder) as engine:
        prompts = [engine.tokens.apply_chat(CHAT), engine.tokens.encode(PROMPT)]
        sampling = SamplingParams(max_tokens=TOKENS_MAX, temperature=0.0)
        alone = [answer.text for answer in engine.answer(prompts, sampling)]
    equal = alone == [served["chat"], served["stream"]]
    if equal:
        console.print("[bold green]identical[/] to the same model in one process")
    else:
        console.print(f"[bold red]different[/] from one process, which says {alone!r}")
    return equal


def wait_until_interrupted(console: Console, cluster: Cluster) -> None:
    body = {"model": cluster.model, "messages": CHAT, "max_tokens": TOKENS_MAX}
    console.print("\nserving until Ctrl-C; try")
    console.print(
        f"  curl {cluster.url}/v1/chat/completions -H 'content-type: application/json' "
        f"-d '{json.dumps(body)}'",
        soft_wrap=True,
    )
    for member in (cluster.prefill, cluster.decode):
        console.print(f"  curl {member.supervisor_url}/health   # {member.name}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        signal.pause()
    except KeyboardInterrupt:
        console.print()


if __name__ == "__main__":
    try:
        sys.exit(app())
    except PdrtError as error:
        sys.stderr.write(f"demo: {error.code}: {error}\n")
        sys.exit(1)
