"""One side of one room, step by step; and the pages and aux rows that it uses."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass
from time import monotonic_ns

import numpy as np
from numpy.typing import NDArray

from pdrt.engine.manager import KVManager
from pdrt.engine.receiver import KVReceiver
from pdrt.engine.sender import KVSender
from pdrt.errors import CorruptAux
from pdrt.memory.aux import AuxRow
from pdrt.protocol.states import Reason, Role
from stress.cascades import plan, words
from stress.cascades.history import Kind, Writer
from stress.cascades.plan import Spec
from stress.cascades.words import FAILED, SUCCESS, TRANSFERRING, WAITING

HOLD_NS = 150_000_000  # pages of a room that is over are looked at again after this,
LONG_HOLD_NS = 2_000_000_000  # and of some rooms after this
PACE_NS = 20_000_000  # a paced chunk goes after this, whatever has landed
LANDING_SPIN_NS = 1_500_000
HELD_MAX = 48
LONG_EVERY, SUCCESS_EVERY = 64, 8  # by a room's number in its lane
WIPED = (1 << 64) - 1
ENGINE_ROWS = range(48, 56)
_U64 = struct.Struct("<Q")
_ODD = np.arange(1, 2 * 4096, 2, dtype=np.uint64)
_STEPS = (np.arange(4096, dtype=np.uint64) * np.uint64(plan.STEP)).astype(np.uint64)

Pages = NDArray[np.int32]


@dataclass
class Taken:
    pages: Pages
    aux: int


class Purse:
    """Pages and aux rows of this life of a player: a half of the pool.

    What a predecessor left may still be written until its rooms are cleared.  So successive lives
    take different halves, and a life whose predecessor had not yet seen the rooms of its own
    predecessor out (`safe` is false) waits until no room of anybody else is left.
    """

    def __init__(self, manager: KVManager, half: int, *, safe: bool, seed: int) -> None:
        self._manager = manager
        pages, rows = manager.maps[0].pages_count // 2, manager.maps[0].aux_rows // 2
        self._mine = (
            list(range(half * pages, (half + 1) * pages)),
            list(range(half * rows, (half + 1) * rows)),
        )
        random.Random(seed).shuffle(self._mine[0])
        self._pages, self._aux = self._mine if safe else ([], [])
        self._settled = False
        self._looked_ns = 0

    def look_round(self, now_ns: int) -> bool:
        """True once: the first time that no room of another life was there."""
        if self._settled or now_ns - self._looked_ns < 10_000_000:
            return False
        self._looked_ns = now_ns
        table = self._manager.table
        me = table.me
        for row in ENGINE_ROWS:
            mine = me.incarnation & 0x7FF if row == me.row else -1
            if table.slots_opened_by(row, but=mine):
                return False
        self._settled = True
        self._pages, self._aux = self._mine
        return True

    def take(self, pages_count: int) -> Taken | None:
        if len(self._pages) < pages_count or not self._aux:
            return None
        taken = self._pages[-pages_count:]
        del self._pages[-pages_count:]
        return Taken(np.array(taken, dtype=np.int32), self._aux.pop())

    def give(self, taken: Taken) -> None:
        self._pages.extend(taken.pages.tolist())
        self._aux.append(taken.aux)


class Hand:
    """What all parts of one life share."""

    def __init__(self, salt: int, manager: KVManager, player: int) -> None:
        self.salt, self.manager, self.player = salt, manager, player
        self.is_prefill = manager.role is Role.PREFILL
        count = manager.maps[0].pages_count
        self.kv = np.frombuffer(manager.kv(0), dtype=np.uint64).reshape(count, plan.PAGE_WORDS)
        self._opened: dict[int, int] = {}
        self.held = 0
        header = words.HEADER.unpack_from(manager.table.map)
        self._slots = words.HEADER_BYTES + header[4] * (words.OWNER_BYTES + header[5] * 8)

    def open_in(self, lane: int) -> int:
        return self._opened.get(lane, 0)

    def add(self, lane: int, amount: int) -> None:
        self._opened[lane] = self._opened.get(lane, 0) + amount

    def word(self, slot: int) -> int:
        """As it is in the table."""
        at = self._slots + slot * words.SLOT_BYTES
        return int(_U64.unpack_from(self.manager.table.map, at)[0])

    def open(self, room: int, spec: Spec, taken: Taken, peer: str, writer: Writer) -> Part:
        """Raises Refused."""
        half: KVSender | KVReceiver
        if self.is_prefill:
            half = self.manager.sender(room)
        else:
            half = self.manager.receiver(room, peer)
        _, slot, generation = half._handles[0]
        writer.append(Kind.OPENED, room, self.player, generation, slot)
        self.add(plan.lane_of(room), 1)
        if isinstance(half, KVSender):
            half.init(spec.pages_count, taken.aux)
            first = plan.first_word(self.salt, room)
            values = np.uint64(first) + _STEPS[: spec.pages_count]
            self.kv[taken.pages] = values[:, None]
            self.manager.aux.write(taken.aux, AuxRow(room, plan.token(self.salt, room)))
            return Sending(self, room, spec, taken, half)
        self.manager.aux.write(taken.aux, AuxRow(WIPED, 0))
        half.init()
        return Receiving(self, room, spec, taken, half)

    def let_go(self) -> None:
        del self.kv


class Part:
    """Common to both sides: from the verdict on, and the aborts."""

    role = 0

    def __init__(
        self, hand: Hand, room: int, spec: Spec, taken: Taken, half: KVSender | KVReceiver
    ) -> None:
        self.hand, self.room, self.spec, self.taken = hand, room, spec, taken
        self._half = half
        _, self._slot, self._generation = half._handles[0]
        self.over = False
        self._verdict: int | None = None
        self._aim = spec.aim if spec.aborter == self.role else 0
        self._abort_ns = 0
        self._due_ns = 0
        self.quiet = False
        self._exposed = False  # bytes may have moved
        self._pattern: int | None = None
        self._opened_ns = monotonic_ns()

    def step(self, now_ns: int, writer: Writer) -> bool:
        if self._verdict is None:
            return self._play(now_ns, writer)
        return self._leave(now_ns, writer)

    # --- before the verdict ----------------------------------------------------------------------

    def _play(self, now_ns: int, writer: Writer) -> bool:
        state = int(self._half.poll())
        if state in (FAILED, SUCCESS):
            self._conclude(state, now_ns, writer)
            return True
        if self._aim:
            if self._abort_ns:
                if now_ns >= self._abort_ns:
                    self._abort(writer)
                    return True
            elif self._reached(state, now_ns):
                self._abort_ns = now_ns + self.spec.delay_us * 1000
        return self._go_on(state, now_ns, writer)

    def _go_on(self, state: int, now_ns: int, writer: Writer) -> bool:
        raise NotImplementedError

    def _reached(self, state: int, now_ns: int) -> bool:
        """Is the abort's moment here?"""
        raise NotImplementedError

    def lose_client(self, writer: Writer) -> None:
        if self._verdict is None:
            self._abort(writer)

    def _abort(self, writer: Writer) -> None:
        reason = Reason.CLIENT_GONE if self.spec.client_gone else Reason.ABORTED
        writer.append(Kind.ABORTED, self.room, self.hand.player, self.spec.aim, int(reason))
        self._aim = 0
        self._half.abort(reason)

    def has_ended(self, writer: Writer) -> bool:
        """For a room whose tree is gone: nothing is done for it but look."""
        if self._verdict is None:
            state = int(self._half.poll())
            if state not in (FAILED, SUCCESS):
                return False
            self._note_verdict(state, writer)
        return True

    def _note_verdict(self, state: int, writer: Writer) -> None:
        self._verdict = state
        word = words.decode(self.hand.word(self._slot))
        writer.append(Kind.VERDICT, self.room, self.hand.player, state, word.reason)

    def _conclude(self, state: int, now_ns: int, writer: Writer) -> None:
        self._note_verdict(state, writer)
        self.hand.add(plan.lane_of(self.room), -1)
        if state == SUCCESS and not self.hand.is_prefill:
            self._check(writer)
        self._due_ns = now_ns + self.spec.linger_ms * 1_000_000
        if self._aim == plan.AFTER:
            self._due_ns += self.spec.delay_us * 1000

    def _check(self, writer: Writer) -> None:
        """What has arrived, for the oracle to compare."""
        player, count = self.hand.player, len(self.taken.pages)
        found = self.hand.kv[self.taken.pages]
        first = found[:, 0]
        whole = int((found == first[:, None]).all())
        digest = int((first * _ODD[:count]).sum(dtype=np.uint64))
        writer.append(Kind.BYTES, self.room, player, whole, digest)
        try:
            got = self.hand.manager.aux.read(self.taken.aux, self.room).first_token
        except CorruptAux:
            got = WIPED
        writer.append(Kind.TOKEN, self.room, player, 0, got)

    # --- after it --------------------------------------------------------------------------------

    def _leave(self, now_ns: int, writer: Writer) -> bool:
        if now_ns < self._due_ns:
            return False
        if self._aim == plan.AFTER:
            self._abort(writer)
        if self._pattern is not None:
            self._look(writer)
            return True
        if not self.quiet:
            if not self._half.quiet():
                return False
            self.quiet = True
            self._again(writer)
            writer.append(Kind.QUIET, self.room, self.hand.player)
        self._half.clear()
        writer.append(Kind.CLEARED, self.room, self.hand.player)
        if self._is_held():
            self._fill(now_ns, writer)
        else:
            self.over = True
        return True

    def _again(self, writer: Writer) -> None:
        word = words.decode(self.hand.word(self._slot))
        if word.generation != self._generation:
            writer.append(Kind.AGAIN, self.room, self.hand.player, 255, word.generation)
        else:
            writer.append(Kind.AGAIN, self.room, self.hand.player, word.state, word.reason)

    def _is_held(self) -> bool:
        """Are its pages kept, to see whether anything lands there?  Those of failed rooms, and of
        some of decode's successes: after these nothing may land either."""
        success = self._verdict == SUCCESS
        if success and (self.hand.is_prefill or self.room % SUCCESS_EVERY):
            return False
        return self._exposed and self.hand.held < HELD_MAX

    def _hold_ns(self) -> int:
        """The long ones leave place for others, and clients' are waited for."""
        is_long = self.room % LONG_EVERY == 0 and not self.room & plan.CLIENTS
        return LONG_HOLD_NS if is_long and self.hand.held <= HELD_MAX // 2 else HOLD_NS

    def _fill(self, now_ns: int, writer: Writer) -> None:
        """As their next owner would; what lands there now is a late byte."""
        self._pattern = plan.canary(self.hand.salt, self.room)
        self.hand.kv[self.taken.pages] = np.uint64(self._pattern)
        self.hand.held += 1
        self._due_ns = now_ns + self._hold_ns()
        writer.append(Kind.FILLED, self.room, self.hand.player, len(self.taken.pages))

    def _look(self, writer: Writer) -> None:
        found = self.hand.kv[self.taken.pages]
        changed = int((found != np.uint64(self._pattern or 0)).any(axis=1).sum())
        count = len(self.taken.pages)
        writer.append(Kind.LOOKED, self.room, self.hand.player, count, changed)
        self.hand.held -= 1
        self.over = True


