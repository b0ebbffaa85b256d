"""THE STATUS TABLE: what is in shared memory, drawn here and asserted below.

One sealed memfd, handed on by descriptor, so there is nothing to unlink and nothing to leak.

    +--------+-----------------+----------------------+---------------------------+
    | header | owners_max x 128 | owners_max x counters | rooms_max slots x 128    |
    +--------+-----------------+----------------------+---------------------------+

A slot is one room on one rank:

      0      8      16         24      32      40       48               88     96      104
    +------+------+----------+-------+-------+--------+----------------+------+-------+--------+
    | word | room | deadline | moved | taken | opener | entered_ns x 5 | path | use   | detail |
    +------+------+----------+-------+-------+--------+----------------+------+-------+--------+

The word is everything that must change together, and changes only by compare-and-swap:

     63          32 31         21 20    13 12     5  4      3     0
    +--------------+-------------+--------+--------+-------+-------+
    | generation   | incarnation | owner  | reason | quiet | state |
    +--------------+-------------+--------+--------+-------+-------+

An even generation is a free slot, so a zero page reads as all free; an odd one is a live room.
`deadline`, `moved`, `taken`, `path` and `use` carry the low 24 bits of the generation above a
40-bit value and change by compare-and-swap too: a writer of an older generation can change nothing
of a newer room.  `path` is the transport's code (8 bits) and a digest of the peer's instance (32).
`use` is prefill's name of this use of the room id: ours on prefill, on decode the one that landed.
`opener` is the engine that holds the room; `owner` in the word is the worker whose death ends it.

Nothing here is locked: a process killed between any two instructions leaves the table usable.  A
slot claimed by a process that dies before it publishes the room is freed by the sweep.

What this is *not*: it knows no message, no page and no clock; times are arguments.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from atomicshm import AtomicView
from numpy.typing import NDArray

from pdrt import failpoints
from pdrt.clock import MILLISECOND_NS
from pdrt.errors import AttachFailed, TableFull, is_exhausted
from pdrt.memfd import memory_fd
from pdrt.process_rows import (
    HEADER_BYTES,
    INCARNATION_MASK,
    NOBODY,
    OWNER_BYTES,
    OWNERS_MAX,
    ROWS_END,
    Owner,
    ProcessRows,
)
from pdrt.protocol.counters import COUNTERS_MAX, Counter, bucket_of
from pdrt.protocol.states import (
    MOVES,
    ON_EXPIRY,
    TERMINAL,
    Event,
    KVPoll,
    Reason,
    Role,
    quiet_at,
)

MAGIC = 0x7064_7274_5F73_6C31  # "pdrt_sl1"
LAYOUT_VERSION = 3  # 2: the bound of renewals; 3: the use of a room id
SLOT_BYTES = 128  # two cache lines: neighbours never share a prefetched pair
# magic version role slots owners counters pid start instance timeouts queue
HEADER = struct.Struct("<QIIIIIIQ16s5QQ")

ROOM, DEADLINE, MOVED, TAKEN, OPENER, ENTERED = 8, 16, 24, 32, 40, 48
PATH, USE, DETAIL, DETAIL_BYTES = 88, 96, 104, 24

STATE_MASK, QUIET_BIT = 0xF, 1 << 4
REASON_SHIFT, OWNER_SHIFT, INCARNATION_SHIFT, GENERATION_SHIFT = 5, 13, 21, 32
OWNER_BITS = 0x7FFFF << OWNER_SHIFT  # owner and incarnation together
CLAIMED = 0xF  # a state of the slot, not of a room: taken, not yet published
TAG_SHIFT, TAG_MASK, VALUE_MASK = 40, 0xFFFFFF, (1 << 40) - 1

HIGH_WATER = 1024  # in the header: how many slots, from the first, were ever used

assert HEADER.size <= HIGH_WATER < HEADER_BYTES
assert DETAIL + DETAIL_BYTES <= SLOT_BYTES
assert ENTERED + 8 * len(KVPoll) == PATH

_STATES = tuple(KVPoll)
_NEVER, _NO_DETAIL = bytes(PATH - ENTERED), bytes(DETAIL_BYTES)
_REASONS = tuple(Reason(n) if n in set(Reason) else Reason.NONE for n in range(256))
_ROLES = frozenset(Role)


class Handle(NamedTuple):
    """What a holder of a room keeps.  A stale handle changes nothing, and so does one that never
    was: an even generation, whatever a peer may say, names a free slot and no room."""

    room: int
    slot: int
    generation: int


class Word(NamedTuple):
    state: KVPoll
    quiet: bool
    reason: Reason
    owner: Owner
    generation: int

    @property
    def untouched(self) -> bool:
        """Was no byte of it ever allowed to move?  Who moves them is named before the first."""
        return not self.owner.row


def pack(state: int, quiet: bool, reason: int, owner: Owner, generation: int) -> int:
    return (
        state
        | (QUIET_BIT if quiet else 0)
        | reason << REASON_SHIFT
        | owner.row << OWNER_SHIFT
        | (owner.incarnation & INCARNATION_MASK) << INCARNATION_SHIFT
        | generation << GENERATION_SHIFT
    )


def unpack(word: int) -> Word:
    return Word(
        _STATES[word & STATE_MASK],
        bool(word & QUIET_BIT),
        _REASONS[word >> REASON_SHIFT & 0xFF],
        Owner(word >> OWNER_SHIFT & 0xFF, word >> INCARNATION_SHIFT & INCARNATION_MASK),
        word >> GENERATION_SHIFT,
    )


def transport_of(path: int) -> int:
    """Code of the transport in a slot's `path`."""
    return path >> 32 & 0xFF


