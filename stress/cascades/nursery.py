"""Forks players, watchers and connectors from a process that has imported everything already.

A killed engine is back in milliseconds then, and what a cycle costs is what pdrt costs.  Reads one
JSON object a line, answers each with the pid of the new process.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from stress.bench.trees import ROOT, tie_to_parent
from stress.cascades import clients, connector, player, watcher

CHILDREN: Mapping[str, tuple[type[Any], Callable[[Any], None]]] = {
    "player": (player.Told, player.main),
    "watcher": (watcher.Told, watcher.main),
    "connector": (connector.Told, connector.main),
    "client": (clients.Told, clients.main),
}


class Nursery:
    """Our end of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with (folder / "nursery.log").open("ab") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", "from stress.cascades.nursery import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                text=True,
            )

    def bear(self, kind: str, name: str, told: msgspec.Struct) -> int:
        """Start one; returns its pid."""
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        log = str(self._folder / f"{name}.log")
        ask = {"kind": kind, "log": log, "told": msgspec.to_builtins(told)}
        self.popen.stdin.write(json.dumps(ask) + "\n")
        self.popen.stdin.flush()
        return int(self.popen.stdout.readline())

    def close(self) -> None:
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.popen.stdin.close()
        self.popen.stdout.close()
        self.popen.kill()
        self.popen.returncode = 0  # whoever adopts orphans reaps it


def _become(ask: dict[str, Any]) -> NoReturn:
    """In the new process."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        tie_to_parent()
        log = os.open(ask["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for descriptor, to in ((null, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, to)
        os.closerange(3, 256)
        told, main = CHILDREN[ask["kind"]]
        main(msgspec.convert(ask["told"], told))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    tie_to_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    gc.freeze()
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            _become(json.loads(line))
        print(pid, flush=True)
