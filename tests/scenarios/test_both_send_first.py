"""Two that have much to say to each other before either listens.

F106.
"""

from __future__ import annotations

import itertools
import os

import pytest

from pdrt.mail import mailbox as mailbox_module
from pdrt.protocol.counters import Counter
from pdrt.protocol.messages import NewsTaken
from tests.mail.site import Site
from tests.waiting import wait_until

QUEUE, MESSAGES = 10, 1000


def test_neither_blocks_and_what_found_no_place_is_counted(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox_module, "QUEUE_MAX", QUEUE)
    both = []
    for name in ("a", "b"):
        endpoint, server = site.listen()
        box, counts = site.mailbox(name)
        box.open_door("door", endpoint, os.dup(server.fileno()), from_peer=True)
        both.append((box, counts, endpoint))
    for (box, _, _), (_, _, endpoint) in (both, both[::-1]):
        box.link("to", endpoint)
    for number, (box, _, _) in itertools.product(range(MESSAGES), both):
        box.post("to", NewsTaken(number, 1))
        box.flush()
    for _, counts, _ in both:
        sent, refused = counts.of[Counter.MESSAGES_OUT], counts.of[Counter.SENDS_REFUSED]
        assert sent + refused == MESSAGES
        assert refused > 0
    heard = {id(box): 0 for box, _, _ in both}

    def all_heard() -> bool:
        for box, _, _ in both:
            heard[id(box)] += len(box.receive(5))
        return [heard[id(box)] for box, _, _ in both] == [
            counts.of[Counter.MESSAGES_OUT] for _, counts, _ in both[::-1]
        ]

    wait_until(all_heard, 5, "everything that was sent to be heard")
