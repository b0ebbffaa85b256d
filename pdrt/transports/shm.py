"""The transport for two processes on one host, without NIXL: a peer's region is mapped and written.

Copies are cooperative.  A small write is done inside `write`; a larger one is queued and copied by
`poll` and `progress`, at most a budget a call, in the order of posting.  So this process alone
moves the bytes, a frozen peer costs nothing, and what is released or disconnected is not copied
any further: a fence needs to wait only for earlier writes that are still wanted.

The peer's side of a fence is the connection that came with its region.  We hold it for as long as
we map the region; when it ends (we disconnected, closed or died) the peer knows that nothing of
ours can land any more.  When the peer's end of it closes, which its supervisor sees to when the
worker is dead that offered the region, writes to the peer become FAILED and it is `lost`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pdrt.memory.runs import merge_runs
from pdrt.transports.base import TransferState, TransportError
from pdrt.transports.handles import HANDLES_MAX, Handles, Tables
from pdrt.transports.mapped import Mapped
from pdrt.transports.metadata import ShmMetadata, check_scratch, decode, encode
from pdrt.transports.tables import FEW, Run, Table, check_write, few_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from pdrt.transports.base import Grid, Indices, Region

    OpenRegion = Callable[[str, str], "Fetch"]

BUDGET_BYTES = 8 << 20
INLINE_BYTES_MAX = 256 << 10  # about what one call of `write` may cost without being noticed
RUNS_MAX = 4096  # in one call: many tiny runs cost more than their bytes

log = logging.getLogger("pdrt.transports")


class Fetch(Protocol):
    """A peer's region on its way to us."""

    def poll(self) -> tuple[int, int] | None:
        """(region fd, connection fd), both the caller's to close; None: not yet.  Never waits, and
        is bounded in time.  Raises OSError or TransportError."""

    def close(self) -> None:
        """Give up, before there is an answer."""


@dataclass
class _Peer:
    region: Mapped
    connection_fd: int
    hangup: select.poll
    queued: int = 0  # jobs of this peer in the queue

    def gone(self) -> bool:
        """Whether the peer closed its end of the connection."""
        return bool(self.hangup.poll(0))


@dataclass(eq=False)
class _Job:
    """A write, or a fence, which has no runs and cannot fail."""

    peer: str
    runs: Iterator[Run]
    state: TransferState = TransferState.PENDING
    rest: Run | None = None  # of a run that the budget cut
    fence: bool = False


@dataclass(frozen=True)
class _Connecting:
    fetch: Fetch
    job: _Job
    region_bytes: int


