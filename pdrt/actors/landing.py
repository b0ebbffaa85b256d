"""A rank of decode's room has landed: is that the room's success?

Of all bytes that may come, only if its destination was given to one room of prefill's.  A listener
sees to that, and its successor as far as that worker lives; so if another listener was ever sent
the destination, or we cannot know, the present one must confirm what a worker says.

And only if all ranks come from one room of prefill's.  A router may use an id again while our half
of its former use is open, and prefill gives rank by rank what it has.  So every `Landed` names the
use of the id that it is of, the first one is written into the slot of rank 0, where it outlives
this process, and a rank of another use ends the room.
"""

from __future__ import annotations

from collections.abc import Callable

from pdrt import failpoints
from pdrt.actors.decode_failing import Failing, Room
from pdrt.protocol.counters import Counter
from pdrt.protocol.messages import Landed
from pdrt.protocol.states import Event, KVPoll, Reason
from pdrt.shm_status import Handle, StatusTable


class Landing:
    def __init__(
        self, instance: str, table: StatusTable, failing: Failing, wake: Callable[[int], None]
    ) -> None:
        self._instance = instance
        self._table = table
        self._failing = failing
        self._wake = wake

    def take(self, landed: Landed, room: Room | None, now_ns: int, *, confirmed: bool) -> bool:
        """Give the verdict.  `confirmed`: prefill's present listener says so.  False if it is to be
        said again: by the listener, or to us once our engine has told us what room that is."""
        slot, generation = landed.slot, landed.generation
        table = self._table
        confirmed |= not landed.use  # of a prefill that knows nothing of all this
        state = table.state(slot, generation)
        # A tree before us may have had this address, and a room in this slot.
        ours = landed.instance == self._instance
        if state is None or not ours or state is KVPoll.Success:
            table.count(Counter.LATE)
            return True
        if state is KVPoll.Failed:  # too late to count, but nothing is moving any more
            failed = room or self._failing.find(Handle(landed.room, slot, generation))
            if confirmed or (failed is not None and failed.is_sole):
                self._failing.become_quiet(slot, generation)
            elif failed is not None:
                failed.landed = landed
            word = table.read(slot, generation)
            return word is None or word.quiet
        if room is None:
            return False
        if room.landed is None or room.landed.use != landed.use:
            room.landed = landed
        if not confirmed and not room.is_sole:
            return False
        told = room.landed  # the worker, who said so first, knows how much it was
        table.set_moved(slot, generation, told.length_bytes)
        table.set_taken(slot, generation, max(1, told.chunks))
        if not table.settle_use(*room.lead, landed.use):
            self._refuse(landed, now_ns)
            return True
        failpoints.hit("decode.landed.before_move")
        if not table.move(slot, generation, Event.LANDED, now_ns=now_ns):
            given_up = table.state(slot, generation) is KVPoll.Failed  # meanwhile
            return not given_up or self.take(landed, room, now_ns, confirmed=confirmed)
        failpoints.hit("decode.landed.after_move")
        table.count(Counter.BYTES_MOVED, told.length_bytes)
        table.count(Counter.CHUNKS_MOVED, told.chunks)
        self._wake(table.opener_row(slot))
        return True

    def _refuse(self, landed: Landed, now_ns: int) -> None:
        slot, generation, reason = landed.slot, landed.generation, Reason.PEER_LOST
        self._table.set_detail(slot, "ranks of two uses")
        if self._table.move(slot, generation, Event.FAULT, now_ns=now_ns, reason=reason):
            self._failing.become_quiet(slot, generation)
            self._wake(self._table.opener_row(slot))
