"""An engine on the unmodified SGLang components, driven as stress/bench/player.py drives ours.

Runs in an environment of its own, by file name, and imports nothing of ours.  Arguments: a JSON
object with role, port, shape (layers, item_bytes, pages, chunks, pages_count).  Then it reads asks,
one JSON object a line, and answers each with one.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from typing import Any

HOST = "127.0.0.1"
AUX_ROWS = 64
START_S = 60.0
POLL_S = 0.00005  # the components have nothing to wait on

os.environ["SGLANG_HOST_IP"] = HOST


def spare_torchvision() -> None:
    """PyPI's torchvision is built for another torch, and registers operators that it then lacks.
    Nothing here uses them."""
    import torch

    register = torch.library.register_fake

    def patient(operator: Any, *args: Any, **options: Any) -> Any:
        if str(operator).startswith("torchvision::"):
            return lambda function: function
        return register(operator, *args, **options)

    torch.library.register_fake = patient


class Components:
    """The manager of one role over CPU tensors, and the classes beside it."""

    def __init__(self, role: str, port: int, shape: dict[str, int]) -> None:
        spare_torchvision()
        import torch
        from sglang.srt.disaggregation import utils
        from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
        from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish
        from sglang.srt.server_args import ServerArgs

        server = ServerArgs(
            model_path="dummy",
            device="cpu",
            host=HOST,
            port=port + 1 + (role == "decode"),
            disaggregation_mode=role,
            disaggregation_transfer_backend="nixl",
            disaggregation_bootstrap_port=port,
        )
        publish(server, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        get_parallel().override_permanently(pp_group=None)

        def component(name: str) -> Any:
            kind = getattr(utils.KVClassType, name)
            return utils.get_kv_class(utils.TransferBackend.NIXL, kind)

        self.KVPoll = KVPoll
        self.address = f"{HOST}:{port}"
        if role == "prefill":
            self.bootstrap = component("BOOTSTRAP_SERVER")(host=HOST, port=port)
        self.room = component("SENDER" if role == "prefill" else "RECEIVER")
        size = shape["pages_count"], shape["item_bytes"]
        self.kv = [torch.zeros(size, dtype=torch.uint8) for _ in range(2 * shape["layers"])]
        self.aux = utils.MetadataBuffers(AUX_ROWS, 64, torch.float32, 0)
        arguments = KVArgs()
        for name, value in self._description(shape).items():
            setattr(arguments, name, value)
        mode = utils.DisaggregationMode(role)
        self.manager = component("MANAGER")(arguments, mode, server, False)

    def _description(self, shape: dict[str, int]) -> dict[str, Any]:
        """What the manager wants to know of a pool; empty is what a plain model has."""
        empty = "state_types state_data_ptrs state_data_lens state_item_lens state_layer_ids"
        empty += " state_dim_per_tensor state_slice_outer_counts state_conv_shard_groups"
        empty += " mla_compression_ratios kv_layer_ids"
        zero = "engine_rank pp_rank system_dp_rank gpu_id prefill_start_layer num_draft_entries"
        none = "rust_http_port kv_layout swa_kv_cache_layout ib_device"
        aux = zip(
            ("aux_data_ptrs", "aux_data_lens", "aux_item_lens"),
            self.aux.get_buf_infos(),
            strict=True,
        )
        return {
            **{name: [] for name in empty.split()},
            **dict.fromkeys(zero.split(), 0),
            **dict.fromkeys(none.split()),
            **dict(aux),
            "kv_cache_dtype_str": "uint8",
            "kv_data_ptrs": [tensor.data_ptr() for tensor in self.kv],
            "kv_data_lens": [tensor.nbytes for tensor in self.kv],
            "kv_item_lens": [shape["item_bytes"]] * len(self.kv),
            "kv_data_mem_kinds": ["DRAM"] * len(self.kv),
            "is_hybrid_mla_backend": False,
            "kv_head_num": 1,
            "total_kv_head_num": 1,
            "page_size": 16,
            "prefill_end_layer": shape["layers"],
        }

    def introduce(self) -> None:
        """Decode: until prefill's server has told what it has."""
        end = time.monotonic() + START_S
        while not self.manager.try_ensure_parallel_info(self.address):
            if time.monotonic() > end:
                raise SystemExit("prefill's bootstrap server does not answer")
            time.sleep(0.2)


