"""KVReceiver: decode's half of a room, as its engine drives it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pdrt import failpoints
from pdrt.engine.room import LISTENER, Desk, KVRoom
from pdrt.errors import IllegalMove
from pdrt.protocol.messages import Destination, Opened
from pdrt.protocol.states import Event, KVPoll
from pdrt.shm_status import Handle


class KVReceiver(KVRoom):
    """init, poll until WaitingForInput, send_metadata, poll until the verdict."""

    def __init__(self, room: int, handles: Sequence[Handle], desk: Desk, peer: str) -> None:
        super().__init__(room, handles, desk, peer=peer)
        self._destinations: list[Destination] = []
        self._landing: tuple[bytes, int] | None = None  # pages and aux row, still to be told
        self._resent_ns = self._pause_ns = 0

    def init(self) -> None:
        """Ask for the room at its prefill."""
        self._resent_ns = self._clock()
        failpoints.hit("engine.receiver.before_opened")
        self._post_opened()
        self._desk.flush()

    def _post_opened(self) -> None:
        lead = self._handles[0]
        for rank, handle in enumerate(self._handles):
            opened = Opened(self.room, rank, *handle[1:], self.peer, *lead[1:])
            self._desk.mailbox.post(LISTENER, opened)

    def poll(self) -> KVPoll:
        state = super().poll()
        if state is KVPoll.WaitingForInput and self._landing is not None:
            return KVPoll.Transferring  # the engine has done its part; see send_metadata
        return state

    def send_metadata(self, pages: NDArray[np.int32], aux_index: int) -> None:
        """Say where the KV must land: in as many pages as prefill will send, or the room fails
        (BAD_DESTINATION).  From here on bytes may land there, until the room is quiet.
        While a worker of ours is being replaced, `tick` says it once its successor is there.
        Raises IllegalMove unless the room is WaitingForInput.  After a failure nothing is sent."""
        state = self.poll()
        if state is KVPoll.Failed:
            return
        if state is not KVPoll.WaitingForInput:
            raise IllegalMove(f"room {self.room} is {state.name}; wait for WaitingForInput")
        failpoints.hit("engine.metadata.before_move")
        self._landing = np.ascontiguousarray(pages, dtype="<i4").tobytes(), aux_index
        self._tell(self._clock())

    def _tell(self, now_ns: int) -> None:
        assert self._landing is not None
        workers = [self._desk.worker(rank) for rank in range(len(self._handles))]
        if not all(worker.incarnation for worker in workers):
            return  # nobody would own the room: its next owner would find it an orphan
        data, aux_index = self._landing
        self._landing = None
        for rank, handle in enumerate(self._handles):
            worker = workers[rank]
            # The move comes before the message: once the destination has left, only a fence or the
            # worker's death can make these pages quiet, and the table must know it by then.
            if not self._table.move(
                handle.slot, handle.generation, Event.DESTINATION_SENT, now_ns=now_ns, owner=worker
            ):
                self.poll()
                return
            failpoints.hit("engine.metadata.before_post")
            destination = Destination(
                self.room,
                rank,
                handle.slot,
                handle.generation,
                self._desk.instance,
                worker.incarnation,
                data,
                aux_index,
            )
            self._destinations.append(destination)
            self._desk.mailbox.post(LISTENER, destination)
        self._resent_ns = now_ns
        self._desk.flush()

    @property
    def queued(self) -> bool:
        return not self._destinations and self._landing is None

    def resend(self, now_ns: int, *, restarted: bool) -> bool:
        """Tell a listener that was restarted, or that may have missed it, about this room again."""
        if self._verdict is not None:
            return False
        if self._landing is not None:
            self._tell(now_ns)
        handles, table = self._handles, self._table
        if not restarted:
            if all(table.taken(h.slot, h.generation) for h in handles):
                return False
            self._pause_ns = self._pause_ns or 5 * self._desk.resend_ns
            if now_ns - self._resent_ns < self._pause_ns:
                return False
            self._pause_ns = min(2 * self._pause_ns, 50 * self._desk.resend_ns)
        self._resent_ns = now_ns
        self._post_opened()
        for destination in self._destinations:
            self._desk.mailbox.post(LISTENER, destination)
        return True
