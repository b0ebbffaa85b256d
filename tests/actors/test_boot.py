from __future__ import annotations

import os
import secrets
import selectors

import pytest

from pdrt.actors.boot import RegionFetch
from pdrt.memfd import memory_fd
from pdrt.protocol.peers import instance_digest
from pdrt.transports.base import TransportError
from tests.attach.services import serve, turn
from tests.waiting import wait_until


@pytest.mark.parametrize("key", ["", "0", "0#", "#1", "0#x", "-1#1", "0#1#2", "\u00b2#1"])
def test_a_key_that_is_none_is_refused(key: str) -> None:
    with pytest.raises(TransportError, match="no region"):
        RegionFetch("@pdrt-test-nobody", key, "peer")


def test_nobody_at_the_address_is_no_region() -> None:
    with pytest.raises(TransportError, match="no pdrt runtime answers"):
        RegionFetch("@pdrt-test-nobody", "0#1", "peer").poll()


def test_a_region_comes_with_the_connection_that_says_that_we_map_it() -> None:
    address, selector = f"@pdrt-test-{secrets.token_hex(8)}", selectors.DefaultSelector()
    fd = memory_fd("region", 4096)

    service = serve(address, selector, regions=[fd], worker_epoch=lambda rank: 3)

    def fetched() -> tuple[int, int] | None:
        turn(selector)
        return fetch.poll()

    def mapped() -> bool:
        turn(selector)
        return service.mapped(instance_digest("peer"), 0, 3)

    fetch = RegionFetch(address, "0#3", "peer")
    found = wait_until(fetched, 5.0, "the region")
    assert found is not None
    region, connection = found
    assert os.fstat(region).st_ino == os.fstat(fd).st_ino
    assert mapped()
    os.close(region)
    os.close(connection)
    wait_until(lambda: not mapped(), 5.0, "the end of the mapping")
    fetch = RegionFetch(address, "0#2", "peer")
    with pytest.raises(TransportError, match="epoch 2 is gone"):
        wait_until(fetched, 5.0, "a refusal")
    service.close()
    selector.close()
    os.close(fd)