def pages_of(place: int, shape: dict[str, int]) -> Any:
    import numpy as np

    first = place * shape["pages"]
    return np.arange(first, first + shape["pages"], dtype=np.int32)


def play_prefill(parts: Components, shape: dict[str, int], ask: dict[str, int]) -> list[float]:
    import numpy as np

    seconds: list[float] = []
    asked: dict[int, Any] = {}
    free = list(range(shape["pages_count"] // shape["pages"]))[:AUX_ROWS]
    moving: dict[int, tuple[Any, int, float]] = {}
    opened = 0
    while len(seconds) < ask["rooms"]:
        while opened < ask["rooms"] and len(asked) + len(moving) < ask["open"]:
            room = ask["first"] + opened
            asked[room] = parts.room(parts.manager, parts.address, room)
            opened += 1
        for room, sender in list(asked.items()):
            state = sender.poll()
            assert state != parts.KVPoll.Failed, f"room {room} failed"
            if state == parts.KVPoll.WaitingForInput:
                begun, place = time.perf_counter(), free.pop()
                sender.pop_decode_prefix_len()
                parts.aux.bootstrap_room[place, 0] = room
                parts.aux.output_ids[place, 0] = 1
                sender.init(shape["pages"], place)
                for part in np.array_split(pages_of(place, shape), shape["chunks"]):
                    sender.send(part)
                moving[room] = asked.pop(room), place, begun
        for room, (sender, place, begun) in list(moving.items()):
            state = sender.poll()
            assert state != parts.KVPoll.Failed, f"room {room} failed"
            if state == parts.KVPoll.Success:
                seconds.append(time.perf_counter() - begun)
                sender.clear()
                free.append(place)
                del moving[room]
        time.sleep(POLL_S)
    return seconds


def play_decode(parts: Components, shape: dict[str, int], ask: dict[str, int]) -> list[float]:
    seconds: list[float] = []
    free = list(range(shape["pages_count"] // shape["pages"]))[:AUX_ROWS]
    moving: dict[int, tuple[Any, int, float]] = {}
    opened = 0
    while len(seconds) < ask["rooms"]:
        while opened < ask["rooms"] and len(moving) < ask["open"]:
            room = ask["first"] + opened
            opened += 1
            begun, place = time.perf_counter(), free.pop()
            receiver = parts.room(parts.manager, parts.address, room)
            receiver.init(0)
            assert receiver.poll() == parts.KVPoll.WaitingForInput
            receiver.send_metadata(pages_of(place, shape), place, None, decode_prefix_len=0)
            moving[room] = receiver, place, begun
        for room, (receiver, place, begun) in list(moving.items()):
            state = receiver.poll()
            assert state != parts.KVPoll.Failed, f"room {room} failed"
            if state == parts.KVPoll.Success:
                seconds.append(time.perf_counter() - begun)
                assert int(parts.aux.bootstrap_room[place, 0]) == room
                receiver.clear()
                free.append(place)
                del moving[room]
        time.sleep(POLL_S)
    return seconds


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with its parent, even while frozen
    told = json.loads(sys.argv[1])
    # What the components print must not stand between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    parts = Components(told["role"], told["port"], told["shape"])
    play = play_prefill if told["role"] == "prefill" else play_decode
    if told["role"] == "decode":
        parts.introduce()
    answers.write("{}\n")
    answers.flush()
    for line in sys.stdin:
        begun, cpu = time.perf_counter(), time.process_time()
        seconds = play(parts, told["shape"], json.loads(line))
        whole_s = time.perf_counter() - begun
        answer = {"whole_s": whole_s, "seconds": seconds, "cpu_s": time.process_time() - cpu}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)  # its threads do not end


if __name__ == "__main__":
    main()
