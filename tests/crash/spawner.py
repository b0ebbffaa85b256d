"""A process that starts process trees for the tests and ends them when its input closes.

Trees that a test starts outlive it (the next cell uses them); as grandchildren of the tests they
belong to the module, which is what the leak check looks at.  Run by file name; imports nothing of
ours.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from typing import Any

PR_SET_CHILD_SUBREAPER = 36


def spawn(ask: dict[str, Any]) -> int:
    with open(ask["log"], "ab") as output:
        popen = subprocess.Popen(
            ask["command"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ask["environment"]},
            start_new_session=True,
        )
    popen.returncode = 0  # reaped below, by whoever comes first
    return popen.pid


def reap() -> None:
    """Everybody who died, orphans of a killed supervisor included."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    started: list[int] = []
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], 0.02)
        reap()
        if not ready:
            continue
        line = sys.stdin.readline()
        if not line:
            break
        started.append(spawn(json.loads(line)))
        sys.stdout.write(f"{started[-1]}\n")
        sys.stdout.flush()
    for pid in started:
        try:
            os.kill(pid, signal.SIGKILL)  # a number of a reaped one is free, so nobody is hit
        except ProcessLookupError:
            continue
    reap()


if __name__ == "__main__":
    main()
