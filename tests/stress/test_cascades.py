"""What a run of the cascades is made of: pieces that resume and add up, and reports of them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stress.bench.report import Machine
from stress.cascades import __main__ as command
from stress.cascades import abort_storm, judgement, kill_cascade, plan, report
from stress.cascades.apart import Order
from stress.cascades.lanes import DECODES, PREFILLS, Lanes, lane_number
from stress.cascades.oracle.power import ASKED, EXCUSED
from stress.cascades.piece import Outcome, Piece

ROOMS = st.builds(plan.room_of, st.integers(1, 8), st.integers(0, 1 << 30), calm=st.booleans())
MIXES = [kill_cascade.MIX, abort_storm.MIX]
MACHINE = Machine.now(["bin/stress", "--release"])


def outcome(seed: int, **fields: object) -> Outcome:
    made = Outcome(cascade="kill_cascade", seed=seed, cycles=10, rooms=100, took_s=5.0)
    made.counts = {"verdicts": 200, "pieces": 1}
    made.none("changed verdicts", 0, "verdicts")
    made.time("listener killed", 0.02 * seed)
    made.series["verdicts/s"] = [(0.0, 7.0)]
    made.peak("open past its deadline, s", 0.01 * seed)
    return msgspec.structs.replace(made, **fields)


# --- pieces ---


def test_pieces_add_up() -> None:
    whole = outcome(1)
    whole.add(outcome(2, violations=["late bytes: of room 1"]))
    assert (whole.cycles, whole.rooms, whole.took_s) == (20, 200, 10.0)
    assert whole.counts == {"verdicts": 400, "pieces": 2, "changed verdicts": 0}
    assert whole.times_s == {"listener killed": [0.02, 0.04]}
    assert whole.peaks == {"open past its deadline, s": 0.02}
    assert whole.series == {"verdicts/s": [(0.0, 7.0), (5.0, 7.0)]}
    assert whole.violations == ["late bytes: of room 1"]


def test_a_piece_does_its_cycles_and_begins_none_when_its_time_is_up(tmp_path: Path) -> None:
    assert list(Piece(1, 3, 60.0, tmp_path).rounds()) == [0, 1, 2]
    assert list(Piece(1, 3, 0.0, tmp_path, begun_s=0.0).rounds()) == [0]


def test_the_draws_of_a_piece_are_settled_by_its_seed_and_the_purpose(tmp_path: Path) -> None:
    def draw(seed: int, purpose: str) -> float:
        return Piece(seed, 1, 1.0, tmp_path).random(purpose).random()

    assert draw(1, "victims") == draw(1, "victims")
    assert len({draw(1, "victims"), draw(2, "victims"), draw(1, "storms")}) == 3


def test_a_piece_that_was_played_is_not_played_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[str] = []

    def play(order: Order, folder: Path) -> Outcome:
        played.append(order.name)
        return outcome(order.seed)

    monkeypatch.setattr(command, "play", play)
    order = Order("kill_cascade", 7, 1, 1.0)
    first, again = command.played(order, tmp_path), command.played(order, tmp_path)
    assert first == again == outcome(7)
    assert played == ["kill_cascade-7"]


def test_a_broken_law_makes_the_run_fail_and_tells_how_to_play_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = outcome(7, violations=["late bytes: of room 1"])
    monkeypatch.setattr(command, "play", lambda order, folder: broken)
    arguments = ["kill_cascade", "--cycles", "1", "--seed", "7", "--pieces-in", str(tmp_path)]
    assert command.main(arguments) == 1
    assert "VIOLATION late bytes: of room 1" in capsys.readouterr().out
    monkeypatch.setattr(command, "play", lambda order, folder: outcome(order.seed))
    assert command.main([*arguments[:-3], "8", *arguments[-2:]]) == 0
    assert Order("soak", 3, 9, 1.0).replay(2) == "bin/stress soak --seed 3 --cycles 2"


@pytest.mark.parametrize("violations", [[], ["late bytes: of room 1"]])
def test_histories_that_were_kept_are_judged_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    violations: list[str],
) -> None:
    place = tmp_path / "abort_storm-7"
    (place / "histories").mkdir(parents=True)
    judged: list[tuple[object, ...]] = []

    def judge(piece: Piece, name: str, salt: int, mix: plan.Mix) -> Outcome:
        judged.append((piece.histories, piece.seed, name, salt, mix))
        return outcome(7, violations=violations)

    monkeypatch.setattr(judgement, "judge", judge)
    assert command.main(["--again", str(place)]) == bool(violations)
    mix = abort_storm.MIX
    assert judged == [(place / "histories", 7, "abort_storm", plan.mix64(7), mix)]
    assert ("VIOLATION" in capsys.readouterr().out) is bool(violations)


@pytest.mark.parametrize("name", ["abort_storm-7", "nonesuch-7", "soak", "torn-7"])
def test_a_folder_that_no_such_piece_left_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / name).mkdir()
    assert command.main(["--again", str(tmp_path / name)]) == 2
    assert "histories" in capsys.readouterr().err


def test_a_release_is_ten_thousand_cycles_of_kills_and_aborts() -> None:
    options = command.parse(["--release", "kill_cascade", "abort_storm"])
    orders = list(command.orders(options))
    assert sum(order.cycles for order in orders) == 10_000
    assert len({order.name for order in orders}) == len(orders)


def test_a_quick_run_of_both_leaves_most_of_three_minutes_to_others() -> None:
    orders = command.orders(command.parse(["--quick", "kill_cascade", "abort_storm"]))
    assert sum(order.seconds for order in orders) < 60


def test_an_unknown_cascade_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse(["nonesuch"])
    assert "nonesuch" in capsys.readouterr().err


# --- reports ---


def test_beside_a_zero_stands_the_bound_that_it_leaves() -> None:
    assert report.rows_of_zeros(outcome(1)) == [["changed verdicts", "0", "200 verdicts", "0.015"]]
    found = outcome(1, counts={"verdicts": 200, "changed verdicts": 2})
    assert report.rows_of_zeros(found) == [["changed verdicts", "2", "200 verdicts", ""]]
    assert report.bound(0) == "no trial"


def test_beside_the_reasons_of_failures_stands_what_they_would_excuse() -> None:
    counts = {"verdicts: decode, peer lost": 9, "verdicts: decode, Success": 70}
    asked = {ASKED: 150, EXCUSED + "peer lost": 30, EXCUSED + "worker died": 0}
    whole = outcome(1, counts=counts | asked)
    whole.add(outcome(2, counts={ASKED: 150, EXCUSED + "worker died": 6}))
    assert report.rows_of_power(whole) == [["peer lost", "30 of 300", "10 %"]]
    assert "by reason: peer lost 10 %\n" in report.console([whole])
    assert "| peer lost | 30 of 300 | 10 % |" in report.markdown(MACHINE, 5, [whole], "r.png")
    assert report.rows_of_power(outcome(1)) == []


def test_a_report_is_markdown_json_and_a_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The plot itself is drawn by every run with --report: its library keeps fonts open for good.
    monkeypatch.setattr(report, "draw", lambda path, outcomes: path.write_bytes(b"drawn"))
    report.write(tmp_path / "r.md", MACHINE, 5, [outcome(1), outcome(2)])
    text = (tmp_path / "r.md").read_text()
    assert "(r.png)" in text
    assert "**0 violations**" in text
    assert MACHINE.commit in text
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["seed"] == 5
    assert record["results"][0]["times_s"]["listener killed"]["n"] == 1
    assert (tmp_path / "r.png").exists()


# --- rooms ---


@given(ROOMS, st.sampled_from(MIXES))
def test_a_room_is_what_its_id_says(room: int, mix: plan.Mix) -> None:
    drawn = plan.spec(9, room, mix)
    assert drawn == plan.spec(9, room, mix)
    assert drawn.pages_count < 256
    assert all(pages > 0 for pages in drawn.chunks)
    assert bool(drawn.aborter) == bool(drawn.aim)
    assert not (plan.is_calm(room) and drawn.aborter)
    assert (
        plan.room_of(plan.lane_of(room), room & plan.NUMBER_MASK, calm=plan.is_calm(room)) == room
    )


def test_every_aim_is_drawn_from_either_side() -> None:
    drawn = [plan.spec(3, plan.room_of(1, n), abort_storm.MIX) for n in range(2000)]
    aims = {(each.aborter, each.aim) for each in drawn if each.aim}
    assert aims == {(side, aim) for side in (plan.PREFILL, plan.DECODE) for aim in plan.AIMS}
    assert {each.after_restart for each in drawn} == {0, 1, 2}


def test_lanes_have_numbers_of_their_own_and_fields_of_one_word(tmp_path: Path) -> None:
    numbers = {
        lane_number(prefill, decode, leader)
        for prefill in range(PREFILLS)
        for decode in range(DECODES)
        for leader in (plan.PREFILL, plan.DECODE)
    }
    assert numbers == set(range(1, 1 + 2 * PREFILLS * DECODES))
    ours, theirs = Lanes(tmp_path / "lanes"), Lanes(tmp_path / "lanes")
    for lane in numbers:
        ours.set_lane(lane, 1, lane << 40)
    ours.set_player(0, 0, 5)
    assert [theirs.lane(lane, 1) for lane in sorted(numbers)] == [n << 40 for n in sorted(numbers)]
    assert theirs.player(0, 0) == 5
    ours.close()
    theirs.close()


# --- the thing itself ---


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quick_run_breaks_no_law(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = command.main(["abort_storm", "kill_cascade", "--quick", "--pieces-in", str(tmp_path)])
    assert code == 0, capsys.readouterr().out
    played = [msgspec.json.decode(p.read_bytes(), type=Outcome) for p in tmp_path.glob("*.json")]
    assert {each.cascade for each in played} == {"abort_storm", "kill_cascade"}
    assert all(each.cycles > 0 and each.rooms > 100 for each in played)
