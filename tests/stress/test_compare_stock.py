"""The stock comparison: its table, what it says of a stack that is not there, and our own column.

The stock columns are not tested: they need 3 GB each.  Run as a program, this module is a puppet.
"""

from __future__ import annotations

import argparse
import ast
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.protocol.states import KVPoll
from pdrt.shm_status import StatusTable
from stress import compare_stock
from stress.compare_stock import PLAYS, column, parse, play
from stress.stock import environments, pdrt_race
from stress.stock.findings import (
    FAULTS,
    STACKS,
    Finding,
    Found,
    Kept,
    NoEnvironment,
    NoSuchThing,
    Trial,
    markdown,
    side_by_side,
    until,
)
from stress.stock.obey import obey
from stress.stock.puppets import Puppet, started
from stress.stock.races import meet

ROOT = Path(__file__).parent.parent.parent
#: What runs in a stock environment, and all that it may import of this project.
FAR_ENDS = ["obey", "races", "sglang_puppet", "vllm_puppet"]
SHARED = {"stress.bench.stock_engine", "stress.stock.obey", "stress.stock.races"}
CELLS = st.dictionaries(
    st.tuples(st.sampled_from(list(FAULTS)), st.sampled_from(list(STACKS))),
    st.text("abc |", min_size=1),
    min_size=1,
)


