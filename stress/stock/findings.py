"""What one fault does to one stack, and the table of all of them side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stress.bench.figures import digits

STACKS = {"sglang": "SGLang", "vllm": "vLLM", "pdrt": "pdrt"}
#: In the order they are played.
FAULTS = {
    "frame": "one malformed frame to prefill's control port",
    "abort": "prefill aborts a room",
    "stopped": "decode is SIGSTOPped while its room's bytes move",
    "starved": "one decode is frozen, another is healthy",
    "ghosts": "metadata comes late, for rooms that are over",
    "race": "a verdict Failed meets a late write of Success",
    "late": "a room is given up, its pages are used again, bytes land late",
}
WATCH_S = 45.0
T = TypeVar("T")


class NoEnvironment(Exception):
    """The stack cannot be installed here; says what was tried."""


class NoSuchThing(Exception):
    """The stack is built so that the fault cannot be put to it; says why."""


class Kept:
    """Processes that one fault leaves for the next, since a stack takes long to import."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._made: dict[str, Any] = {}

    def get(self, name: str, make: Callable[[], contextlib.AbstractContextManager[T]]) -> T:
        if name not in self._made:
            self._made[name] = self._stack.enter_context(make())
        kept: T = self._made[name]
        return kept

    def close(self) -> None:
        """Ends them: at the end, or when they are spoilt."""
        self._made.clear()
        self._stack.close()


@dataclass(frozen=True)
class Trial:
    """What a fault is played with."""

    folder: Path  # for logs; gone afterwards
    kept: Kept
    python: Path | None = None  # of the stack's own environment
    watch_s: float = WATCH_S  # what has not happened by then is reported as a lower bound
    part: float = 1.0  # of the rooms

    def count(self, count: int) -> int:
        return max(1, round(count * self.part))


@dataclass(frozen=True)
class Found:
    """`said` goes into the table; `how` lets somebody else do it again."""

    said: str
    how: str
    figures: Mapping[str, Any]


Play = Callable[[Trial], Found]


class Finding(msgspec.Struct, kw_only=True):
    """A row of one column.  `why_not` says why there is nothing to see."""

    stack: str
    fault: str
    said: str = ""
    how: str = ""
    figures: dict[str, Any] = msgspec.field(default_factory=dict)
    took_s: float = 0.0
    why_not: str = ""

    @property
    def cell(self) -> str:
        return self.said or f"not run here: {self.why_not}"


def ms(seconds: float) -> str:
    return f"{digits(seconds * 1e3)} ms"


def until(seconds: float | None, watch_s: float) -> str:
    """How long something took; None: it had not happened when the watch ended."""
    if seconds is None:
        return f"still open after {watch_s:g} s"
    return ms(seconds) if seconds < 1 else f"{digits(seconds)} s"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(head), line(["---"] * len(head)), *map(line, rows)]


def side_by_side(findings: Sequence[Finding]) -> list[str]:
    """The table: a row for each fault, a column for each stack."""
    cells = {(finding.fault, finding.stack): finding.cell for finding in findings}
    stacks = [stack for stack in STACKS if any(f.stack == stack for f in findings)]
    faults = [fault for fault in FAULTS if any(f.fault == fault for f in findings)]
    return _table(
        ["fault", *(STACKS[stack] for stack in stacks)],
        (
            [FAULTS[fault], *(cells.get((fault, stack), "not asked for") for stack in stacks)]
            for fault in faults
        ),
    )


def details(findings: Sequence[Finding]) -> list[str]:
    """How each fault was provoked, and every figure that was taken."""
    lines = []
    for fault, title in FAULTS.items():
        mine = [finding for finding in findings if finding.fault == fault]
        if not mine:
            continue
        lines += ["", f"## {fault}: {title}", ""]
        for finding in mine:
            lines.append(f"**{STACKS[finding.stack]}** ({finding.took_s:.0f} s): {finding.cell}.")
            if finding.how:
                lines += ["", finding.how]
            if finding.figures:
                lines += ["", *_table(["figure", "value"], _rows(finding.figures))]
            lines.append("")
        lines.pop()
    return lines


def _rows(figures: Mapping[str, Any]) -> list[list[str]]:
    return [[name, _text(value)] for name, value in figures.items()]


def _text(value: Any) -> str:
    if value is None:
        return "not within the watch"
    if isinstance(value, float):
        return digits(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value)) or "none"
    return str(value)


INTRODUCTION = """# The stock comparison

The same faults, put to unmodified components of SGLang and vLLM and to pdrt. Each stack is driven
by its own importable classes, over CPU memory and NIXL on TCP (`UCX_TLS=tcp,self`), in processes
that `stress/stock/` starts, with the defaults of its settings unless a row says otherwise. No code
of theirs is changed; the one thing that is put in a component's place, to force a race, is named
there. pdrt runs as real process trees.

This is about faults, not speed, and about the components that move KV, not whole servers: what an
engine's own scheduler does around them is told where it matters, and the health endpoints of whole
servers are not asked. What had not happened when the watch ended is given as a lower bound, however
long it would have gone on. A figure with no failure in n trials leaves an upper bound of 3/n for
its rate (95 %). The seconds behind a stack's name count from the start of what the fault needed,
which on a busy host is most of them.
"""


def markdown(machine: Mapping[str, Any], findings: Sequence[Finding]) -> str:
    lines = [INTRODUCTION]
    lines += _table(["", ""], ([name, str(value)] for name, value in machine.items()))
    lines += ["", "## Side by side", "", *side_by_side(findings), *details(findings)]
    return "\n".join(lines) + "\n"
