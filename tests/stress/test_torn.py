"""`torn` sees a word that cannot be: its laws, its oracle, each of its mutants, real processes."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pdrt.memfd import memory_fd
from pdrt.process_rows import NOBODY, Owner
from pdrt.protocol.states import MOVES, OPEN, Event, KVPoll, Reason, Role, quiet_at
from pdrt.shm_status import CLAIMED, StatusTable, create, pack
from stress.cascades.history import RECORD
from stress.cascades.history import Writer as History
from stress.cascades.torn.cascade import Crew, play_round
from stress.cascades.torn.gate import Told
from stress.cascades.torn.oracle import Written, judge
from stress.cascades.torn.reader import Reader
from stress.cascades.torn.table import LATE_AUX, MUTANTS, Kind, Tracked, region_map
from stress.cascades.torn.words import Witness, impossible, no_step, unlike
from stress.cascades.torn.writer import Writer

SLOTS = 2
STEPS = 1500
PLAYED_S = 0.5
ME = Owner(3, 7)


def words_of(*words: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(words, np.uint64)


@st.composite
def lives(draw: st.DrawFn) -> list[int]:
    """The words of one slot through some rooms, by the state machine itself."""
    role = draw(st.sampled_from(Role))
    words = [0]
    for room in range(draw(st.integers(1, 4))):
        generation = 2 * room + 1
        words.append(pack(CLAIMED, False, 0, ME, generation))
        state, owner = KVPoll.Bootstrapping, NOBODY
        words.append(pack(state, False, 0, owner, generation))
        while state in OPEN:
            moves = [e for s, e in MOVES[role] if s is state and MOVES[role][s, e][0] is not state]
            event = draw(st.sampled_from(moves))
            before, state = state, MOVES[role][state, event][0]
            owner = ME if state is KVPoll.Transferring else owner
            reason = draw(st.sampled_from(tuple(Reason)[1:])) if event is Event.FAULT else 0
            quiet = state in (KVPoll.Failed, KVPoll.Success) and quiet_at(before, state)
            words.append(pack(state, quiet, reason, owner, generation))
        if not words[-1] & 0x10:
            words.append(words[-1] | 0x10)
        words.append(generation + 1 << 32)
    return words


@settings(max_examples=40)
@given(lives(), st.data())
def test_no_legal_word_is_called_impossible_however_many_are_missed(words, data):
    every = words_of(*words)
    assert not impossible(every).any()
    assert not no_step(every[:-1], every[1:]).any()
    seen = [w for w in words if data.draw(st.booleans())]
    witness = Witness(1)
    for word in seen:
        witness.look(words_of(word))
    assert witness.faults == []
    assert witness.looked == len(seen)


@settings(max_examples=40)
@given(lives(), st.data())
def test_no_word_can_follow_a_later_one_and_no_step_is_two(words, data):
    first = data.draw(st.integers(0, len(words) - 2))
    second = data.draw(st.integers(first + 1, len(words) - 1))
    assert unlike(words_of(words[second]), words_of(words[first])).all()
    assert no_step(words_of(words[second]), words_of(words[first])).all()
    if second > first + 1:
        skipped = words_of(words[first]), words_of(words[second])
        straight = not no_step(*skipped).any()
        # Any open room may fail at once, and quiet verdicts of one kind look the same.
        assert not straight or words[second] & 0xF == KVPoll.Failed


@settings(max_examples=40)
@given(lives(), st.integers(0, 31), st.data())
def test_a_word_with_one_wrong_bit_below_its_generation_cannot_be_or_is_another_states(
    words, bit, data
):
    """A bit of a reason or an owner may only make another one: what it was decides."""
    index = data.draw(st.integers(1, len(words) - 1))
    before, word = words[index - 1], words[index]
    wrong = words_of(word ^ 1 << bit)
    if words[index] >> 32 & 1 == 0:
        assert impossible(wrong).all()
    elif bit == 4:
        assert impossible(wrong).all() or word & 0xF == KVPoll.Failed
    followed = words[index + 1] if index + 1 < len(words) else word
    found = impossible(wrong) | no_step(words_of(before), wrong)
    found |= unlike(wrong, words_of(followed)) | no_step(wrong, words_of(followed))
    may_be = bit == 4 or (5 <= bit < 13 and word & 0xF == KVPoll.Failed) or bit >= 13
    assert found.all() or may_be


PLANTED = {
    "a verdict that changes": (pack(0, True, 1, NOBODY, 1), pack(0, True, 2, NOBODY, 1)),
    "a success that fails": (pack(4, True, 0, ME, 1), pack(0, True, 1, ME, 1)),
    "quiet that goes back": (pack(0, True, 1, ME, 1), pack(0, False, 1, ME, 1)),
    "a room that comes back": (pack(0, True, 1, NOBODY, 1), pack(1, False, 0, NOBODY, 1)),
    "a generation that goes back": (pack(1, False, 0, NOBODY, 3), pack(1, False, 0, NOBODY, 1)),
    "another owner": (pack(3, False, 0, ME, 1), pack(3, False, 0, Owner(4, 1), 1)),
    "an open room with a reason": (0, pack(1, False, 3, NOBODY, 1)),
    "a failure without one": (0, pack(0, True, 0, NOBODY, 1)),
    "a reason that is none": (0, pack(0, True, 19, NOBODY, 1)),
    "a state that is none": (0, pack(5, False, 0, ME, 1)),
    "a free slot that is not blank": (0, pack(0, True, 1, NOBODY, 2)),
    "bytes that move for nobody": (0, pack(3, False, 0, NOBODY, 1)),
    "bytes that may move still, and for nobody": (0, pack(0, False, 1, NOBODY, 1)),
    "a success that is not quiet": (0, pack(4, False, 0, ME, 1)),
}


#: A word of each state, as the state machine leaves it.
PLAIN = {
    CLAIMED: pack(CLAIMED, False, 0, ME, 1),
    KVPoll.Bootstrapping: pack(KVPoll.Bootstrapping, False, 0, NOBODY, 1),
    KVPoll.WaitingForInput: pack(KVPoll.WaitingForInput, False, 0, NOBODY, 1),
    KVPoll.Transferring: pack(KVPoll.Transferring, False, 0, ME, 1),
    KVPoll.Success: pack(KVPoll.Success, True, 0, ME, 1),
}


def test_the_steps_are_those_of_the_state_machine_and_no_others():
    moves = {(s, m[0]) for side in MOVES.values() for (s, _), m in side.items() if m[0] is not s}
    allowed: set[tuple[int, int]] = {move for move in moves if move[1] is not KVPoll.Failed}
    allowed.add((CLAIMED, KVPoll.Bootstrapping))
    for before, old in PLAIN.items():
        for after, new in PLAIN.items():
            is_step = not no_step(words_of(old), words_of(new)).any()
            assert is_step == ((before, after) in allowed), (before, after)
        failed = [pack(0, quiet, 1, o, 1) for quiet in (False, True) for o in (NOBODY, ME)]
        fails = [not no_step(words_of(old), words_of(word)).any() for word in failed]
        assert any(fails) == ((before, KVPoll.Failed) in moves), before


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_word_is_seen(name):
    witness = Witness(1)
    for word in PLANTED[name]:
        assert witness.faults == []
        witness.look(words_of(word))
    assert len(witness.faults) == 1


class Stage:
    """Writers and a reader on one table, in this process: a writer with a mutant of the table, one
    without, and a reader that looks at the mutant's worst moments."""

    def __init__(self, stack: ExitStack, folder: Path, mutant: str) -> None:
        self.folder = folder
        fds = (
            create(
                Role.PREFILL,
                rooms_max=SLOTS,
                instance=b"",
                timeouts_ms=dict.fromkeys(OPEN, 60_000),
                now_ns=1,
            ),
            memory_fd("torn-region", region_map(SLOTS).length_bytes),
        )
        for fd in fds:
            stack.callback(os.close, fd)
        told = Told(
            table_fd=fds[0], region_fd=fds[1], slots=SLOTS, seed="", row=1, mutant=mutant, out=""
        )
        self.table = StatusTable(fds[0], NOBODY)
        stack.callback(self.table.close)
        self.reader = Reader(told, self.table, random.Random(1))
        stack.callback(self.reader.close)
        self.writers: list[Writer] = []
        for row, kind in ((1, MUTANTS.get(mutant, Tracked)), (2, Tracked)):
            history = History(folder / f"{row}.history")
            table = kind(fds[0], Owner(row, 1), history)
            stack.callback(table.close)
            stack.callback(history.close)
            honest = replace(told, mutant="") if row == 2 else told
            self.writers.append(Writer(honest, table, random.Random(row), 0))
            if row == 1:
                table.between = self.between

    def between(self) -> None:
        for _ in range(3):
            self.writers[1].step()
            self.reader.step()

    def play(self) -> list[str]:
        for _ in range(STEPS):
            for writer in self.writers:
                writer.step()
            self.reader.step()
            if self.reader.faults:
                break
        return self.reader.faults + [f for w in self.writers for f in w.faults]

    def judged(self) -> list[str]:
        written = Written.read(self.folder.glob("*.history"))
        return judge(written, self.table.words.copy(), [self.reader.witness.sights()])


