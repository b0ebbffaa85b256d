"""Judges the histories of `agents` when all is over: what each request came to, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stress.cascades.agents.words import CODES, OTHER, Kind
from stress.cascades.history import DTYPE
from stress.cascades.piece import Outcome

Histories = Mapping[str, NDArray[np.void]]

AFTER_S = 3.0  # so long after a role is struck a request may still fail by it
SEEN_S = 1.0  # a restart is seen after the requests that it ended, by less than this
SHOWN_MAX = 10
ENDS = (Kind.DONE, Kind.FAILED, Kind.LEFT, Kind.HUNG)
KINDS = {
    "requests without an end": "requests",
    "requests over the bound": "requests",
    "failures without a cause": "requests",
    "failures without a typed error": "requests",
    "first answers that differ": "first answers",
}


@dataclass
class Request:
    asked_s: float
    first: bool = False
    token_s: float = 0.0
    ended_s: float = 0.0
    end: int = 0
    code: int = 0
    aborted: bool = False


@dataclass
class Judge:
    outcome: Outcome
    bound_s: float
    strikes_s: list[float] = field(default_factory=list)
    killed: set[str] = field(default_factory=set)
    shown: dict[str, int] = field(default_factory=dict)

    def violation(self, kind: str, text: str) -> None:
        self.outcome.none(kind, 1, KINDS[kind])
        self.shown[kind] = self.shown.get(kind, 0) + 1
        if self.shown[kind] <= SHOWN_MAX:
            self.outcome.violations.append(f"{kind}: {text}")

    def read_driver(self, driver: NDArray[np.void]) -> None:
        for ns, _, c, b, a, kind in driver.tolist():
            if kind == Kind.STRUCK:
                self.strikes_s.append(ns / 1e9)
                self.outcome.count("roles struck")
            elif kind == Kind.RESTARTED:  # on purpose, to make a room quiet, or for a hang
                self.strikes_s.append(ns / 1e9 - SEEN_S)
                self.outcome.count("restarts that we did not play")
            elif kind == Kind.SERVES:
                self.outcome.time("role serves again", c / 1e9)
            elif kind == Kind.KILLED:
                self.killed.add(f"clients-{a}-{b}")
                self.outcome.count("processes of clients killed")
            elif kind == Kind.ZERO:
                self.outcome.time("nothing in flight after the last request began", c / 1e9)

    def was_struck(self, begun_s: float, ended_s: float) -> bool:
        return any(begun_s - AFTER_S <= at_s <= ended_s for at_s in self.strikes_s)

    def read_clients(self, name: str, records: NDArray[np.void]) -> None:
        """Of one life of a process of clients."""
        requests: dict[int, Request] = {}
        left = False
        for ns, number, c, _, _, kind in records.tolist():
            at_s = ns / 1e9
            if kind == Kind.EXIT:
                left = True
            elif kind == Kind.ASKED:
                requests[number] = Request(at_s, first=c > 0)
            elif kind == Kind.FIRST:
                requests[number].token_s = at_s
            elif kind == Kind.ABORTED:
                requests[number].aborted = True
                self.outcome.count("aborts by /abort_request")
                self.outcome.count("requests that an abort found", c)
            elif kind == Kind.DIFFERS:
                self.violation("first answers that differ", f"{name}: request {number}")
            elif kind in ENDS:
                request = requests[number]
                request.ended_s, request.end, request.code = at_s, kind, c
        for number, request in requests.items():
            self._judge(name, number, request, killed=name in self.killed and not left)
        if not left and name not in self.killed:
            self.outcome.violations.append(f"{name} ended, and nobody killed it")

    def _judge(self, name: str, number: int, request: Request, *, killed: bool) -> None:
        outcome = self.outcome
        outcome.count("requests")
        if not request.end:
            outcome.count("requests of killed clients" if killed else "requests cut off")
            if not killed:
                self.violation("requests without an end", f"{name}: request {number}")
            return
        took_s = request.ended_s - request.asked_s
        outcome.count(Kind(request.end).name.lower())
        if request.end == Kind.HUNG or took_s > self.bound_s:
            self.violation("requests over the bound", f"{name}: {number} took {took_s:.1f} s")
        if request.token_s:
            outcome.time("first token", request.token_s - request.asked_s)
        if request.end == Kind.DONE:
            outcome.count("first answers", int(request.first and not request.code))
            outcome.time("whole answer", took_s)
        if request.end == Kind.FAILED:
            outcome.time("error", took_s)
            self._judge_failure(name, number, request)

    def _judge_failure(self, name: str, number: int, request: Request) -> None:
        code = CODES[request.code] if request.code < OTHER else "another code"
        self.outcome.count(f"failed: {code}")
        if request.code == OTHER:
            self.violation("failures without a typed error", f"{name}: request {number}")
        if not request.aborted and not self.was_struck(request.asked_s, request.ended_s):
            self.violation("failures without a cause", f"{name}: request {number}: {code}")


def judge(histories: Histories, bound_s: float, outcome: Outcome) -> None:
    """Counts, times and violations go into the outcome."""
    judge_ = Judge(outcome, bound_s)
    for kind, of in KINDS.items():
        outcome.none(kind, 0, of)
        outcome.count(of, 0)
    judge_.read_driver(histories.get("driver", np.zeros(0, DTYPE)))
    for name, records in histories.items():
        if name.startswith("clients-"):
            judge_.read_clients(name, records)
