"""What a failpoint is: listed, in its place, nothing when off, and what it says when armed."""

from __future__ import annotations

import ast
import dis
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt import failpoints
from pdrt.config import Settings
from pdrt.errors import BadConfig
from pdrt.failpoints import POINTS, Action, Failpoint, Injected, Once
from tests.failpoints import render
from tests.failpoints.cells import all_cells

ROOT = Path(__file__).parent.parent.parent
POINT = "worker.post.after_move"


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.disarm()


# --- the list and the code ---


def calls(folder: Path) -> Iterator[tuple[str, ast.Call]]:
    """(where, call) of everything that is called on `failpoints` below a folder."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("failpoints."):
                yield f"{path.relative_to(folder)}:{node.lineno}", node


def test_every_point_is_hit_in_one_place_and_every_hit_is_listed():
    places: Counter[str] = Counter()
    for where, call in calls(ROOT / "pdrt"):
        assert ast.unparse(call.func) == "failpoints.hit", where
        (name,) = call.args
        assert isinstance(name, ast.Constant), f"{where}: a point's name is written out"
        assert isinstance(name.value, str), where
        places[name.value] += 1
    assert places.keys() == POINTS.keys()
    assert set(places.values()) == {1}, "a name that stands in two places says too little"


def test_nothing_in_pdrt_can_arm_a_failpoint():
    """No module but its own knows more of failpoints than `hit`, and none has imported the name,
    which would go on calling the old one."""
    for path in sorted((ROOT / "pdrt").rglob("*.py")):
        if path.name == "failpoints.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.module != "pdrt.failpoints", path
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "failpoints":
                assert node.attr == "hit", f"{path}:{node.lineno}"
                assert isinstance(node.ctx, ast.Load), f"{path}:{node.lineno}"


def test_no_setting_and_no_flag_speaks_of_failpoints():
    assert not [name for name in Settings.__struct_fields__ if "fail" in name and "point" in name]
    help_text = subprocess.run(
        [sys.executable, "-c", "from pdrt.cli.launch import prefill; prefill()", "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    ).stdout
    assert "--bootstrap-port" in help_text
    assert "failpoint" not in help_text.lower()


@pytest.mark.parametrize("point", POINTS)
def test_a_point_is_described(point):
    who, here, undone = POINTS[point]
    assert who
    assert here
    assert undone
    assert not {here[-1], undone[-1]} & set(".;,"), "they are joined to a sentence"


# --- off ---


def test_off_a_hit_runs_no_line_of_python():
    assert failpoints.hit is failpoints._off
    assert not hasattr(failpoints.hit, "__code__"), "nothing to disassemble, so nothing to run"
    with pytest.raises(TypeError):
        dis.get_instructions(failpoints.hit)
    failpoints.hit(POINT)


def test_off_again_after_it_was_armed():
    failpoints.arm(Once(Failpoint(point=POINT, action=Action.RAISE)))
    failpoints.disarm()
    failpoints.hit(POINT)
    assert failpoints.hit is failpoints._off


# --- armed ---


@given(st.text(max_size=30).filter(lambda name: name not in POINTS), st.sampled_from(Action))
def test_a_point_that_there_is_not_is_refused(name, action):
    with pytest.raises(BadConfig, match="no failpoint is called"):
        Failpoint(point=name, action=action)


@given(st.integers(max_value=0) | st.none(), st.floats(allow_nan=True, allow_infinity=True))
def test_a_hit_or_delay_that_can_not_be_is_refused(on_hit, delay_s):
    if on_hit is None:
        if 0 <= delay_s <= failpoints.DELAY_MAX_S:
            return
        given_ = {"delay_s": delay_s}
    else:
        given_ = {"on_hit": on_hit}
    with pytest.raises(BadConfig, match=POINT):
        Failpoint(point=POINT, action=Action.DELAY, **given_)


def test_a_point_that_there_is_not_is_refused_from_a_file_too():
    text = msgspec.json.encode({"point": "worker.nowhere", "action": "kill"})
    with pytest.raises(BadConfig, match=r"worker\.nowhere"):
        msgspec.json.decode(text, type=Failpoint)


@given(st.lists(st.sampled_from(sorted(POINTS)), max_size=40), st.integers(1, 5))
def test_it_strikes_once_at_the_hit_it_names(points, on_hit):
    """Whatever else is hit on the way, and however often it is hit afterwards."""
    target = points[0] if points else POINT
    failpoints.arm(Once(Failpoint(point=target, action=Action.RAISE, on_hit=on_hit)))
    struck = []
    for at, point in enumerate(points):
        try:
            failpoints.hit(point)
        except Injected:
            struck.append(at)
    hits = [at for at, point in enumerate(points) if point == target]
    assert struck == hits[on_hit - 1 : on_hit]


def test_of_several_that_are_armed_alike_one_claims_it():
    claims = iter([True, False])
    first, second = (
        Once(Failpoint(point=POINT, action=Action.RAISE), claim=lambda: next(claims))
        for _ in range(2)
    )
    assert first(POINT) is not None
    assert second(POINT) is None


def armed_process(action: Action) -> subprocess.Popen[str]:
    source = (
        "from pdrt import failpoints as f; "
        f"f.arm(f.Once(f.Failpoint(point='{POINT}', action=f.Action('{action}')))); "
        f"print('armed', flush=True); f.hit('{POINT}'); print('went on', flush=True)"
    )
    return subprocess.Popen(
        [sys.executable, "-c", source],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


@pytest.mark.parametrize(
    ("action", "code", "out", "err"),
    [
        (Action.KILL, -signal.SIGKILL, "armed\n", ""),
        (Action.RAISE, 1, "armed\n", f"Injected: {POINT}"),
        (Action.DELAY, 0, "armed\nwent on\n", ""),
    ],
)
def test_what_an_action_does_to_a_process(action, code, out, err):
    process = armed_process(action)
    said = process.communicate(timeout=20)
    assert process.returncode == code
    assert said[0] == out
    assert err in said[1]


def test_a_stopped_process_goes_on_when_it_is_continued():
    process = armed_process(Action.STOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert os.WSTOPSIG(status) == signal.SIGSTOP
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=20)[0] == "armed\nwent on\n"
    assert process.returncode == 0


# --- the page ---


def test_the_page_is_current():
    """If not: python -m tests.failpoints.render."""
    assert render.PAGE.read_text(encoding="utf-8") == render.page(render.last_run())


def test_no_cell_failed_in_the_last_run():
    """Cells that were added since may be missing from it."""
    run = render.last_run()
    assert run.passed
    assert all(run.passed.values()), [cell for cell, passed in run.passed.items() if not passed]
    assert set(run.struck) == run.passed.keys()


def test_a_page_tells_failed_and_missing_cells_from_passed_ones():
    first, second, *_ = (str(cell) for cell in all_cells())
    run = render.Run("today", "abc", "this one", {first: True, second: False}, [first, second])
    text = render.page(run)
    count = len(all_cells())
    assert f"{count}: 1 passed, 1 failed, {count - 2} not run" in text
    assert all(f"| `{point}` |" in text for point in POINTS)
