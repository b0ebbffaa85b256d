"""Processes of two prefills and two decodes die and stop, one or several at once, under load.

A cycle is one blow: it begins when the roles that were hit in the one before serve again, or now
and then earlier, in the middle of their restart.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection
from time import monotonic_ns

from stress.cascades import census, crowd, judgement, victims
from stress.cascades.history import Kind
from stress.cascades.oracle.faults import Role
from stress.cascades.piece import Outcome, Piece, Share
from stress.cascades.plan import Mix
from stress.cascades.rig import UNLIMITED, Rig, salt_of
from stress.cascades.victims import AIMS, Executioner, Strike

NAME = "kill_cascade"
LIMIT_S = 900.0
QUICK = Share(pieces=2, cycles=1_000_000, seconds=14.0)
RELEASE = Share(pieces=24, cycles=250, seconds=600.0)
WINDOW, ROOMS_PER_S = 8, 1000.0
BACK_S = 60.0
CROWD_FIRST, CROWD_EVERY = 4, 100  # of the cycles, before which sixty clients die at once
AIM_NS = 25_000_000
OVERLAPS = 0.15  # of the cycles begin in the restart of the one before
MIX = Mix()
STANDBYS = (Role.LISTENER_STANDBY, Role.WORKER_STANDBY)  # nobody waits for one


def run(piece: Piece) -> Outcome:
    cycles, late = 0, ""
    with Rig(piece, MIX) as rig:
        census.before(rig)
        rig.load(WINDOW, ROOMS_PER_S)
        rig.grant(UNLIMITED)
        executioner = Executioner(rig)
        source = piece.random("victims")
        for cycle in piece.rounds():
            rig.writer.append(Kind.CYCLE, cycle)
            if cycle % CROWD_EVERY == CROWD_FIRST and not late:
                late = _settle(executioner) or crowd.kill_all(rig, source, cycle)
            late = late or _cycle(rig, executioner, source, cycle)
            cycles += 1
            if late:
                break
        _settle(executioner)
        drained = rig.drain()
        census.after(rig)
    outcome = judgement.judge(piece, NAME, salt_of(piece), MIX)
    outcome.cycles = cycles
    if late:
        outcome.violations.append(late)
    if not drained:
        outcome.violations.append("rooms were left when the piece was over")
    return outcome


def _cycle(rig: Rig, executioner: Executioner, source: random.Random, cycle: int) -> str:
    """A sentence if a role did not come back."""
    count = source.choices([1, 2, 3], [80, 14, 6])[0]
    plans = [victims.draw(source, len(rig.trees)) for _ in range(count)]
    aim, rest_s, early = source.choice(AIMS), source.random() * 0.02, source.random() < OVERLAPS
    tree = rig.trees[plans[0].tree]
    if not tree.lost:
        victims.wait_for(tree, aim, monotonic_ns() + AIM_NS)
    executioner.strike(plans, cycle)
    if early or all(plan.role in STANDBYS for plan in plans):
        time.sleep(rest_s)
        executioner.turn()
        return ""
    return _settle(executioner, but=STANDBYS)


def _settle(executioner: Executioner, *, but: Collection[Role] = ()) -> str:
    """Wait for whom was hit, `but` some."""

    def pending() -> list[Strike]:
        return [strike for strike in executioner.pending if strike.plan.role not in but]

    end_s = time.monotonic() + BACK_S
    executioner.turn()
    while pending():
        if time.monotonic() > end_s:
            missing = [f"{s.plan.role.words} of tree {s.plan.tree}" for s in pending()]
            return f"not back within {BACK_S:g} s: {', '.join(missing)}"
        time.sleep(0.001)
        executioner.turn()
    return ""
