"""The matrix as data: victims, phases, signals, and what the laws expect of each cell."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pdrt import errors


class Victim(StrEnum):
    LISTENER = "listener"
    WORKER = "worker"
    ENGINE = "engine"
    SUPERVISOR = "supervisor"
    TREE = "tree"
    LISTENER_STANDBY = "listener-standby"
    WORKER_STANDBY = "worker-standby"


class Phase(StrEnum):
    """Of the touched room when the signal is sent.  Where the two sides differ, the victim's."""

    BOOTSTRAPPING = "bootstrapping"  # opened on both sides; no destination known
    WAITING = "waiting"  # the victim side's slot is in WaitingForInput
    FIRST = "first"  # Transferring, the first chunk (32 MiB) in flight or just landed
    MIDDLE = "middle"  # Transferring, two of four chunks have landed
    LAST = "last"  # Transferring, all chunks but the last have landed
    UNREAD = "success_unread"  # Success on both sides, and no engine has looked
    ABORTING = "aborting"  # the other side's engine aborted with a chunk in flight; not quiet
    IDLE = "idle"  # no touched room


class Signal(StrEnum):
    KILL = "KILL"
    STOP = "STOP"  # and CONT, once the verdict is there
    RAISE = "RAISE"  # an exception out of the loop
    SPIN = "SPIN"  # an endless loop that keeps the GIL, until CONT


class Expect(StrEnum):
    SUCCESS = "Success"
    FAILED = "Failed"
    NOTHING = "-"


STANDBYS = {Victim.LISTENER_STANDBY, Victim.WORKER_STANDBY}
MOVING = {Phase.FIRST, Phase.MIDDLE, Phase.LAST}


@dataclass(frozen=True)
class Cell:
    transport: str
    victim: Victim
    side: str
    phase: Phase
    signal: Signal

    def __str__(self) -> str:
        return f"{self.transport}-{self.victim}-{self.side}-{self.phase}-{self.signal}"

    @property
    def dies(self) -> bool:
        """A callback of the supervisor's loop may raise: it is counted, and the loop goes on."""
        raises = self.signal is Signal.RAISE and self.victim is not Victim.SUPERVISOR
        return raises or self.signal is Signal.KILL

    @property
    def pauses(self) -> bool:
        return self.signal in (Signal.STOP, Signal.SPIN)

    @property
    def dies_whole(self) -> bool:
        """Does the victim's tree have to be started again?"""
        return self.dies and self.victim in (Victim.SUPERVISOR, Victim.TREE)

    @property
    def is_replaced(self) -> bool:
        """Does its supervisor kill it when it stands still?"""
        return self.victim in {Victim.LISTENER, Victim.WORKER, *STANDBYS}

    @property
    def expect(self) -> Expect:
        if self.phase is Phase.IDLE:
            return Expect.NOTHING
        if self.phase is Phase.UNREAD:
            return Expect.SUCCESS  # law 1
        if self._prefill_finishes:
            return Expect.SUCCESS
        if self.victim in STANDBYS and self.phase is not Phase.ABORTING:
            return Expect.SUCCESS  # nobody misses it
        if self.phase is Phase.ABORTING or self.victim is Victim.ENGINE or self.dies_whole:
            return Expect.FAILED
        if self.victim is Victim.TREE:
            return Expect.FAILED  # silent for longer than a peer may be
        if self.victim is Victim.WORKER and self.phase in MOVING:
            return Expect.FAILED
        return Expect.SUCCESS  # law 7: it only waited, or the victim moved none of its bytes

    @property
    def _prefill_finishes(self) -> bool:
        """A frozen engine of decode is not needed for the bytes to land."""
        frozen = self.victim is Victim.ENGINE and self.pauses
        return frozen and self.side == "decode" and self.phase in MOVING

    @property
    def fences_decode(self) -> bool:
        """Is decode's worker restarted on purpose, since nobody is left who could say that the
        touched room is quiet?  Rooms in Transferring on decode fail by that, as designed."""
        moved = self.phase in MOVING or self.phase is Phase.ABORTING
        gone = self.victim is Victim.WORKER or self.dies_whole
        return moved and gone and self.side == "prefill" and self.transport == "nixl"

    @property
    def may_fence_decode(self) -> bool:
        """As `fences_decode`, or prefill may still come back in time to say so."""
        gone = self.victim in (Victim.WORKER, Victim.SUPERVISOR, Victim.TREE)
        return gone and self.side == "prefill" and self.transport == "nixl"

    @property
    def goes_on(self) -> bool:
        """Do the surviving engines carry on with the room after the signal, as engines do?  Not
        where the verdict must come by itself."""
        still = {Victim.WORKER, Victim.TREE}
        if self.dies:
            still.add(Victim.ENGINE)  # else prefill may be done before it hears
        stuck = self.victim in still and self.phase in MOVING
        return not stuck and self.phase not in (Phase.ABORTING, Phase.IDLE)