class ShmTransport:
    """See the module, and `Transport` for the contract."""

    name = "shm"

    def __init__(
        self,
        *,
        address: str,
        key: str,
        open_region: OpenRegion,
        budget_bytes: int = BUDGET_BYTES,
        handles_max: int = HANDLES_MAX,
    ) -> None:
        """address, key: where and as what our region is given out to peers.
        open_region: (address, key) of a peer -> its region on its way, see Fetch; raises OSError or
        TransportError.
        budget_bytes: copied at most in one call of `poll` or `progress`."""
        self._address, self._key, self._open_region = address, key, open_region
        self._budget_bytes = budget_bytes
        self._ours: Mapped | None = None
        self._peers: dict[str, _Peer] = {}
        self._connecting: dict[str, _Connecting] = {}
        self._tables = Tables[None]()
        self._jobs = Handles[_Job](handles_max)
        self._queue: deque[_Job] = deque()
        self._ends = select.poll()  # of all connections, so that one call tells who hung up
        self._names: dict[int, str] = {}  # of peers, by connection

    def open(self, agent: str, region: Region, scratch_offset: int) -> bytes:
        """See Transport.  The scratch is not used."""
        if self._ours is not None:
            raise TransportError("already open")
        check_scratch(scratch_offset, region.length_bytes)
        self._ours = Mapped(region.fd, region.length_bytes)
        return encode(
            ShmMetadata(
                agent=agent,
                boot_id=_boot_id(),
                address=self._address,
                key=self._key,
                region_bytes=region.length_bytes,
            )
        )

    def connect(self, peer: str, metadata: bytes) -> int:
        """See Transport.  PENDING until the region has come; FAILED if it does not.

        Raises TransportError also if the peer is on another host."""
        self._region(None)
        self._jobs.check_room()
        theirs = decode(metadata, ShmMetadata)
        if theirs.boot_id != _boot_id():
            raise TransportError(f"{peer} is on another host; shm needs both ends on one")
        self.disconnect(peer)
        try:
            fetch = self._open_region(theirs.address, theirs.key)
        except OSError as error:
            raise TransportError(f"{peer} does not give out its region: {error}") from error
        job = _Job(peer, iter(()))
        self._connecting[peer] = _Connecting(fetch, job, theirs.region_bytes)
        return self._jobs.add(job)

    def _connect_further(self, peer: str, connecting: _Connecting) -> None:
        job = connecting.job
        try:
            fetched = connecting.fetch.poll()
            if fetched is None:
                return
            known = self._peers[peer] = _map_peer(*fetched, connecting.region_bytes)
            self._names[known.connection_fd] = peer
            self._ends.register(known.connection_fd, select.POLLRDHUP)
            job.state = TransferState.DONE
        except (OSError, TransportError) as error:
            log.warning("peer=%s does not give out its region: %s", peer, error)
            job.state = TransferState.FAILED
        del self._connecting[peer]

    def disconnect(self, peer: str) -> None:
        """See Transport.  Here it is a fence: nothing of ours can land afterwards."""
        if (connecting := self._connecting.pop(peer, None)) is not None:
            connecting.fetch.close()
            connecting.job.state = TransferState.FAILED
        known = self._peers.pop(peer, None)
        if known is None:
            return
        for job in self._queue:
            if job.peer == peer:
                job.state = TransferState.FAILED
        self._queue = deque(job for job in self._queue if job.peer != peer)
        self._tables.drop(peer)
        # Unmapped first: the end of the connection tells the peer that it is.
        known.region.close()
        del self._names[known.connection_fd]
        self._ends.unregister(known.connection_fd)
        os.close(known.connection_fd)

    def prepare(self, peer: str | None, grids: Sequence[Grid]) -> int:
        """See Transport."""
        return self._tables.add(peer, Table(grids, len(self._region(peer).view)), None)

    def write(
        self, peer: str, local: int, local_items: Indices, remote: int, remote_items: Indices
    ) -> int:
        """See Transport.  A small write to a peer without queued ones is done on return."""
        known = self._peer(peer)
        self._jobs.check_room()
        source, _ = self._tables.get(local, None)
        target, _ = self._tables.get(remote, peer)
        if len(local_items) <= FEW:
            runs = few_runs(source, local_items, target, remote_items)
        else:
            check_write(source, local_items, target, remote_items)
            runs = _runs(source, local_items, target, remote_items)
        job = _Job(peer, iter(runs))
        if known.gone():
            job.state = TransferState.FAILED
        return self._start(known, job, sum(length for _, _, length in runs))

    def fence(self, peer: str) -> int:
        """See Transport.  DONE at once unless an earlier write to the peer is still wanted."""
        known = self._peer(peer)
        self._jobs.check_room()
        return self._start(known, _Job(peer, iter(()), fence=True), 0)

    def poll(self, handle: int) -> TransferState:
        """See Transport.  Copies up to the budget, whichever write is first in the queue."""
        job = self._jobs.get(handle)
        if job.state is TransferState.PENDING:
            self.progress()
        return job.state

    def release(self, handle: int) -> None:
        """See Transport.  Here it is a cancel: the rest of the write is not copied."""
        job = self._jobs.pop(handle)
        if job.state is TransferState.PENDING and job.peer in self._peers:
            self._queue.remove(job)
            self._peers[job.peer].queued -= 1

    def lost(self) -> list[str]:
        """See Transport.  Those whose supervisor hung up."""
        return [self._names[fd] for fd, _ in self._ends.poll(0)] if self._names else []

    def progress(self) -> None:
        """See Transport.  Incoming traffic moves without us; this copies up to the budget."""
        for peer, connecting in list(self._connecting.items()):
            self._connect_further(peer, connecting)
        if self._queue:
            self._copy_queued()

    def close(self) -> None:
        """See Transport.  Peers that mapped our region can write to it until they disconnect."""
        for peer in [*self._peers, *self._connecting]:
            self.disconnect(peer)
        self._jobs.clear()
        self._tables.drop(None)
        if self._ours is not None:
            self._ours.close()
            self._ours = None

    def _peer(self, peer: str) -> _Peer:
        known = self._peers.get(peer)
        if known is None:
            raise TransportError(f"peer {peer!r} is not connected")
        return known

    def _region(self, peer: str | None) -> Mapped:
        """The peer's region; None: ours."""
        if peer is not None:
            return self._peer(peer).region
        if self._ours is None:
            raise TransportError("not open")
        return self._ours

    def _start(self, known: _Peer, job: _Job, length_bytes: int) -> int:
        """Do the job now if it is small and nothing is before it, else queue it."""
        if job.state is TransferState.PENDING:
            if known.queued == 0 and length_bytes <= INLINE_BYTES_MAX:
                self._copy(known, job, INLINE_BYTES_MAX, RUNS_MAX)
            if job.state is TransferState.PENDING:
                self._queue.append(job)
                known.queued += 1
        return self._jobs.add(job)

    def _copy_queued(self) -> None:
        """Copy from the head of the queue until the budget or the queue is used up."""
        budget_bytes, runs = self._budget_bytes, RUNS_MAX
        while self._queue and budget_bytes > 0 and runs > 0:
            job = self._queue[0]
            known = self._peers[job.peer]
            if known.gone() and not job.fence:
                job.state = TransferState.FAILED
            else:
                budget_bytes, runs = self._copy(known, job, budget_bytes, runs)
            if job.state is not TransferState.PENDING:
                self._queue.popleft()
                known.queued -= 1

    def _copy(self, known: _Peer, job: _Job, budget_bytes: int, runs: int) -> tuple[int, int]:
        """Copy what the budget allows, mark the job DONE at its end, return what is left of it."""
        source, target = self._region(None).view, known.region.view
        while budget_bytes > 0 and runs > 0:
            run = job.rest or next(job.runs, None)
            if run is None:
                job.state = TransferState.DONE
                break
            local, remote, length = run
            part = min(length, budget_bytes)
            target[remote : remote + part] = source[local : local + part]
            job.rest = (local + part, remote + part, length - part) if part < length else None
            budget_bytes, runs = budget_bytes - part, runs - 1
        return budget_bytes, runs


