"""What the oracle found: violations with their evidence, and the figures of a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

SHOWN_MAX = 12  # of one kind; the others are counted

#: Every kind of violation, and of what there were so many trials.
KINDS = {
    "changed verdicts": "verdicts",
    "impossible moves": "words",
    "stale generations": "words",
    "open past deadline": "slots",
    "rooms without a verdict": "halves",
    "players that died by themselves": "pieces",
    "wrong bytes": "successes",
    "success against failure": "successes",
    "late bytes": "pages looked at again",
    "untouched rooms failed": "halves",
    "rooms not quiet without a cause": "slots",
    "restarts without a cause": "pieces",
    "refused connects": "connects",
    "connects never served": "connects",
    "connects reset without a cause": "connects",
    "processes not dead": "signals",
    "roles not back": "signals",
    "leaks": "pieces",
}


@dataclass
class Findings:
    counts: Counter[str] = field(default_factory=Counter)
    peaks: dict[str, float] = field(default_factory=dict)
    times_s: dict[str, list[float]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    series: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    _found: Counter[str] = field(default_factory=Counter)

    def violation(self, kind: str, text: str) -> None:
        assert kind in KINDS, kind
        self._found[kind] += 1
        if self._found[kind] <= SHOWN_MAX:
            self.violations.append(f"{kind}: {text}")

    def found(self, kind: str) -> int:
        return self._found[kind]

    def peak(self, name: str, value: float) -> None:
        self.peaks[name] = max(self.peaks.get(name, value), value)

    def time(self, name: str, seconds: float) -> None:
        self.times_s.setdefault(name, []).append(round(seconds, 6))
