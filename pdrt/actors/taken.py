"""Which room of ours was given each slot of each decode: one destination is for one room.

A decode's slot takes part in one room a generation, and generations only grow.  So a destination is
refused if a newer generation of its slot was seen, if another room of ours had the same one, or if
its decode was told that none has it.

Guarantee: a destination that comes late, when the router uses its room id again, is never written
to, though prefill's listener was restarted in between.  For:

* A copy that was sent to an earlier listener names that session, and is dropped.
* A copy that was sent to the present one left while decode's room was open.  If a room of ours had
  it before, our worker, which wrote for that room, has it here and refuses it to any other.
* If none had it, nothing was written for it, and decode's room ends by what the present listener
  says: that a room is quiet is not believed of an earlier one.
* That a room has landed is not believed of a worker alone if another listener may have given its
  destination away, too: the present one must say that no other room of ours has it, or will, and
  asks its worker, since a listener between may have given it away.

Assumption: if both died, listener and worker, and the destination is given to another room, then
the dead worker's writes have ended, as they have over shm.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from pdrt.protocol.messages import Destination, Recall, Recalled
from pdrt.shm_status import Handle

SLOTS_MAX = 1 << 18  # remembered; the slot that was used longest ago is forgotten first
NEVER: tuple[int, Handle | None, int, bool] = (-1, None, 0, False)
ANOTHER = Handle(0, -1, 0)  # a room of ours, and a predecessor knew which


class Taken:
    def __init__(self, forgot: Callable[[], object] = lambda: None) -> None:
        """`forgot` is called for each slot that is forgotten for want of a place."""
        self._forgot = forgot
        # By decode's slot: the generation, whose it is, the use of that one's id, and `end`.
        self._newest: OrderedDict[tuple[str, int], tuple[int, Handle | None, int, bool]]
        self._newest = OrderedDict()

    def take(self, destination: Destination, ours: Handle, use: int = 0) -> bool:
        """May this destination be given to that room of ours?  Remembered if so."""
        key = destination.instance, destination.slot
        generation, owner, *_ = self._newest.get(key, NEVER)
        if destination.generation < generation:
            return False
        if destination.generation == generation:
            return owner == ours
        self._note(key, destination.generation, ours, use)
        return True

    def spend(self, instance: str, slot: int, generation: int) -> None:
        """No room of ours gets that one any more: its decode was told that nothing of it lands."""
        key = instance, slot
        if slot >= 0 and generation > self._newest.get(key, NEVER)[0]:
            self._note(key, generation, None, 0)

    def learn(self, instance: str, slot: int, generation: int, use: int) -> None:
        """A predecessor of ours gave that one to a room of ours, of that use."""
        if generation > self._newest.get((instance, slot), NEVER)[0]:
            self._note((instance, slot), generation, ANOTHER, use)

    def had(self, instance: str, slot: int, generation: int) -> bool:
        """Was that use of a decode's slot given to a room of ours, or may it have been, since a
        later one was seen?"""
        newest, owner, *_ = self._newest.get((instance, slot), NEVER)
        return newest > generation or (newest == generation and owner is not None)

    def use_of(self, instance: str, slot: int, generation: int) -> int:
        """The use of the room that it was given to; 0 if there is none, or we cannot know."""
        newest, _, use, _ = self._newest.get((instance, slot), NEVER)
        return use if newest == generation else 0

    def recall(self, recall: Recall, since: int) -> Recalled:
        """What a listener after the one that gave it away asks the worker: who had it?"""
        slot, generation, instance = theirs = recall.slot, recall.generation, recall.instance
        had = self.had(instance, slot, generation)
        use = self.use_of(instance, slot, generation)
        newest, *_, ended = self._newest.get((instance, slot), NEVER)
        self.spend(instance, slot, generation)
        return Recalled(*theirs, had, use, since, over=ended and newest == generation)

    def end(self, destination: Destination | None) -> None:
        """Of the room that was given it, if any, nothing can land there any more."""
        if destination is None:
            return
        key = destination.instance, destination.slot
        generation, owner, use, _ = self._newest.get(key, NEVER)
        if generation == destination.generation and owner is not None:
            self._newest[key] = generation, owner, use, True

    def _note(self, key: tuple[str, int], generation: int, owner: Handle | None, use: int) -> None:
        self._newest[key] = generation, owner, use, False
        self._newest.move_to_end(key)
        if len(self._newest) > SLOTS_MAX:
            self._newest.popitem(last=False)
            self._forgot()
