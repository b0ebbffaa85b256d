from __future__ import annotations

import errno
import os

import pytest

from pdrt.clock import ManualClock
from pdrt.transports.base import TransportError
from pdrt.transports.shortage import LOOK_NS, Shortage


def test_a_shortage_is_said_once_it_is_over_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    clock = ManualClock(LOOK_NS)
    shortage = Shortage(clock)
    for _ in range(3):
        shortage.check()
        clock.now_ns += LOOK_NS
    with monkeypatch.context() as patch:
        patch.setattr(os, "eventfd", none_left)
        for _ in range(3):  # nothing better could be started now
            shortage.check()
            clock.now_ns += LOOK_NS
    with pytest.raises(TransportError, match="descriptors ran out"):
        shortage.check()
