"""Ways to hang, for every process of a tree that has this folder in PYTHONPATH.

SIGUSR1 is an endless loop in the main thread, SIGUSR2 a call that never returns and never lets go
of the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import signal


def _loop(_signum: int, _frame: object) -> None:
    while True:
        pass


def _hold(_signum: int, _frame: object) -> None:
    ctypes.PyDLL(None).sleep(3600)


signal.signal(signal.SIGUSR1, _loop)
signal.signal(signal.SIGUSR2, _hold)
