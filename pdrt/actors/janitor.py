"""The janitor sweeps: rooms past their deadline, rooms of dead processes, rooms that stay unquiet.

Nothing depends on it alone.  Readers enforce deadlines themselves; the janitor is for rooms that
nobody reads any more.  It runs in the supervisor's loop, which is where deaths are seen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from pdrt import failpoints
from pdrt.actors.base import Beating
from pdrt.clock import MILLISECOND_NS, SECOND_NS, to_ns
from pdrt.config import Timeouts
from pdrt.process_rows import INCARNATION_MASK
from pdrt.protocol.counters import Counter
from pdrt.protocol.peers import transport_code
from pdrt.protocol.states import OPEN, Event, KVPoll, Reason, Role
from pdrt.shm_status import (
    CLAIMED,
    DEADLINE,
    ENTERED,
    GENERATION_SHIFT,
    INCARNATION_SHIFT,
    OPENER,
    OWNER_SHIFT,
    PATH,
    QUIET_BIT,
    REASON_SHIFT,
    STATE_MASK,
    VALUE_MASK,
    StatusTable,
    peer_of,
    transport_of,
)

SHM = transport_code("shm")
ORPHANS_NS = SECOND_NS // 2  # no process outlives its supervisor for a fifth of that
IDLE_FENCE_NS = SECOND_NS  # idle for so long, a worker is fenced early: nobody else pays for it

Cells = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]  # of a slot

log = logging.getLogger("pdrt.janitor")


class Janitor:
    def __init__(
        self,
        *,
        table: StatusTable,
        timeouts: Timeouts,
        mapped: Callable[[int, int, int], bool],
        fence: Callable[[int, str], None],
        wake: Callable[[int], None],
        beating: Beating,
    ) -> None:
        """`mapped(peer, rank, epoch)`: does a process of that peer instance (digest) still map the
        memory of a rank, as that incarnation of our worker offered it?
        `fence(row, reason)`: restart the worker in that row on purpose."""
        self._table = table
        self._timeouts = timeouts
        self._mapped = mapped
        self._fence = fence
        self._wake = wake
        self._beating = beating
        self._busy_ns: dict[int, int] = {}  # row -> when it last had a room that moves
        self._fenced: dict[int, int] = {}  # row -> incarnation restarted on purpose
        # slot -> its generation, and when it was first seen unquiet
        self._undated: dict[int, tuple[int, int]] = {}

    def sweep(self, now_ns: int) -> int:
        """One pass over the live rooms.  Returns how many it changed."""
        table = self._table
        slots = table.live_slots()
        if not len(slots):
            return 0
        rows = table.rows(slots)
        # A slot that was cleared since `live_slots` reads as Failed, unquiet and owned by nobody.
        live = (rows[:, 0] >> np.uint64(GENERATION_SHIFT)) & np.uint64(1) == 1
        slots, rows = slots[live], rows[live]
        words, openers = rows[:, 0], rows[:, OPENER // 8]
        living = table.incarnations()
        states = words & np.uint64(STATE_MASK)
        is_open = (states > 0) & (states < 4)
        owner_rows = (words >> np.uint64(OWNER_SHIFT) & np.uint64(0xFF)).astype(np.intp)
        owners = words >> np.uint64(INCARNATION_SHIFT) & np.uint64(INCARNATION_MASK)
        owner_dead = (owner_rows != 0) & (living[owner_rows % len(living)] != owners)
        opener_rows = (openers & np.uint64(0xFF)).astype(np.intp)
        opened_by = openers >> np.uint64(8) & np.uint64(INCARNATION_MASK)
        opener_dead = (opener_rows != 0) & (living[opener_rows % len(living)] != opened_by)
        late_ms = np.uint64(now_ns // MILLISECOND_NS)
        late = is_open & ((rows[:, DEADLINE // 8] & np.uint64(VALUE_MASK)) < late_ms)
        unquiet = (states == KVPoll.Failed) & (words & np.uint64(QUIET_BIT) == 0)
        claimed = states == CLAIMED
        moving = np.bincount(owner_rows[states == KVPoll.Transferring], minlength=256)
        for row_index in np.flatnonzero(moving).tolist():
            self._busy_ns[row_index] = now_ns
        changed = 0
        due = np.flatnonzero(late | owner_dead | opener_dead | unquiet | claimed)
        for i in self._beating(due.tolist()):
            failpoints.hit("janitor.sweep.before_room")
            slot, generation = int(slots[i]), int(words[i] >> np.uint64(GENERATION_SHIFT))
            if claimed[i]:
                if owner_dead[i]:
                    table.discard(slot, generation)
                continue
            if late[i]:
                table.poll(slot, generation, now_ns)
            if owner_dead[i] or opener_dead[i]:
                reason = Reason.ENGINE_DIED
                if owner_dead[i]:
                    planned = self._fenced.get(int(owner_rows[i])) == int(owners[i])
                    reason = Reason.WORKER_FENCED if planned else Reason.WORKER_DIED
                changed += self._bury(slot, generation, reason, now_ns)
            if unquiet[i]:
                failed_ns = self._failed_ns(rows[i], slot, generation, now_ns)
                self._settle(rows[i], slot, generation, bool(owner_dead[i]), now_ns, failed_ns)
            # Not in the sweep that ended it: the listener has yet to read how, and tell the peer.
            if opener_dead[i] and not is_open[i] and table.clear(slot, generation):
                changed += 1
        return changed

    def _bury(self, slot: int, generation: int, reason: Reason, now_ns: int) -> int:
        """End an open room whose process is dead."""
        table = self._table
        word = table.read(slot, generation)
        if word is None or word.state not in OPEN:
            return 0
        if table.move(slot, generation, Event.FAULT, now_ns=now_ns, reason=reason):
            failpoints.hit("janitor.bury.after_move")
            table.count(Counter.SWEPT)
            self._wake(table.opener_row(slot))
            return 1
        return 0

    def _failed_ns(self, row: Cells, slot: int, generation: int, now_ns: int) -> int:
        """When a room failed.  Who failed it notes that afterwards: perhaps not yet, perhaps never,
        and perhaps a note of the slot's last room came late.  Then it is since we have known."""
        opened_ns, failed_ns = (
            int(row[ENTERED // 8 + s]) for s in (KVPoll.Bootstrapping, KVPoll.Failed)
        )
        if failed_ns >= opened_ns:
            return failed_ns
        undated = self._undated.get(slot)
        if undated is None or undated[0] != generation:
            self._undated[slot] = undated = generation, now_ns
        return undated[1]

    def _settle(
        self,
        row: Cells,
        slot: int,
        generation: int,
        owner_dead: bool,
        now_ns: int,
        failed_ns: int,
    ) -> None:
        """A Failed room that is not quiet: is it by now, and if it takes too long, make it so."""
        table = self._table
        owner_row = int(row[0] >> np.uint64(OWNER_SHIFT)) & 0xFF
        owner = int(row[0] >> np.uint64(INCARNATION_SHIFT)) & INCARNATION_MASK
        # Our worker's death ends what it reads, and what lands through its registration.  Over shm
        # the peer's worker writes by itself: until it unmaps what the dead one offered, which
        # nobody can map anew.  Before our worker is dead, no mapping does not mean that none comes.
        peer, rank = peer_of(int(row[PATH // 8])), int(row[OPENER // 8]) >> 40
        if owner_dead and not (table.role is Role.DECODE and self._mapped(peer, rank, owner)):
            if table.set_quiet(slot, generation):
                self._wake(table.opener_row(slot))
            return
        age_ns = now_ns - failed_ns
        reason = int(row[0]) >> REASON_SHIFT & 0xFF
        orphan = reason == Reason.PEER_RESTARTED and age_ns > ORPHANS_NS
        if orphan and self._settle_orphan(slot, generation, peer, rank, owner):
            return
        if owner_dead or self._fenced.get(owner_row) == owner:
            return
        rest_ns = now_ns - self._busy_ns.get(owner_row, 0)
        idle = table.role is Role.DECODE and min(age_ns, rest_ns) > IDLE_FENCE_NS
        if idle or age_ns > to_ns(self._timeouts.quiet_s):
            failpoints.hit("janitor.settle.before_fence")
            self._fence(owner_row, f"room {int(row[1])} did not become quiet")
            self._fenced[owner_row] = owner  # last: if asking fails, the next sweep asks again
            table.count(Counter.QUIET_FORCED)
            log.warning("row=%d room=%d not quiet: its worker is restarted", owner_row, int(row[1]))

    def _settle_orphan(self, slot: int, generation: int, peer: int, rank: int, owner: int) -> bool:
        """Another instance has the address of the room's prefill, so that one is dead.  Over shm it
        alone could write, and by now no process of it is left that might map our memory: then a
        mapping would be known, and there is none."""
        table = self._table
        over_shm = transport_of(table.path(slot, generation)) == SHM
        if table.role is not Role.DECODE or not over_shm or self._mapped(peer, rank, owner):
            return False
        quiet = table.set_quiet(slot, generation)
        if quiet:
            self._wake(table.opener_row(slot))
        return quiet
