"""The data and the arithmetic of supervision.  Starts nothing, watches nothing: see `supervisor`.

The words are OTP's: a spec says what to run and how it may die; a limit on deaths within a period
says when restarting has become pointless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from pdrt.errors import BadConfig

BACKOFF_S, BACKOFF_MAX_S = 0.1, 2.0
EXCUSED_MAX = 20  # times its limit: then a silent child is hung whatever excuse it has


class Restart(Enum):
    PERMANENT = "permanent"  # always restarted
    TRANSIENT = "transient"  # restarted unless it ended with exit code 0
    TEMPORARY = "temporary"  # never restarted

    def applies(self, exit_code: int | None) -> bool:
        """None: it could not even be launched."""
        return self is Restart.PERMANENT or (self is Restart.TRANSIENT and exit_code != 0)


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """What to run and how it may die.  Data, so a test can read the whole tree."""

    name: str
    target: Callable[..., None]
    args: tuple[Any, ...] = ()
    row: int  # its row on the board
    restart: Restart = Restart.PERMANENT
    ready_s: float = 30.0  # from launch to ready, else it is killed
    shutdown_s: float = 5.0  # from SIGTERM to SIGKILL
    hang_s: float = 5.0  # once ready: no change of its pulse for so long, and it is killed
    #: It is a warm spare for these children.  Its target takes a `Promotion` before its args, and
    #: waits there until it is told which of them to become.  Nothing waits for it or fails with it.
    stands_for: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # A child has a `__main__` of its own; this one would not be found there.
        if self.target.__module__ == "__main__":
            raise BadConfig(f"{self.name}: move {self.target.__qualname__} out of the main module")


class Board(Protocol):
    """One row a child, in memory that supervisor and children share.

    The supervisor calls these; the child raises `ready` and moves `pulse` by means of its own.
    `buried` and `failed` may raise: that is logged and counted.
    """

    def incarnate(self, row: int, incarnation: int, pid: int) -> None:
        """Called with pid 0 before the launch: the row is not ready now.  Called once more with the
        pid after it: record that and touch nothing else, for the child may have been faster."""

    def ready(self, row: int) -> bool:
        """Whether the incarnation that was announced last has said that it is ready."""

    def pulse(self, row: int) -> int:
        """Any change, however small, is a sign of life; the number itself means nothing here."""

    def buried(self, row: int, incarnation: int) -> None:
        """No process of this incarnation exists any more, nor one it forked; or it was a standby's,
        and has left this row for another.  Comes before the next `incarnate`, once for each."""

    def failed(self, row: int, detail: str) -> None:
        """The row has no process and gets none by itself, or has one that cannot be killed."""


class Phase(Enum):
    """Where a child is.

    IDLE ──► STARTING ──► UP             supervised
                 └───┬─────┘
                     ├──► STOPPING       SIGTERM sent; shutdown_s to go
                     ├──► KILLED         SIGKILL sent; kill_s to go
                     │      └──► QUARANTINED    it survived: reported, and no twin is started
                     ▼
                  BURYING                pidfd fired, reaped; what it forked has to go too
                     ├──► BACKOFF ──► STARTING     restarted
                     └──► DONE                     not restarted
    """

    IDLE = "idle"
    STARTING = "starting"
    UP = "up"
    STOPPING = "stopping"
    KILLED = "killed"
    BURYING = "burying"
    BACKOFF = "backoff"
    DONE = "done"
    QUARANTINED = "quarantined"


SUPERVISED = frozenset({Phase.STARTING, Phase.UP})
DYING = frozenset({Phase.STOPPING, Phase.KILLED, Phase.BURYING})
IN_MOTION = DYING | {Phase.STARTING, Phase.BACKOFF}


@dataclass(frozen=True, kw_only=True)
class ChildState:
    """What health may know of a child: a copy, at most one beat old."""

    name: str
    phase: Phase
    pid: int | None
    incarnation: int  # 1 is the first; grows with each launch
    restarts: int  # after deaths; deliberate ones are not counted
    cause: str  # of the last death; empty before the first
    uptime_s: float  # since launch; 0 without a process
    standby: bool = False  # nobody misses it before another child dies


class Spent(NamedTuple):
    """What a thread has done in all; nothing if the kernel keeps no count.  A wait is added when it
    is over."""

    ran_ns: int = 0
    waited_ns: int = 0  # ready to run, without a CPU


class Excuses(Protocol):
    """Why a process may be silent without being hung."""

    def spent(self) -> Spent:
        """By its main thread, whose pulse it is.  Cheap: asked at every pulse."""

    def state(self) -> str:
        """Of its main thread, as /proc has it: R, S, D, T, …; empty if nobody can look."""

    def waits_ns(self) -> dict[int, int]:
        """How long each of its threads, in all, has been ready to run and had no CPU."""


class Look(NamedTuple):
    """From half of the limit on."""

    since_ns: int  # no wait for a CPU has ended
    spent: Spent  # by then
    waits_ns: dict[int, int]  # by thread, at the first look


@dataclass
class Pulse:
    """When a child last showed life, and how much of the silence since is its own."""

    value: int = 0
    changed_ns: int = 0
    spent: Spent = field(default_factory=Spent)  # by then
    look: Look | None = None

    def feel(self, value: int, now_ns: int, excuses: Excuses) -> None:
        if value != self.value:
            self.value, self.changed_ns, self.look = value, now_ns, None
            self.spent = excuses.spent()

    def is_hung(self, now_ns: int, *, limit_ns: int, excuses: Excuses) -> bool:
        """Silent for longer than the limit, not counting time in which it had no CPU; and not while
        the kernel fetches a page for it from a disk, which no kill would end."""
        silent_ns = now_ns - self.changed_ns
        if silent_ns <= limit_ns // 2:
            return False
        spent = excuses.spent()
        if self.look is None or not self.look.waits_ns:  # or there was no descriptor to look with
            since_ns = min(now_ns, self.changed_ns + limit_ns * 3 // 4)  # we may be late ourselves
            self.look = Look(since_ns, spent, excuses.waits_ns())
        elif spent.waited_ns != self.look.spent.waited_ns:
            self.look = self.look._replace(since_ns=now_ns, spent=spent)
        if silent_ns <= limit_ns:
            return False
        if silent_ns > EXCUSED_MAX * limit_ns:
            return True
        starved = spent.waited_ns - self.spent.waited_ns
        state = excuses.state()
        if state == "R" and spent.ran_ns:  # it may be waiting since, which is not counted yet
            ran_ns = spent.ran_ns - self.look.spent.ran_ns
            starved += max(0, now_ns - self.look.since_ns - ran_ns)
        else:  # it may wait for another thread, which has no CPU
            starved = max(starved, starved_ns(self.look.waits_ns, excuses.waits_ns()))
        return silent_ns - starved > limit_ns and state != "D"


def starved_ns(before: Mapping[int, int], after: Mapping[int, int]) -> int:
    """How long a process was held up between two looks at the waits of its threads: as long as the
    thread that waited longest.  Their sum would excuse a loop in one by the waits of the others."""
    return max((waited - before.get(thread, 0) for thread, waited in after.items()), default=0)


def deaths_within(deaths_ns: Iterable[int], now_ns: int, *, period_ns: int) -> int:
    return sum(1 for died_ns in deaths_ns if died_ns > now_ns - period_ns)


def restarts_allowed(
    deaths_ns: Iterable[int], now_ns: int, *, deaths_max: int, period_ns: int
) -> bool:
    """False once more than deaths_max of them fell inside the last period."""
    return deaths_within(deaths_ns, now_ns, period_ns=period_ns) <= deaths_max


def backoff_s(deaths_recent: int) -> float:
    """The first restart is immediate; only repeated deaths make the next one wait."""
    if deaths_recent <= 1:
        return 0.0
    return min(BACKOFF_S * 2.0 ** min(deaths_recent - 2, 16), BACKOFF_MAX_S)
