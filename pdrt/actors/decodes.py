"""The decodes that introduced themselves to a prefill: hello, compatibility, and the path to each.

A decode is ready when every worker of ours has warmed its path to the decode's agent of the same
rank. Whatever is lost here is asked for again with `Resync`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec
import numpy as np

from pdrt import failpoints
from pdrt.actors.base import Beating, Throttle, deaf_for
from pdrt.actors.missing import Missing
from pdrt.actors.past import Room
from pdrt.clock import MILLISECOND_NS, SECOND_NS, to_ns
from pdrt.config import Timeouts
from pdrt.mail.knock import Knock
from pdrt.mail.mailbox import Address, Postman
from pdrt.process_rows import INCARNATION_MASK
from pdrt.protocol.counters import Counter
from pdrt.protocol.layout import Layout
from pdrt.protocol.messages import (
    OLDEST,
    VERSION,
    Agent,
    Destination,
    Heartbeat,
    Hello,
    HelloReply,
    Introduced,
    Introduction,
    PeerGone,
    PeerUp,
    PeerWarm,
    Resync,
)
from pdrt.protocol.peers import instance_digest
from pdrt.protocol.states import Reason
from pdrt.shm_status import StatusTable, peer_of

DECODES_MAX = 4096
OFFERS_BYTES_MAX = 64 << 10  # of one agent; all decodes' are kept
ITEMS_MAX = 2**31 - 1  # pages and aux rows of one agent, numbered through in int32
AGE_MAX_MS = 0x7FFF_FFFF  # what a U31 has place for
BEAT_MIN_NS = 10 * MILLISECOND_NS  # heartbeats of one decode that come faster say nothing new
COME_PEERS = 2  # times `peer_s`: who lives has come to a new listener by then
BURIED_MAX = 4096  # instances remembered of which another has the address now

log = logging.getLogger("pdrt.listener")


def is_older(epoch: int, than: int) -> bool:
    """Epochs start again from 1 after the last one: of two, the older is half a circle behind."""
    return 0 < (than - epoch) % INCARNATION_MASK <= INCARNATION_MASK // 2


def worker_link(rank: int) -> str:
    """Name of the listener's link to the worker of a rank."""
    return f"worker{rank}"


def _impossible(agent: Agent) -> str:
    """Why this is none that a worker could write to or we could keep; "" if it is."""
    if sum(len(metadata) for metadata in agent.offers.values()) > OFFERS_BYTES_MAX:
        return f"an agent offers more than {OFFERS_BYTES_MAX} bytes"
    if agent.pages_count + agent.aux_rows > ITEMS_MAX:
        return f"an agent has more than {ITEMS_MAX} pages and aux rows"
    return ""


@dataclass(slots=True)
class Decode:
    introduction: Introduction
    address: Address
    heard_ns: int
    warm: dict[int, PeerWarm] = field(default_factory=dict)  # by rank
    answered_ns: int = 0  # when its heartbeat was answered last

    @property
    def instance(self) -> str:
        return self.introduction.instance

    def agent(self, rank: int) -> Agent | None:
        return next((agent for agent in self.introduction.agents if agent.rank == rank), None)

    def transport(self, rank: int) -> str:
        """Name of the transport of a rank, "" while there is none."""
        warm = self.warm.get(rank)
        return warm.transport if warm is not None else ""

    def refusal(self, destination: Destination) -> Reason:
        """Pages or aux row that the decode's own introduction does not have?"""
        agent = self.agent(destination.rank)
        if agent is None or len(destination.pages) % 4 or destination.aux_index >= agent.aux_rows:
            return Reason.BAD_DESTINATION
        if len(destination.pages) // 4 > agent.pages_count:
            return Reason.BAD_DESTINATION
        pages = np.frombuffer(destination.pages, dtype="<u4")  # so that -1 is a huge number
        if len(pages) and np.maximum.reduce(pages) >= agent.pages_count:
            return Reason.BAD_DESTINATION
        return Reason.NONE


