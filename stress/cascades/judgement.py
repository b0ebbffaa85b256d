"""From the oracle's findings to the outcome of a piece."""

from __future__ import annotations

from stress.cascades.lanes import DECODES, PREFILLS
from stress.cascades.oracle import judge as oracle
from stress.cascades.oracle.findings import KINDS, Findings
from stress.cascades.piece import Outcome, Piece
from stress.cascades.plan import DECODE, PREFILL, Mix


def judge(piece: Piece, name: str, salt: int, mix: Mix) -> Outcome:
    sides = [PREFILL] * PREFILLS + [DECODE] * DECODES
    return outcome_of(oracle.judge(piece.histories, sides, salt, mix), piece, name)


def outcome_of(findings: Findings, piece: Piece, name: str) -> Outcome:
    outcome = Outcome(cascade=name, seed=piece.seed, took_s=piece.spent_s())
    outcome.rooms = findings.counts["rooms"]
    outcome.counts = dict(findings.counts)
    outcome.peaks = findings.peaks
    outcome.times_s = findings.times_s
    outcome.series = findings.series
    for kind, trials in KINDS.items():
        outcome.none(kind, findings.found(kind), trials)
        outcome.counts.setdefault(trials, 0)
    outcome.violations += findings.violations
    return outcome
