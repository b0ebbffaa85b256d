"""pdrt carries the KV cache of a request from prefill to decode, and cannot wedge.

The public names, and nothing else.  They are imported when they are used: every process of a tree
imports this package, and most of them need none of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdrt.engine.manager import KVManager
    from pdrt.engine.receiver import KVReceiver
    from pdrt.engine.room import RoomTimeline
    from pdrt.engine.sender import KVSender
    from pdrt.errors import PdrtError, TransferError
    from pdrt.memory.aux import AuxRow
    from pdrt.protocol.layout import Layout
    from pdrt.protocol.states import KVPoll, Reason

__all__ = [
    "AuxRow",
    "KVManager",
    "KVPoll",
    "KVReceiver",
    "KVSender",
    "Layout",
    "PdrtError",
    "Reason",
    "RoomTimeline",
    "TransferError",
]

_HOMES = {
    "AuxRow": "pdrt.memory.aux",
    "KVManager": "pdrt.engine.manager",
    "KVPoll": "pdrt.protocol.states",
    "KVReceiver": "pdrt.engine.receiver",
    "KVSender": "pdrt.engine.sender",
    "Layout": "pdrt.protocol.layout",
    "PdrtError": "pdrt.errors",
    "Reason": "pdrt.protocol.states",
    "RoomTimeline": "pdrt.engine.room",
    "TransferError": "pdrt.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pdrt' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
