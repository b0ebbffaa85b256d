"""From a description to a running actor: what each child process does before and around its
loop."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdrt import attach, failpoints
from pdrt.actors import base
from pdrt.actors.decode_listener import DecodeListener
from pdrt.actors.decodes import worker_link
from pdrt.actors.paths import LISTENER
from pdrt.actors.prefill_listener import PrefillListener
from pdrt.actors.transfer import WRITES_A_BEAT, TransferWorker
from pdrt.attach import AttachRequest
from pdrt.child import Descriptor, Promotion
from pdrt.clock import monotonic_ns
from pdrt.config import Settings, default_environment, ucx_environment
from pdrt.errors import AttachFailed
from pdrt.logs import start_logging
from pdrt.mail.knock import Knocks
from pdrt.mail.mailbox import Mailbox
from pdrt.process_rows import Owner
from pdrt.protocol.layout import Layout, RegionMap
from pdrt.protocol.states import Role
from pdrt.shm_status import StatusTable
from pdrt.transports.base import Region, Transport, TransportError

if TYPE_CHECKING:
    from pdrt.transports.nixl import NixlTransport

SUPERVISOR_ROW, LISTENER_ROW, FIRST_WORKER_ROW, FIRST_ENGINE_ROW = 1, 2, 8, 48
LISTENER_STANDBY_ROW, WORKER_STANDBY_ROW = 3, 4
WORKERS_MAX, ENGINES_MAX = 40, 8
WORKER = "worker"  # and its rank: the name of a worker's child
FETCH_TIMEOUT_S = 1.0
REGION_KEY = re.compile(r"([0-9]{1,3})#([0-9]{1,10})")  # rank and epoch of its worker
STANDBY_BEAT_S = 0.25  # nobody waits for it, and every wake-up costs an idle tree


@dataclass(frozen=True, kw_only=True)
class Boot:
    """What every actor of one tree is told.  Descriptors survive the trip into the child."""

    settings: Settings
    role: Role
    instance: str
    boot_id: str
    layout: Layout
    maps: tuple[RegionMap, ...]
    table: Descriptor
    regions: tuple[Descriptor, ...]
    wakes: tuple[Descriptor, ...]  # eventfds, by engine row
    control: str  # host:port that peers dial
    control_door: Descriptor  # listening sockets, owned by the supervisor
    local_door: Descriptor
    worker_doors: tuple[Descriptor, ...]
    attach_address: str

    @property
    def listener_endpoint(self) -> str:
        return f"ipc://@pdrt-{self.instance}-listener"

    def worker_endpoint(self, rank: int) -> str:
        return f"ipc://@pdrt-{self.instance}-worker{rank}"


class Waker:
    """Nudges engines through their eventfds, once a duty cycle however much happened in it."""

    def __init__(self, wakes: Sequence[Descriptor]) -> None:
        self._fds = {FIRST_ENGINE_ROW + index: wake.fd for index, wake in enumerate(wakes)}
        self._due: set[int] = set()

    def __call__(self, row: int) -> None:
        self._due.add(row)

    def flush(self) -> None:
        for row in self._due & self._fds.keys():
            os.eventfd_write(self._fds[row], 1)
        self._due.clear()


def _enter(boot: Boot, row: int) -> tuple[StatusTable, Mailbox]:
    start_logging(boot.settings)
    table = StatusTable(boot.table.fd)
    table.me = Owner(row, table.incarnation(row))
    return table, Mailbox(f"{boot.instance}-{row}.{table.me.incarnation}".encode(), table.count)


def _beating(table: StatusTable, items_a_beat: int = base.ITEMS_A_BEAT) -> base.Beating:
    return base.Beating(lambda: table.beat(monotonic_ns()), items_a_beat)


def _run(actor: base.Actor, mailbox: Mailbox, table: StatusTable, wake: Waker) -> None:
    stopped = False

    def stop(_signum: int, _frame: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    failpoints.hit("actor.start.before_ready")
    table.announce_ready()
    base.run(actor, mailbox, table, monotonic_ns, stopping=lambda: stopped, wake=wake.flush)
    mailbox.close()


def run_listener(boot: Boot) -> None:
    """The listener's process."""
    table, mailbox = _enter(boot, LISTENER_ROW)
    mailbox.open_door("local", boot.listener_endpoint, boot.local_door.fd, from_peer=False)
    host, _, port = boot.control.rpartition(":")
    endpoint = f"tcp://{host}:{port}"
    mailbox.open_door(base.CONTROL_DOOR, endpoint, boot.control_door.fd, from_peer=True)
    for rank in range(boot.layout.ranks):
        mailbox.link(worker_link(rank), boot.worker_endpoint(rank))
    wake = Waker(boot.wakes)
    actor: base.Actor
    if boot.role is Role.PREFILL:
        actor = PrefillListener(
            instance=boot.instance,
            boot_id=boot.boot_id,
            layout=boot.layout,
            table=table,
            mailbox=mailbox,
            timeouts=boot.settings.timeouts,
            wake=wake,
            nobody_listens=Knocks(),
            beating=_beating(table),
        )
    else:
        actor = DecodeListener(
            instance=boot.instance,
            boot_id=boot.boot_id,
            control=boot.control,
            layout=boot.layout,
            maps=boot.maps,
            table=table,
            mailbox=mailbox,
            timeouts=boot.settings.timeouts,
            wake=wake,
            nobody_listens=Knocks(),
            beating=_beating(table),
        )
    _run(actor, mailbox, table, wake)


