"""Real process trees with real models for the end-to-end tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pdrt.cli.cluster import Cluster
from stress.cascades.logs import errors_in
from tests.serving.tiny_model import make_tiny_model

#: Short, so that a test of a deadline takes seconds.
QUICK = ("--bootstrap-timeout", "5", "--waiting-timeout", "5", "--transfer-stall-timeout", "5")
LOOPBACK = {"UCX_NET_DEVICES": "lo", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

StartCluster = Callable[..., Cluster]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of a few thousand weights: starts and answers fast."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)


@pytest.fixture(scope="session")
def make_cluster(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> StartCluster:
    """make_cluster(*flags, model=tiny, router=None) -> a Cluster, not started."""

    def make(
        *flags: str,
        prefill: Sequence[str] = (),
        decode: Sequence[str] = (),
        model: Path | None = None,
        router: str | None = None,
        router_flags: Sequence[str] = (),
    ) -> Cluster:
        common = ["--model-path", str(model or tiny_folder), "--served-model-name", "tiny"]
        return Cluster(
            tmp_path_factory.mktemp("cluster"),
            both=[*common, "--threads", "1", "--kv-checksum", *flags],
            prefill=prefill,
            decode=decode,
            router=router,
            router_flags=router_flags,
            environment=LOOPBACK,
        )

    return make


@contextlib.contextmanager
def started(cluster: Cluster) -> Iterator[Cluster]:
    """And stopped.  Whatever was done to it, no process of it may have failed by itself: another
    takes its place so soon that no client need notice."""
    with cluster:
        cluster.start()
        yield cluster
    errors = list(errors_in(cluster.prefill.log.parent))
    assert not errors, errors


@pytest.fixture(scope="module")
def start_cluster(make_cluster: StartCluster) -> Iterator[StartCluster]:
    """As make_cluster, and started; stopped at the module's end, if the test did not."""
    with contextlib.ExitStack() as stack:

        def start(*flags: str, **options: Any) -> Cluster:
            # Standbys are `pair`'s, and tests/crash's; here their start would only cost time.
            return stack.enter_context(started(make_cluster("--no-standby", *flags, **options)))

        yield start


@pytest.fixture(scope="session", params=["nixl", pytest.param("shm", marks=pytest.mark.slow)])
def pair(make_cluster: StartCluster, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One prefill and one decode for every test that leaves them as it found them, whatever it
    killed.  Two devices, small chunks, short deadlines."""
    flags = ["--devices", "cpu:0,cpu:1", "--chunked-prefill-size", "64", "--quiet-timeout", "3"]
    with started(make_cluster("--transport", request.param, *flags, *QUICK)) as cluster:
        yield cluster
