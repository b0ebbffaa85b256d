"""The engines of the world: real KVSender and KVReceiver objects under a scheduler of a few lines.

An engine frees pages only when its room is quiet and cleared, and then fills them with a pattern;
from there on no byte may land in them.  Decode compares every byte of a Success with what prefill
wrote.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pdrt.actors.boot import FIRST_WORKER_ROW, LISTENER_ROW
from pdrt.clock import MILLISECOND_NS, to_ns
from pdrt.engine.receiver import KVReceiver
from pdrt.engine.room import LISTENER, Desk
from pdrt.engine.sender import KVSender
from pdrt.errors import TableFull
from pdrt.mail.mailbox import Address
from pdrt.memory.aux import AuxRow, AuxRows
from pdrt.memory.pages import PageAllocator, Pages
from pdrt.process_rows import Owner
from pdrt.protocol.layout import AUX_ROW_BYTES
from pdrt.protocol.messages import AnyMessage, Declined, Opened
from pdrt.protocol.states import TERMINAL, KVPoll, Reason, Role
from pdrt.shm_status import Handle, StatusTable
from tests.actors.post import Box
from tests.actors.tree import Tree

FREED = {Role.PREFILL: 0xEE, Role.DECODE: 0xDD}  # else a free page could hide where it went
UPKEEP_NS, IDLE_NS = 20 * MILLISECOND_NS, 50 * MILLISECOND_NS


@dataclass
class Sent:
    """What a prefill engine wrote for one use of a room id."""

    room: int
    pages: list[NDArray[np.uint8]]  # by rank, [pages, page_bytes]


@dataclass
class Ledger:
    """What the world knows beside the actors, to compare them with."""

    sent: dict[int, Sent] = field(default_factory=dict)  # by use, which is the first token
    landed: set[int] = field(default_factory=set)
    #: How prefill's half of a use ended, rank by rank, by its word: whoever lives to see it.
    ended: dict[tuple[int, int], KVPoll] = field(default_factory=dict)
    uses: int = 0


@dataclass(frozen=True)
class Plan:
    """How an engine treats a room."""

    room: int
    pages_count: int = 4
    chunks: int = 2
    split: tuple[int, ...] = ()  # prefill: where its chunks end, if not evenly; (4, 4): 4 pages, 0
    pace_ms: int = 0  # prefill: between chunks; decode: between WaitingForInput and the destination
    eager: bool = False  # prefill: send before the destination is known
    peer: str = ""  # decode: host:port of prefill
    bad: bool = False  # decode: name pages outside the pool
    mute: bool = False  # prefill: send nothing until `unmute`


@dataclass(eq=False)
class Job:
    plan: Plan
    use: int
    half: KVSender | KVReceiver
    handles: list[Handle]
    pages: Pages | None = None
    aux_index: int = -1
    sent_chunks: int = 0
    due_ns: int = 0
    opened_ns: int = 0
    verdict: KVPoll | None = None
    verdict_ns: int = 0
    reason: Reason = Reason.NONE
    detail: str = ""
    cleared: bool = False


class Engine:
    """What both roles share.  `jobs` are open; `history` has all of this incarnation."""

    def __init__(self, tree: Tree, box: Box, table: StatusTable, ledger: Ledger) -> None:
        self.tree, self.table, self.ledger, self.clock = tree, table, ledger, tree.clock
        self.box = box
        self.jobs: dict[int, Job] = {}
        self.history: list[Job] = []
        self.plans: list[Plan] = []
        self.declined_count = 0
        self.freed = FREED[tree.role]
        self.pages: PageAllocator | None = None  # None: rooms of a predecessor are not quiet yet
        self.listener_seen = table.incarnation(LISTENER_ROW)
        self.workers_seen = [table.incarnation(FIRST_WORKER_ROW + m.rank) for m in tree.maps]
        self._upkeep_ns = self._renewed_ns = 0
        self._again_ns = 0  # when we have something to do of our own accord
        self._starved = False  # a room waits for pages
        resend_ns = to_ns(tree.shape.timeouts.resend_s)
        self.desk = Desk(
            table, box, tree.clock, tree.instance, box.flush, self._forget, self._worker, resend_ns
        )

    def _forget(self, room: int) -> None:
        self.jobs.pop(room, None)

    def _worker(self, rank: int) -> Owner:
        row = FIRST_WORKER_ROW + rank
        return Owner(row, self.table.incarnation(row))

    # --- memory ----------------------------------------------------------------------------------

    def _grid(self, rank: int) -> NDArray[np.uint8]:
        m = self.tree.maps[rank]
        return self.tree.memory[rank][: m.aux_offset].reshape(m.pages_count, m.page_bytes)

    def _aux_grid(self, rank: int) -> NDArray[np.uint8]:
        m = self.tree.maps[rank]
        aux = self.tree.memory[rank][m.aux_offset : m.scratch_offset]
        return aux.reshape(m.aux_rows, AUX_ROW_BYTES)

    def _settle_in(self) -> None:
        """Wait for the rooms of a predecessor, then take the whole pool."""
        if self.table.slots_opened_by(self.table.me.row, but=self.table.me.incarnation):
            return
        self.pages = PageAllocator(self.tree.shape.pages_count)
        self.aux = AuxRows(self.tree.regions, self.tree.maps)
        for m in self.tree.maps:
            self._grid(m.rank)[:] = self.freed
            self._aux_grid(m.rank)[:] = self.freed
        self.free_pages = np.ones(self.tree.shape.pages_count, bool)
        self.free_aux = np.ones(self.tree.shape.aux_rows, bool)

    def _reserve(self, job: Job) -> bool:
        assert self.pages is not None
        if (
            self.pages.free_count < job.plan.pages_count
            or self.aux.used_count == self.aux.rows_count
        ):
            self._starved = True
            return False
        job.pages = self.pages.allocate(job.plan.pages_count)
        job.aux_index = self.aux.reserve()
        self.free_pages[job.pages] = False
        self.free_aux[job.aux_index] = False
        return True

    def _give_back(self, job: Job) -> None:
        """Free what the room held, and mark it so that a late byte is seen."""
        if job.pages is None or self.pages is None:
            return
        if self._starved or self.plans:
            self._starved = False
            self._later(0)
        self.pages.free(job.pages)
        self.aux.release(job.aux_index)
        self.free_pages[job.pages] = True
        self.free_aux[job.aux_index] = True
        for m in self.tree.maps:
            self._grid(m.rank)[job.pages] = self.freed
            self._aux_grid(m.rank)[job.aux_index] = self.freed
        job.pages = None

    def check_moved(self, rank: int, offsets: list[int], verb: str) -> None:
        """Bytes were moved there: nothing of it may be free."""
        if self.pages is None:
            return
        m = self.tree.maps[rank]
        for offset in offsets:
            if offset < m.aux_offset:
                free = self.free_pages[offset // m.page_bytes]
            else:
                free = self.free_aux[(offset - m.aux_offset) // AUX_ROW_BYTES]
            what = "free pages" if offset < m.aux_offset else "a free aux row"
            assert not free, f"{self.tree.name}: bytes {verb} {what} of rank {rank}"

    def check_freed(self) -> None:
        """No byte lands in a page or aux row that is nobody's."""
        if self.pages is None:
            return
        for m in self.tree.maps:
            dirty = (self._grid(m.rank)[self.free_pages] != self.freed).any()
            assert not dirty, f"{self.tree.name}: bytes landed in free pages of rank {m.rank}"
            dirty = (self._aux_grid(m.rank)[self.free_aux] != self.freed).any()
            assert not dirty, f"{self.tree.name}: bytes landed in a free aux row of rank {m.rank}"

    # --- rooms -----------------------------------------------------------------------------------

    def plan(self, plan: Plan) -> None:
        """Serve this room as soon as its id is free here."""
        self.plans.append(plan)
        self.box.due_ns = 0

    def job(self, room: int) -> Job:
        """The latest use of a room id in this incarnation."""
        return next(job for job in reversed(self.history) if job.plan.room == room)

    def abort(self, room: int, reason: Reason = Reason.ABORTED) -> None:
        if (job := self.jobs.get(room)) is not None:
            job.half.abort(reason)
            self.box.due_ns = 0

    def decline(self, room: int, peer: str = "") -> None:
        """As KVManager.decline does."""
        for m in self.tree.maps:
            self.declined_count += 1
            declined = Declined(room, m.rank, self.declined_count, Reason.PEER_REFUSED, peer)
            self.box.post(LISTENER, declined)

    def _open_handles(self, room: int, use: int = 0) -> list[Handle]:
        """As KVManager does.  Raises TableFull."""
        with contextlib.ExitStack() as undo:
            handles = []
            for m in self.tree.maps:
                handle = self.table.open(room, m.rank, now_ns=self.clock(), use=use)
                undo.callback(self.table.discard, handle.slot, handle.generation)
                handles.append(handle)
            undo.pop_all()
        return handles

    def _begin(self, plan: Plan) -> Job:
        raise NotImplementedError

    def _drive(self, job: Job, state: KVPoll, now_ns: int) -> None:
        raise NotImplementedError

    def _check(self, job: Job) -> None:
        """At Success."""

    def unmute(self, room: int) -> None:
        job = self.jobs[room]
        job.plan = replace(job.plan, mute=False)
        self.box.due_ns = 0

    def handle(self, sender: Address, message: AnyMessage, now_ns: int) -> None:
        raise AssertionError(f"an engine got {message!r}")

    def tick(self, now_ns: int) -> int:
        self._again_ns = now_ns + (UPKEEP_NS if self.jobs else IDLE_NS)
        if self.pages is None:
            self._settle_in()
            return UPKEEP_NS // MILLISECOND_NS
        plans, self.plans = self.plans, []
        for plan in plans:
            if plan.room in self.jobs:
                self.plans.append(plan)
                continue
            try:
                job = self._begin(plan)
            except TableFull:
                self.decline(plan.room, plan.peer)
                continue
            self.jobs[plan.room] = job
            self.history.append(job)
            self._later(now_ns + UPKEEP_NS)
        for job in list(self.jobs.values()):
            self._serve(job, now_ns)
        self._upkeep(now_ns)
        return max(0, self._again_ns - now_ns) // MILLISECOND_NS

    def _later(self, at_ns: int) -> None:
        self._again_ns = min(self._again_ns, at_ns)

    def _serve(self, job: Job, now_ns: int) -> None:
        state = job.half.poll()
        if state not in TERMINAL:
            self._drive(job, state, now_ns)
            return
        if job.verdict is None:
            job.verdict, job.verdict_ns = state, now_ns
            if state is KVPoll.Success:
                self._check(job)
            else:
                word = self.table.read(*job.handles[0][1:])
                job.reason = word.reason if word else Reason.NONE
                job.detail = str(job.half.failure())
        assert job.half.poll() is job.verdict, "a verdict changed"
        if job.half.quiet():
            job.half.clear()
            job.cleared = True
            self._give_back(job)

    def _upkeep(self, now_ns: int) -> None:
        """As KVManager.tick does."""
        if now_ns - self._upkeep_ns < UPKEEP_NS:
            return
        self._upkeep_ns = now_ns
        listener = self.table.incarnation(LISTENER_ROW)
        new_listener = listener not in (0, self.listener_seen)
        self.listener_seen = listener or self.listener_seen
        new_workers = []
        for m in self.tree.maps:
            incarnation = self.table.incarnation(FIRST_WORKER_ROW + m.rank)
            if incarnation not in (0, self.workers_seen[m.rank]):
                self.workers_seen[m.rank] = incarnation
                new_workers.append(m.rank)
        renew_ns = self.tree.shape.renew_ms * MILLISECOND_NS
        renew = renew_ns and now_ns - self._renewed_ns >= renew_ns
        if renew:
            self._renewed_ns = now_ns
        if new_listener:
            self.desk.say_again(now_ns)
        for job in list(self.jobs.values()):
            if renew:
                job.half.renew_queued(now_ns)
            if isinstance(job.half, KVReceiver):
                job.half.resend(now_ns, restarted=new_listener)
            else:
                for rank in new_workers:
                    job.half.resend(now_ns, rank=rank)
                job.half.resend(now_ns, rank=None)


