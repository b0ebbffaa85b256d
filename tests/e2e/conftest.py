"""Real process trees with real models for the end-to-end tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from pdrt.cli.cluster import Cluster
from tests.serving.tiny_model import make_tiny_model

#: Short, so that a test of a deadline takes seconds.
QUICK = ("--bootstrap-timeout", "5", "--waiting-timeout", "5", "--transfer-stall-timeout", "5")
LOOPBACK = {"UCX_NET_DEVICES": "lo", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

StartCluster = Callable[..., Cluster]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of a few thousand weights: starts and answers fast."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def start_cluster(
    tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path
) -> Iterator[StartCluster]:
    """start_cluster(*flags, model=tiny, router=None) -> a running Cluster, stopped at module
    end."""
    running: list[Cluster] = []

    def start(
        *flags: str,
        prefill: Sequence[str] = (),
        decode: Sequence[str] = (),
        model: Path | None = None,
        router: str | None = None,
    ) -> Cluster:
        cluster = Cluster(
            tmp_path_factory.mktemp("cluster"),
            both=[
                "--model-path",
                str(model or tiny_folder),
                "--served-model-name",
                "tiny",
                "--threads",
                "1",
                "--kv-checksum",
                *flags,
            ],
            prefill=prefill,
            decode=decode,
            router=router,
            environment=LOOPBACK,
        )
        running.append(cluster)
        cluster.start()
        return cluster

    yield start
    for cluster in running:
        cluster.stop()
