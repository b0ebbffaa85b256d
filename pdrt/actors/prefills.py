"""The prefills a decode talks to: one link each, dialled when a room first names it.

DIALLING --HelloReply--> INTRODUCING --Introduced--> READY
    ^  Resync, silence, another instance, or a restarted worker of ours (back to INTRODUCING)
REFUSED: layouts or versions differ, or no transport; asked again after a while, since the
deployment may be mended
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from pdrt.actors.base import deaf_for
from pdrt.clock import MILLISECOND_NS, to_ns
from pdrt.config import Timeouts
from pdrt.errors import BadConfig, NoDescriptors, ProtocolError
from pdrt.mail.knock import Knock
from pdrt.mail.mailbox import Address, Postman
from pdrt.protocol.counters import Counter
from pdrt.protocol.layout import Layout, RegionMap, first_difference, layout_of
from pdrt.protocol.messages import (
    OLDEST,
    VERSION,
    Agent,
    Heartbeat,
    Hello,
    HelloReply,
    Introduced,
    Introduction,
    Resync,
    WorkerUp,
    session_of,
)
from pdrt.protocol.states import Reason
from pdrt.shm_status import StatusTable

DOUBTED_S = 2.0  # a path to our workers may be missing this long: one of them may be restarting
SILENT_S = 1.0  # a worker of ours that says nothing for this long is not to be introduced
HELLO_MAX_S = 1.0  # between two hellos to one that does not answer; the first comes sooner
REFUSED_S = 2.0  # how long a refusal is remembered before the prefill is asked again
UNUSED_S = 300.0  # a link without rooms is closed after this long
PREFILLS_MAX = 4096
CLOCKS_ALIKE = 1000  # two hosts' clocks gain less than a part in so many on each other

log = logging.getLogger("pdrt.listener")


class Stage(Enum):
    DIALLING = auto()
    INTRODUCING = auto()
    READY = auto()
    REFUSED = auto()


@dataclass(slots=True)
class Prefill:
    peer: str  # host:port
    link: str
    stage: Stage
    heard_ns: int
    used_ns: int
    due_ns: int  # of the next hello or introduction
    pause_s: float = 0.0  # before the one after that; 0: as short as it gets
    instance: str = ""
    session: str = ""  # the incarnation of its listener that answered our hello
    began_ns: int = 0  # it was there by then, by our clock
    transport: str = ""
    refusal: Reason = Reason.NONE
    detail: str = ""
    doubted_ns: int = 0  # when it first found no path to our workers, since it last had one

    @property
    def ready(self) -> bool:
        return self.stage is Stage.READY


class Prefills:
    def __init__(
        self,
        *,
        instance: str,
        boot_id: str,
        control: str,
        layout: Layout,
        maps: tuple[RegionMap, ...],
        table: StatusTable,
        mailbox: Postman,
        timeouts: Timeouts,
        nobody_listens: Knock,
    ) -> None:
        self._nobody_listens = nobody_listens
        self._instance = instance
        self._boot_id = boot_id
        self._control = control
        self._layout = layout
        self._maps = maps
        self._table = table
        self._mailbox = mailbox
        self._timeouts = timeouts
        self._known: dict[str, Prefill] = {}
        self._by_link: dict[Address, Prefill] = {}
        self._workers: dict[int, WorkerUp] = {}
        self._heard_ns: dict[int, int] = {}  # when each said last that it is up
        self._serial = 0
        # A prefill that was restarted hears from all its decodes: not from all of them at once.
        self._random = random.Random(f"{instance}#{table.me.incarnation}")
        self._looked_ns = 0  # when silence was looked for last

    def get(self, peer: str) -> Prefill | None:
        return self._known.get(peer)

    def by_link(self, sender: Address) -> Prefill | None:
        return self._by_link.get(sender)

    def ready(self) -> list[Prefill]:
        return [prefill for prefill in self._known.values() if prefill.ready]

    def dial(self, peer: str, now_ns: int) -> Prefill:
        """The prefill at host:port, dialled if it is new."""
        prefill = self._known.get(peer)
        if prefill is None:
            link = f"prefill:{peer}"
            prefill = Prefill(peer, link, Stage.DIALLING, now_ns, now_ns, now_ns)
            if len(self._known) >= PREFILLS_MAX:
                prefill.stage, prefill.refusal = Stage.REFUSED, Reason.PEER_REFUSED
                prefill.detail = f"{PREFILLS_MAX} prefills known"
                return prefill
            try:
                self._mailbox.link(link, f"tcp://{peer}", from_peer=True)
            except (ProtocolError, NoDescriptors) as error:  # a request may name no address
                prefill.stage, prefill.refusal = Stage.REFUSED, Reason.PEER_REFUSED
                prefill.detail = str(error)
                return prefill
            self._known[peer] = self._by_link[link] = prefill
            self._hello(prefill, now_ns)
        prefill.used_ns = now_ns
        return prefill

    def _wait(self, prefill: Prefill, now_ns: int, longest_s: float = HELLO_MAX_S) -> None:
        """Until it is asked again: ever longer, up to a bound, and no two decodes equally long."""
        pause_s = prefill.pause_s or self._timeouts.resend_s
        prefill.due_ns = now_ns + to_ns(pause_s * self._random.uniform(0.75, 1))
        prefill.pause_s = min(2 * pause_s, max(longest_s, self._timeouts.resend_s))

    def _hello(self, prefill: Prefill, now_ns: int) -> None:
        self._wait(prefill, now_ns)
        epoch = self._table.me.incarnation
        hello = Hello(VERSION, OLDEST, self._instance, epoch, self._layout.digest)
        self._mailbox.post(prefill.link, hello)

    def on_hello_reply(self, prefill: Prefill, reply: HelloReply, now_ns: int) -> None:
        prefill.heard_ns = now_ns
        prefill.pause_s = 0.0
        prefill.instance = reply.instance
        prefill.session = session_of(reply.instance, reply.epoch)
        # A host may stand still for as long as its peers bear with it, and no two clocks go alike.
        age_ns = reply.age_ms * MILLISECOND_NS
        doubt_ns = to_ns(self._timeouts.peer_s) + age_ns // CLOCKS_ALIKE
        prefill.began_ns = now_ns - age_ns + doubt_ns
        if reply.refusal:
            detail = reply.detail
            if reply.layout:
                detail = self._name_difference(reply.layout)
            self._refuse(
                prefill,
                Reason.LAYOUT_MISMATCH if reply.layout else Reason.PEER_REFUSED,
                detail,
                now_ns,
            )
        elif prefill.stage in (Stage.DIALLING, Stage.REFUSED):
            prefill.stage, prefill.refusal, prefill.detail = Stage.INTRODUCING, Reason.NONE, ""
            self._introduce(prefill, now_ns)

    def _name_difference(self, theirs: bytes) -> str:
        try:
            layout = layout_of(theirs)
        except BadConfig:
            return "the prefill's layout cannot be read"
        return first_difference(self._layout, layout) or "equal layouts, different digests"

    def _refuse(self, prefill: Prefill, reason: Reason, detail: str, now_ns: int) -> None:
        if (prefill.refusal, prefill.detail) != (reason, detail):
            log.error("prefill=%s refused=%s detail=%r", prefill.peer, reason.name, detail)
        prefill.stage, prefill.refusal, prefill.detail = Stage.REFUSED, reason, detail
        prefill.due_ns = now_ns + to_ns(REFUSED_S * self._random.uniform(0.75, 1))

    def _introduce(self, prefill: Prefill, now_ns: int) -> None:
        self._wait(prefill, now_ns, self._timeouts.peer_s / 3)  # until it is ready, its only beat
        if len(self._workers) < self._layout.ranks:
            return  # sent when the last worker is up
        agents = [
            Agent(up.rank, up.epoch, m.pages_count, m.aux_rows, up.offers)
            for m, (_, up) in zip(self._maps, sorted(self._workers.items()), strict=True)
        ]
        epoch = self._table.me.incarnation
        self._mailbox.post(
            prefill.link,
            Introduction(self._instance, epoch, self._control, self._boot_id, agents, self._serial),
        )

    def on_introduced(self, prefill: Prefill, introduced: Introduced, now_ns: int) -> bool:
        """True if the prefill has just become ready."""
        prefill.heard_ns = now_ns
        if introduced.serial != self._serial or prefill.stage is not Stage.INTRODUCING:
            return False
        if not introduced.transport:
            # The worker that we introduced may just have died; its successor is introduced next.
            prefill.doubted_ns = prefill.doubted_ns or now_ns
            silent = any(now_ns - ns > to_ns(SILENT_S) for ns in self._heard_ns.values())
            if silent or now_ns - prefill.doubted_ns < to_ns(DOUBTED_S):
                return False  # introduced again when due; the rooms' deadline bounds the wait
            self._refuse(prefill, Reason.TRANSPORT_FAILED, introduced.detail, now_ns)
            return False
        prefill.stage, prefill.transport = Stage.READY, introduced.transport
        prefill.doubted_ns, prefill.pause_s = 0, 0.0
        log.info("prefill=%s ready transport=%s", prefill.peer, prefill.transport)
        return True

    def on_resync(self, prefill: Prefill, resync: Resync, now_ns: int) -> None:
        """The listener there is new, or new to us."""
        prefill.heard_ns = now_ns
        if prefill.stage in (Stage.READY, Stage.INTRODUCING):
            self._table.count(Counter.RESYNCS)
            prefill.stage = Stage.DIALLING
            self._hello(prefill, now_ns)

    def on_beat(self, prefill: Prefill, beat: Heartbeat, now_ns: int) -> None:
        """Perhaps of a successor of the one that answered our hello: it took our introduction, and
        knows us by that.  We must not take it for the other until a room is to be sent there."""
        prefill.heard_ns = now_ns
        if session_of(beat.instance, beat.epoch) != prefill.session:
            self.on_resync(prefill, Resync(beat.instance, beat.epoch), now_ns)

    def worker_up(self, up: WorkerUp, now_ns: int) -> None:
        """A worker of ours announced itself; a new one changes where bytes may land."""
        if up.rank >= self._layout.ranks:
            return
        self._heard_ns[up.rank] = now_ns
        known = self._workers.get(up.rank)
        if known is not None and known.epoch == up.epoch:
            return
        self._workers[up.rank] = up
        for prefill in self._known.values():
            prefill.doubted_ns, prefill.pause_s = 0, 0.0
        self._serial += 1
        for prefill in self._known.values():
            if prefill.stage in (Stage.READY, Stage.INTRODUCING):
                prefill.stage = Stage.INTRODUCING
                self._introduce(prefill, now_ns)

    def take_lost(self, now_ns: int, used: Iterable[str] = ()) -> list[Prefill]:
        """Prefills that fell silent, and those of `used` whose tree is gone; they are dialled
        again."""
        limit_ns = to_ns(self._timeouts.peer_s)
        deaf_ns, self._looked_ns = deaf_for(self._looked_ns, now_ns), now_ns
        lost = []
        for prefill in self._known.values():
            prefill.heard_ns = min(prefill.heard_ns + deaf_ns, now_ns)
        gone = {peer for peer in used if self._is_gone(peer, now_ns)}
        for prefill in self._known.values():
            silent_ns = now_ns - prefill.heard_ns
            if prefill.peer in gone and not prefill.ready:
                lost.append(prefill)
            elif prefill.ready and (silent_ns > limit_ns or prefill.peer in gone):
                log.warning("prefill=%s lost silent_s=%.1f", prefill.peer, silent_ns / 1e9)
                self._table.count(Counter.PEERS_LOST)
                prefill.stage = Stage.DIALLING
                self._hello(prefill, now_ns)
                lost.append(prefill)
        return lost

    def _is_gone(self, peer: str, now_ns: int) -> bool:
        """It says nothing, and nobody listens at its port: waiting for it would be in vain."""
        prefill = self._known.get(peer)
        if prefill is None:
            return False
        patience_s = 2 * self._timeouts.beat_s if prefill.ready else self._timeouts.resend_s
        silent_ns = now_ns - prefill.heard_ns
        return silent_ns >= to_ns(patience_s) and self._nobody_listens(peer, now_ns)

    def tick(self, now_ns: int, used: Iterable[str]) -> None:
        for peer in used:
            if (prefill := self._known.get(peer)) is not None:
                prefill.used_ns = now_ns
        for prefill in list(self._known.values()):
            if now_ns - prefill.used_ns > to_ns(UNUSED_S):
                self._mailbox.unlink(prefill.link)
                del self._known[prefill.peer], self._by_link[prefill.link]
            elif prefill.stage is not Stage.READY and now_ns >= prefill.due_ns:
                if prefill.stage is Stage.INTRODUCING:
                    self._introduce(prefill, now_ns)
                else:
                    self._hello(prefill, now_ns)
