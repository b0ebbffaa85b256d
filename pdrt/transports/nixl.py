"""The transport over NIXL (UCX): the real one.  The only file that knows NIXL; written for 1.5.

What it takes care of, so that nobody above has to:

* NIXL has no cancel.  A request released while it moves is kept here and polled by `progress`
  until it ends; its bytes land or not, and only a fence says when that is over.
* A fence is an 8-byte READ of the peer's scratch from the thread that posted the writes: its flush
  covers every earlier operation to that peer.  There is one UCX worker, so all share one order.
* NIXL raises negative states.  They become FAILED here, or TransportError where nothing was posted.
* UCX aborts the process on corrupt agent metadata, so a checksum is compared before it sees any,
  and a peer with another version of NIXL is refused.  Whoever can forge the checksum must be kept
  out by the authenticated control port.
* The progress thread that NIXL starts sleeps between rounds; NIXL's own default burns a core.

UCX reads its own variables when `open` is called.  Those that matter: UCX_TCP_USER_TIMEOUT (without
it a write to a peer behind a dead link stays PENDING for good; it does not help a READ),
UCX_TLS and UCX_NET_DEVICES (lanes: on one host the default copies inside `write`; `tcp,self` over
`lo` does not), UCX_LOG_LEVEL.  NIXL_LOG_LEVEL raises NIXL's own log.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pdrt.transports.base import TransferState, TransportError
from pdrt.transports.handles import HANDLES_MAX, Handles, Tables
from pdrt.transports.mapped import Mapped
from pdrt.transports.metadata import NixlMetadata, check_scratch, checksum, decode, encode
from pdrt.transports.shortage import Shortage
from pdrt.transports.tables import Table, check_write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdrt.transports.base import Grid, Indices, Region

# The backend module itself: the `nixl` package in front of it imports torch to choose one.
DISTRIBUTIONS = ("nixl_cu12", "nixl_cu13")
ERRORS = (
    *("Backend", "Cancelled", "InvalidParam", "Mismatch", "NotAllowed", "NotFound", "NotPosted"),
    *("NotSupported", "RemoteDisconnect", "RepostActive", "Unknown"),
)
PROGRESS_DELAY_US = 20_000  # traffic on a socket wakes it sooner; idle it takes 0.1 % of a core
ABANDONED_POLLED_MAX = 64  # in one call of `progress`

# Our scratch: fences read the peer's SOURCE into our SINK, and all read the same value.
FENCE_BYTES, SINK, SOURCE = 8, 0, 8


@dataclass(frozen=True)
class _Peer:
    agent: str  # NIXL's name of it
    region_address: int
    region_bytes: int
    scratch: Any  # prepared list of one item: the 8 bytes a fence reads


@dataclass
class _Transfer:
    peer: str
    request: Any  # None once NIXL has it back
    state: TransferState


@dataclass
class _Opened:
    """What exists between `open` and `close`."""

    agent: Any
    version: str
    errors: tuple[type[Exception], ...]  # everything NIXL raises; it has no common base
    memory: Mapped
    scratch: Any  # prepared list of one item: where our fences read to
    tables: Tables[Any] = field(default_factory=Tables)  # beside each: its prepared list
    peers: dict[str, _Peer] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)  # requests NIXL would not take back


class NixlTransport:
    """See the module, and `Transport` for the contract.  One instance is one NIXL agent."""

    name = "nixl"

    def __init__(
        self, *, progress_delay_us: int = PROGRESS_DELAY_US, handles_max: int = HANDLES_MAX
    ) -> None:
        """progress_delay_us: how long NIXL's progress thread sleeps between two rounds.
        handles_max: transfers that may exist at once, those released while moving included."""
        self._progress_delay_us = progress_delay_us
        self._warm: tuple[Any, Any, str] | None = None  # module, agent, version: not opened yet
        self._opened: _Opened | None = None
        self._shortage = Shortage()
        self._transfers = Handles[_Transfer](handles_max)
        self._abandoned: deque[_Transfer] = deque()

    def warm(self, agent: str) -> None:
        """Do the slow part of `open` ahead: about half a second, in which UCX looks for devices.
        The agent keeps this name, whatever `open` is told.  Raises TransportError."""
        api, version = _load()
        try:
            native = _create_agent(api, agent, self._progress_delay_us)
        except _errors(api.nixlBind) as error:
            raise TransportError(f"NIXL cannot start: {error}") from error
        self._warm = api, native, version

    def open(self, agent: str, region: Region, scratch_offset: int) -> bytes:
        """See Transport.  Takes about half a second unless it was warmed."""
        if self._opened is not None:
            raise TransportError("already open")
        check_scratch(scratch_offset, region.length_bytes)
        if self._warm is None:
            self.warm(agent)
        assert self._warm is not None
        (api, native, version), self._warm = self._warm, None
        memory = Mapped(region.fd, region.length_bytes)
        errors = _errors(api.nixlBind)
        try:
            native.register_memory([(memory.address, region.length_bytes, 0, "")], "DRAM")
            sink = memory.address + scratch_offset + SINK
            scratch = native.prep_xfer_dlist("", _one_item(sink), "DRAM")
            agent_metadata = native.get_agent_metadata()
        except errors as error:
            memory.close()
            raise TransportError(f"NIXL cannot start: {error}") from error
        self._opened = _Opened(native, version, errors, memory, scratch)
        return encode(
            NixlMetadata(
                agent=native.name,
                version=version,
                agent_metadata=agent_metadata,
                checksum=checksum(agent_metadata),
                region_address=memory.address,
                region_bytes=region.length_bytes,
                scratch_offset=scratch_offset,
            )
        )

    def connect(self, peer: str, metadata: bytes) -> int:
        """See Transport.  A peer that is connected already is forgotten first.

        Blocks up to some tens of milliseconds, never on the peer; the handle is a first fence,
        which makes UCX open its connections."""
        opened = self._open()
        self._transfers.check_room(len(self._abandoned) + len(opened.kept))
        theirs = decode(metadata, NixlMetadata)
        if theirs.version != opened.version:
            raise TransportError(
                f"{peer} has NIXL {theirs.version}, we have {opened.version}; install the same"
            )
        self.disconnect(peer)
        if any(other.agent == theirs.agent for other in opened.peers.values()):
            raise TransportError(f"agent {theirs.agent!r} is connected under another name")
        self._add_agent(theirs)
        source = theirs.region_address + theirs.scratch_offset + SOURCE
        try:
            scratch = opened.agent.prep_xfer_dlist(theirs.agent, _one_item(source), "DRAM")
        except opened.errors as error:
            self._remove_agent(theirs.agent)
            raise TransportError(f"{peer}: its scratch is not registered: {error}") from error
        opened.peers[peer] = _Peer(
            theirs.agent, theirs.region_address, theirs.region_bytes, scratch
        )
        return self.fence(peer)

    def disconnect(self, peer: str) -> None:
        """See Transport.  Transfers to the peer that still move become FAILED."""
        opened = self._open()
        known = opened.peers.pop(peer, None)
        if known is None:
            return
        ours = [t for t in (*self._transfers.values(), *self._abandoned) if t.peer == peer]
        for transfer in ours:
            if transfer.state is TransferState.PENDING:
                self._finish(transfer, TransferState.FAILED)
        self._abandoned = deque(t for t in self._abandoned if t.peer != peer)
        for side in opened.tables.drop(peer):
            side.release()
        known.scratch.release()
        self._remove_agent(known.agent)

    def prepare(self, peer: str | None, grids: Sequence[Grid]) -> int:
        """See Transport.  One strided list a table: later writes pass item numbers only."""
        opened = self._open()
        if peer is None:
            agent, base, length_bytes = "", opened.memory.address, len(opened.memory.view)
        else:
            known = self._peer(peer)
            agent, base, length_bytes = known.agent, known.region_address, known.region_bytes
        table = Table(grids, length_bytes)
        rows = [(base + g.offset, g.item_bytes, 0, g.stride_bytes, g.count) for g in table.grids]
        try:
            # NIXL refuses an empty list; a table without items gets one that nothing can name.
            spans = np.array(rows or [(base, 1, 0, 1, 1)], np.uint64)
            side = opened.agent.prep_xfer_dlist(agent, spans, "DRAM")
        except opened.errors as error:
            raise TransportError(f"NIXL refuses the table: {error}") from error
        return opened.tables.add(peer, table, side)

    def write(
        self, peer: str, local: int, local_items: Indices, remote: int, remote_items: Indices
    ) -> int:
        """See Transport.  May copy everything before it returns (same host, default lanes).

        A write that NIXL refuses while it posts becomes a FAILED handle, not an error: some of its
        bytes may be on their way, so it needs a fence like any other."""
        opened = self._open()
        self._transfers.check_room(len(self._abandoned) + len(opened.kept))
        self._peer(peer)
        source, source_side = opened.tables.get(local, None)
        target, target_side = opened.tables.get(remote, peer)
        check_write(source, local_items, target, remote_items)
        if len(local_items) == 0:
            return self._transfers.add(_Transfer(peer, None, TransferState.DONE))
        try:
            request = opened.agent.make_prepped_xfer(
                "WRITE", source_side, local_items, target_side, remote_items
            )
        except opened.errors as error:
            raise TransportError(f"{peer}: NIXL refuses the write: {error}") from error
        return self._post(peer, request)

    def fence(self, peer: str) -> int:
        """See Transport."""
        opened = self._open()
        self._transfers.check_room(len(self._abandoned) + len(opened.kept))
        known = self._peer(peer)
        first = np.zeros(1, np.int32)
        try:
            request = opened.agent.make_prepped_xfer(
                "READ", opened.scratch, first, known.scratch, first
            )
        except opened.errors as error:
            raise TransportError(f"{peer}: NIXL refuses the fence: {error}") from error
        return self._post(peer, request)

    def poll(self, handle: int) -> TransferState:
        """See Transport."""
        transfer = self._transfers.get(handle)
        self._advance(transfer)
        return transfer.state

    def release(self, handle: int) -> None:
        """See Transport.  A handle that still moves is polled by `progress` until it ends."""
        transfer = self._transfers.pop(handle)
        if transfer.state is TransferState.PENDING:
            self._abandoned.append(transfer)

    def lost(self) -> list[str]:
        """See Transport.  UCX does not say; a write to the dead fails."""
        return []

    def progress(self) -> None:
        """See Transport.  Also ends what was released while it moved."""
        opened = self._open()
        self._shortage.check()
        try:
            opened.agent.get_new_notifs()  # polls UCX; pdrt sends no notifications
        except opened.errors as error:
            raise TransportError(f"NIXL cannot make progress: {error}") from error
        for _ in range(min(len(self._abandoned), ABANDONED_POLLED_MAX)):
            transfer = self._abandoned.popleft()
            self._advance(transfer)
            if transfer.state is TransferState.PENDING:
                self._abandoned.append(transfer)

    def close(self) -> None:
        """See Transport.  Destroys the agent, which is the fence for our own region."""
        opened = self._opened
        if opened is None:
            return
        for peer in list(opened.peers):
            self.disconnect(peer)
        self._transfers.clear()
        self._abandoned.clear()
        for side in opened.tables.drop(None):
            side.release()
        opened.scratch.release()
        self._opened = None
        # The native agent ends with its last reference.  The region is not deregistered first:
        # UCX may hold it for operations in flight until its worker is gone.
        opened.kept.clear()
        opened.scratch = opened.agent = None
        opened.memory.close()

    def _open(self) -> _Opened:
        if self._opened is None:
            raise TransportError("not open")
        return self._opened

    def _peer(self, peer: str) -> _Peer:
        known = self._open().peers.get(peer)
        if known is None:
            raise TransportError(f"peer {peer!r} is not connected")
        return known

    def _post(self, peer: str, request: Any) -> int:
        """Start the request and give out its handle."""
        opened = self._open()
        transfer = _Transfer(peer, request, TransferState.PENDING)
        try:
            state = opened.agent.transfer(request)
        except opened.errors:
            state = "ERR"
        self._settle(transfer, state)
        return self._transfers.add(transfer)

    def _advance(self, transfer: _Transfer) -> None:
        """Ask NIXL about a transfer that still moves.  This also drives UCX."""
        if transfer.state is not TransferState.PENDING:
            return
        opened = self._open()
        try:
            state = opened.agent.check_xfer_state(transfer.request)
        except opened.errors:
            state = "ERR"
        self._settle(transfer, state)

    def _settle(self, transfer: _Transfer, state: str) -> None:
        """Translate NIXL's word, and give a finished request back."""
        if state == "DONE":
            self._finish(transfer, TransferState.DONE)
        elif state != "PROC":
            self._finish(transfer, TransferState.FAILED)

    def _finish(self, transfer: _Transfer, state: TransferState) -> None:
        transfer.state, request, transfer.request = state, transfer.request, None
        opened = self._open()
        try:
            request.release()
        except opened.errors:
            # Its finalizer would lose it; kept, it is given back when the agent goes.
            opened.kept.append(request)

    def _add_agent(self, theirs: NixlMetadata) -> None:
        """Load the peer's metadata.  NIXL must not know the agent: it refuses a second one."""
        opened = self._open()
        try:
            added = opened.agent.add_remote_agent(theirs.agent_metadata)
        except opened.errors as error:
            raise TransportError(f"NIXL refuses the metadata: {error}") from error
        name = added.decode() if isinstance(added, bytes) else added
        if name != theirs.agent:
            self._remove_agent(name)
            raise TransportError(f"metadata of {name!r} came under the name {theirs.agent!r}")

    def _remove_agent(self, agent: str) -> None:
        opened = self._open()
        try:
            opened.agent.remove_remote_agent(agent)
        except opened.errors as error:
            logging.getLogger(__name__).debug("NIXL did not know %s: %s", agent, error)


