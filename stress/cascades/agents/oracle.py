"""Judges the histories of `agents` when all is over: what each request came to, and why.

What may fail a request, of the one prefill and the one decode through which all of them go:

    a worker was struck or restarted    until the first token: then decode has all of its KV
    a listener was away for a while     likewise; the next one takes up what one that died was at
    a standby was struck                never
    an abort found it                   if the answer says so
    who serves HTTP got SIGKILL         at any time.  In the midst of a request it cuts the answer,
                                        or leaves it without a code; nothing else may: who is left
                                        can say what happened.  (Nobody strikes the router.)
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

import numpy as np
from numpy.typing import NDArray

from stress.cascades.agents.words import ABORTED_CODES, CODES, HTTP_ROWS, OTHER, UNTYPED, Kind
from stress.cascades.history import DTYPE
from stress.cascades.piece import Outcome
from stress.cascades.words import LISTENER, WORKER

Histories = Mapping[str, NDArray[np.void]]

AFTER_S = 3.0  # so long after a role is struck a request may still fail by it
AWAY_S = 1.0  # a listener that is back sooner fails nobody
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
    aborted: bool = False  # by an abort that found it


@dataclass
class Strike:
    place: tuple[int, int]  # tree and row
    at_s: float
    number: int = 0  # of the signal; 0: a restart that we did not play
    back_s: float = inf  # when the role was served again

    def may_fail(self, begun_s: float, ended_s: float) -> bool:
        """A request that had no token yet."""
        _, row = self.place
        if row == LISTENER:  # what we did not play was a hang
            counts = not self.number or self.back_s - self.at_s > AWAY_S
        else:
            counts = row in (WORKER, *HTTP_ROWS)
        over_s = max(self.at_s + AFTER_S, self.back_s)
        return counts and self.at_s <= ended_s and begun_s <= over_s

    def cuts(self, begun_s: float, ended_s: float) -> bool:
        """Did somebody die meanwhile without whom there is no HTTP?"""
        _, row = self.place
        fatal = row in HTTP_ROWS and self.number == signal.SIGKILL
        return fatal and begun_s <= self.at_s <= ended_s


@dataclass
class Judge:
    outcome: Outcome
    bound_s: float
    strikes: list[Strike] = field(default_factory=list)
    killed: set[str] = field(default_factory=set)
    shown: dict[str, int] = field(default_factory=dict)

    def violation(self, kind: str, text: str) -> None:
        self.outcome.none(kind, 1, KINDS[kind])
        self.shown[kind] = self.shown.get(kind, 0) + 1
        if self.shown[kind] <= SHOWN_MAX:
            self.outcome.violations.append(f"{kind}: {text}")

    def read_driver(self, driver: NDArray[np.void]) -> None:
        for ns, row, c, b, a, kind in driver.tolist():
            at_s, place = ns / 1e9, (a, row)
            if kind == Kind.STRUCK:
                self.strikes.append(Strike(place, at_s, c))
                self.outcome.count("roles struck")
            elif kind == Kind.RESTARTED:  # on purpose, to make a room quiet, or for a hang
                self.strikes.append(Strike(place, at_s - SEEN_S, back_s=at_s))
                self.outcome.count("restarts that we did not play")
            elif kind == Kind.SERVES:
                self._is_back(place, at_s, c / 1e9)
                self.outcome.time("role serves again", c / 1e9)
            elif kind == Kind.KILLED:
                self.killed.add(f"clients-{a}-{b}")
                self.outcome.count("processes of clients killed")
            elif kind == Kind.ZERO:
                self.outcome.time("nothing in flight after the last request began", c / 1e9)

    def _is_back(self, place: tuple[int, int], at_s: float, took_s: float) -> None:
        """The strike that began so long ago is over: one of those at this place."""
        mine = [s for s in self.strikes if s.place == place and s.number and s.back_s == inf]
        if mine:
            min(mine, key=lambda s: abs(at_s - took_s - s.at_s)).back_s = at_s

    def _was_cut(self, request: Request) -> bool:
        return any(strike.cuts(request.asked_s, request.ended_s) for strike in self.strikes)

    def _has_cause(self, request: Request, code: str) -> bool:
        """May it have failed with this code, though whoever serves HTTP lived?"""
        if request.aborted and code in ABORTED_CODES:
            return True
        if request.token_s or code == "aborted":
            return False
        return any(strike.may_fail(request.asked_s, request.ended_s) for strike in self.strikes)

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
                requests[number].aborted |= c > 0
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
            if request.code and not request.aborted:
                self.violation("failures without a cause", f"{name}: request {number}: ends early")
        if request.end == Kind.FAILED:
            outcome.time("error", took_s)
            self._judge_failure(name, number, request)

    def _judge_failure(self, name: str, number: int, request: Request) -> None:
        code = CODES[request.code] if request.code < OTHER else "another code"
        self.outcome.count(f"failed: {code}")
        cut = self._was_cut(request)
        if request.code == OTHER or (code in UNTYPED and not cut):
            self.violation("failures without a typed error", f"{name}: request {number}: {code}")
        if not cut and not self._has_cause(request, code):
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