def stand_by_listener(promotion: Promotion, boot: Boot) -> None:
    """A spare listener's process: everything is imported, nothing is opened."""
    _stand_by(promotion, boot, LISTENER_STANDBY_ROW)
    run_listener(boot)


def stand_by_worker(promotion: Promotion, boot: Boot) -> None:
    """A spare worker's process, for any rank: NIXL has found its devices already."""
    default_environment(ucx_environment(boot.settings))
    epoch = StatusTable(boot.table.fd).incarnation(WORKER_STANDBY_ROW)
    spare = None
    if boot.settings.transport == "nixl":
        from pdrt.transports.nixl import NixlTransport

        spare = NixlTransport()
        spare.warm(f"{boot.instance}.standby#{epoch}")
    name = _stand_by(promotion, boot, WORKER_STANDBY_ROW)
    run_worker(boot, int(name.removeprefix(WORKER)), spare)


def _stand_by(promotion: Promotion, boot: Boot, row: int) -> str:
    """Wait to be promoted; returns the name of the child to become."""
    start_logging(boot.settings)
    table = StatusTable(boot.table.fd)
    table.me = Owner(row, table.incarnation(row))
    table.announce_ready()
    try:
        name = promotion.wait(lambda: table.beat(monotonic_ns()), STANDBY_BEAT_S)
    finally:
        table.close()
    failpoints.hit("standby.promotion.read")
    return name


def run_worker(boot: Boot, rank: int, spare: NixlTransport | None = None) -> None:
    """A transfer worker's process.  `spare` is a warm transport to start from."""
    default_environment(ucx_environment(boot.settings))  # before NIXL is imported
    table, mailbox = _enter(boot, FIRST_WORKER_ROW + rank)
    mailbox.open_door(
        "worker", boot.worker_endpoint(rank), boot.worker_doors[rank].fd, from_peer=False
    )
    mailbox.link(LISTENER, boot.listener_endpoint)
    region_map = boot.maps[rank]
    region = Region(boot.regions[rank].fd, region_map.length_bytes)
    agent = f"{boot.instance}.{rank}#{table.me.incarnation}"
    transports: dict[str, tuple[Transport, bytes]] = {}
    for transport in _transports(boot, rank, table.me.incarnation, spare):
        metadata = transport.open(agent, region, region_map.scratch_offset)
        transports[transport.name] = transport, metadata
    wake = Waker(boot.wakes)
    worker = TransferWorker(
        region=region_map,
        transports=transports,
        preferred=boot.settings.transport,
        table=table,
        mailbox=mailbox,
        timeouts=boot.settings.timeouts,
        clock=monotonic_ns,
        wake=wake,
        listener_row=LISTENER_ROW,
        beating=_beating(table, WRITES_A_BEAT),
    )
    try:
        _run(worker, mailbox, table, wake)
    finally:
        worker.close()


class RegionFetch:
    """Asks a peer's supervisor for a region; see `transports.shm.Fetch`.  The key is ours, from
    `_transports`: "rank#epoch" of the worker that offers it."""

    def __init__(self, address: str, key: str, instance: str) -> None:
        """Raises TransportError."""
        parts = REGION_KEY.fullmatch(key)
        if parts is None:
            raise TransportError(f"{key[:100]!r} is no region")
        rank, epoch = map(int, parts.groups())
        ask = AttachRequest(kind="region", rank=rank, epoch=epoch, instance=instance)
        self._asking = attach.Asking(address, ask, timeout_s=FETCH_TIMEOUT_S)

    def poll(self) -> tuple[int, int] | None:
        try:
            answer = self._asking.poll()
        except AttachFailed as error:
            raise TransportError(str(error)) from None
        if answer is None:
            return None
        _, fds, connection = answer
        if len(fds) != 1:
            connection.close()
            for fd in fds:
                os.close(fd)
            raise TransportError(f"{len(fds)} descriptors instead of a region")
        return fds[0], connection.detach()

    def close(self) -> None:
        self._asking.close()


def _transports(boot: Boot, rank: int, epoch: int, spare: NixlTransport | None) -> list[Transport]:
    # Imported here: only a worker may load NIXL, and only one that uses it does.
    from pdrt.transports.shm import Fetch, ShmTransport

    def open_region(address: str, key: str) -> Fetch:
        return RegionFetch(address, key, boot.instance)

    found: list[Transport] = []
    if boot.settings.transport == "nixl":
        from pdrt.transports.nixl import NixlTransport

        found.append(spare or NixlTransport())
    found.append(
        ShmTransport(address=boot.attach_address, key=f"{rank}#{epoch}", open_region=open_region)
    )
    return found


def local_door(endpoint: str) -> socket.socket:
    """A listening Unix socket for an ipc:// endpoint in the abstract namespace."""
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    door.bind("\0" + endpoint.removeprefix("ipc://@"))
    door.listen(512)
    door.setblocking(False)
    return door
