"""How every process of a tree logs: to stderr, one line an event, with role and pid, at a bounded
rate.

The bound is each place's own: whatever provokes a line ten thousand times a second, a frame or a
connection from outside included, writes ten, and those of other places are not lost among them.
What peers say of themselves stands in these lines, so an event is one line whatever they say.
"""

from __future__ import annotations

import logging
from typing import Any

from pdrt.config import Settings

LINES_A_SECOND = 10  # from one place in the code
LINE_CHARS_MAX = 4096  # four times what a peer may name itself


class Bounded(logging.Filter):
    """Lets through the first lines of each place in each second.  The next that passes says how
    many did not.  What it remembers is bounded by the places there are in the code."""

    def __init__(self, lines_a_second: int = LINES_A_SECOND) -> None:
        super().__init__()
        self._lines_a_second = lines_a_second
        self._places: dict[tuple[str, int], tuple[int, int]] = {}  # -> second, lines in it

    def filter(self, record: logging.LogRecord) -> bool:
        place = record.pathname, record.lineno
        second, lines = self._places.get(place, (-1, 0))
        if int(record.created) == second:
            self._places[place] = second, lines + 1
            return lines < self._lines_a_second
        self._places[place] = int(record.created), 1
        if lines > self._lines_a_second:
            suppressed = lines - self._lines_a_second
            record.msg = f"{record.getMessage()} ({suppressed} more like it were not logged)"
            record.args = None
        return True


class OneLine(logging.Formatter):
    """No event begins another line, moves a terminal's cursor or goes on for ever.  Only a
    traceback has lines of its own, which are indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  {printable(line)}" for line in lines)


def printable(text: str) -> str:
    """With escapes for what does not print, cut after LINE_CHARS_MAX."""
    if len(text) > LINE_CHARS_MAX:
        text = text[:LINE_CHARS_MAX] + "..."
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def start_logging(settings: Settings) -> None:
    """In each process, before anything is logged; once more does no harm."""
    handler = logging.StreamHandler()
    role = f"role={settings.role} pid=%(process)d"
    handler.setFormatter(OneLine(f"%(asctime)s %(levelname)s %(name)s {role} %(message)s"))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    for used in logging.getLogger().handlers:
        if not any(isinstance(each, Bounded) for each in used.filters):
            used.addFilter(Bounded())
