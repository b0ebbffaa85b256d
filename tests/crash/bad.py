"""Bugs on demand: a process that is armed raises, or loops for ever, when it gets a signal."""

from __future__ import annotations

import signal

from pdrt.shm_status import StatusTable

RAISE, SPIN = signal.SIGUSR1, signal.SIGUSR2


class Bug:
    """Arm it in the main thread."""

    def __init__(self) -> None:
        self._raises = self._spins = False

    def arm(self) -> None:
        signal.signal(RAISE, self._on_raise)
        signal.signal(SPIN, self._on_spin)
        signal.signal(signal.SIGCONT, self._on_continue)

    def strike(self) -> None:
        """Called where the loop turns."""
        if self._raises:
            self._raises = False
            raise RuntimeError("this process fails on purpose")

    def _on_raise(self, _signum: int, _frame: object) -> None:
        self._raises = True

    def _on_spin(self, _signum: int, _frame: object) -> None:
        """Wherever it is just now."""
        self._spins = True
        while self._spins:
            pass

    def _on_continue(self, _signum: int, _frame: object) -> None:
        self._spins = False


def arm_actor() -> None:
    """From now on this process has the bug in its loop, where it beats."""
    bug, beat = Bug(), StatusTable.beat
    bug.arm()

    def beat_or_fail(table: StatusTable, now_ns: int) -> None:
        bug.strike()
        beat(table, now_ns)

    StatusTable.beat = beat_or_fail  # type: ignore[assignment, method-assign]
