"""What logs say: that a process ended by an error of its own, of a tree or of those who watch.

No history shows it.  A process that is killed, hung or fenced is replaced, and so is one that has
failed, in the same few milliseconds; only its supervisor knows which it was.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

TREES = ("prefill*.log", "decode*.log")
WATCHING = ("watcher.log", "connector.log", "nursery.log")
ENDED = re.compile(r" ended name=(\S+) incarnation=(\d+) cause='(.*)'")
#: By the cascade, by an end in order, or by its supervisor, which says why.
LAWFUL = re.compile(r"ended by SIG(?:KILL|TERM)$|stop: |hung|restart|stopped|not ready")
TRACEBACK = "Traceback (most recent call last):"


def deaths_in(folder: Path) -> Counter[str]:
    """How many processes of a role ended in which way."""
    found: Counter[str] = Counter()
    for _, lines in _logs(folder):
        for death in filter(None, map(ENDED.search, lines)):
            name, _, cause = death.groups()
            lawful = LAWFUL.match(cause)
            found[f"{name} {lawful[0] if lawful else cause}"] += 1
    return found


def errors_in(folder: Path, *patterns: str) -> Iterator[str]:
    """A sentence for each process that ended by itself, and for each error that was caught."""
    for tree, lines in _logs(folder, patterns or (*TREES, *WATCHING)):
        yield from _errors(tree, lines)


def _logs(folder: Path, patterns: Sequence[str] = TREES) -> Iterator[tuple[str, list[str]]]:
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            yield path.stem, path.read_text(errors="replace").splitlines()


def _errors(tree: str, lines: list[str]) -> Iterator[str]:
    error = ""  # what the last traceback came to, until somebody ended by it
    for number, line in enumerate(lines):
        if TRACEBACK in line:
            if error:
                yield f"{tree}: {error}"
            error = _last_of(lines, number)
        elif (found := ENDED.search(line)) and not LAWFUL.match(found[3]):
            name, incarnation, cause = found.groups()
            yield f"{tree}: {name} {incarnation} ended by {cause!r}; {error or 'without a word'}"
            error = ""
    if error:
        yield f"{tree}: {error}"


def _last_of(lines: list[str], number: int) -> str:
    """The line that names the error: the first after the traceback that is indented no deeper."""
    depth = len(lines[number]) - len(lines[number].lstrip())
    for line in lines[number + 1 :]:
        if line.strip() and len(line) - len(line.lstrip()) <= depth:
            return line.strip()
    return "a traceback without an end"
