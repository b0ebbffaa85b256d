"""Sixty clients, each with a room, die at one instant."""

from __future__ import annotations

import random
import signal
from time import monotonic_ns

from stress.cascades import clients, lanes, plan
from stress.cascades.history import Kind
from stress.cascades.lanes import DECODES, PREFILLS, lane_number
from stress.cascades.rig import Rig
from stress.cascades.trees import Held

CLIENTS = 60
SETTLED_S, OPEN_S, OVER_S = 20.0, 20.0, 20.0


def kill_all(rig: Rig, source: random.Random, cycle: int) -> str:
    """A sentence if their rooms do not end.  Nobody else may be hit meanwhile."""
    if not rig.until(lambda: _settled(rig), SETTLED_S):
        return f"cycle {cycle}: what dead engines left was not cleared within {SETTLED_S:g} s"
    turn = rig.lanes.get(lanes.ASK) + 1
    crowd = [_client(rig, source, cycle, number, turn) for number in range(CLIENTS)]
    rig.lanes.set(lanes.ASK, turn)

    def count() -> int:
        return sum(rig.lanes.player(n, lanes.CLIENTS) for n in range(len(rig.trees)))

    try:
        if not rig.until(lambda: count() == 2 * CLIENTS, OPEN_S):
            return f"cycle {cycle}: only {count()} halves of {CLIENTS} clients' rooms were opened"
        rig.until(lambda: False, source.random() * 0.05)
        begun_ns = monotonic_ns()
        for held in crowd:
            held.signal(signal.SIGKILL)
        over = rig.until(lambda: count() == 0, OVER_S, 0.001)
        rig.writer.append(Kind.CROWD, monotonic_ns() - begun_ns, 0, CLIENTS)
        return "" if over else f"cycle {cycle}: {count()} halves of killed clients' rooms are left"
    finally:
        for held in crowd:
            held.signal(signal.SIGKILL)
            held.close()


def _settled(rig: Rig) -> bool:
    """Has every engine its pages?  One that has not opens no room, and those of clients wait."""
    return all(rig.lanes.player(number, lanes.SETTLED) for number in range(len(rig.trees)))


def _client(rig: Rig, source: random.Random, cycle: int, number: int, turn: int) -> Held:
    prefill, decode = source.randrange(PREFILLS), source.randrange(DECODES)
    lane = lane_number(prefill, decode, source.choice((plan.PREFILL, plan.DECODE)))
    room = plan.room_of(lane, plan.CLIENTS | cycle << 8 | number)
    addresses = tuple(clients.address_of(rig.token, n) for n in (prefill, PREFILLS + decode))
    told = clients.Told(addresses, room, str(rig.folder / "lanes"), turn)
    return Held(rig.nursery.bear("client", "clients", told))