class Echo:
    """A puppet without a stack."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        self.turns = 0

    def turn(self) -> None:
        self.turns += 1

    def do_say(self, what: str) -> dict[str, Any]:
        print("not an answer")  # noqa: T201
        return {"what": what, "told": self.told["word"]}

    def do_wait_for_turns(self, count: int) -> int:
        return self.turns if self.turns >= count else -1

    def do_stumble(self) -> None:
        raise ValueError("it stumbled")


# --- the table ---


@given(CELLS)
def test_each_cell_stands_in_its_row_and_its_column(cells):
    findings = [Finding(stack=stack, fault=f, said=said) for (f, stack), said in cells.items()]
    head, _, *rows = [
        [cell.strip() for cell in line.replace("\\|", "\0").strip("|").split("|")]
        for line in side_by_side(findings)
    ]
    columns = [stack for stack, title in STACKS.items() if title in head]
    assert {stack for _, stack in cells} == set(columns)
    assert len(rows) == len({fault for fault, _ in cells})
    for title, *found in rows:
        fault = next(name for name, words in FAULTS.items() if words == title)
        for stack, cell in zip(columns, found, strict=True):
            wanted = cells.get((fault, stack), "not asked for")
            assert cell.replace("\0", "|") == wanted.strip()


def test_a_report_says_how_each_fault_was_provoked_and_what_was_not_run():
    findings = [
        Finding(
            stack="sglang",
            fault="frame",
            said="it wedges",
            how="One frame is sent.",
            figures={"rooms": 7, "knows after, s": None, "ratios": [1.5, 2.0], "none": []},
        ),
        Finding(stack="vllm", fault="frame", why_not="the wheel is gone"),
        Finding(stack="pdrt", fault="frame", said="it counts | drops", took_s=3.2),
    ]
    text = markdown({"date": "some day", "versions": "SGLang: 1; vLLM: 2"}, findings)
    for words in (
        "| one malformed frame to prefill's control port | it wedges | not run here: the wheel is "
        "gone | it counts \\| drops |",
        "One frame is sent.",
        "| knows after, s | not within the watch |",
        "| ratios | 1.50, 2.00 |",
        "| none | none |",
        "| date | some day |",
        "SGLang: 1; vLLM: 2",
        "**pdrt** (3 s)",
    ):
        assert words in text


def test_what_did_not_happen_is_a_lower_bound():
    assert until(None, 45.0) == "still open after 45 s"
    assert until(0.0123, 45.0) == "12.3 ms"
    assert until(3.21, 45.0) == "3.21 s"


# --- what is asked for, and what is not there ---


def test_every_stack_plays_every_fault():
    for plays in PLAYS.values():
        assert set(plays) == set(FAULTS)
    assert set(PLAYS) == set(STACKS)


def test_what_is_not_known_is_refused_and_what_is_asked_comes_in_the_tables_order(capsys):
    options = parse(["--only", "pdrt,sglang", "--faults", "late,abort"])
    assert options.only == ["sglang", "pdrt"]
    assert options.faults == ["abort", "late"]
    for arguments in (["--only", "vlm"], ["--faults", "abort,lat"]):
        with pytest.raises(SystemExit):
            parse(arguments)
    assert "vlm" in capsys.readouterr().err


def test_a_command_that_fails_is_an_environment_that_cannot_be_had():
    with pytest.raises(NoEnvironment, match="the wheel: no such wheel"):
        environments._run("the wheel", sys.executable, "-c", "raise SystemExit('no such wheel')")
    with pytest.raises(NoEnvironment, match=r"venv: .*No such file"):
        environments._run("venv", "/nowhere/python")


@pytest.mark.parametrize("stack", ["sglang", "vllm"])
def test_a_stack_without_its_environment_says_so_in_every_cell(stack, tmp_path, monkeypatch):
    def gone() -> Path:
        raise NoEnvironment("the wheel: 404")

    monkeypatch.setitem(environments.MAKERS, stack, gone)
    found = column(stack, ["frame", "late"], tmp_path, options())
    assert sorted(finding.fault for finding in found.findings) == ["frame", "late"]
    for finding in found.findings:
        assert "not run here: its environment could not be made: the wheel: 404" in finding.cell


def options() -> argparse.Namespace:
    return argparse.Namespace(watch_s=1.0, part=1.0)


def trial(folder: Path, part: float = 0.01) -> Trial:
    return Trial(folder, Kept(), watch_s=20.0, part=part)


def test_a_fault_that_cannot_be_played_says_why_and_ends_what_was_kept(tmp_path, monkeypatch):
    def broken(trial: Trial) -> Found:
        trial.kept.get("puppets", lambda: closing)
        raise TimeoutError("nobody came\nand more")

    def none(trial: Trial) -> Found:
        raise NoSuchThing("it pulls")

    closed: list[int] = []
    closing = Closing(closed)
    monkeypatch.setitem(PLAYS, "sglang", {"frame": broken, "abort": none})
    asked = trial(tmp_path)
    assert play("sglang", "frame", asked).cell == "not run here: TimeoutError: nobody came"
    assert closed == [1]
    assert play("sglang", "abort", asked).cell == "no such thing: it pulls"


class Closing:
    def __init__(self, closed: list[int]) -> None:
        self._closed = closed

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._closed.append(1)


def test_only_our_own_column_must_be_whole(tmp_path, monkeypatch, capsys):
    def fails(trial: Trial) -> Found:
        raise ValueError("no")

    monkeypatch.setitem(environments.MAKERS, "sglang", lambda: Path(sys.executable))
    monkeypatch.setattr(environments, "versions", lambda *_: "sglang 0")
    monkeypatch.setattr(compare_stock, "default_environment", lambda _: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    good = lambda _: Found("well", "so", {})  # noqa: E731
    for stack, wanted in (("sglang", 0), ("pdrt", 1)):
        monkeypatch.setitem(PLAYS, stack, {"frame": fails, "abort": good})
        report = tmp_path / f"{stack}.md"
        arguments = ["--only", stack, "--faults", "frame,abort", "--report", str(report)]
        assert compare_stock.main(arguments) == wanted
        assert "not run here: ValueError: no" in report.read_text()
        assert f"--only {stack}" in report.read_text()
        assert str(tmp_path) not in report.read_text()
    capsys.readouterr()


def test_columns_of_an_earlier_run_stand_beside_and_say_when_they_were_played(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(compare_stock, "default_environment", lambda _: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setitem(environments.MAKERS, "sglang", lambda: Path(sys.executable))
    monkeypatch.setattr(environments, "versions", lambda *_: "sglang 0")
    words = ["before", "now"]
    for stack, said in zip(("sglang", "pdrt"), words, strict=True):
        found = Found(f"{said} {stack}", "so", {"rooms": 3})
        monkeypatch.setitem(PLAYS, stack, {"frame": lambda _, found=found: found})
    old, report = tmp_path / "old.json", tmp_path / "new.md"
    common = ["--faults", "frame"]
    assert compare_stock.main(["--only", "sglang", *common, "--json", str(old)]) == 0
    beside = ["--beside", str(old), "--report", str(report)]
    assert compare_stock.main(["--only", "pdrt", *common, *beside]) == 0
    text = report.read_text()
    assert "| before sglang | now pdrt |" in text
    assert "SGLang: sglang 0; pdrt: pdrt" in text
    assert "| SGLang, played before |" in text
    assert "--only sglang --faults frame" in text
    capsys.readouterr()


# --- the other end ---


def test_a_puppet_answers_stumbles_and_turns_all_the_while(tmp_path):
    puppet = Puppet("echo", tmp_path, Path(sys.executable), __spec__.name, word="yes")
    with started(puppet):
        assert puppet.do("say", what="this") == {"what": "this", "told": "yes"}
        with pytest.raises(RuntimeError, match="it stumbled"):
            puppet.do("stumble")
        end = time.monotonic() + 20
        while puppet.do("wait_for_turns", count=3) < 3:
            assert time.monotonic() < end
        with puppet.stopped():
            puppet.tell("say", what="later")
            with pytest.raises(TimeoutError):
                puppet.hear(0.1)
        assert puppet.hear(20)["what"] == "later"
    assert puppet._popen.returncode is not None


@pytest.mark.parametrize("name", FAR_ENDS)
def test_what_runs_in_a_stock_environment_needs_nothing_of_ours(name):
    tree = ast.parse((ROOT / f"stress/stock/{name}.py").read_text())
    imported = {
        node.module if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    ours = {str(module) for module in imported if str(module).startswith(("stress", "pdrt"))}
    assert ours <= SHARED


# --- races, and our own column ---


def test_both_writers_meet_at_every_number():
    first: list[int] = []
    second: list[int] = []
    assert meet(first.append, second.append, 50, 60.0) == 50
    assert first == second == list(range(50))


def test_a_race_ends_with_its_time():
    assert meet(lambda _: None, lambda _: None, 1_000_000, 0.05) < 1_000_000


def test_no_verdict_of_ours_changes():
    ends = pdrt_race.Ends()
    with pdrt_race.small_table() as table:
        ends.race(table, 500)
    assert ends.rooms == ends.success + ends.failed == 500
    assert (ends.changed, ends.both) == (0, 0)


def test_a_verdict_that_is_overwritten_is_seen(monkeypatch):
    """Each writer believes that it won, as with a check and a store instead of one CAS."""
    true_move = StatusTable.move

    def blind(*arguments: Any, **options: Any) -> bool:
        true_move(*arguments, **options)
        return True

    ends = pdrt_race.Ends()
    with pdrt_race.small_table() as table:
        monkeypatch.setattr(StatusTable, "move", blind)
        ends.race(table, 100)
    assert ends.changed == ends.both == 100


def test_a_writer_that_is_overtaken_changes_nothing(monkeypatch):
    with pdrt_race.small_table() as table:
        assert pdrt_race.forced(table) is KVPoll.Failed
        load, store = table._load, table._store

        def blind(at: int, old: int, new: int) -> int:
            """A store instead of a compare-and-swap."""
            if at >= table._slots and load(at) >> 32 == new >> 32:
                store(at, new)
            return old

        monkeypatch.setattr(table, "_cas", blind)
        assert pdrt_race.forced(table) is KVPoll.Success


def test_decode_is_told_of_prefills_abort_in_our_column(tmp_path):
    found = play("pdrt", "abort", trial(tmp_path))
    assert found.said, found.why_not
    assert found.figures["rooms"] == 2
    assert 0 < found.figures["most ms"] < 10_000


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in ("abort", "race")])
def test_our_column_is_played(fault, tmp_path, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    found = play("pdrt", fault, trial(tmp_path, part=0.05))
    assert found.said, found.why_not
    figures = found.figures
    match fault:
        case "frame":
            assert figures["malformed frames counted"] == 1
            assert figures["listener is the same process"]
        case "stopped":
            assert figures["Failed after, s"] is not None
        case "ghosts":
            assert figures["slots left, both sides"] == 0
        case "late":
            lost = [value for name, value in figures.items() if "overwritten" in name]
            assert lost == [[0], [0]]


if __name__ == "__main__":
    obey(Echo)
