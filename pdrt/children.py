"""What the supervisor knows of one child.  A record: `supervisor` decides, `child` acts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdrt.child import ChildProcess, Promoter, launch
from pdrt.clock import SECOND_NS, to_ns
from pdrt.supervision import ChildSpec, ChildState, Phase, Pulse


@dataclass
class Child:
    spec: ChildSpec
    phase: Phase = Phase.IDLE
    process: ChildProcess | None = None
    promoter: Promoter | None = None  # of a standby that still stands by
    incarnation: int = 0
    deadline_ns: int = 0  # when the phase has lasted too long; in BACKOFF, when it is over
    pulse: Pulse = field(default_factory=Pulse)
    launched_ns: int = 0
    stopped_ns: int = 0  # since when it was found stopped before it was ready; 0: it runs
    been_up: bool = False
    deliberate: bool = False  # this death was asked for
    blame: str = ""  # why it is being ended, if we end it
    cause: str = ""
    exit_code: int | None = None
    restarts: int = 0
    deaths_ns: deque[int] = field(default_factory=lambda: deque(maxlen=16))

    @property
    def is_standby(self) -> bool:
        return bool(self.spec.stands_for)

    def launch(self) -> ChildProcess:
        """Start its process.  Raises OSError, BadConfig."""
        args = self.spec.args
        if self.is_standby:
            self.promoter = Promoter()
            args = (self.promoter.promotion, *args)
        try:
            self.process = launch(self.spec.name, self.spec.target, args)
        except BaseException:
            self.forget()
            raise
        if self.promoter is not None:
            self.promoter.launched()
        return self.process

    def take_over(self, standby: Child) -> ChildProcess:
        """Its process is ours now, and hears of it by `promote`."""
        assert standby.process is not None
        self.process, standby.process = standby.process, None
        return self.process

    def promote(self, name: str) -> None:
        """Tell the standby's process which child it is now."""
        assert self.promoter is not None
        self.promoter.send(name)
        self.forget()

    def forget(self) -> None:
        """It stands by no longer: close the pipe."""
        if self.promoter is not None:
            self.promoter.close()
            self.promoter = None

    def rise(self, value: int, now_ns: int) -> None:
        assert self.process is not None
        self.phase, self.been_up = Phase.UP, True
        self.pulse = Pulse(value, now_ns, self.process.spent())

    def feel(self, value: int, now_ns: int) -> None:
        assert self.process is not None
        self.pulse.feel(value, now_ns, self.process)

    def is_hung(self, now_ns: int) -> bool:
        assert self.process is not None
        limit_ns = to_ns(self.spec.hang_s)
        return self.pulse.is_hung(now_ns, limit_ns=limit_ns, excuses=self.process)

    def is_stopped(self, now_ns: int) -> bool:
        """Has it, which has yet to show a pulse, been stopped for as long as makes it hung?"""
        assert self.process is not None
        self.stopped_ns = (self.stopped_ns or now_ns) if self.process.stopped() else 0
        return self.stopped_ns > 0 and now_ns - self.stopped_ns > to_ns(self.spec.hang_s)

    def state(self, clock_ns: int) -> ChildState:
        return ChildState(
            name=self.spec.name,
            phase=self.phase,
            pid=self.process.pid if self.process else None,
            incarnation=self.incarnation,
            restarts=self.restarts,
            cause=self.cause,
            uptime_s=(clock_ns - self.launched_ns) / SECOND_NS if self.process else 0.0,
            standby=self.is_standby,
        )


def standby_for(child: Child, children: Sequence[Child], now_ns: int) -> Child | None:
    """One that waits for this role and has shown life within its last beats."""
    for other in children:
        if child.spec.name in other.spec.stands_for and other.phase is Phase.UP:
            if now_ns - other.pulse.changed_ns <= to_ns(other.spec.hang_s / 2):
                return other
    return None


def standby_may_come(child: Child, children: Sequence[Child]) -> bool:
    """One that was launched before is sooner there than a process that was not."""
    on_its_way = {Phase.STARTING, Phase.UP}
    return any(c.phase in on_its_way and child.spec.name in c.spec.stands_for for c in children)