def _load() -> tuple[Any, str]:
    """NIXL's Python module and its version.  Raises TransportError if none is installed."""
    failures = []
    for distribution in DISTRIBUTIONS:
        try:
            api = importlib.import_module(f"{distribution}._api")
        except ImportError as error:
            failures.append(str(error))
            continue
        # NIXL logs each agent to standard output at INFO; a level set on purpose stays.
        log = logging.getLogger("nixl")
        if log.level == logging.INFO:
            log.setLevel(logging.WARNING)
        return api, importlib.metadata.version(distribution)
    raise TransportError(f"NIXL is not installed here: {'; '.join(failures)}")


def _create_agent(api: Any, name: str, progress_delay_us: int) -> Any:
    """An agent whose progress thread sleeps.  NIXL's Python sets the delay to 0 and has no knob."""
    native = api.nixlBind.nixlAgent

    def patient(agent: str, config: Any) -> Any:
        config.pthrDelay = progress_delay_us
        return native(agent, config)

    api.nixlBind.nixlAgent = patient
    try:
        return api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
    finally:
        api.nixlBind.nixlAgent = native


def _errors(bindings: Any) -> tuple[type[Exception], ...]:
    """Everything NIXL raises.  RuntimeError is what its C++ throws beyond its own."""
    return RuntimeError, *(getattr(bindings, f"nixl{name}Error") for name in ERRORS)


def _one_item(address: int) -> Any:
    """A strided list of a fence's eight bytes."""
    return np.array([(address, FENCE_BYTES, 0, FENCE_BYTES, 1)], np.uint64)
