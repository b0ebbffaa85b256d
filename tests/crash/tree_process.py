"""A runtime without an engine and without a model, with settings that the command line has not."""

from __future__ import annotations

import json
import logging
import signal
import sys

import msgspec

from pdrt import runtime
from pdrt.actors import boot as actors
from pdrt.actors.boot import Boot
from pdrt.child import Promotion
from pdrt.config import Settings, default_environment
from pdrt.protocol.layout import Layout
from pdrt.supervisor import Supervisor
from tests.crash import bad

PAGE_TOKENS, KV_HEADS, HEAD_DIM = 64, 4, 128
LAYOUT = Layout(
    model="crash",
    layers=1,
    kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    dtype="float32",
    page_size=PAGE_TOKENS,
    ranks=1,
)  # a page is 256 KiB
PAGES_COUNT = 320
BUG_SIGNALS = {bad.RAISE, bad.SPIN, signal.SIGCONT}


def run_listener(boot: Boot) -> None:
    bad.arm_actor()
    actors.run_listener(boot)


def run_worker(boot: Boot, rank: int) -> None:
    bad.arm_actor()
    actors.run_worker(boot, rank)


def stand_by_listener(promotion: Promotion, boot: Boot) -> None:
    bad.arm_actor()
    actors.stand_by_listener(promotion, boot)


def stand_by_worker(promotion: Promotion, boot: Boot) -> None:
    bad.arm_actor()
    actors.stand_by_worker(promotion, boot)


def arm() -> None:
    """This process is a supervisor with a bug, and starts children that have one."""
    for target in (run_listener, run_worker, stand_by_listener, stand_by_worker):
        setattr(runtime, target.__name__, target)
    on_signal = Supervisor._on_signal

    def other_signals(supervisor: Supervisor, signum: int) -> None:
        if signum not in BUG_SIGNALS:
            on_signal(supervisor, signum)

    Supervisor._on_signal = other_signals  # type: ignore[assignment, method-assign]
    bad.arm_actor()


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    default_environment({"UCX_TLS": "tcp,self"})
    logging.basicConfig(
        level="INFO", format="%(asctime)s %(levelname)s %(name)s pid=%(process)d %(message)s"
    )
    arm()
    with runtime.Runtime(settings, LAYOUT, None) as tree:
        sys.stdout.write(json.dumps({"pdrt": tree.facts()}) + "\n")
        sys.stdout.flush()
        tree.run()


if __name__ == "__main__":
    main()