@contextmanager
def staged(folder: Path, mutant: str) -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(stack, folder, mutant)


def test_an_honest_table_has_no_fault(tmp_path):
    with staged(tmp_path, "") as stage:
        assert stage.play() == []
        assert stage.judged() == []
        assert stage.reader.reads["aux rows"] > 10
        assert min(stage.reader.reads.values()) > 10, "the test does not do what it says"


@pytest.mark.parametrize("mutant", [*MUTANTS, LATE_AUX])
def test_each_mutant_is_caught(tmp_path, mutant):
    with staged(tmp_path, mutant) as stage:
        assert stage.play() or stage.judged(), mutant


def test_real_processes_read_write_and_die_on_one_table_and_no_word_is_torn(tmp_path):
    crew = Crew(writers=2, readers=2)
    found = play_round(
        tmp_path / "round", "seed", crew, slots=SLOTS, role=Role.DECODE, seconds=PLAYED_S
    )
    assert found.faults == []
    assert found.rooms > 10
    assert found.writes > 5 * found.rooms
    assert found.reads["words"] > found.reads["words one by one"] > 0
    assert not list(tmp_path.iterdir()), "a round without faults leaves nothing"


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_real_processes_catch_each_mutant(tmp_path, mutant):
    crew = Crew(writers=2, readers=2, kills=False, mutant=mutant)
    found = play_round(
        tmp_path / "round", "seed", crew, slots=SLOTS, role=Role.PREFILL, seconds=10.0
    )
    assert found.faults
    assert list((tmp_path / "round").iterdir()), "what shows a fault is kept"