class PrefillEngine(Engine):
    def _begin(self, plan: Plan) -> Job:
        self.ledger.uses += 1
        handles = self._open_handles(plan.room, self.ledger.uses)
        sender = KVSender(plan.room, handles, self.desk)
        for rank, handle in enumerate(handles):
            self.box.post(LISTENER, Opened(plan.room, rank, handle.slot, handle.generation))
        now_ns = self.clock()
        return Job(plan, self.ledger.uses, sender, handles, opened_ns=now_ns, due_ns=now_ns)

    def _drive(self, job: Job, state: KVPoll, now_ns: int) -> None:
        plan, sender = job.plan, job.half
        assert isinstance(sender, KVSender)
        chunks = len(plan.split) or plan.chunks
        if plan.mute or job.sent_chunks == chunks:
            return
        if state is KVPoll.Bootstrapping and not plan.eager:
            return
        if now_ns < job.due_ns:
            self._later(job.due_ns)
            return
        if job.pages is None:
            if not self._reserve(job):
                return
            self._write(job)
            sender.init(plan.pages_count, job.aux_index)
        assert job.pages is not None
        even = tuple(plan.pages_count * i // chunks for i in range(1, chunks + 1))
        edges = (0, *(plan.split or even))
        first, end = edges[job.sent_chunks : job.sent_chunks + 2]
        job.sent_chunks += 1
        sender.send(job.pages[first:end], last=job.sent_chunks == chunks)
        job.due_ns = now_ns + plan.pace_ms * MILLISECOND_NS
        self._later(job.due_ns)

    def _write(self, job: Job) -> None:
        """The KV of this use: bytes that no other use has."""
        assert job.pages is not None
        rng = np.random.default_rng(job.use)
        contents = []
        for m in self.tree.maps:
            data = rng.integers(0, 256, (len(job.pages), m.page_bytes), dtype=np.uint8)
            self._grid(m.rank)[job.pages] = data
            contents.append(data)
        self.aux.write(job.aux_index, AuxRow(job.plan.room, first_token=job.use))
        self.ledger.sent[job.use] = Sent(job.plan.room, contents)


class DecodeEngine(Engine):
    def _begin(self, plan: Plan) -> Job:
        handles = self._open_handles(plan.room)
        receiver = KVReceiver(plan.room, handles, self.desk, plan.peer)
        receiver.init()
        return Job(plan, 0, receiver, handles, opened_ns=self.clock())

    def _drive(self, job: Job, state: KVPoll, now_ns: int) -> None:
        if state is not KVPoll.WaitingForInput:
            return
        receiver = job.half
        assert isinstance(receiver, KVReceiver)
        job.due_ns = job.due_ns or now_ns + job.plan.pace_ms * MILLISECOND_NS
        if now_ns < job.due_ns:
            self._later(job.due_ns)
            return
        if not self._reserve(job):
            return
        assert job.pages is not None
        pages = job.pages + self.tree.shape.pages_count if job.plan.bad else job.pages
        receiver.send_metadata(pages, job.aux_index)

    def _check(self, job: Job) -> None:
        """Success means every byte is in place, on all ranks, the aux row included."""
        assert job.pages is not None
        row = self.aux.read(job.aux_index, job.plan.room)
        sent = self.ledger.sent[row.first_token]
        job.use = row.first_token
        assert sent.room == job.plan.room
        assert row.first_token not in self.ledger.landed, "one sender's bytes, two successes"
        self.ledger.landed.add(row.first_token)
        theirs = [self.ledger.ended.get((job.use, m.rank)) for m in self.tree.maps]
        agreed = all(verdict is KVPoll.Success for verdict in theirs)
        assert agreed, f"room {job.plan.room}: Success, and on prefill {theirs}"
        for m in self.tree.maps:
            same = np.array_equal(self._grid(m.rank)[job.pages], sent.pages[m.rank])
            assert same, f"room {job.plan.room}: Success, and rank {m.rank} has other bytes"