def _runs(source: Table, local_items: Indices, target: Table, remote_items: Indices) -> list[Run]:
    """Pieces that are contiguous on both sides, in the order of the items."""
    sizes = source.sizes(local_items)
    local, remote, lengths = merge_runs(
        source.offsets(local_items), target.offsets(remote_items), step=sizes[:-1]
    )
    ends: NDArray[np.int64] = sizes.cumsum()[lengths.cumsum() - 1]
    begins = [0, *ends[:-1].tolist()]
    spans = zip(local.tolist(), remote.tolist(), begins, ends.tolist(), strict=True)
    return [(from_, to, end - begin) for from_, to, begin, end in spans]


def _map_peer(region_fd: int, connection_fd: int, region_bytes: int) -> _Peer:
    try:
        region = _map_sealed(region_fd, region_bytes)
    except TransportError:
        os.close(connection_fd)
        raise
    finally:
        os.close(region_fd)
    hangup = select.poll()
    hangup.register(connection_fd, select.POLLRDHUP)
    return _Peer(region, connection_fd, hangup)


def _map_sealed(fd: int, length_bytes: int) -> Mapped:
    """Map a peer's region.  Raise TransportError unless it is sealed against shrinking: a peer
    that truncates what we copy to would kill us with SIGBUS."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise TransportError(f"the peer's region is not a memfd: {error}") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise TransportError("the peer's region is not sealed against shrinking")
    return Mapped(fd, length_bytes)


def _boot_id() -> str:
    """The same in every process of a running host, containers included."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
