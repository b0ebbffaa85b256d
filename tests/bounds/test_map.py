"""docs/bounds.md is a map: every constant and every test that it names is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scenarios.test_faults_map import functions_in
from tests.test_tidy import ROOT

TEXT = (ROOT / "docs/bounds.md").read_text(encoding="utf-8")
CAPITALS = re.compile(r"\b[A-Z][A-Z0-9_]{2,}\b")
NO_CONSTANTS = {"CPU", "HTTP", "PDRT_CACHE", "UCX", "ZMQ", "ZMTP"}
TEST = re.compile(r"`(tests/[\w./]*)`|\b(test_\w+)|\b([a-z]\w*)")


def assigned_in(path: Path) -> Iterator[str]:
    """Names of constants and of members of enums, and the options of ZMQ that are used."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "zmq":
            yield node.attr


def not_assigned(text: str) -> list[str]:
    there = {name for path in (ROOT / "pdrt").rglob("*.py") for name in assigned_in(path)}
    return sorted(set(CAPITALS.findall(text)) - there - NO_CONSTANTS)


def not_there(cell: str) -> Iterator[str]:
    """Of the last cell of a row: files and folders, and parts of the tests' names in a file."""
    names: frozenset[str] = frozenset()
    where = "no file"
    for path, file, word in TEST.findall(re.sub(r"\([^)]*\)", "", cell)):
        if word:
            if not any(word in name for name in names):
                yield f"{word} in {where}"
            continue
        where = path or f"tests/bounds/{file}.py"
        if not (ROOT / where).exists():
            yield where
        names = functions_in(ROOT / where) if (ROOT / where).is_file() else frozenset()


def last_cells(text: str) -> list[str]:
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [line[-1].removesuffix("|").strip() for line in lines if line[0] != "| what"]


def test_every_constant_that_is_named_exists() -> None:
    assert not_assigned(TEXT) == []


def test_every_test_that_is_named_exists() -> None:
    cells = last_cells(TEXT)
    assert len(cells) > 50
    assert [line for cell in cells for line in not_there(cell)] == []


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("-", []),
        ("test_engines until_one_is_gone, `tests/mail/`", []),
        ("`tests/nowhere/`", ["tests/nowhere/"]),
        ("test_nothing", ["tests/bounds/test_nothing.py"]),
        ("test_engines one_is_gone, two_are", ["two_are in tests/bounds/test_engines.py"]),
        ("`tests/mail/` a_word", ["a_word in tests/mail/"]),
        ("a_word", ["a_word in no file"]),
    ],
)
def test_a_cell_with_a_fault_is_found(cell: str, said: list[str]) -> None:
    assert list(not_there(cell)) == said


def test_a_constant_that_is_none_is_found() -> None:
    assert not_assigned("PONG_MS, QUEUE_MAX, MAXMSGSIZE, OVERSIZED") == ["PONG_MS"]
