"""A prefill or a decode on vLLM's unmodified NixlConnector, both its halves, in one process: what
its scheduler and its worker would do round each step, without a model.  Runs in vLLM's environment.
"""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

from stress.stock.obey import obey

HOST = "127.0.0.1"
BLOCK_TOKENS, HEADS, HEAD_SIZE = 32, 8, 128  # a block is 256 KiB in each layer
LAYERS = [f"model.layers.{index}.self_attn.attn" for index in range(2)]
SETTLED_S = 0.5

ENVIRONMENT = {
    "VLLM_HOST_IP": HOST,
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
}


class Blocks:
    """Blocks that an engine allocated for a request, none of them from its prefix cache."""

    def __init__(self, numbers: list[int]) -> None:
        self._numbers = numbers
        self.blocks = ([SimpleNamespace(block_hash=None, is_null=False) for _ in numbers],)

    def get_unhashed_block_ids_all_groups(self) -> tuple[list[int], ...]:
        return (self._numbers,)


class Puppet:
    def __init__(self, told: dict[str, Any]) -> None:
        os.environ.update(ENVIRONMENT, VLLM_NIXL_SIDE_CHANNEL_PORT=str(told["port"]))
        import torch
        from vllm.config import KVTransferConfig, set_current_vllm_config
        from vllm.distributed import (
            ensure_model_parallel_initialized,
            init_distributed_environment,
        )
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        transfer = KVTransferConfig(
            kv_connector="NixlConnector",
            kv_role="kv_producer" if told["role"] == "prefill" else "kv_consumer",
            kv_buffer_device="cpu",
        )
        config = EngineArgs(
            model=told["model"],
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="float32",
            block_size=BLOCK_TOKENS,
            enforce_eager=True,
            kv_transfer_config=transfer,
        ).create_engine_config()
        config.cache_config.kv_cache_layout = "LBHNC"  # what the connector asks for
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32
        )
        cache = KVCacheConfig(
            num_blocks=told["blocks"],
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(LAYERS, spec)],
        )
        shape = told["blocks"], HEADS, BLOCK_TOKENS, 2 * HEAD_SIZE
        self.kv = {name: torch.zeros(shape) for name in LAYERS}
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"tcp://{HOST}:{told['gloo']}", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
            make = KVConnectorFactory.create_connector
            self.worker = make(config, KVConnectorRole.WORKER, cache)
            self.scheduler = make(config, KVConnectorRole.SCHEDULER, cache)
            self.worker.register_kv_caches(self.kv)
        self.scheduler.set_xfer_handshake_metadata_pp_aware(
            {(0, 0): self.worker.get_handshake_metadata()}
        )
        self.ended: dict[str, list[Any]] = {}  # request -> [how, when]

    def turn(self) -> None:
        """One step of an engine that has nothing to compute."""
        metadata = self.scheduler.build_connector_meta(None)
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv(None)
        results = self.worker.get_transfer_results(set())
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(results)
        now = time.monotonic()
        for request in results.finished_sending:
            self.ended[request] = ["sent", now]
        for request in results.finished_recving:
            how = "failed" if request in results.failed_recving else "received"
            self.ended[request] = [how, now]

    # --- requests ---

    def _request(self, name: str, params: dict[str, Any], blocks: int) -> Any:
        tokens = blocks * BLOCK_TOKENS
        return SimpleNamespace(
            request_id=name,
            kv_transfer_params=params,
            prompt_token_ids=[1] * tokens,
            num_prompt_tokens=tokens,
            num_computed_tokens=tokens,
            status=None,
        )

    def do_offer(self, request: str, first: int, count: int) -> dict[str, Any]:
        """Prefill: compute a request and finish it; what its client is answered."""
        from vllm.v1.request import RequestStatus

        numbers = list(range(first, first + count))
        wanted = {"do_remote_decode": True, "do_remote_prefill": False}
        made = self._request(request, wanted, count)
        self.scheduler.on_new_request(made)
        self.scheduler.update_state_after_alloc(made, Blocks(numbers), 0)
        self.turn()
        made.status = RequestStatus.FINISHED_LENGTH_CAPPED
        held, params = self.scheduler.request_finished_all_groups(made, (numbers,))
        assert held, "its blocks are not held"
        self.turn()
        return dict(params)

    def do_pull(self, request: str, params: dict[str, Any], first: int, count: int) -> float:
        """Decode: a request that brings what prefill's client was answered.  When it was asked."""
        made = self._request(request, dict(params), count)
        begun = time.monotonic()
        self.scheduler.on_new_request(made)
        tokens, _ = self.scheduler.get_num_new_matched_tokens(made, 0)
        numbers = list(range(first, first + count))
        self.scheduler.update_state_after_alloc(made, Blocks(numbers), tokens)
        self.turn()
        return begun

    def do_watch(self, requests: list[str], limit_s: float) -> dict[str, Any]:
        """Until each has ended or the limit: [how, when], ["open", None]."""
        end = time.monotonic() + limit_s
        while not all(request in self.ended for request in requests):
            if time.monotonic() > end:
                break
            self.turn()
            time.sleep(0.0005)
        return {request: self.ended.get(request, ["open", None]) for request in requests}

    def do_pulls(self, offers: list[list[Any]], first: int, count: int) -> list[float]:
        """One after the other; seconds of each."""
        seconds = []
        for request, params in offers:
            begun = self.do_pull(request, params, first, count)
            how, at = self.do_watch([request], 60.0)[request]
            assert how == "received", f"{request} {how}"
            seconds.append(at - begun)
        return seconds

    def do_notify_again(self, params: list[dict[str, Any]]) -> None:
        """Decode: say once more of requests that they have been read."""
        worker = self.worker.connector_worker
        for each in params:
            agent = worker._remote_agents[each["remote_engine_id"]][0, 0]
            worker.nixl_wrapper.send_notif(
                agent, notif_msg=f"{each['remote_request_id']}:1".encode()
            )

    # --- blocks ---

    def _bytes(self, first: int, count: int) -> list[Any]:
        import torch

        return [
            cache[first : first + count].view(torch.uint8).reshape(count, -1)
            for cache in self.kv.values()
        ]

    def do_fill(self, value: int, first: int, count: int) -> None:
        for part in self._bytes(first, count):
            part.fill_(value)

    def do_first_bytes(self, value: int, first: int, count: int, limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while not any(bool((part[:, 0] == value).any()) for part in self._bytes(first, count)):
            if time.monotonic() > end:
                return False
        return True

    def do_count_with(self, value: int, first: int, count: int) -> int:
        """Blocks with a byte that is `value`."""
        import torch

        found = torch.stack([(part == value).any(dim=1) for part in self._bytes(first, count)])
        return int(found.any(dim=0).sum())

    # --- the connector ---

    def do_facts(self) -> dict[str, Any]:
        worker, scheduler = self.worker.connector_worker, self.scheduler.connector_scheduler
        kept = {
            f"{type(part).__name__}{name}": len(value)
            for part in (worker, scheduler)
            for name, value in vars(part).items()
            if "req" in name and isinstance(value, dict | set)
        }
        return {
            "threads": [thread.name for thread in threading.enumerate()],
            "kept": {name: count for name, count in kept.items() if count},
            "after_expiry": len(worker.xfer_stats.data.get("num_notifications_after_expiry", ())),
        }


if __name__ == "__main__":
    obey(Puppet)
