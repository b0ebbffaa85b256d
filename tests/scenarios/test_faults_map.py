"""docs/faults.md is a map: every scenario has its row, and every test it names is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.test_tidy import ROOT

# 101 kinds; the numbers that are missing were reports of the same kind as another.
IDS = [
    *(1, 2, 3, 5, 6, 7, 10, 12, 13, 15, 17, 18, 19, 21, 23, 24, 25, 26, 28, 29, 30, 33, 34, 36),
    *(37, 39, 40, 42, 43, 44, 45, 47, 48, 50, 51, 53, 54, 55, 56, 59, 60, 62, 63, 65, 66, 68, 69),
    *(72, 73, 74, 76, 77, 79, 80, 81, 82, 84, 85, 86, 88, 89, 90, 91, 92, 94, 96, 97, 98, 99, 102),
    *(103, 104, 106, 108, 109, 110, 112, 113, 115, 116, 117, 118, 119, 120, 123, 124, 125, 127),
    *(129, 130, 132, 134, 135, 137, 138, 139, 140, 142, 143, 145, 146),
]
TEST = re.compile(r"`([\w./]+\.py)::(?:\w+::)?(\w+)`")
REASON = re.compile(r"(cannot occur|not run|open): \S.{20,}")


def rows(text: str) -> list[list[str]]:
    """The cells of every row that begins with an id."""
    lines = [line for line in text.splitlines() if re.match(r"\| F\d+ \|", line)]
    return [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in lines]


ROWS = rows((ROOT / "docs/faults.md").read_text(encoding="utf-8"))


@cache
def functions_in(path: Path) -> frozenset[str]:
    """Names of the test functions and methods of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return frozenset(f.name for f in functions if f.name.startswith("test_"))


def faults_of(row: list[str]) -> list[str]:
    """What is wrong with a row."""
    if len(row) != 4 or not all(row):
        return [f"{row[0]}: four cells with something in each, not {len(row)}"]
    named = TEST.findall(row[3])
    wrong = [f"{row[0]}: names neither a test nor a reason"]
    found = [] if named or REASON.match(row[3]) else wrong
    for path, name in named:
        if not (ROOT / path).is_file() or name not in functions_in(ROOT / path):
            found.append(f"{row[0]}: there is no {path}::{name}")
    return found


def test_every_scenario_has_one_row() -> None:
    assert len(IDS) == len(set(IDS)) == 101
    assert [int(row[0].removeprefix("F")) for row in ROWS] == IDS


def test_every_row_names_tests_that_exist_or_says_why_there_is_none() -> None:
    assert [line for row in ROWS for line in faults_of(row)] == []


def files_that_are_not(text: str) -> list[str]:
    named = set(re.findall(r"\btests/[\w/]+\.py\b", text))
    return sorted(path for path in named if not (ROOT / path).is_file())


def test_every_file_of_tests_that_a_document_names_exists() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    found = {each.name: files_that_are_not(each.read_text(encoding="utf-8")) for each in documents}
    assert {name: paths for name, paths in found.items() if paths} == {}
    assert files_that_are_not("see `tests/nowhere/test_x.py`.") == ["tests/nowhere/test_x.py"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("| F001 | a | b | |", "four cells"),
        ("| F001 | a | b |", "four cells"),
        ("| F001 | a | b | nothing to see |", "neither a test nor a reason"),
        ("| F001 | a | b | open: later |", "neither a test nor a reason"),
        ("| F001 | a | b | `tests/nowhere.py::test_x` |", "there is no"),
        ("| F001 | a | b | `tests/scenarios/test_faults_map.py::test_x` |", "there is no"),
    ],
)
def test_a_row_with_a_fault_is_found(row: str, said: str) -> None:
    (cells,) = rows(row)
    assert said in faults_of(cells)[0]