#: What a victim's death or silence may be called: code of the typed error, on either side.
TYPED: dict[Victim, set[type[errors.TransferError]]] = {
    Victim.WORKER: {errors.ProcessLost, errors.PeerLost, errors.TransportFailed},
    Victim.ENGINE: {
        errors.ProcessLost, errors.PeerLost, errors.BootstrapTimeout, errors.WaitingTimeout,
        errors.TransferStalled,
    },
    Victim.LISTENER: set(),
    Victim.SUPERVISOR: {
        errors.PeerLost, errors.ProcessLost, errors.TransportFailed, errors.BootstrapTimeout,
        errors.WaitingTimeout, errors.TransferStalled,
    },
}  # fmt: skip
TYPED[Victim.TREE] = TYPED[Victim.SUPERVISOR]
TYPED[Victim.LISTENER_STANDBY] = TYPED[Victim.WORKER_STANDBY] = set()


def typed_codes(cell: Cell) -> set[str]:
    codes = {error.code for error in TYPED[cell.victim]}
    if cell.phase is Phase.ABORTING:  # the victim's side may never hear of the abort
        codes.add(errors.Aborted.code)
    return codes


TRANSPORTS = {  # the worker is what a transport is about; the others take turns, to save time
    Victim.LISTENER: ("nixl",),
    Victim.WORKER: ("nixl", "shm"),
    Victim.ENGINE: ("nixl",),
    Victim.SUPERVISOR: ("shm",),
    Victim.TREE: ("nixl", "shm"),
    Victim.LISTENER_STANDBY: ("shm",),
    Victim.WORKER_STANDBY: ("nixl",),
}


def signals_for(victim: Victim, transport: str) -> list[Signal]:
    """What happens inside a process is played with one transport, and in one process at a time."""
    if victim is Victim.TREE or transport != TRANSPORTS[victim][0]:
        return [Signal.KILL, Signal.STOP]
    return list(Signal)


def all_cells() -> list[Cell]:
    """The whole matrix, one transport after the other, so that trees are shared."""
    return [
        Cell(transport, victim, side, phase, signal)
        for transport in ("nixl", "shm")
        for victim in Victim
        if transport in TRANSPORTS[victim]
        for side in ("prefill", "decode")
        for phase in Phase
        for signal in signals_for(victim, transport)
    ]


#: Part of the default suite, under 60 s.
SUBSET = (
    Cell("nixl", Victim.LISTENER, "prefill", Phase.FIRST, Signal.KILL),
    Cell("nixl", Victim.LISTENER, "decode", Phase.WAITING, Signal.STOP),
    Cell("nixl", Victim.LISTENER, "decode", Phase.ABORTING, Signal.KILL),
    Cell("nixl", Victim.WORKER, "prefill", Phase.WAITING, Signal.KILL),
    Cell("nixl", Victim.WORKER, "prefill", Phase.FIRST, Signal.KILL),
    Cell("nixl", Victim.WORKER, "decode", Phase.MIDDLE, Signal.STOP),
    Cell("nixl", Victim.ENGINE, "prefill", Phase.MIDDLE, Signal.KILL),
    Cell("nixl", Victim.ENGINE, "decode", Phase.FIRST, Signal.KILL),
    Cell("nixl", Victim.ENGINE, "prefill", Phase.UNREAD, Signal.KILL),
    Cell("nixl", Victim.TREE, "decode", Phase.MIDDLE, Signal.KILL),
    Cell("nixl", Victim.TREE, "prefill", Phase.WAITING, Signal.STOP),
    Cell("nixl", Victim.WORKER, "prefill", Phase.MIDDLE, Signal.RAISE),
    Cell("nixl", Victim.LISTENER, "prefill", Phase.WAITING, Signal.SPIN),
    Cell("nixl", Victim.WORKER_STANDBY, "prefill", Phase.FIRST, Signal.KILL),
)
