"""The five faults that pdrt was written against, each as a scenario that the true code survives.

    an abort message kills the listener          a late Transferring brings a Failed room back
    the skipped last chunk leaves a room open    a write that never completes has no deadline
    health says 200 over a wedge

Each scenario runs a second time under *mutants* that put the cause back, and must then fail: so it
tests what it says, and not something that is kept by another law.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pdrt.actors import base
from pdrt.mail.mailbox import Envelope
from tests.actors.post import Box
from tests.actors.tree import Process


@dataclass
class BoxMailbox:
    """A box of the world, as the loop of an actor uses a mailbox."""

    box: Box

    def receive(self, timeout_ms: int) -> list[Envelope]:
        return self.box.receive()

    def flush(self, now_ns: int) -> None:
        self.box.flush()


def _one_round(process: Process, now_ns: int) -> None:
    rounds = iter((False, True))
    base.run(
        process.actor,
        BoxMailbox(process.box),  # type: ignore[arg-type]
        process.table,
        lambda: now_ns,
        stopping=lambda: next(rounds),
        wake=lambda: None,
    )


@pytest.fixture
def real_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends an actor's loop ends its process here, too, which its tree then restarts."""
    monkeypatch.setattr(Process, "turn", _one_round)
