"""As tests/crash/tree_process.py: a runtime whose processes obey the test's orders.

usage: ... <settings> <folder of the orders> <name of the tree>
"""

from __future__ import annotations

import json
import logging
import os
import sys

import msgspec

from pdrt import runtime
from pdrt.actors import boot as actors
from pdrt.actors.boot import Boot
from pdrt.child import Promotion
from pdrt.config import Settings, default_environment
from tests.crash.tree_process import LAYOUT
from tests.failpoints import control


def run_listener(boot: Boot) -> None:
    control.obey()
    actors.run_listener(boot)


def run_worker(boot: Boot, rank: int) -> None:
    control.obey()
    actors.run_worker(boot, rank)


def stand_by_listener(promotion: Promotion, boot: Boot) -> None:
    control.obey()
    actors.stand_by_listener(promotion, boot)


def stand_by_worker(promotion: Promotion, boot: Boot) -> None:
    control.obey()
    actors.stand_by_worker(promotion, boot)


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    os.environ[control.FOLDER], os.environ[control.TREE] = sys.argv[2:4]
    default_environment({"UCX_TLS": "tcp,self"})
    logging.basicConfig(
        level="INFO", format="%(asctime)s %(levelname)s %(name)s pid=%(process)d %(message)s"
    )
    for target in (run_listener, run_worker, stand_by_listener, stand_by_worker):
        setattr(runtime, target.__name__, target)
    control.obey()
    with runtime.Runtime(settings, LAYOUT, None) as tree:
        sys.stdout.write(json.dumps({"pdrt": tree.facts()}) + "\n")
        sys.stdout.flush()
        tree.run()
