"""A worker's paths to decodes' agents: chosen, connected, warmed, reported, and let go of.

    PeerUp -> connecting -> open | refused -> PeerWarm to our listener
    PeerGone, another incarnation of the agent, or its death -> leaving -> disconnected

A path that leaves stays connected for as long as a room that ends needs it for its fence.  If the
same agent is back by then, it gets its path back.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from dataclasses import dataclass

from pdrt import failpoints
from pdrt.clock import SECOND_NS
from pdrt.errors import NoDescriptors, ProtocolError, QueueFull
from pdrt.mail.mailbox import Postman
from pdrt.protocol.layout import AUX_ROW_BYTES, RegionMap
from pdrt.protocol.messages import Agent, PeerUp, PeerWarm, detail_of
from pdrt.transports.base import Grid, TransferState, Transport, TransportError
from pdrt.transports.choose import choose

LISTENER = "listener"
MENTION_NS = 5 * SECOND_NS

log = logging.getLogger("pdrt.worker")


def tables(region: RegionMap, pages_count: int, aux_rows: int) -> list[Grid]:
    """The items of a region: its pages, then its aux rows.  Item n < pages_count is page n."""
    page = region.page_bytes
    return [
        Grid(0, page, page, pages_count),
        Grid(pages_count * page, AUX_ROW_BYTES, AUX_ROW_BYTES, aux_rows),
    ]


def _link(instance: str) -> str:
    """Name of the link to a decode's listener."""
    return f"peer:{instance}"


@dataclass(slots=True, eq=False)
class Path:
    """To one rank of a decode."""

    agent: Agent
    instance: str
    name: str  # of the agent: unique for each of its incarnations
    link: str  # to its listener, for `Landed`
    transport: Transport | None = None  # None: refused, see detail
    connecting: int | None = None  # handle of the connect
    remote: int = -1  # prepared table, once open
    detail: str = ""

    @property
    def reported(self) -> bool:
        return self.connecting is None


class Paths:
    def __init__(
        self,
        *,
        region: RegionMap,
        transports: Mapping[str, Transport],
        preferred: str,
        mailbox: Postman,
    ) -> None:
        self._region = region
        self._transports = transports
        self._preferred = preferred
        self._mailbox = mailbox
        self._paths: dict[str, Path] = {}  # by instance
        self._mentioned_ns = 0
        self._leaving: list[Path] = []  # gone or replaced, and perhaps named by a room that ends

    def get(self, instance: str) -> Path | None:
        return self._paths.get(instance)

    @property
    def connecting(self) -> bool:
        return any(not path.reported for path in self._paths.values())

    @property
    def leaving_count(self) -> int:
        return len(self._leaving)

    def up(self, up: PeerUp) -> Path | None:
        """An agent is there.  Returns the path that it replaces: its rooms are lost."""
        name = f"{up.instance}.{up.agent.rank}#{up.agent.epoch}"
        try:
            self._mailbox.link(_link(up.instance), f"tcp://{up.control}", from_peer=True)
        except (ProtocolError, NoDescriptors) as error:  # of no use: it would never hear of us
            refusal = PeerWarm(up.instance, self._region.rank, up.agent.epoch, "", detail_of(error))
            self._mailbox.post(LISTENER, refusal)
            return None
        path = old = self._paths.get(up.instance)
        if path is None or path.name != name or path.transport is None:
            path = self._paths[up.instance] = self._return(name) or self._connect(name, up)
        else:
            old = None
        if old is not None:
            self._leaving.append(old)
        if path.reported:
            self._report(path)
        return old

    def gone(self, instance: str) -> Path | None:
        """A decode is gone.  Returns the path that led to it: its rooms are lost."""
        path = self._paths.pop(instance, None)
        if path is not None:
            self._leaving.append(path)
        return path

    def _return(self, name: str) -> Path | None:
        """The same agent is back before the rooms it left were quiet: its path is still there."""
        for path in self._leaving:
            if path.name == name and path.transport is not None:
                self._leaving.remove(path)
                return path
        return None

    def _connect(self, name: str, up: PeerUp) -> Path:
        path = Path(up.agent, up.instance, name, _link(up.instance))
        try:
            choice = choose(
                list(self._transports),
                list(up.agent.offers),
                preferred=self._preferred,
                same_host=up.same_host,
            )
            transport = self._transports[choice.name]
            path.connecting = transport.connect(name, up.agent.offers[choice.name])
            path.transport = transport
            wished = choice.name == self._preferred
            log.log(logging.INFO if wished else logging.WARNING, "path=%s %s", name, choice.why)
        except (TransportError, QueueFull) as error:
            path.detail = detail_of(error)
        return path

    def take_open(self) -> list[Path]:
        """Look after the paths that connect; return those that have just opened or been
        refused."""
        decided = []
        for path in self._paths.values():
            if not path.reported and self._connected(path):
                self._report(path)
                decided.append(path)
        return decided

    def _connected(self, path: Path) -> bool:
        assert path.transport is not None
        assert path.connecting is not None
        transport = path.transport
        state = transport.poll(path.connecting)
        if state is TransferState.PENDING:
            return False
        transport.release(path.connecting)
        path.connecting = None
        agent = path.agent
        try:
            if state is TransferState.FAILED:
                raise TransportError("the first transfer to it failed")
            grids = tables(self._region, agent.pages_count, agent.aux_rows)
            path.remote = transport.prepare(path.name, grids)
        except TransportError as error:
            transport.disconnect(path.name)
            path.transport, path.detail = None, detail_of(error)
        return True

    def _report(self, path: Path) -> None:
        failpoints.hit("worker.path.before_report")
        name = path.transport.name if path.transport is not None else ""
        epoch = path.agent.epoch
        warm = PeerWarm(path.instance, self._region.rank, epoch, name, path.detail)
        self._mailbox.post(LISTENER, warm)

    def _to_the_dead(self) -> list[Path]:
        names = {name for transport in self._transports.values() for name in transport.lost()}
        return [path for path in self._paths.values() if path.name in names] if names else []

    def let_go(self, needed: Container[Path | None], now_ns: int) -> None:
        """Disconnect the paths that leave, except those that are still needed.  Those that stay are
        mentioned now and then: our listener may be another one and not know to whom they lead.
        One that leads to the dead leaves though nobody has told us: what it maps there is not quiet
        before, and a decode that has no room with us says nothing."""
        if now_ns - self._mentioned_ns >= MENTION_NS:
            self._mentioned_ns = now_ns
            for path in self._paths.values():
                if path.reported:
                    self._report(path)
        for path in self._to_the_dead():
            self.gone(path.instance)  # its rooms end as their decode says
        for path in list(self._leaving):
            if path in needed:
                continue
            self._leaving.remove(path)
            if path.transport is not None:
                if path.connecting is not None:
                    path.transport.release(path.connecting)
                path.transport.disconnect(path.name)
            if path.instance not in self._paths:
                self._mailbox.unlink(path.link)
