"""The log is bounded, whatever provokes it."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pdrt.logs import LINE_CHARS_MAX, LINES_A_SECOND, Bounded, OneLine

LINES = 3


def record(place: int, at_ms: int) -> logging.LogRecord:
    made = logging.LogRecord("x", logging.WARNING, "x.py", place, "number %d", (place,), None)
    made.created = at_ms / 1000
    return made


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.one_of(st.just(0), st.integers(0, 1500))), max_size=200
    )
)
def test_each_place_has_its_lines_a_second_and_says_what_it_kept_back(
    events: list[tuple[int, int]],
) -> None:
    bounded, at_ms = Bounded(LINES), 0
    passed: Counter[tuple[int, int]] = Counter()
    asked: Counter[tuple[int, int]] = Counter()
    said: Counter[int] = Counter()
    for place, pause_ms in events:
        at_ms += pause_ms
        line = record(place, at_ms)
        asked[place, at_ms // 1000] += 1
        if bounded.filter(line):
            passed[place, at_ms // 1000] += 1
            text = line.getMessage()
            assert text.startswith(f"number {place}")
            if found := re.search(r"\((\d+) more like it", text):
                said[place] += int(found[1])
    assert passed == Counter({key: min(count, LINES) for key, count in asked.items()})
    for place in range(3):
        seconds = sorted(second for p, second in asked if p == place)
        kept_back = sum(max(0, asked[place, second] - LINES) for second in seconds[:-1])
        assert said[place] == kept_back


def test_ten_thousand_lines_of_one_place_are_a_few_and_hide_no_other() -> None:
    code = """
import logging
from pdrt.config import Settings
from pdrt.logs import start_logging
start_logging(Settings(role="prefill"))
start_logging(Settings(role="prefill"))
for number in range(10_000):
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    if number % 1000 == 0 and number < 5000:
        logging.getLogger("pdrt.x").error("something else")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    lines = run.stderr.splitlines()
    seconds = len({line.split(",")[0] for line in lines})
    assert 0 < sum("Invalid HTTP" in line for line in lines) <= seconds * LINES_A_SECOND
    assert sum("something else" in line for line in lines) == 5


@given(st.text(st.characters(), max_size=50) | st.just("x" * 10_000), st.booleans())
def test_whatever_a_peer_says_of_itself_is_a_part_of_one_line(text: str, raised: bool) -> None:
    line = logging.LogRecord("x", logging.WARNING, "x.py", 1, "decode=%s refused", (text,), None)
    if raised:
        try:
            raise ValueError(text)
        except ValueError:
            line.exc_info = sys.exc_info()
    said, *rest = OneLine("%(levelname)s %(message)s").format(line).split("\n")
    assert said.startswith("WARNING decode=")
    assert len(said) <= 2 * LINE_CHARS_MAX
    assert all(each.isprintable() for each in (said, *rest))
    assert all(each.startswith("  ") for each in rest), "it would look like another event"
    assert bool(rest) is raised
    if text.isprintable() and len(text) < LINE_CHARS_MAX // 2:
        assert text in said
