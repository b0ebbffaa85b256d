"""Paths that are slower than they could be: said when they are opened.

F139.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from pdrt.actors.paths import Paths
from pdrt.protocol.layout import RegionMap
from pdrt.protocol.messages import Agent, PeerUp
from pdrt.transports.base import Region
from pdrt.transports.fake import FakeFabric, FakeTransport
from tests.actors.post import Box, Post
from tests.actors.world import LAYOUT
from tests.transports.peer_process import sealed_memory

MAP = RegionMap(layout=LAYOUT, rank=0, pages_count=4, aux_rows=1)


@pytest.fixture
def ends() -> Iterator[tuple[FakeTransport, bytes]]:
    """Our transport, and a peer's metadata."""
    fabric = FakeFabric()
    ours, theirs = FakeTransport(fabric), FakeTransport(fabric)
    fd = sealed_memory("both", MAP.length_bytes)
    region = Region(fd, MAP.length_bytes)
    ours.open("ours#1", region, MAP.scratch_offset)
    yield ours, theirs.open("theirs#1", region, MAP.scratch_offset)
    for transport in (ours, theirs):
        transport.close()
    os.close(fd)


@pytest.mark.parametrize(("wish", "level"), [("fake", logging.INFO), ("nixl", logging.WARNING)])
def test_the_way_to_a_peer_is_logged_and_one_that_was_not_wished_for_is_a_warning(
    ends: tuple[FakeTransport, bytes], caplog: pytest.LogCaptureFixture, wish: str, level: int
) -> None:
    ours, metadata = ends
    box = Box(Post(0), "prefill", "worker")
    paths = Paths(region=MAP, transports={"fake": ours}, preferred=wish, mailbox=box)
    with caplog.at_level(logging.INFO, "pdrt.worker"):
        paths.up(PeerUp("decode", "10.0.0.2:1", Agent(0, 1, 4, 1, {"fake": metadata}), True))
    (line,) = [record for record in caplog.records if "decode" in record.getMessage()]
    assert line.levelno == level
    assert wish in line.getMessage()
