"""Starts children in order, watches them, restarts them within limits, stops them in reverse.

It is not an actor and knows nothing of rooms: what children do is their targets' business, and what
a death means for shared memory is the Board's.

One thread, one loop.  Nothing in it blocks except the selector, and that for a bounded time.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from pdrt import failpoints
from pdrt.child import PR_SET_CHILD_SUBREAPER, ChildProcess, prctl
from pdrt.children import Child, standby_for, standby_may_come
from pdrt.clock import SECOND_NS, Clock, monotonic_ns, to_ns
from pdrt.errors import BadConfig, BadRequest, Escalated, PdrtError, StartFailed, is_exhausted
from pdrt.loop import Loop
from pdrt.supervision import (
    BACKOFF_MAX_S,
    DYING,
    IN_MOTION,
    SUPERVISED,
    Board,
    ChildSpec,
    ChildState,
    Phase,
    Restart,
    backoff_s,
    deaths_within,
    restarts_allowed,
)

__all__ = ["Board", "ChildSpec", "ChildState", "Escalated", "Phase", "Restart", "Supervisor"]

logger = logging.getLogger("pdrt.supervisor")

BEAT_S, SHORT_BEAT_S = 0.1, 0.005  # rest of the loop; the short one while a child is on its way
HELPERS_S = 0.2  # for what a dead child left (a resource tracker, say) to clean up and go
PROMOTED_S = 1.0  # for a promoted standby to be ready, and so long that a busy machine is no reason
STANDBY_COMING_S = 1.0  # so long a death waits for one that has been launched
NEXT_STANDBY_S = 0.25  # the takeover comes first: another standby's imports want the same CPUs


class Supervisor:
    """Use it as a context manager in the main thread; hook in services and timers, then `run`.

    `children`, `restart` and `request_stop` may be called from any thread.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        board: Board,
        *,
        deaths_max: int = 5,
        period_s: float = 30.0,
        kill_s: float = 5.0,
        clock: Clock = monotonic_ns,
    ) -> None:
        self._children = [Child(spec) for spec in specs]
        self._by_name = {child.spec.name: child for child in self._children}
        if len(self._by_name) < len(specs) or len({spec.row for spec in specs}) < len(specs):
            raise BadConfig("two children share a name or a row")
        self._board = board
        self._deaths_max, self._period_s, self._kill_s = deaths_max, period_s, kill_s
        self._deaths_ns: deque[int] = deque(maxlen=deaths_max + 1)
        self._loop = Loop(clock)
        self._requests: deque[tuple[str, str]] = deque()
        self._stop_reason: str | None = None
        self._stopping = False
        self._escalated: Escalated | None = None
        self._publish()

    def __enter__(self) -> Self:
        assert threading.current_thread() is threading.main_thread(), "signals and launches need it"
        # SIGCHLD too: if an ignored one was inherited, every exit code would be lost.
        self._loop.open((signal.SIGTERM, signal.SIGINT, signal.SIGCHLD), self._on_signal)
        # Orphans that children leave become ours to reap, whoever pid 1 is.
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        try:
            self.stop("closed")
        finally:
            for child in self._children:
                if child.process is not None:  # quarantined, or stopping went wrong
                    child.process.kill()
                    child.process.close()
                child.forget()
            prctl(PR_SET_CHILD_SUBREAPER, 0)
            self._loop.close()

    # --- what a composition root calls -----------------------------------------------------------

    @property
    def callback_errors_count(self) -> int:
        return self._loop.callback_errors_count

    @property
    def stopping(self) -> bool:
        """Was it asked to stop?  From any thread."""
        return self._stop_reason is not None

    def run(self) -> str:
        """Start, supervise until somebody asks to stop, stop; return the reason.

        Raises StartFailed or Escalated, but only after everything is stopped.
        """
        try:
            self.start()
            while self._stop_reason is None:
                self.step()
        except PdrtError as error:
            self.stop(str(error))
            raise
        self.stop(self._stop_reason or "")
        return self._stop_reason or ""

    def start(self) -> None:
        """Launch each child once the one before it is ready, standbys without waiting for them.
        Returns early if asked to stop."""
        for child in self._children:
            self._launch(child)
            if child.is_standby:
                continue
            # One that was ready and died is restarted like any other, and the next may start.
            while child.phase in IN_MOTION and not child.been_up:
                self.step()
                if self._stop_reason is not None:
                    return
            if not child.been_up and child.spec.restart.applies(child.exit_code):
                raise StartFailed(child.spec.name, child.cause)

    def step(self, wait_s: float = BEAT_S) -> None:
        """One round: take in what happened, then look after every child."""
        moving = any(child.phase in IN_MOTION for child in self._children)
        self._loop.turn(min(wait_s, SHORT_BEAT_S if moving else BEAT_S))
        while self._requests:
            name, reason = self._requests.popleft()
            self._begin_restart(self._by_name[name], reason)
        for child in self._children:
            self._tend(child)
        for child in self._children:
            if child.phase is Phase.BACKOFF and not self._stopping:
                # A standby costs no start, and the next one is long enough in coming.
                now_ns = self._loop.now_ns
                if now_ns >= child.deadline_ns or standby_for(child, self._children, now_ns):
                    self._launch(child)
        self._publish()
        if self._escalated is not None and not self._stopping:
            raise self._escalated

    def stop(self, reason: str) -> None:
        """Stop all in reverse order.  Bounded by the sum of shutdown_s + kill_s."""
        self._stopping = True
        self._stop_reason = self._stop_reason or reason
        for child in reversed(self._children):
            if child.phase in SUPERVISED:
                self._terminate(child, f"stop: {reason}")
            while child.phase in DYING and child.process is not None:
                self.step()
            if child.process is None:
                child.phase = Phase.DONE
        self._publish()

    def request_stop(self, reason: str) -> None:
        """Ask `run` to stop.  The first reason stands."""
        self._stop_reason = self._stop_reason or reason
        self._loop.wake()

    def restart(self, name: str, reason: str) -> None:
        """Ask for a deliberate restart, by SIGKILL: who asks wants the old process to be gone.  It
        does not count against the restart limit."""
        if name not in self._by_name:
            raise BadRequest(f"no child is called {name}")
        self._requests.append((name, reason))
        self._loop.wake()

    def children(self) -> list[ChildState]:
        """In the order of the specs."""
        return list(self._states)

    def add_service(self, fileno: int, callback: Callable[[], object]) -> None:
        """Call back from the loop while `fileno` is readable; main thread only, as add_timer."""
        self._loop.add_service(fileno, callback)

    def remove_service(self, fileno: int) -> None:
        """Call before closing the descriptor."""
        self._loop.remove_service(fileno)

    def add_timer(self, period_s: float, callback: Callable[[], object]) -> None:
        """Call back from the loop about every period_s.  No callback may block, or call `stop`."""
        self._loop.add_timer(period_s, callback)

    # --- the life of a child ---------------------------------------------------------------------

    def _launch(self, child: Child) -> None:
        spec = child.spec
        child.incarnation += 1
        child.blame, child.exit_code, child.deliberate = "", None, False
        self._board.incarnate(spec.row, child.incarnation, 0)
        standby = standby_for(child, self._children, self._loop.now_ns)
        if standby is not None:
            self._promote(standby, child)
            return
        try:
            process = child.launch()
        except (OSError, BadConfig) as error:  # to give up for want of a place would help nobody
            excused = child.been_up and is_exhausted(error)
            self._after_death(child, f"not launched: {error}", excused=excused)
            return
        self._adopt(child, process, spec.ready_s, "launched")

    def _adopt(self, child: Child, process: ChildProcess, ready_s: float, how: str) -> None:
        name, row = child.spec.name, child.spec.row
        self._loop.watch(process.pidfd, partial(self._on_exit, child))  # first: `stop` relies on it
        child.launched_ns, child.stopped_ns = self._loop.clock_ns, 0
        self._enter(child, Phase.STARTING, ready_s)
        failpoints.hit("supervisor.launch.before_row")
        self._board.incarnate(row, child.incarnation, process.pid)
        logger.info("%s name=%s incarnation=%d pid=%d", how, name, child.incarnation, process.pid)

    def _promote(self, standby: Child, child: Child) -> None:
        """The standby's process takes the child's row; another standby follows."""
        process = child.take_over(standby)
        self._enter(standby, Phase.BACKOFF, NEXT_STANDBY_S)  # first: it has no process to tend now
        self._loop.unwatch(process.pidfd)
        self._loop.guard(partial(self._board.buried, standby.spec.row, standby.incarnation))
        self._adopt(child, process, PROMOTED_S, "promoted")
        failpoints.hit("supervisor.promote.half")
        standby.promote(child.spec.name)

    def _tend(self, child: Child) -> None:
        """Move on what moves by time, by the board, or by a process group getting empty."""
        late = self._loop.now_ns >= child.deadline_ns
        process, spec = child.process, child.spec
        if process is not None and process.exit_code is not None and process.group_empty():
            self._bury(child, process)
        elif child.phase is Phase.STARTING and self._board.ready(spec.row):
            self._rise(child)
        elif child.phase is Phase.STARTING and late:
            waited_s = (child.deadline_ns - child.launched_ns) / SECOND_NS
            self._kill(child, f"not ready within {waited_s:g} s")
        elif child.phase is Phase.STARTING and child.is_stopped(self._loop.now_ns):
            self._kill(child, f"stopped for {spec.hang_s:g} s before it was ready")
        elif child.phase is Phase.UP:
            self._feel_pulse(child)
        elif child.phase is Phase.STOPPING and late:
            self._kill(child, f"still there {spec.shutdown_s:g} s after SIGTERM")
        elif child.phase is Phase.BURYING and late and process is not None:
            process.kill()  # the rest of its group
            self._enter(child, Phase.KILLED, self._kill_s)
        elif child.phase is Phase.KILLED and late:
            self._quarantine(child)

    def _rise(self, child: Child) -> None:
        child.rise(self._board.pulse(child.spec.row), self._loop.now_ns)
        logger.info("ready name=%s incarnation=%d", child.spec.name, child.incarnation)

    def _feel_pulse(self, child: Child) -> None:
        child.feel(self._board.pulse(child.spec.row), self._loop.now_ns)
        if child.is_hung(self._loop.now_ns):
            self._kill(child, f"hung: no pulse for {child.spec.hang_s:g} s")

    def _enter(self, child: Child, phase: Phase, limit_s: float) -> None:
        child.phase, child.deadline_ns = phase, self._loop.now_ns + to_ns(limit_s)

    def _terminate(self, child: Child, blame: str) -> None:
        assert child.process is not None
        child.blame = blame
        child.process.terminate()
        self._enter(child, Phase.STOPPING, child.spec.shutdown_s)

    def _kill(self, child: Child, blame: str) -> None:
        assert child.process is not None
        child.blame = child.blame or blame
        logger.warning("killing name=%s pid=%d cause=%r", child.spec.name, child.process.pid, blame)
        child.process.kill()
        failpoints.hit("supervisor.kill.sent")
        self._enter(child, Phase.KILLED, self._kill_s)

    def _quarantine(self, child: Child) -> None:
        assert child.process is not None
        child.phase = Phase.QUARANTINED
        child.cause = f"pid {child.process.pid} survived SIGKILL for {self._kill_s:g} s"
        logger.error("quarantined name=%s cause=%r", child.spec.name, child.cause)
        self._report_failed(child)

    def _on_exit(self, child: Child) -> None:
        """The pidfd fired."""
        assert child.process is not None
        child.exit_code = child.process.reap()
        if child.exit_code is None:
            return  # dead, but a debugger holds it; the pidfd stays readable
        failpoints.hit("supervisor.exit.seen")
        self._loop.unwatch(child.process.pidfd)
        if child.phase is Phase.STARTING and self._board.ready(child.spec.row):
            self._rise(child)  # it was, for less than a beat: this is no failed start
        self._enter(child, Phase.BURYING, HELPERS_S)

    def _bury(self, child: Child, process: ChildProcess) -> None:
        failpoints.hit("supervisor.bury.before_sweep")
        process.close()
        child.process = None
        child.forget()
        self._loop.guard(partial(self._board.buried, child.spec.row, child.incarnation))
        failpoints.hit("supervisor.bury.after_sweep")
        self._after_death(child, child.blame or process.describe_exit())

    def _after_death(self, child: Child, cause: str, *, excused: bool = False) -> None:
        """Restart, or not: the whole policy."""
        child.cause = cause
        level = logging.INFO if self._stopping or child.deliberate else logging.WARNING
        name, incarnation = child.spec.name, child.incarnation
        logger.log(level, "ended name=%s incarnation=%d cause=%r", name, incarnation, cause)
        if self._stopping:
            child.phase = Phase.DONE
        elif child.deliberate:
            self._enter(child, Phase.BACKOFF, 0)
        elif excused:
            self._enter(child, Phase.BACKOFF, BACKOFF_MAX_S)
        elif child.is_standby:  # it failed nobody: tried again, ever more slowly, and for ever
            child.deaths_ns.append(self._loop.now_ns)
            child.restarts += 1
            self._enter(child, Phase.BACKOFF, self._backoff_s(child))
        elif child.been_up and child.spec.restart.applies(child.exit_code):
            self._restart_or_escalate(child)
        else:  # it does not return; if it has never been up, `start` is waiting for it and gives up
            child.phase = Phase.DONE
            if child.exit_code != 0 or child.spec.restart.applies(0):
                self._report_failed(child)

    def _restart_or_escalate(self, child: Child) -> None:
        now_ns, period_ns = self._loop.now_ns, to_ns(self._period_s)
        self._deaths_ns.append(now_ns)
        child.deaths_ns.append(now_ns)
        if restarts_allowed(
            self._deaths_ns, now_ns, deaths_max=self._deaths_max, period_ns=period_ns
        ):
            child.restarts += 1
            coming_s = STANDBY_COMING_S if standby_may_come(child, self._children) else 0.0
            self._enter(child, Phase.BACKOFF, max(self._backoff_s(child), coming_s))
            return
        child.phase = Phase.DONE
        self._report_failed(child)
        self._escalated = Escalated(
            child.spec.name, child.cause, deaths_max=self._deaths_max, period_s=self._period_s
        )

    def _backoff_s(self, child: Child) -> float:
        now_ns, period_ns = self._loop.now_ns, to_ns(self._period_s)
        return backoff_s(deaths_within(child.deaths_ns, now_ns, period_ns=period_ns))

    def _begin_restart(self, child: Child, reason: str) -> None:
        logger.info(
            "restart asked name=%s phase=%s reason=%r", child.spec.name, child.phase, reason
        )
        if child.phase in SUPERVISED:
            child.deliberate = True
            self._kill(child, f"restart: {reason}")
        elif child.phase in {Phase.DONE, Phase.BACKOFF} and not self._stopping:
            self._enter(child, Phase.BACKOFF, 0)

    def _on_signal(self, signum: int) -> None:
        if signum == signal.SIGCHLD:
            return
        name = signal.Signals(signum).name
        if self._stop_reason is None:
            self._stop_reason = name
            return
        self._stopping = True
        for child in self._children:
            if child.phase in SUPERVISED | DYING:
                self._kill(child, f"second signal: {name}")

    def _report_failed(self, child: Child) -> None:
        self._loop.guard(partial(self._board.failed, child.spec.row, child.cause))

    def _publish(self) -> None:
        self._states = tuple(child.state(self._loop.clock_ns) for child in self._children)