class Sending(Part):
    role = plan.PREFILL
    _half: KVSender

    def __init__(
        self, hand: Hand, room: int, spec: Spec, taken: Taken, half: KVSender | KVReceiver
    ) -> None:
        super().__init__(hand, room, spec, taken, half)
        self._sent = self._sent_pages = 0
        self._sent_ns = 0

    def _reached(self, state: int, now_ns: int) -> bool:
        match self._aim:
            case plan.OPENING | plan.WHENEVER:
                return True
            case plan.KNOWN:
                return state == WAITING
            case plan.FIRST:
                return self._sent >= 1
            case plan.MIDDLE:
                return self._sent >= (len(self.spec.chunks) + 1) // 2
            case plan.LAST:
                return self._sent == len(self.spec.chunks)
            case plan.LANDING:
                return self._sent == len(self.spec.chunks) and self._all_landed()
        return False

    def _all_landed(self) -> bool:
        """Watch closely for a moment: what comes between is short."""
        page_bytes = self.hand.manager.maps[0].page_bytes
        end_ns = monotonic_ns() + LANDING_SPIN_NS
        table, total = self.hand.manager.table, self._sent_pages * page_bytes
        while monotonic_ns() < end_ns:
            if table.moved_bytes(self._slot, self._generation) >= total:
                return True
            if int(self._half.poll()) in (FAILED, SUCCESS):
                return False
        return False

    def _may_send(self, state: int, now_ns: int) -> bool:
        if self._sent == 0:
            ready = self.spec.ahead or state in (WAITING, TRANSFERRING)
            return ready and self._aim not in (plan.OPENING, plan.KNOWN)
        if not self.spec.paced or now_ns - self._sent_ns > PACE_NS:
            return True
        landed = self.hand.manager.table.moved_bytes(self._slot, self._generation)
        return landed >= self._sent_pages * self.hand.manager.maps[0].page_bytes

    def _go_on(self, state: int, now_ns: int, writer: Writer) -> bool:
        chunks = self.spec.chunks
        moved = False
        end = len(chunks) - self.spec.held
        while self._sent < end and not self._abort_ns and self._may_send(state, now_ns):
            count = chunks[self._sent]
            pages = self.taken.pages[self._sent_pages : self._sent_pages + count]
            self._sent += 1
            self._sent_pages += count
            self._exposed = True
            last = self._sent == len(chunks)
            self._half.send(pages, last=last)
            self._sent_ns = now_ns
            if len(chunks) > 1:
                writer.append(Kind.SENT, self.room, self.hand.player, self._sent, int(last))
            moved = True
            if self._aim and self._reached(state, now_ns):
                self._abort_ns = now_ns + self.spec.delay_us * 1000
        return moved


class Receiving(Part):
    role = plan.DECODE
    _half: KVReceiver

    def _reached(self, state: int, now_ns: int) -> bool:
        told = self._exposed
        match self._aim:
            case plan.OPENING | plan.WHENEVER:
                return True
            case plan.KNOWN:
                return state == WAITING
            case plan.FIRST:
                return told
            case plan.MIDDLE | plan.LAST | plan.LANDING:
                return told and self._landing(now_ns)
        return False

    def _landing(self, now_ns: int) -> bool:
        """Bytes are there: look into the pages themselves, as nobody tells decode on the way."""
        count = len(self.taken.pages)
        at = {plan.MIDDLE: count // 2, plan.LAST: max(0, count - 2)}.get(self._aim, count - 1)
        word = int(self.hand.kv[self.taken.pages[at], -1])
        return word == plan.first_word(self.hand.salt, self.room) + at * plan.STEP & plan.MASK

    def _go_on(self, state: int, now_ns: int, writer: Writer) -> bool:
        if state != WAITING or self._exposed or self._aim == plan.KNOWN:
            return False
        self._exposed = True
        writer.append(Kind.TOLD, self.room, self.hand.player, len(self.taken.pages))
        self._half.send_metadata(self.taken.pages, self.taken.aux)
        return True