class Decodes:
    def __init__(
        self,
        *,
        instance: str,
        boot_id: str,
        layout: Layout,
        table: StatusTable,
        mailbox: Postman,
        timeouts: Timeouts,
        nobody_listens: Knock,
        beating: Beating,
    ) -> None:
        self.missing = Missing(timeouts.beat_s)
        self._nobody_listens = nobody_listens
        self._beating = beating
        self._instance = instance
        self._boot_id = boot_id
        self._layout = layout
        self._table = table
        self._mailbox = mailbox
        self._timeouts = timeouts
        self._known: dict[str, Decode] = {}
        self._replaced: list[Decode] = []  # forgotten, and not yet returned by `take_lost`
        self._buried: dict[str, None] = {}  # instances, in the order they were replaced
        self._worker_epochs: dict[int, int] = {}
        self._looked_ns = self._began_ns = 0  # when silence was looked for last, and first
        self._first_ns = 0  # the latter, however long we stood still since
        self._mourned = False  # those who had not come to us in good time
        self._may_log = Throttle()

    def get(self, instance: str) -> Decode | None:
        return self._known.get(instance)

    def resync(self, sender: Address) -> None:
        """Ask somebody we do not know to start again from hello."""
        self._table.count(Counter.RESYNCS)
        self._mailbox.post(sender, Resync(self._instance, self._table.me.incarnation))

    def hello(self, sender: Address, hello: Hello, now_ns: int) -> None:
        """Phase one: versions and the layout's digest, nothing else."""
        refusal, detail, layout = Reason.NONE, "", b""
        if hello.oldest > VERSION or hello.version < OLDEST:
            refusal = Reason.PEER_REFUSED
            detail = (
                f"no common protocol version: prefill speaks {OLDEST}..{VERSION}, "
                f"decode {hello.oldest}..{hello.version}"
            )
        elif hello.digest != self._layout.digest:
            refusal, layout = Reason.LAYOUT_MISMATCH, msgspec.msgpack.encode(self._layout)
            detail = "the KV layouts differ"
        elif hello.instance in self._buried:
            refusal, detail = Reason.PEER_REFUSED, "another decode has its control address by now"
        elif len(self._known) >= DECODES_MAX and hello.instance not in self._known:
            refusal, detail = Reason.PEER_REFUSED, f"{DECODES_MAX} decodes known"
        if not refusal and hello.instance not in self._known:
            self.missing.greet(hello.instance, now_ns)
        if refusal and self._may_log(now_ns):
            log.error("decode=%s refused=%s detail=%r", hello.instance, refusal.name, detail)
        epoch = self._table.me.incarnation
        digest = self._layout.digest
        age_ms = min((now_ns - (self._first_ns or now_ns)) // MILLISECOND_NS, AGE_MAX_MS)
        self._mailbox.post(
            sender,
            HelloReply(
                VERSION, OLDEST, self._instance, epoch, digest, refusal, detail, layout, age_ms
            ),
        )

    def introduce(self, sender: Address, introduction: Introduction, now_ns: int) -> None:
        """Phase two: where the decode's bytes may land.  Answered once our workers are warm."""
        ranks = sorted(agent.rank for agent in introduction.agents)
        known = self._known.get(introduction.instance)
        if ranks != list(range(self._layout.ranks)) or self._is_late(introduction, known):
            self._table.count(Counter.LATE)
            return
        if detail := next(filter(None, map(_impossible, introduction.agents)), ""):
            refused = Introduced(introduction.instance, introduction.serial, "", detail)
            self._mailbox.post(sender, refused)
            return
        if known is None:
            self._replace(introduction)
            if len(self._known) >= DECODES_MAX:
                self.resync(sender)  # our answer to its hello says why
                return
            known = self._known[introduction.instance] = Decode(introduction, sender, now_ns)
            self.missing.find(introduction.instance, introduction.control)
        known.introduction, known.address, known.heard_ns = introduction, sender, now_ns
        epochs = {agent.rank: agent.epoch for agent in introduction.agents}
        # A path that could not be opened is tried again: whoever asks again hopes so.
        known.warm = {
            r: w for r, w in known.warm.items() if w.agent_epoch == epochs[r] and w.transport
        }
        if not self._answer(known):
            failpoints.hit("prefill.introduce.before_workers")
            for rank in ranks:
                self._tell_worker(known, rank)

    def _is_late(self, introduction: Introduction, known: Decode | None) -> bool:
        """Was it on its way so long that another one overtook it?"""
        if known is None:
            return introduction.instance in self._buried
        latest = known.introduction
        if introduction.epoch != latest.epoch:
            return is_older(introduction.epoch, latest.epoch)
        return introduction.serial < latest.serial

    def _replace(self, introduction: Introduction) -> None:
        """Another instance has the address of one that we know: that one is dead."""
        for decode in list(self._known.values()):
            if decode.introduction.control == introduction.control:
                log.warning("decode=%s replaced by=%s", decode.instance, introduction.instance)
                self._forget(decode)
                self._replaced.append(decode)
                self._buried[decode.instance] = None
                if len(self._buried) > BURIED_MAX:
                    del self._buried[next(iter(self._buried))]
                    self._table.count(Counter.FORGOTTEN)

    def _forget(self, decode: Decode) -> None:
        self._table.count(Counter.PEERS_LOST)
        del self._known[decode.instance]
        for rank in range(self._layout.ranks):
            self._mailbox.post(worker_link(rank), PeerGone(decode.instance))

    def _tell_worker(self, decode: Decode, rank: int) -> None:
        agent = decode.agent(rank)
        assert agent is not None
        introduction = decode.introduction
        same_host = introduction.boot_id == self._boot_id
        up = PeerUp(introduction.instance, introduction.control, agent, same_host)
        self._mailbox.post(worker_link(rank), up)

    def warmed(self, warm: PeerWarm, now_ns: int) -> None:
        """A worker has, or cannot have, a path to one rank of a decode."""
        if warm.rank >= self._layout.ranks:
            return
        decode = self._known.get(warm.instance)
        if decode is None:
            # A listener before us knew it.
            if self._all_have_come(now_ns):
                self._mailbox.post(worker_link(warm.rank), PeerGone(warm.instance))
            return
        agent = decode.agent(warm.rank)
        if agent is None or agent.epoch != warm.agent_epoch:
            return
        known, decode.warm[warm.rank] = decode.warm.get(warm.rank), warm
        if known != warm:
            self._answer(decode)

    def _answer(self, decode: Decode) -> bool:
        if len(decode.warm) < self._layout.ranks:
            return False
        cold = [warm for warm in decode.warm.values() if not warm.transport]
        introduced = Introduced(
            decode.instance,
            decode.introduction.serial,
            "" if cold else decode.warm[0].transport,
            cold[0].detail if cold else "",
        )
        self._mailbox.post(decode.address, introduced)
        return True

    def worker_up(self, rank: int, epoch: int) -> bool:
        """A worker announced itself.  True if it is another one than before: it knows nothing."""
        if rank >= self._layout.ranks or self._worker_epochs.get(rank) == epoch:
            return False
        self._worker_epochs[rank] = epoch
        for decode in self._known.values():
            decode.warm.pop(rank, None)
            self._tell_worker(decode, rank)
        return True

    def beat(self, sender: Address, beat: Heartbeat, now_ns: int) -> list[int] | None:
        """The rooms that wait there to send a destination.  None if there is nothing to answer: we
        do not know the sender and have asked it to start again, or it beats too fast."""
        decode = self._known.get(beat.instance)
        if decode is None or decode.introduction.epoch != beat.epoch:
            self.resync(sender)
            return None
        decode.heard_ns, decode.address = now_ns, sender
        if now_ns - decode.answered_ns < BEAT_MIN_NS:
            return None
        decode.answered_ns = now_ns
        waiting = np.frombuffer(beat.rooms[: len(beat.rooms) // 8 * 8], dtype="<u8")
        found: list[int] = waiting[: self._table.rooms_max].tolist()
        return found

    def beat_back(self, sender: Address, served: list[Room]) -> None:
        """`served`: those that we still serve; named by slot and generation there."""
        theirs = [room.theirs[1:] for room in self._beating(served)]
        rooms = np.array(theirs, dtype="<u8").tobytes()
        self._mailbox.post(sender, Heartbeat(self._instance, self._table.me.incarnation, rooms))

    def take_lost(self, now_ns: int, *, waited_for: bool) -> dict[str, Reason]:
        """Forget every decode that has been silent for too long, or whose tree is gone, if somebody
        waits for one; return their instances, and those whose address another has now."""
        deaf_ns, self._looked_ns = deaf_for(self._looked_ns, now_ns), now_ns
        self._began_ns = min((self._began_ns or now_ns) + deaf_ns, now_ns)
        self._first_ns = self._first_ns or now_ns
        lost = {decode.instance: Reason.PEER_RESTARTED for decode in self._replaced}
        self._replaced = []
        for decode in self._known.values():
            decode.heard_ns = min(decode.heard_ns + deaf_ns, now_ns)
        for decode in [d for d in self._known.values() if self._is_lost(d, now_ns, waited_for)]:
            silent_s = (now_ns - decode.heard_ns) / SECOND_NS
            log.warning("decode=%s lost silent_s=%.1f", decode.instance, silent_s)
            self._forget(decode)
            self.missing.lose(decode.introduction.control, now_ns)
            lost[decode.instance] = Reason.PEER_LOST
        return lost

    def unwanted(self, rooms: Collection[Room], now_ns: int) -> list[Room]:
        """Those that no living decode will ask for."""
        return [*self.missing.rooms(self._beating(rooms), now_ns), *self._orphans(rooms, now_ns)]

    def _orphans(self, rooms: Collection[Room], now_ns: int) -> list[Room]:
        """Once, when all that live have come to us: rooms that a listener before us matched with
        another.  The table remembers with whom."""
        if self._mourned or not self._all_have_come(now_ns):
            return []
        self._mourned = True
        living = {0, *(instance_digest(instance) for instance in self._known)}
        path = self._table.path
        return [r for r in self._beating(rooms) if peer_of(path(*r.handle[1:])) not in living]

    def _all_have_come(self, now_ns: int) -> bool:
        """Those whom a listener before us knew, if they live."""
        waited_ns = now_ns - self._began_ns if self._began_ns else 0
        return waited_ns > to_ns(COME_PEERS * self._timeouts.peer_s)

    def _is_lost(self, decode: Decode, now_ns: int, waited_for: bool) -> bool:
        silent_ns = now_ns - decode.heard_ns
        if silent_ns > to_ns(self._timeouts.peer_s):
            return True
        doubted = waited_for and silent_ns >= to_ns(2 * self._timeouts.beat_s)
        return doubted and self._nobody_listens(decode.introduction.control, now_ns)
