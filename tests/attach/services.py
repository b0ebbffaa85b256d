"""An attach service in a loop that a test turns."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Sequence
from typing import Any

from pdrt.attach import AttachReply, AttachRequest, AttachService, bind
from pdrt.errors import AttachFailed


def no_engine(*_: object) -> Any:
    raise AttachFailed("there is no engine here")


def serve(
    address: str,
    selector: selectors.BaseSelector,
    *,
    regions: Sequence[int] = (),
    worker_epoch: Callable[[int], int] = lambda rank: 0,
    answer_engine: Callable[[AttachRequest, int], tuple[AttachReply, list[int]]] = no_engine,
    engine_gone: Callable[[int], None] = no_engine,
) -> AttachService:
    """Whatever the selector then says is to be called."""

    def watch(fd: int, callback: Callable[[], None]) -> None:
        selector.register(fd, selectors.EVENT_READ, callback)

    def unwatch(fd: int) -> None:
        selector.unregister(fd)

    return AttachService(
        bind(address),
        regions=regions,
        worker_epoch=worker_epoch,
        answer_engine=answer_engine,
        engine_gone=engine_gone,
        watch=watch,
        unwatch=unwatch,
    )


def turn(selector: selectors.BaseSelector) -> None:
    for key, _ in selector.select(0.01):
        key.data()
