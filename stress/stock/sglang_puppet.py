"""A prefill or a decode on the unmodified SGLang components.  Runs in SGLang's environment, and
imports nothing of ours but what drives the same components for the benchmark."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from stress.bench.stock_engine import AUX_ROWS, Components, play_decode, play_prefill
from stress.stock.obey import obey
from stress.stock.races import Held, meet

LOOK_S = 0.0005
SETTLED_S = 0.5  # nothing changed for so long: nothing is under way


class Puppet:
    def __init__(self, told: dict[str, Any]) -> None:
        self.shape = told["shape"]
        self.prefill = told["role"] == "prefill"
        self.parts = Components(told["role"], told["port"], self.shape)
        self.manager = self.parts.manager
        self.rooms: dict[int, Any] = {}
        self._meet()

    # --- rooms ---

    def _meet(self) -> None:
        """A decode that lost sight of its prefill asks for it again, as its scheduler does."""
        if not self.prefill:
            self.parts.introduce()

    def do_open(self, room: int, first: int = 0, count: int = 0) -> None:
        """On decode it says at once where the KV must land."""
        self._meet()
        made = self.rooms[room] = self.parts.room(self.manager, self.parts.address, room)
        if not self.prefill:
            made.init(0)
            pages = self._pages(first, count)
            made.send_metadata(pages, room % AUX_ROWS, None, decode_prefix_len=0)

    def do_send(self, room: int, first: int, count: int) -> None:
        sender, row = self.rooms[room], room % AUX_ROWS
        sender.pop_decode_prefix_len()
        self.parts.aux.bootstrap_room[row, 0] = room
        self.parts.aux.output_ids[row, 0] = 1
        sender.init(count, row)
        sender.send(self._pages(first, count))

    def do_watch(self, rooms: list[int], states: list[int], limit_s: float) -> dict[str, Any]:
        """Until each room is in one of the states, or the limit: [state, when] of each."""
        seen: dict[int, list[float]] = {}
        end = time.monotonic() + limit_s
        while len(seen) < len(rooms):
            for room in rooms:
                if room not in seen and (state := int(self.rooms[room].poll())) in states:
                    seen[room] = [state, time.monotonic()]
            if time.monotonic() > end:
                break
            time.sleep(LOOK_S)
        left = {room: [int(self.rooms[room].poll()), None] for room in rooms if room not in seen}
        return {str(room): found for room, found in {**seen, **left}.items()}

    def do_abort(self, room: int) -> float:
        at = time.monotonic()
        self.rooms[room].abort()
        return at

    def do_clear(self, rooms: list[int]) -> None:
        """As its scheduler does: a failed room by asking why, another one by clear()."""
        from sglang.srt.disaggregation.common.conn import KVTransferError

        for room in rooms:
            made = self.rooms.pop(room)
            if int(made.poll()) != 0:
                made.clear()
                continue
            with contextlib.suppress(KVTransferError):
                made.failure_exception()  # clears, then raises why

    def do_give_up(self, rooms: list[int]) -> None:
        for room in rooms:
            self.do_abort(room)
        self.do_clear(rooms)

    def do_release(self, room: int) -> dict[str, Any]:
        """Wait until its scheduler would use an aborted room's pages again: once every prefill
        rank has acknowledged the abort, or after its time-out."""
        from sglang.srt.environ import envs

        limit_s = envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT.get()
        needed = len(self.rooms[room].bootstrap_infos)
        begun = time.monotonic()
        while not (safe := self.manager.is_abort_release_safe(room, needed)):
            if time.monotonic() - begun >= limit_s:
                break
            time.sleep(LOOK_S)
        return {"acknowledged": bool(safe), "waited_s": time.monotonic() - begun}

    def do_play(self, rooms: int, first: int) -> list[float]:
        """Small rooms one after the other; seconds of each."""
        self._meet()
        play = play_prefill if self.prefill else play_decode
        return play(self.parts, self.shape, {"rooms": rooms, "open": 1, "first": first})

    # --- pages ---

    def _pages(self, first: int, count: int) -> Any:
        import numpy as np

        return np.arange(first, first + count, dtype=np.int32)

    def do_fill(self, value: int) -> None:
        for tensor in self.parts.kv:
            tensor.fill_(value)

    def do_first_bytes(self, value: int, limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while not any(bool((tensor[:, 0] == value).any()) for tensor in self.parts.kv):
            if time.monotonic() > end:
                return False
        return True

    def do_count_other(self, value: int) -> int:
        """Pages with a byte that is not `value`."""
        import torch

        pages = torch.stack([(tensor != value).any(dim=1) for tensor in self.parts.kv])
        return int(pages.any(dim=0).sum())

    def do_settle(self, value: int, limit_s: float) -> int:
        """`count_other`, once nothing lands any more."""
        last, since, end = -1, time.monotonic(), time.monotonic() + limit_s
        while time.monotonic() - since < SETTLED_S and time.monotonic() < end:
            if (now := self.do_count_other(value)) != last:
                last, since = now, time.monotonic()
            time.sleep(0.02)
        return last

    # --- the manager ---

    def do_facts(self) -> dict[str, Any]:
        return {
            "port": self.manager.rank_port,
            "threads": [thread.name for thread in threading.enumerate()],
            "queues": len(getattr(self.manager, "transfer_queues", ())),
            "request_status": len(self.manager.request_status),
            "transfer_infos": len(getattr(self.manager, "transfer_infos", ())),
        }

    def do_race(self, rooms: int, limit_s: float) -> dict[str, int]:
        """Each room is opened and moved to Transferring; then one thread writes Success and another
        Failed, through the manager's own `update_status`."""
        poll, update = self.parts.KVPoll, self.manager.update_status
        for room in range(rooms):
            update(room, poll.Bootstrapping)
            update(room, poll.Transferring)
        played = meet(
            lambda room: update(room, poll.Success),
            lambda room: update(room, poll.Failed),
            rooms,
            limit_s,
        )
        ends = [int(self.manager.check_status(room)) for room in range(played)]
        for room in range(rooms):
            self.manager.request_status.pop(room)
        return {"rooms": played, "success": ends.count(4), "failed": ends.count(0)}

    def do_force(self) -> int:
        """One writer of Success is held between its reading of a room's status, through a dict that
        lets it wait there, and its writing, while another writes Failed.  How the room ends."""
        poll, held = self.parts.KVPoll, Held()

        class Slow(dict[int, Any]):
            def get(self, key: int, default: Any = None) -> Any:
                value = super().get(key, default)
                held.after_reading()
                return value

        kept, room = self.manager.request_status, 0
        self.manager.request_status = Slow({room: poll.Transferring})
        update = self.manager.update_status
        try:
            if not held.overtaken(
                lambda: update(room, poll.Success), lambda: update(room, poll.Failed)
            ):
                raise RuntimeError("its status is not read through get()")
            return int(self.manager.request_status[room])
        finally:
            self.manager.request_status = kept


if __name__ == "__main__":
    obey(Puppet)