CLAIM, OPENED = pack(CLAIMED, False, 0, ME, 1), pack(1, False, 0, NOBODY, 1)
ENDED = pack(0, True, 1, NOBODY, 1)


def history_of(path: Path, *writes: tuple[int, int], killed: bool = False) -> None:
    """Of a process that wrote these words into slot 0; `killed` before it wrote the last down."""
    history = History(path)
    for before, after in writes:
        history.append(Kind.WILL, before, b=0, c=after, ns=1)
        history.append(Kind.DID, ns=1)
    history.close()
    if killed:
        os.truncate(path, path.stat().st_size - RECORD.size)


@pytest.mark.parametrize("alone", [True, False])
def test_what_a_killed_process_wrote_and_did_not_say_is_found_out(tmp_path, alone):
    """By what stands there, and by what others made of it."""
    history_of(tmp_path / "1.history", (0, CLAIM), (CLAIM, OPENED), (OPENED, ENDED), killed=True)
    if not alone:
        history_of(tmp_path / "2.history", (ENDED, 2 << 32))
    final = words_of(ENDED if alone else 2 << 32)
    sights = [(np.zeros(1, np.intp), words_of(ENDED))]
    written = Written.read(sorted(tmp_path.iterdir()))
    assert judge(written, final, sights) == []
    assert written.rooms == 1
    assert written.verdicts() == {"succeeded": 0, "failed, reason 1": 1}


def test_two_that_tried_the_same_are_not_taken_for_two_that_did_it(tmp_path):
    history_of(tmp_path / "1.history", (0, CLAIM), (CLAIM, OPENED), (OPENED, ENDED))
    history_of(tmp_path / "2.history", (OPENED, ENDED), killed=True)
    assert judge(Written.read(sorted(tmp_path.iterdir())), words_of(ENDED), []) == []


def test_the_oracle_sees_what_no_reader_saw(tmp_path):
    def faults(final: int, *writes: tuple[int, int], seen: int = 0) -> str:
        history_of(tmp_path / "1.history", *writes)
        written = Written.read([tmp_path / "1.history"])
        (tmp_path / "1.history").unlink()
        return " ".join(judge(written, words_of(final), [(np.zeros(1, np.intp), words_of(seen))]))

    life = (0, CLAIM), (CLAIM, OPENED), (OPENED, ENDED)
    assert faults(ENDED, *life) == ""
    assert "never written" in faults(ENDED, *life, seen=ENDED ^ 1 << 40)
    assert "not replaced" in faults(OPENED, *life)
    assert "not written" in faults(ENDED, (0, CLAIM), (OPENED, ENDED))
    assert "replaced twice" in faults(ENDED, *life, (OPENED, ENDED))
    assert "was made" in faults(ENDED, (0, OPENED), (OPENED, ENDED))