def peer_of(path: int) -> int:
    """Digest of the peer instance in a slot's `path`; 0 while there is none."""
    return path & 0xFFFF_FFFF


def create(
    role: Role,
    *,
    rooms_max: int,
    instance: bytes,
    timeouts_ms: dict[KVPoll, int],
    now_ns: int,
    queue_ms: int = 600_000,
) -> int:
    """Make the memfd of a new tree and return its descriptor.  A room that waits is renewed until
    `queue_ms` after it was opened.  Raises NoMemory."""
    slots_offset = HEADER_BYTES + OWNERS_MAX * (OWNER_BYTES + COUNTERS_MAX * 8)
    length_bytes = slots_offset + rooms_max * SLOT_BYTES
    fd = memory_fd("pdrt-status", length_bytes)
    timeouts = [timeouts_ms.get(state, 0) for state in _STATES]
    os.pwrite(
        fd,
        HEADER.pack(
            MAGIC,
            LAYOUT_VERSION,
            role,
            rooms_max,
            OWNERS_MAX,
            COUNTERS_MAX,
            os.getpid(),
            now_ns,
            instance,
            *timeouts,
            queue_ms,
        ),
        0,
    )
    return fd


class StatusTable(ProcessRows):
    """A process's view of the table.  `me` is written as the mover and owns the counters."""

    def __init__(self, fd: int, me: Owner = NOBODY) -> None:
        """Map the table.  The descriptor stays the caller's.  Raises AttachFailed on a foreign
        one."""
        try:
            self.map = mmap.mmap(fd, max(HEADER_BYTES, os.fstat(fd).st_size))
        except (OSError, ValueError) as error:
            if is_exhausted(error):
                raise
            raise AttachFailed(f"not a status table: {error}") from None
        (
            magic,
            version,
            role,
            self.rooms_max,
            owners,
            counters,
            self.supervisor_pid,
            self.started_ns,
            self.instance,
            *timeouts,
            self.queue_ms,
        ) = HEADER.unpack_from(self.map)
        self._slots = ROWS_END + OWNERS_MAX * COUNTERS_MAX * 8
        whole = len(self.map) == self._slots + self.rooms_max * SLOT_BYTES
        ours = (MAGIC, LAYOUT_VERSION, OWNERS_MAX, COUNTERS_MAX)
        if (magic, version, owners, counters) != ours or role not in _ROLES or not whole:
            self.map.close()
            raise AttachFailed(
                f"not a status table of layout {LAYOUT_VERSION} "
                f"(magic {magic:#x}, layout {version})"
            )
        self.me = me
        self.role = Role(role)
        self.timeouts_ms = dict(zip(_STATES, timeouts, strict=True))
        self._view = AtomicView(self.map)
        self._load, self._cas, self._store = (
            self._view.load_u64,
            self._view.cas_u64,
            self._view.store_u64,
        )
        self._steps = [self._steps_of(event) for event in Event]
        cells = np.frombuffer(self.map, dtype=np.uint64)
        self._rows = cells[self._slots // 8 :].reshape(self.rooms_max, SLOT_BYTES // 8)
        self.words: NDArray[np.uint64] = self._rows[:, 0]  # rooms_max words; to read many at once
        self.counters: NDArray[np.uint64] = cells[ROWS_END // 8 : self._slots // 8].reshape(
            OWNERS_MAX, COUNTERS_MAX
        )
        self._owners = cells[HEADER_BYTES // 8 : ROWS_END // 8].reshape(
            OWNERS_MAX, OWNER_BYTES // 8
        )
        self._free: list[int] = []
        self._cursor, self._closed = 0, False

    def _steps_of(self, event: Event) -> list[tuple[int, int] | None]:
        """By the low four bits of a word: what `event` makes of them, and the new deadline in
        milliseconds from now (0: none).  None: it does not apply."""
        steps: list[tuple[int, int] | None] = [None] * (STATE_MASK + 1)
        for state in KVPoll:
            if (state, event) in MOVES[self.role]:
                after = MOVES[self.role][state, event][0]
                quiet = QUIET_BIT if quiet_at(state, after) else 0
                steps[state] = after | quiet, self.timeouts_ms[after]
        return steps

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._view.close()
            del self._rows, self.words, self.counters, self._owners
            self.map.close()

    # --- rooms: open, move, read, clear ----------------------------------------------------------

    def open(self, room: int, rank: int, *, now_ns: int, use: int = 0) -> Handle:
        """Claim a free slot and publish a room in Bootstrapping, opened by `me`.  `use` is the same
        for all ranks of the room (prefill); 0 on decode.  Raises TableFull."""
        slot, generation = self._claim()
        failpoints.hit("table.open.claimed")
        at = self._slots + slot * SLOT_BYTES
        tag = (generation & TAG_MASK) << TAG_SHIFT
        store = self._store
        store(at + ROOM, room)
        store(
            at + DEADLINE, tag | (now_ns // MILLISECOND_NS + self.timeouts_ms[KVPoll.Bootstrapping])
        )
        store(at + MOVED, tag)
        store(at + TAKEN, tag)
        store(at + OPENER, self.me.row | self.me.incarnation << 8 | rank << 40)
        # Nobody reads these before the word is published, and no older generation swaps them.
        self.map[at + ENTERED : at + PATH] = _NEVER
        self.map[at + DETAIL : at + DETAIL + DETAIL_BYTES] = _NO_DETAIL
        store(at + ENTERED + 8 * KVPoll.Bootstrapping, now_ns)
        store(at + PATH, tag)
        store(at + USE, tag | use & VALUE_MASK)
        failpoints.hit("table.open.before_word")
        store(at, pack(KVPoll.Bootstrapping, False, 0, NOBODY, generation))
        self.count(Counter.ROOMS_OPENED)
        return Handle(room, slot, generation)

    def _claim(self) -> tuple[int, int]:
        for _ in range(2 + self.rooms_max // 1024):
            while self._free:
                slot = self._free.pop()
                at = self._slots + slot * SLOT_BYTES
                word = self._load(at)
                generation = word >> GENERATION_SHIFT
                if generation & 1:
                    continue
                generation = (generation + 1) & 0xFFFFFFFF
                # Before the claim: killed between the two, this process must not leave a claimed
                # slot beyond the mark, where no sweep would see it.
                self._raise_high_water(slot + 1)
                if self._cas(at, word, pack(CLAIMED, False, 0, self.me, generation)) == word:
                    return slot, generation
            self._find_free()
        self.count(Counter.ROOMS_REFUSED)
        raise TableFull(
            f"all {self.rooms_max} room slots are in use; raise --rooms-max or send less at once"
        )

    def _raise_high_water(self, used: int) -> None:
        """Slots from here on were never used, so that scans of a quiet table cost nothing."""
        seen = self._load(HIGH_WATER)
        while seen < used:
            previous = self._cas(HIGH_WATER, seen, used)
            if previous == seen:
                return
            seen = previous

    def _find_free(self) -> None:
        """Look at the next 1,024 slots.  Only a guess: the CAS decides."""
        end = min(self._cursor + 1024, self.rooms_max)
        block = self.words[self._cursor : end]
        found = np.flatnonzero((block >> np.uint64(GENERATION_SHIFT) & np.uint64(1)) == 0)
        self._free.extend((found[::-1] + self._cursor).tolist())
        self._cursor = 0 if end == self.rooms_max else end

    def move(
        self,
        slot: int,
        generation: int,
        event: Event,
        *,
        now_ns: int,
        reason: Reason = Reason.NONE,
        owner: Owner | None = None,
    ) -> bool:
        """Apply an event.  True if the room is now where the event leads; False if it is over,
        stale or the event does not apply (all normal, law 1).  `owner` becomes the process whose
        death ends the room; a room that moves is nobody's to take over."""
        if not 0 <= slot < self.rooms_max:
            return False
        at = self._slots + slot * SLOT_BYTES
        steps = self._steps[event]
        kept = OWNER_BITS if owner is None else 0
        fixed = generation << GENERATION_SHIFT | reason << REASON_SHIFT
        if owner is not None:
            fixed |= owner.row << OWNER_SHIFT
            fixed |= (owner.incarnation & INCARNATION_MASK) << INCARNATION_SHIFT
        word = self._load(at)
        while word >> GENERATION_SHIFT == generation:
            step = steps[word & STATE_MASK]
            if step is None:
                return False
            low_bits, timeout_ms = step
            if owner is not None and word & STATE_MASK == low_bits & STATE_MASK:
                if (word ^ fixed) & OWNER_BITS:
                    return False
            new = low_bits | fixed | (word & kept)
            if timeout_ms:
                self._tagged(at + DEADLINE, generation, now_ns // MILLISECOND_NS + timeout_ms)
            if new == word:
                return True
            seen = self._cas(at, word, new)
            if seen == word:
                self._entered(at, word & STATE_MASK, new & STATE_MASK, reason, now_ns)
                return True
            word = seen
        return False

    def _entered(self, at: int, state: int, after: int, reason: Reason, now_ns: int) -> None:
        """Times and counters of a move this process has just made.  Statistics, never the truth."""
        failpoints.hit("table.move.after_cas")
        if after == state:
            return
        self._store(at + ENTERED + 8 * after, now_ns)
        if after not in TERMINAL:
            return
        load, count = self._load, self.count
        room_ns = max(0, now_ns - load(at + ENTERED + 8 * KVPoll.Bootstrapping))
        count(Counter.ROOM_NS, room_ns)
        count(Counter.ROOM_BUCKET, 1, bucket_of(room_ns))
        if after == KVPoll.Failed:
            count(Counter.VERDICT_FAILED, 1, reason)
            return
        count(Counter.VERDICT_SUCCESS)
        transfer_ns = max(0, now_ns - load(at + ENTERED + 8 * KVPoll.Transferring))
        count(Counter.TRANSFER_NS, transfer_ns)
        count(Counter.TRANSFER_BUCKET, 1, bucket_of(transfer_ns))

    def set_quiet(self, slot: int, generation: int) -> bool:
        """Record that no byte of this finished room can move any more.  True if this call did
        it."""
        if not 0 <= slot < self.rooms_max or not generation & 1:
            return False
        at = self._slots + slot * SLOT_BYTES
        word = self._load(at)
        while word >> GENERATION_SHIFT == generation and word & STATE_MASK in (
            KVPoll.Failed,
            KVPoll.Success,
        ):
            if word & QUIET_BIT:
                return False
            seen = self._cas(at, word, word | QUIET_BIT)
            if seen == word:
                return True
            word = seen
        return False

    def poll(self, slot: int, generation: int, now_ns: int) -> KVPoll | None:
        """State of a room; ends it first if its deadline has passed (law 2).  No system call.
        None if the handle is stale: whoever looks at a room, another may clear it meanwhile."""
        at = self._slots + slot * SLOT_BYTES
        word = self._load(at)
        if 0 < word & STATE_MASK < 4 and word >> GENERATION_SHIFT == generation:
            deadline = self._load(at + DEADLINE)
            if (
                deadline >> TAG_SHIFT == generation & TAG_MASK
                and deadline & VALUE_MASK < now_ns // MILLISECOND_NS
            ):
                self.expire(slot, generation, word, now_ns)
                word = self._load(at)  # by now it may even be cleared, and somebody else's
        if word >> GENERATION_SHIFT != generation or not generation & 1:
            return None
        return _STATES[word & STATE_MASK]

    def expire(self, slot: int, generation: int, word: int, now_ns: int) -> None:
        """End a room whose deadline has passed, unless it moved since `word` was read."""
        state = _STATES[word & STATE_MASK]
        quiet = quiet_at(state, KVPoll.Failed)
        reason = ON_EXPIRY[state]
        keep = word & OWNER_BITS
        new = (
            KVPoll.Failed
            | (QUIET_BIT if quiet else 0)
            | reason << REASON_SHIFT
            | keep
            | generation << GENERATION_SHIFT
        )
        at = self._slots + slot * SLOT_BYTES
        if self._cas(at, word, new) == word:
            self._entered(at, state, KVPoll.Failed, reason, now_ns)
            self.count(Counter.DEADLINES)

    def poll_many(
        self,
        slots: NDArray[np.intp],
        generations: NDArray[np.uint64],
        now_ns: int,
        each: Callable[[Iterable[int]], Iterable[int]] = iter,
    ) -> NDArray[np.uint8]:
        """States of many rooms in one pass, deadlines enforced.  255 marks a stale handle.  `each`
        goes through those that are late."""
        words = self.words[slots]
        states = (words & np.uint64(STATE_MASK)).astype(np.uint8)
        fresh = (words >> np.uint64(GENERATION_SHIFT) == generations) & (generations & 1 != 0)
        deadlines = self._rows[slots, DEADLINE // 8]
        late = (deadlines & np.uint64(VALUE_MASK)) < np.uint64(now_ns // MILLISECOND_NS)
        late &= fresh & (states > 0) & (states < 4)
        for i in each(np.flatnonzero(late).tolist()):
            state = self.poll(int(slots[i]), int(generations[i]), now_ns)
            if state is None:  # cleared since this pass began
                fresh[i] = False
            else:
                states[i] = state
        states[~fresh] = 255
        return states

    def read(self, slot: int, generation: int) -> Word | None:
        """The word of a room, or None if the handle is stale or was never valid."""
        word = self._valid(slot, generation)
        return None if word is None else unpack(word)

    def state(self, slot: int, generation: int) -> KVPoll | None:
        """As `read`, the state alone: it is what most messages need."""
        word = self._valid(slot, generation)
        return None if word is None else _STATES[word & STATE_MASK]

    def _valid(self, slot: int, generation: int) -> int | None:
        if not 0 <= slot < self.rooms_max or not generation & 1:
            return None
        word = self._load(self._slots + slot * SLOT_BYTES)
        stale = word >> GENERATION_SHIFT != generation or word & STATE_MASK == CLAIMED
        return None if stale else word

    def is_quiet(self, slot: int, generation: int) -> bool:
        """Can no byte of this room move any more?  False of a room that was cleared."""
        word = self._load(self._slots + slot * SLOT_BYTES)
        return word >> GENERATION_SHIFT == generation and word & QUIET_BIT != 0

    def clear(self, slot: int, generation: int) -> bool:
        """Free the slot of a quiet verdict.  False if the room is open, not quiet, or cleared
        already."""
        at = self._slots + slot * SLOT_BYTES
        word = self._load(at)
        if word >> GENERATION_SHIFT != generation or not word & QUIET_BIT or not generation & 1:
            return False
        if self._cas(at, word, ((generation + 1) & 0xFFFFFFFF) << GENERATION_SHIFT) != word:
            return False
        if len(self._free) < self.rooms_max:  # who only clears would collect them without end
            self._free.append(slot)
        return True

    def discard(self, slot: int, generation: int) -> None:
        """Undo an `open` that nobody has been told of."""
        at = self._slots + slot * SLOT_BYTES
        word = self._load(at)
        while word >> GENERATION_SHIFT == generation and generation & 1:  # others may move it still
            free = ((generation + 1) & 0xFFFFFFFF) << GENERATION_SHIFT
            seen = self._cas(at, word, free)
            if seen == word:
                return
            word = seen

    # --- what travels beside the word ------------------------------------------------------------

    def renew(self, slot: int, generation: int, now_ns: int, timeout_ms: int) -> None:
        """Move the deadline to now + timeout.  Nothing happens to a newer room in the slot."""
        at = self._slots + slot * SLOT_BYTES
        self._tagged(at + DEADLINE, generation, now_ns // MILLISECOND_NS + timeout_ms)

    def renew_state(self, slot: int, generation: int, now_ns: int) -> None:
        """Renew by the timeout of the state the room is in: its bytes move, or somebody knows what
        it waits for.  A room that only waits is not renewed beyond `queue_ms` after it was opened,
        or a queue that never moves would hold it for good."""
        word = self.read(slot, generation)
        if word is None or not (timeout_ms := self.timeouts_ms[word.state]):
            return
        age_ms = (now_ns - self.entered_ns(slot)[KVPoll.Bootstrapping]) // MILLISECOND_NS
        if word.state >= KVPoll.Transferring or age_ms + timeout_ms <= self.queue_ms:
            self.renew(slot, generation, now_ns, timeout_ms)

    def set_moved(self, slot: int, generation: int, length_bytes: int) -> None:
        self._tagged(self._slots + slot * SLOT_BYTES + MOVED, generation, length_bytes)

    def set_taken(self, slot: int, generation: int, count: int) -> None:
        """Acknowledge to the engine: chunks accepted (prefill); 1 once the destination is
        delivered, then the chunks that landed (decode)."""
        self._tagged(self._slots + slot * SLOT_BYTES + TAKEN, generation, count)

    def taken(self, slot: int, generation: int) -> int:
        value = self._load(self._slots + slot * SLOT_BYTES + TAKEN)
        return value & VALUE_MASK if value >> TAG_SHIFT == generation & TAG_MASK else 0

    def moved_bytes(self, slot: int, generation: int) -> int:
        value = self._load(self._slots + slot * SLOT_BYTES + MOVED)
        return value & VALUE_MASK if value >> TAG_SHIFT == generation & TAG_MASK else 0

    def _tagged(self, at: int, generation: int, value: int) -> None:
        """Set a field that carries the generation; nothing happens if it carries another."""
        tag = generation & TAG_MASK
        old = self._load(at)
        if old >> TAG_SHIFT == tag and generation & 1:
            self._cas(at, old, tag << TAG_SHIFT | (value & VALUE_MASK))

    def set_path(self, slot: int, generation: int, transport: int, peer: int) -> None:
        """Which transport and which peer instance (codes of `protocol.peers`) the room uses;
        before PEER_KNOWN."""
        at = self._slots + slot * SLOT_BYTES + PATH
        self._tagged(at, generation, transport << 32 | peer)

    def set_detail(self, slot: int, detail: str) -> None:
        """A few words for people on why the room is about to fail; before the FAULT."""
        at = self._slots + slot * SLOT_BYTES + DETAIL
        data = detail.encode("ascii", "replace")[:DETAIL_BYTES].ljust(DETAIL_BYTES, b"\0")
        for offset in range(0, DETAIL_BYTES, 8):
            self._store(at + offset, int.from_bytes(data[offset : offset + 8], "little"))

    def detail(self, slot: int) -> str:
        at = self._slots + slot * SLOT_BYTES + DETAIL
        return self.map[at : at + DETAIL_BYTES].rstrip(b"\0").decode("ascii", "replace")

    def path(self, slot: int, generation: int) -> int:
        """For `transport_of` and `peer_of`; 0 before there is one, and of a stale handle."""
        at = self._slots + slot * SLOT_BYTES + PATH
        value = 0 if self._valid(slot, generation) is None else self._load(at)
        return value & VALUE_MASK if value >> TAG_SHIFT == generation & TAG_MASK else 0

    def use(self, slot: int, generation: int) -> int:
        """Prefill's name of this use of the room id; 0 if there is none, and of a stale handle."""
        value = 0
        if self._valid(slot, generation) is not None:
            value = self._load(self._slots + slot * SLOT_BYTES + USE)
        return value & VALUE_MASK if value >> TAG_SHIFT == generation & TAG_MASK else 0

    def settle_use(self, slot: int, generation: int, use: int) -> bool:
        """Decode: is that the use whose bytes the room takes?  The first that asks decides."""
        if self._valid(slot, generation) is None:
            return False
        unsettled = (generation & TAG_MASK) << TAG_SHIFT
        wanted = unsettled | use & VALUE_MASK
        seen = self._cas(self._slots + slot * SLOT_BYTES + USE, unsettled, wanted)
        return seen in (unsettled, wanted)

    def opener_row(self, slot: int) -> int:
        """Row of the engine that opened the room in the slot."""
        return self._load(self._slots + slot * SLOT_BYTES + OPENER) & 0xFF

    def entered_ns(self, slot: int) -> tuple[int, ...]:
        """When the room entered each state, by KVPoll number; 0 if it did not."""
        return tuple(int(v) for v in self._rows[slot, ENTERED // 8 : PATH // 8])

    # --- many rooms at once: listener, janitor, health -------------------------------------------

    def live_slots(self) -> NDArray[np.intp]:
        """Slots that hold a room, in one pass."""
        used = self.words[: self._load(HIGH_WATER)]
        return np.flatnonzero(used >> np.uint64(GENERATION_SHIFT) & np.uint64(1))

    def end_late(
        self, now_ns: int, each: Callable[[Iterable[int]], Iterable[int]] = iter
    ) -> NDArray[np.intp]:
        """As `live_slots`; rooms whose deadline has passed are ended first."""
        slots = self.live_slots()
        if len(slots):  # the pass costs much even of nothing
            self.poll_many(slots, self.words[slots] >> np.uint64(GENERATION_SHIFT), now_ns, each)
        return slots

    def slots_opened_by(self, row: int, *, but: int) -> int:
        """How many rooms an engine row holds from incarnations other than `but`."""
        slots = self.live_slots()
        openers = self._rows[slots, OPENER // 8]
        theirs = (openers & np.uint64(0xFF)) == row
        other = (openers >> np.uint64(8) & np.uint64(INCARNATION_MASK)) != but
        return int(np.count_nonzero(theirs & other))

    def rows(self, slots: NDArray[np.intp]) -> NDArray[np.uint64]:
        """Copies of whole slots, (len, 16) u64 in the order drawn above."""
        return self._rows[slots]

    # --- counters: one row each process ----------------------------------------------------------

    def count(self, counter: Counter, amount: int = 1, offset: int = 0) -> None:
        """Add to a counter of `me`.  Wait-free; one writer each."""
        self._view.fetch_add_u64(
            ROWS_END + (self.me.row * COUNTERS_MAX + counter + offset) * 8, amount
        )
