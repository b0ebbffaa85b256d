"""Rooms a second and their latency through two real trees on this host, without any engine's work.

    bin/bench [--rooms N] [--transports nixl,shm] [--json FILE]

Two processes play the engines: one room is one page of 16 KiB and its aux row, in one chunk.
"open" is how many rooms are under way at once.  Latency is decode's, from asking for the room to
Success.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import select
import struct
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from pdrt.cli.cluster import Cluster
from pdrt.engine.manager import KVManager
from pdrt.engine.receiver import KVReceiver
from pdrt.memory.aux import AuxRow
from pdrt.protocol.states import KVPoll

OPEN = (1, 16, 64)
WAIT_S = 0.005  # a lost wake-up costs no more than this
GIVE_UP_S = 120.0
PAGE_16_KIB = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "vocab_size": 512,
    "eos_token_id": 2,
}


def wait(manager: KVManager) -> None:
    """Until some room may have changed."""
    if select.select([manager.wake_fd], [], [], WAIT_S)[0]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(manager.wake_fd)


def play_prefill(attach: str, rooms_count: int, open_max: int) -> None:
    manager = KVManager.attach(attach, name="bench")
    page = np.array([0], dtype=np.int32)
    under_way: dict[int, tuple[Any, int]] = {}
    opened = done = 0
    while done < rooms_count:
        while opened < rooms_count and len(under_way) < open_max:
            opened += 1
            sender, aux = manager.sender(opened), manager.aux.reserve()
            manager.aux.write(aux, AuxRow(opened, 1))
            sender.init(1, aux)
            sender.send(page, last=True)
            under_way[opened] = sender, aux
        before = done
        for room, (sender, aux) in list(under_way.items()):
            state = sender.poll()
            assert state is not KVPoll.Failed, sender.failure()
            if state is KVPoll.Success:
                sender.clear()
                manager.aux.release(aux)
                del under_way[room]
                done += 1
        manager.tick()
        if done == before:
            wait(manager)
    manager.close()


def play_decode(
    attach: str, peer: str, rooms_count: int, open_max: int, answer: Connection
) -> None:
    manager = KVManager.attach(attach, name="bench")
    under_way: dict[int, tuple[KVReceiver, float]] = {}
    landing: dict[int, int] = {}  # room -> aux row, once the destination has left
    seconds: list[float] = []
    opened = 0
    began = time.perf_counter()
    while len(seconds) < rooms_count:
        while opened < rooms_count and len(under_way) < open_max:
            opened += 1
            asked = time.perf_counter()
            receiver = manager.receiver(opened, peer)
            receiver.init()
            under_way[opened] = receiver, asked
        moved = False
        for room, (receiver, asked) in list(under_way.items()):
            state = receiver.poll()
            assert state is not KVPoll.Failed, receiver.failure()
            if state is KVPoll.WaitingForInput and room not in landing:
                landing[room] = manager.aux.reserve()
                receiver.send_metadata(np.array([room % 64], dtype=np.int32), landing[room])
                moved = True
            elif state is KVPoll.Success:
                seconds.append(time.perf_counter() - asked)
                aux = landing.pop(room)
                assert manager.aux.read(aux, room).first_token == 1
                receiver.clear()
                manager.aux.release(aux)
                del under_way[room]
                moved = True
        manager.tick()
        if not moved:
            wait(manager)
    answer.send((time.perf_counter() - began, seconds))
    manager.close()


def measure(cluster: Cluster, rooms_count: int, open_max: int) -> dict[str, float]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    attaches = [str(m.facts["attach"]) for m in (cluster.prefill, cluster.decode)]
    peer = str(cluster.prefill.facts["control"])
    players = [
        spawn.Process(target=play_prefill, args=(attaches[0], rooms_count, open_max)),
        spawn.Process(target=play_decode, args=(attaches[1], peer, rooms_count, open_max, theirs)),
    ]
    for player in players:
        player.start()
    try:
        if not ours.poll(GIVE_UP_S):
            raise SystemExit("the rooms did not end; see the logs")
        whole_s, seconds = ours.recv()
    finally:
        for player in players:
            player.join(5)
            player.kill()
            player.join()
    p50, p99 = np.percentile(np.array(seconds) * 1e3, [50, 99])
    return {
        "open": open_max,
        "rooms_per_s": round(rooms_count / whole_s, 1),
        "p50_ms": round(float(p50), 3),
        "p99_ms": round(float(p99), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--rooms", type=int, default=4000, help="rooms a measurement (1 open: a quarter)"
    )
    parser.add_argument("--transports", default="nixl,shm")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="pdrt-bench-") as folder:
        model = Path(folder) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(PAGE_16_KIB))
        # Only fingerprinted: there is no engine to load them.
        (model / "tokenizer.json").write_text("{}")
        (model / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
        for transport in options.transports.split(","):
            flags = ["--engine", "none", "--model-path", str(model), "--pool-tokens", "4096"]
            with Cluster(
                Path(folder), both=[*flags, "--transport", transport], router=None
            ) as cluster:
                cluster.start()
                for open_max in OPEN:
                    rooms_count = options.rooms // 4 if open_max == 1 else options.rooms
                    for _ in range(options.repeat):
                        result = {"transport": transport, **measure(cluster, rooms_count, open_max)}
                        results.append(result)
                        print(
                            "  ".join(f"{name}={value}" for name, value in result.items()),
                            flush=True,
                        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
