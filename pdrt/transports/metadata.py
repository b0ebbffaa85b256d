"""What `open` returns and a peer's `connect` takes: how to reach a region.  Data and its checks.

    metadata = msgpack map, told apart by "type"
      nixl1   agent, NIXL version, NIXL's own bytes and their checksum, where the region lies
      shm1    agent, boot id of the host, socket address and key that give out the region
      fake1   agent

It comes from another process, so nothing in it is believed before it is checked here.
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec

from pdrt.protocol.codec import UNDECODABLE
from pdrt.transports.base import TransportError

SCRATCH_BYTES = 64  # of a transport's own, at the scratch offset
METADATA_BYTES_MAX = 1 << 20
ADDRESS_MAX = 1 << 63


class NixlMetadata(msgspec.Struct, frozen=True, tag="nixl1"):
    """`region_address` is one of the peer's process; only the fabric can follow it."""

    agent: str
    version: str  # of NIXL
    agent_metadata: bytes
    checksum: bytes  # of agent_metadata
    region_address: int
    region_bytes: int
    scratch_offset: int


class ShmMetadata(msgspec.Struct, frozen=True, tag="shm1"):
    """Whoever runs on the host `boot_id` gets the region from `address` for `key`."""

    agent: str
    boot_id: str
    address: str
    key: str
    region_bytes: int


class FakeMetadata(msgspec.Struct, frozen=True, tag="fake1"):
    """The fabric is in our own process and knows the rest."""

    agent: str


Metadata = TypeVar("Metadata", NixlMetadata, ShmMetadata, FakeMetadata)

encode = msgspec.msgpack.Encoder().encode


def decode(metadata: bytes, kind: type[Metadata]) -> Metadata:
    """Raise TransportError unless the bytes are one whole `kind` with values that can be true."""
    if len(metadata) > METADATA_BYTES_MAX:
        raise TransportError(f"metadata of {len(metadata)} bytes")
    try:
        theirs = msgspec.msgpack.decode(metadata, type=kind)
    except UNDECODABLE as error:
        raise TransportError(f"not metadata of this transport: {error}") from error
    if isinstance(theirs, NixlMetadata):
        _check_nixl(theirs)
    return theirs


def checksum(agent_metadata: bytes) -> bytes:
    """Sixteen bytes that guard NIXL's own metadata against damage, not against forgery."""
    return hashlib.blake2b(agent_metadata, digest_size=16).digest()


def check_scratch(scratch_offset: int, region_bytes: int) -> None:
    """Raise TransportError unless the scratch lies in the region."""
    if not 0 <= scratch_offset <= region_bytes - SCRATCH_BYTES:
        raise TransportError(f"scratch at {scratch_offset} leaves a region of {region_bytes} bytes")


def _check_nixl(theirs: NixlMetadata) -> None:
    if theirs.checksum != checksum(theirs.agent_metadata):
        raise TransportError("NIXL's metadata is damaged")
    end = theirs.region_address + theirs.region_bytes
    if not 0 < theirs.region_address < end < ADDRESS_MAX:
        raise TransportError("metadata names no region")
    check_scratch(theirs.scratch_offset, theirs.region_bytes)
