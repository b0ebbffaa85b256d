"""Laws of standbys, shown with real processes: who takes over, and whom a standby can hurt."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdrt import child
from pdrt.clock import MILLISECOND_NS, SECOND_NS, monotonic_ns
from pdrt.supervision import EXCUSED_MAX, ChildSpec, ChildState, Pulse, Spent, starved_ns
from pdrt.supervisor import Phase, Supervisor
from tests.supervisor import kids
from tests.supervisor.kids import MemoryBoard, pid_of, spec, supervised, turn_until, words

ROLES = {"child0": 0, "child1": 1}
SPARE = 2
LIMIT_NS = 200 * MILLISECOND_NS


def spare(
    board: MemoryBoard, target: Callable[..., None] = kids.stands_by, **changes: object
) -> ChildSpec:
    return spec(board, SPARE, target, ROLES, stands_for=tuple(ROLES), **changes)


def state(supervisor: Supervisor, row: int) -> ChildState:
    return next(s for s in supervisor.children() if s.name == f"child{row}")


def is_up(supervisor: Supervisor, row: int, incarnation: int = 1) -> Callable[[], bool]:
    def up() -> bool:
        seen = state(supervisor, row)
        return seen.phase is Phase.UP and seen.incarnation >= incarnation

    return up


def start_all(supervisor: Supervisor) -> None:
    supervisor.start()
    turn_until(supervisor, is_up(supervisor, SPARE), "the standby to stand by")


def test_a_standby_becomes_the_child_that_died_and_is_replaced(board: MemoryBoard) -> None:
    steady = [spec(board, row, kids.steady) for row in (0, 1)]
    with supervised(*steady, spare(board), board=board) as supervisor:
        start_all(supervisor)
        warm, bystander = pid_of(state(supervisor, SPARE)), pid_of(state(supervisor, 0))
        board.diary.clear()
        os.kill(pid_of(state(supervisor, 1)), signal.SIGKILL)
        turn_until(supervisor, is_up(supervisor, 1, 2), "the standby to take over")
        assert pid_of(state(supervisor, 1)) == warm
        assert words(board, "buried", "incarnate", "pid") == [
            ("buried", 1),  # first of all: nothing of the dead may be left
            ("incarnate", 1),
            ("buried", SPARE),
            ("pid", 1),
        ]
        turn_until(supervisor, is_up(supervisor, SPARE, 2), "another standby")
        assert pid_of(state(supervisor, SPARE)) != warm
        assert pid_of(state(supervisor, 0)) == bystander
        # What was promoted is a child like any other: it dies, and the next takes over.
        warm = pid_of(state(supervisor, SPARE))
        os.kill(pid_of(state(supervisor, 1)), signal.SIGKILL)
        turn_until(supervisor, is_up(supervisor, 1, 3), "the second standby to take over")
        assert pid_of(state(supervisor, 1)) == warm
    assert not psutil.pid_exists(warm)


def test_a_deliberate_restart_is_served_by_the_standby_too(board: MemoryBoard) -> None:
    with supervised(spec(board, 0, kids.steady), spare(board), board=board) as supervisor:
        start_all(supervisor)
        warm = pid_of(state(supervisor, SPARE))
        supervisor.restart("child0", "because")
        turn_until(supervisor, is_up(supervisor, 0, 2), "the standby to take over")
        assert pid_of(state(supervisor, 0)) == warm
        assert state(supervisor, 0).restarts == 0


def test_repeated_deaths_wait_for_no_backoff_while_a_standby_is_there(board: MemoryBoard) -> None:
    with Supervisor(
        [spec(board, 0, kids.steady), spare(board)], board, deaths_max=99, kill_s=2.0
    ) as supervisor:
        start_all(supervisor)
        for incarnation in range(2, 6):
            turn_until(supervisor, is_up(supervisor, SPARE, incarnation - 1), "a standby")
            os.kill(pid_of(state(supervisor, 0)), signal.SIGKILL)
            turn_until(
                supervisor, lambda: state(supervisor, 0).phase is not Phase.UP, "the death to show"
            )
            assert state(supervisor, 0).phase is Phase.STARTING, "it was promoted in the same turn"
            turn_until(supervisor, is_up(supervisor, 0, incarnation), "the takeover")


def test_a_child_that_dies_before_its_standby_is_ready_gets_the_standby(
    board: MemoryBoard,
) -> None:
    with supervised(spec(board, 0, kids.steady), spare(board), board=board) as supervisor:
        supervisor.start()
        supervisor.step(0.0)
        coming = state(supervisor, SPARE)
        os.kill(pid_of(state(supervisor, 0)), signal.SIGKILL)
        turn_until(supervisor, is_up(supervisor, 0, 2), "the standby to take over")
        assert pid_of(state(supervisor, 0)) == pid_of(coming)


def test_a_stopped_standby_is_passed_over(board: MemoryBoard) -> None:
    slow_to_blame = spare(board, hang_s=0.5)
    with supervised(spec(board, 0, kids.steady), slow_to_blame, board=board) as supervisor:
        start_all(supervisor)
        frozen = pid_of(state(supervisor, SPARE))
        os.kill(frozen, signal.SIGSTOP)
        now = supervisor._loop.now_ns
        turn_until(supervisor, lambda: supervisor._loop.now_ns - now > 3e8, "its pulse to be old")
        os.kill(pid_of(state(supervisor, 0)), signal.SIGKILL)
        turn_until(supervisor, is_up(supervisor, 0, 2), "a child without the standby's help")
        assert pid_of(state(supervisor, 0)) != frozen
        assert state(supervisor, 0).incarnation == 2, "the frozen one was tried first"
        turn_until(supervisor, is_up(supervisor, SPARE, 2), "the stopped standby to be replaced")


def test_deaths_of_a_standby_fail_nobody_and_never_escalate(board: MemoryBoard) -> None:
    with supervised(spec(board, 0, kids.steady), spare(board), board=board) as supervisor:
        start_all(supervisor)
        for incarnation in range(2, 6):  # deaths_max is 2
            os.kill(pid_of(state(supervisor, SPARE)), signal.SIGKILL)
            turn_until(supervisor, is_up(supervisor, SPARE, incarnation), "the next standby")
        assert state(supervisor, 0).incarnation == 1
        assert state(supervisor, 0).phase is Phase.UP


def test_the_start_waits_for_no_standby_and_survives_one_that_cannot_be(board: MemoryBoard) -> None:
    broken = spare(board, kids.cannot_stand_by)
    with supervised(spec(board, 0, kids.steady), broken, board=board) as supervisor:
        supervisor.start()
        turn_until(supervisor, lambda: state(supervisor, SPARE).restarts >= 4, "it to fail often")
        os.kill(pid_of(state(supervisor, 0)), signal.SIGKILL)
        turn_until(supervisor, is_up(supervisor, 0, 2), "a child without a standby's help")


def test_a_promoted_standby_that_is_not_ready_is_killed_and_counts_as_a_death(
    board: MemoryBoard,
) -> None:
    useless = spare(board, kids.stands_by_and_never_gets_ready)
    with supervised(spec(board, 0, kids.steady), useless, board=board) as supervisor:
        start_all(supervisor)
        os.kill(pid_of(state(supervisor, 0)), signal.SIGKILL)
        turn_until(
            supervisor, lambda: "not ready within 1 s" in state(supervisor, 0).cause, "blame"
        )
        assert state(supervisor, 0).restarts == 2


def test_a_standby_may_wait_on_a_descriptor_of_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor with a thousand connections launches standbys too, and numbers are kept."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2048)), hard))
    monkeypatch.setattr(child, "_rename", lambda name: None)
    theirs, ours = os.pipe()
    try:
        high = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 1100)
        os.write(ours, b"listener")
        assert child.Promotion(child.Descriptor(high)).wait(lambda: None, 0.01) == "listener"
    finally:
        os.close(theirs)
        os.close(ours)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- what counts as silence -----------------------------------------------------------------------


@dataclass
class Scheduled:
    """A process as the kernel sees it: its main thread runs, sleeps, or waits for a CPU, and what
    it has waited is not counted before the wait is over."""

    is_at: str = "S"
    ran_ns: int = 1
    slept_ns: int = 0
    waited_ns: int = 0
    waiting_ns: int = 0  # and still does
    others_ns: int = 0

    def spends(self, doing: str, duration_ns: int) -> None:
        if doing == "waits":
            self.is_at, self.waiting_ns = "R", self.waiting_ns + duration_ns
            return
        woken = doing == "runs" and self.is_at == "S"
        self.waited_ns, self.waiting_ns = self.waited_ns + self.waiting_ns + woken, 0
        if doing == "runs":
            self.is_at, self.ran_ns = "R", self.ran_ns + duration_ns
        else:
            self.is_at, self.slept_ns = "S", self.slept_ns + duration_ns

    @property
    def own_ns(self) -> int:
        return self.ran_ns + self.slept_ns

    def spent(self) -> Spent:
        return Spent(self.ran_ns, self.waited_ns)

    def state(self) -> str:
        return self.is_at

    def waits_ns(self) -> dict[int, int]:
        return {1: self.waited_ns, 2: self.others_ns, 3: 0}


Steps = list[tuple[str, int]]  # what it does, and for how many milliseconds
STEPS = st.lists(
    st.tuples(st.sampled_from(["runs", "sleeps", "waits"]), st.integers(1, 300)), max_size=60
)
TICK_NS = 20 * MILLISECOND_NS


@given(before=STEPS, after=STEPS)
@example(before=[("waits", 300)], after=[("sleeps", 201)])  # it is hung all the same
@example(before=[], after=[("waits", 101), ("runs", 101), ("waits", 101)])
@example(before=[], after=[("runs", 1), ("waits", 900)])
@example(before=[], after=[("sleeps", 45), ("runs", 180)])
def test_time_without_a_cpu_is_never_held_against_a_child(before: Steps, after: Steps) -> None:
    """It is hung once the limit is over in its own time, give or take one look."""
    process = Scheduled()
    for doing, duration_ms in before:
        process.spends(doing, duration_ms * MILLISECOND_NS)
    now_ns, pulse = 0, Pulse(1, 0, process.spent())
    # A wait that began before the pulse is an excuse when it ends.
    own_ns, longest_ns = process.own_ns, LIMIT_NS + process.waiting_ns + TICK_NS
    for doing, duration_ms in after:
        left_ns = duration_ms * MILLISECOND_NS
        while left_ns:
            step_ns = min(left_ns, TICK_NS)
            left_ns, now_ns = left_ns - step_ns, now_ns + step_ns
            process.spends(doing, step_ns)
            own = process.own_ns - own_ns
            if pulse.is_hung(now_ns, limit_ns=LIMIT_NS, excuses=process):
                assert own > LIMIT_NS - TICK_NS or now_ns > EXCUSED_MAX * LIMIT_NS
            elif doing != "waits":
                assert own <= longest_ns


def test_who_comes_late_to_look_holds_that_against_nobody() -> None:
    process = Scheduled()
    pulse = Pulse(1, 0, process.spent())
    for _ in range(3):
        process.spends("waits", 5 * LIMIT_NS)
        assert not pulse.is_hung(process.waiting_ns, limit_ns=LIMIT_NS, excuses=process)


def test_a_child_that_had_its_cpu_is_hung_right_after_the_limit() -> None:
    process = Scheduled(waited_ns=10**12, others_ns=10**12)
    pulse = Pulse(1, 0, process.spent())
    for now_ms in range(0, 200, 50):
        assert not pulse.is_hung(now_ms * MILLISECOND_NS, limit_ns=LIMIT_NS, excuses=process)
    assert pulse.is_hung(LIMIT_NS + 1, limit_ns=LIMIT_NS, excuses=process)
    pulse.feel(2, LIMIT_NS + 1, process)
    assert not pulse.is_hung(LIMIT_NS + 2, limit_ns=LIMIT_NS, excuses=process)


@pytest.mark.parametrize("excuse", ["on disk", "ready", "starved", "its threads are starved"])
def test_no_excuse_lasts_for_ever(excuse: str) -> None:
    process = Scheduled(is_at={"on disk": "D", "ready": "R"}.get(excuse, "S"))
    pulse = Pulse(1, 0, process.spent())
    for now_ns in range(0, EXCUSED_MAX * LIMIT_NS, LIMIT_NS // 2):
        if "starved" in excuse:
            process.others_ns = now_ns
            process.waited_ns = now_ns if excuse == "starved" else 0
        assert not pulse.is_hung(now_ns, limit_ns=LIMIT_NS, excuses=process)
    assert pulse.is_hung(EXCUSED_MAX * LIMIT_NS + 1, limit_ns=LIMIT_NS, excuses=process)


def test_a_kernel_that_keeps_no_count_excuses_nobody() -> None:
    process = Scheduled(is_at="R", ran_ns=0)
    pulse = Pulse(1, 0, process.spent())
    for now_ns in range(0, 2 * LIMIT_NS, LIMIT_NS // 4):
        assert pulse.is_hung(now_ns, limit_ns=LIMIT_NS, excuses=process) is (now_ns > LIMIT_NS)


def test_threads_that_starve_are_no_excuse_for_one_that_loops() -> None:
    process = Scheduled(is_at="R")
    pulse = Pulse(1, 0, process.spent())
    for now_ns in range(0, 2 * LIMIT_NS, LIMIT_NS // 4):
        process.ran_ns, process.others_ns = now_ns + 1, now_ns
        assert pulse.is_hung(now_ns, limit_ns=LIMIT_NS, excuses=process) is (now_ns > LIMIT_NS)


def test_a_process_knows_how_long_it_starved(board: MemoryBoard) -> None:
    """Two that loop on one CPU: each waits about half of the time."""
    rivals = [spec(board, row, kids.loops, hang_s=60.0) for row in (0, 1)]
    with supervised(*rivals, board=board) as supervisor:
        supervisor.start()
        cpu = min(os.sched_getaffinity(0))
        for row in (0, 1):
            os.sched_setaffinity(pid_of(state(supervisor, row)), {cpu})
        process = supervisor._children[0].process
        assert process is not None
        before_ns, before = process.waits_ns(), process.spent()

        def both_starved() -> bool:
            waited_ns = process.spent().waited_ns - before.waited_ns
            return min(waited_ns, starved_ns(before_ns, process.waits_ns())) > 100 * MILLISECOND_NS

        turn_until(supervisor, both_starved, "a tenth of a second without the CPU")
        assert process.spent().ran_ns > before.ran_ns
        assert process.state() == "R"


def test_a_process_that_waits_for_its_cpu_longer_than_its_limit_is_not_hung(
    board: MemoryBoard,
) -> None:
    """The kernel counts that wait when it is over, which is too late to excuse it."""
    limit_ns = 50 * MILLISECOND_NS
    with supervised(spec(board, 0, kids.starves, hang_s=limit_ns / SECOND_NS), board=board) as tree:
        tree.start()
        turn_until(tree, is_up(tree, 0), "it to be up")
        pulse = tree._children[0].pulse
        silences_ns: list[int] = []

        def long_silences_that_ended() -> bool:
            silent_ns = monotonic_ns() - pulse.changed_ns
            if silences_ns and silent_ns < silences_ns[-1]:
                silences_ns.append(silent_ns)
            silences_ns[-1:] = [silent_ns]
            return sum(silent_ns > limit_ns for silent_ns in silences_ns[:-1]) >= 5

        turn_until(tree, long_silences_that_ended, "it to have had no CPU for long, and then some")
        assert state(tree, 0).incarnation == 1
