"""Scenario of a link that takes nothing for ever, though whoever is at its other end lives.

F010.
"""

from __future__ import annotations

import contextlib
import os

import pytest

from pdrt.mail.mailbox import Mailbox
from pdrt.protocol.counters import Counter
from pdrt.protocol.messages import NewsTaken
from tests.mail.site import Site
from tests.waiting import wait_until

SIBLINGS = 7


def _no_mending(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Mailbox, "_mend", lambda self, name: None)


@pytest.mark.usefixtures("short_queues")
@pytest.mark.parametrize("mended", [True, False])
def test_a_link_that_would_block_for_ever_is_made_anew(
    site: Site, mended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of eight links to one door read nonsense once, and ZMQ never dials from it again.  What
    it cannot send is refused and counted, its owner dials anew, and the message that its sender
    repeats arrives; its siblings notice nothing."""
    if not mended:
        _no_mending(monkeypatch)
    endpoint, server = site.listen()
    stuck, counts = site.mailbox("stuck")
    stuck.link("to", endpoint, from_peer=True)
    server.setblocking(True)
    nonsense, _ = server.accept()
    nonsense.sendall(b"\xff" + b"nonsense" * 8)
    with contextlib.closing(nonsense), contextlib.suppress(ConnectionResetError):
        while nonsense.recv(4096):  # until ZMQ has hung up
            pass
    server.setblocking(False)
    owner, _ = site.mailbox("owner")
    owner.open_door("door", endpoint, os.dup(server.fileno()), from_peer=True)
    siblings = [site.mailbox(f"sibling{number}") for number in range(SIBLINGS)]
    for sibling, _ in siblings:
        sibling.link("to", endpoint, from_peer=True)
    heard: set[int] = set()

    def arrives() -> bool:
        for number, mailbox in enumerate((stuck, *(sibling for sibling, _ in siblings))):
            mailbox.post("to", NewsTaken(number, 3))
            mailbox.flush()
        heard.update(message.slot for _, message in owner.receive(5))  # type: ignore[union-attr]
        return 0 in heard

    if mended:
        wait_until(arrives, 5, "what the stuck one repeats")
        assert counts.of[Counter.SENDS_REFUSED] >= 1
    else:
        with pytest.raises(AssertionError, match="what the stuck one repeats"):
            wait_until(arrives, 1, "what the stuck one repeats")
        assert len(heard) == SIBLINGS
    assert all(sibling.of[Counter.SENDS_REFUSED] == 0 for _, sibling in siblings)
