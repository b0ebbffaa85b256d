"""Storms of rooms that are given up, by either side, each at the moment it is aimed at.

A cycle is one storm of 16 to 64 rooms, most of them aborted, now and then with a death of an
engine in it.  All must end and be quiet; then a few rooms that nobody aborts must succeed.
"""

from __future__ import annotations

import random

from stress.cascades import census, judgement
from stress.cascades.history import Kind
from stress.cascades.oracle.faults import Mode, Role
from stress.cascades.piece import Outcome, Piece, Share
from stress.cascades.plan import Mix
from stress.cascades.rig import Rig, salt_of
from stress.cascades.victims import Executioner, Plan

NAME = "abort_storm"
LIMIT_S = 900.0
QUICK = Share(pieces=1, cycles=1_000_000, seconds=12.0)
RELEASE = Share(pieces=16, cycles=250, seconds=600.0)
MIX = Mix(aborts=700, middle=250, large=250, lingers=30)
STORM = (2, 8)  # rooms of each lane
CALM = 2
WINDOW, ROOMS_PER_S = 12, 100_000.0
OVER_S = 30.0
DEATHS = 0.06  # of the storms, in which an engine is killed


def run(piece: Piece) -> Outcome:
    cycles, late = 0, ""
    with Rig(piece, MIX) as rig:
        census.before(rig)
        rig.load(WINDOW, ROOMS_PER_S)
        executioner = Executioner(rig)
        source = piece.random("storms")
        for cycle in piece.rounds():
            rig.writer.append(Kind.CYCLE, cycle)
            late = _storm(rig, executioner, source, cycle)
            cycles += 1
            if late:
                break
        drained = rig.drain()
        census.after(rig)
    outcome = judgement.judge(piece, NAME, salt_of(piece), MIX)
    outcome.cycles = cycles
    if late or not drained:
        outcome.violations.append(late or "rooms were left when the piece was over")
    return outcome


def _storm(rig: Rig, executioner: Executioner, source: random.Random, cycle: int) -> str:
    """A sentence if it does not end."""

    def over() -> bool:
        executioner.turn()
        return not executioner.pending and rig.all_granted_are_over()

    each, dies = source.randint(*STORM), source.random() < DEATHS
    after_s, tree = source.random() * 0.05, source.randrange(len(rig.trees))
    rig.grant(each)
    if dies:
        rig.until(lambda: False, after_s, 0.002)
        executioner.strike([Plan(Role.PLAYER, tree, Mode.KILL, 0.0)], cycle)
    if not rig.until(over, OVER_S, 0.001):
        return f"storm {cycle} was not over after {OVER_S:g} s"
    rig.grant(CALM, calm=True)
    if not rig.until(over, OVER_S, 0.001):
        return f"the rooms after storm {cycle} were not over after {OVER_S:g} s"
    return ""
