"""WHAT RUNS: puts one process tree together, starts it, serves attachments, sweeps, stops.

    supervisor (this process)        attach socket, janitor, health over HTTP
      ├─ listener                    peers and engines talk to it
      ├─ worker0, worker1, ...       one a device; own the regions' registration
      └─ engine                      reference engine, or none and engines attach from outside

Everything that must survive a restart belongs to this process and travels to children as
descriptors: table, regions, listening sockets, wake-up eventfds.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from pdrt import attach, shm_status
from pdrt.actors.base import Beating
from pdrt.actors.boot import (
    ENGINES_MAX,
    FIRST_ENGINE_ROW,
    FIRST_WORKER_ROW,
    LISTENER_ROW,
    LISTENER_STANDBY_ROW,
    SUPERVISOR_ROW,
    WORKER,
    WORKER_STANDBY_ROW,
    WORKERS_MAX,
    Boot,
    Waker,
    local_door,
    run_listener,
    run_worker,
    stand_by_listener,
    stand_by_worker,
)
from pdrt.actors.janitor import Janitor
from pdrt.attach import AttachReply, AttachRequest, AttachService
from pdrt.board import TableBoard
from pdrt.child import Descriptor
from pdrt.clock import monotonic_ns, to_ns
from pdrt.config import Settings, Timeouts, authority
from pdrt.errors import AttachFailed, BadConfig, DeploymentError, NoMemory, PortInUse
from pdrt.health import Health, HealthServer, build_app
from pdrt.memfd import memory_fd
from pdrt.metrics import TableCollector, exposition
from pdrt.process_rows import INCARNATION_MASK, Owner
from pdrt.protocol.counters import Counter
from pdrt.protocol.layout import Layout, RegionMap
from pdrt.protocol.states import TIMEOUT_OF, KVPoll, Role
from pdrt.shm_status import StatusTable
from pdrt.supervision import ChildSpec
from pdrt.supervisor import Supervisor

SWEEP_S = 0.05
STANDBY_HANG_S = 1.0  # four of its beats
SILENT_S = 2.5  # an engine in one long forward may beat as rarely; an actor is killed long before
ENGINE_ROW = FIRST_ENGINE_ROW  # of the built-in engine; foreign ones follow

log = logging.getLogger("pdrt.runtime")


@dataclass(frozen=True)
class EngineChild:
    """The built-in engine, handed in from above: `target(attach_address, *args)` in its process."""

    target: Callable[..., None]
    args: tuple[Any, ...]


class Runtime:
    """One tree.  Use as a context manager in the main thread: `with Runtime(...) as r: r.run()`."""

    def __init__(self, settings: Settings, layout: Layout, engine: EngineChild | None) -> None:
        """Reserve memory and sockets.  Raises NoMemory, PortInUse, BadConfig; leaves nothing
        then."""
        if layout.ranks > WORKERS_MAX:
            raise BadConfig(f"{layout.ranks} devices; at most {WORKERS_MAX} are supported")
        self.settings = settings
        self.layout = layout
        self.role = Role[settings.role.upper()]
        self.instance = secrets.token_hex(8)
        self._attached_count = self._callback_errors_count = 0
        self.maps = tuple(
            RegionMap(
                layout=layout,
                rank=rank,
                pages_count=settings.pages_count,
                aux_rows=settings.aux_rows,
            )
            for rank in range(layout.ranks)
        )
        with contextlib.ExitStack() as stack:
            try:
                self._reserve(stack)
            except OSError as error:
                raise _start_error(error) from error
            self._assemble(engine)
            self._owned = stack.pop_all()

    def _reserve(self, stack: contextlib.ExitStack) -> None:
        settings = self.settings
        host = settings.host
        if self.role is Role.PREFILL:
            self._control = listen(host, settings.bootstrap_port, "--bootstrap-port")
        else:
            self._control = listen(host, settings.control_port, "--control-port")
        stack.callback(self._control.close)
        self.control_port: int = self._control.getsockname()[1]
        self._http = listen(host, settings.supervisor_port, "--supervisor-port")
        stack.callback(self._http.close)
        self.supervisor_port: int = self._http.getsockname()[1]
        default = f"@pdrt-{settings.role}-{settings.port or self.control_port}"
        self.attach_address = settings.attach or default
        self._attach_socket = attach.bind(self.attach_address)
        stack.callback(self._attach_socket.close)
        now_ns = monotonic_ns()
        table_fd = shm_status.create(
            self.role,
            rooms_max=settings.rooms_max,
            instance=bytes.fromhex(self.instance).ljust(16, b"\0"),
            timeouts_ms=state_timeouts_ms(settings.timeouts),
            now_ns=now_ns,
            queue_ms=int(settings.timeouts.queue_s * 1000),
        )
        stack.callback(os.close, table_fd)
        self._table_fd = table_fd
        self.table = StatusTable(table_fd, Owner(SUPERVISOR_ROW, 1))
        stack.callback(self.table.close)
        self._region_fds: list[int] = []
        for region in self.maps:
            fd = memory_fd(f"pdrt-kv{region.rank}", region.length_bytes)
            stack.callback(os.close, fd)
            self._region_fds.append(fd)
        self._wake_fds: list[int] = []
        for _ in range(ENGINES_MAX):
            self._wake_fds.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
            stack.callback(os.close, self._wake_fds[-1])
        boot = self._boot = self._describe()
        ranks = range(self.layout.ranks)
        endpoints = [boot.listener_endpoint, *(boot.worker_endpoint(rank) for rank in ranks)]
        doors = [stack.enter_context(local_door(endpoint)) for endpoint in endpoints]
        self._boot = self._describe(doors)

    def _describe(self, doors: list[socket.socket] | None = None) -> Boot:
        settings = self.settings
        advertised = settings.advertise_host or settings.host
        fds = [door.fileno() for door in doors or []]
        return Boot(
            settings=settings,
            role=self.role,
            instance=self.instance,
            boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            layout=self.layout,
            maps=self.maps,
            table=Descriptor(self._table_fd),
            regions=tuple(Descriptor(fd) for fd in self._region_fds),
            wakes=tuple(Descriptor(fd) for fd in self._wake_fds),
            control=authority(advertised, self.control_port),
            control_door=Descriptor(self._control.fileno()),
            local_door=Descriptor(fds[0] if fds else -1),
            worker_doors=tuple(Descriptor(fd) for fd in fds[1:]),
            attach_address=self.attach_address,
        )

    def _assemble(self, engine: EngineChild | None) -> None:
        specs = self._specs(engine)
        self.rows = {spec.name: spec.row for spec in specs}
        self._names = {spec.row: spec.name for spec in specs}
        self.board = TableBoard(self.table, self._names)
        self.supervisor = Supervisor(
            specs,
            self.board,
            deaths_max=self.settings.intensity,
            period_s=self.settings.period_s,
        )
        self.health = Health(
            self.table,
            children=self.supervisor.children,
            clock=monotonic_ns,
            stopping=lambda: self.supervisor.stopping,
            rows=self.rows,
            silent_ns=to_ns(SILENT_S),
        )
        collector = TableCollector(
            self.table,
            role=self.settings.role,
            restarts=lambda: [(c.name, c.restarts) for c in self.supervisor.children()],
        )
        app = build_app(self.health, exposition(collector), self.facts())
        self._health_server = HealthServer(app, self._http)

    def _specs(self, engine: EngineChild | None) -> list[ChildSpec]:
        timeouts = self.settings.timeouts

        def actor(
            name: str,
            row: int,
            target: Callable[..., None],
            *args: Any,
            stands_for: Sequence[str] = (),
        ) -> ChildSpec:
            return ChildSpec(
                name=name,
                target=target,
                args=(self._boot, *args),
                row=row,
                stands_for=tuple(stands_for),
                hang_s=STANDBY_HANG_S if stands_for else timeouts.hang_s,
                ready_s=timeouts.ready_s,
                shutdown_s=timeouts.shutdown_s,
            )

        specs = [actor("listener", LISTENER_ROW, run_listener)]
        workers = [f"{WORKER}{rank}" for rank in range(self.layout.ranks)]
        specs += [
            actor(name, FIRST_WORKER_ROW + rank, run_worker, rank)
            for rank, name in enumerate(workers)
        ]
        if engine is not None:
            specs.append(
                ChildSpec(
                    name="engine",
                    target=engine.target,
                    args=(self.attach_address, *engine.args),
                    row=ENGINE_ROW,
                    ready_s=timeouts.engine_ready_s,
                    shutdown_s=timeouts.drain_s + timeouts.shutdown_s,
                    hang_s=timeouts.engine_hang_s,
                )
            )
        if self.settings.standby:  # last: nothing waits for them
            specs += [
                actor(
                    "listener-standby",
                    LISTENER_STANDBY_ROW,
                    stand_by_listener,
                    stands_for=["listener"],
                ),
                actor("worker-standby", WORKER_STANDBY_ROW, stand_by_worker, stands_for=workers),
            ]
        return specs

    def facts(self) -> dict[str, Any]:
        """What somebody who wants to attach or to debug needs to know."""
        return {
            "role": self.settings.role,
            "instance": self.instance,
            "pid": os.getpid(),
            "control": self._boot.control,
            "attach": self.attach_address,
            "supervisor": f"http://{authority(self.settings.host, self.supervisor_port)}",
            "devices": list(self.settings.devices),
            "transport": self.settings.transport,
            "pages_count": self.settings.pages_count,
            "page_size": self.layout.page_size,
            "rooms_max": self.settings.rooms_max,
        }

    # --- running ---------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._owned.close()

    def run(self) -> str:
        """Start, supervise until asked to stop, stop; returns the reason.  Raises StartFailed or
        Escalated after everything is stopped."""
        with self.supervisor as supervisor:
            service = AttachService(
                self._attach_socket,
                regions=self._region_fds,
                worker_epoch=lambda rank: self.table.incarnation(FIRST_WORKER_ROW + rank),
                answer_engine=self._answer_engine,
                engine_gone=self._engine_gone,
                watch=supervisor.add_service,
                unwatch=supervisor.remove_service,
            )
            wake = Waker(self._boot.wakes)
            janitor = Janitor(
                table=self.table,
                timeouts=self.settings.timeouts,
                mapped=service.mapped,
                fence=lambda row, reason: supervisor.restart(self._names[row], reason),
                wake=wake,
                beating=Beating(self._beat),
            )
            self.board.sweep = partial(self._turn, service, janitor, wake)
            supervisor.add_timer(SWEEP_S, self.board.sweep)
            self._health_server.start()
            try:
                return supervisor.run()
            finally:
                service.close()
                self._health_server.stop()

    def _turn(self, service: AttachService, janitor: Janitor, wake: Waker) -> None:
        self._beat()
        fresh = self.supervisor.callback_errors_count - self._callback_errors_count
        self.table.count(Counter.CALLBACK_ERRORS, fresh)
        self._callback_errors_count += fresh
        service.recall()
        janitor.sweep(monotonic_ns())
        wake.flush()

    def _beat(self) -> None:
        """A sweep of many rooms takes long; it is no standstill."""
        self.health.turned_ns = now_ns = monotonic_ns()
        self.table.beat(now_ns)

    # --- engines ---------------------------------------------------------------------------------

    def _answer_engine(self, ask: AttachRequest, pid: int) -> tuple[AttachReply, list[int]]:
        row = next((r for r, p in self.board.pids.items() if p == pid and r == ENGINE_ROW), 0)
        if not row:
            row = self._free_engine_row(ask, pid)
        boot = self._boot
        reply = AttachReply(
            instance=self.instance,
            row=row,
            incarnation=self.table.incarnation(row),
            maps=self.maps,
            listener=boot.listener_endpoint,
            workers=tuple(boot.worker_endpoint(rank) for rank in range(self.layout.ranks)),
            listener_row=LISTENER_ROW,
            worker_rows=tuple(FIRST_WORKER_ROW + rank for rank in range(self.layout.ranks)),
            resend_s=self.settings.timeouts.resend_s,
        )
        wake_fd = self._wake_fds[row - FIRST_ENGINE_ROW]
        return reply, [self._table_fd, *self._region_fds, wake_fd]

    def _free_engine_row(self, ask: AttachRequest, pid: int) -> int:
        first = ENGINE_ROW + (1 if "engine" in self.rows else 0)
        for row in range(first, FIRST_ENGINE_ROW + ENGINES_MAX):
            if self.table.incarnation(row) == 0:
                self._attached_count += 1
                incarnation = (self._attached_count - 1) % INCARNATION_MASK + 1
                self.table.incarnate(row, incarnation, pid, ask.name)
                return row
        raise AttachFailed(f"{ENGINES_MAX} engines are attached already")

    def _engine_gone(self, row: int) -> None:
        if row != self.rows.get("engine"):  # the built-in engine's death is the supervisor's to see
            self.table.bury(row)


def _start_error(error: OSError) -> DeploymentError:
    """What the kernel refused, in terms of who must act."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return BadConfig(f"no descriptor is left for the tree: {error.strerror}; raise ulimit -n")
    return NoMemory(f"cannot reserve what the tree needs: {error.strerror or error}")


def listen(host: str, port: int, flag: str) -> socket.socket:
    """A listening TCP socket.  Raises PortInUse, BadConfig."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        if isinstance(error, socket.gaierror):
            raise BadConfig(f"--host {host}: {error.strerror}") from None
        raise PortInUse(f"{flag} {host}:{port}: {error.strerror}; choose another") from None
    listening.setblocking(False)
    return listening


def state_timeouts_ms(timeouts: Timeouts) -> dict[KVPoll, int]:
    """Deadline of each open state in milliseconds, as the table's header carries it."""
    return {state: int(getattr(timeouts, name) * 1000) for state, name in TIMEOUT_OF.items()}
