"""Every error pdrt raises, split by who must act.

PdrtError
  TransferError            one room failed; other rooms are not affected, retry it with a new room
    Aborted                somebody asked for it, on this side or on the peer's
    BootstrapTimeout       the peer never sent its destination
    WaitingTimeout         the destination was known and no chunk followed
    TransferStalled        bytes stopped moving
    PeerLost               the peer stopped its heartbeat, restarted, or refused the room
    ProcessLost            a process of ours that moved or owned the room died
    TransportFailed        the fabric refused or lost a write
    BadDestination         pages or aux row outside the pool; the peer's bug
    CorruptAux             the aux row belongs to another room; the KV is not used
    RankFailed             another rank of the same room failed
    RoomLayoutMismatch     the two engines cannot exchange KV
  Refused                  a limit is reached; nothing changed, try again later
    TableFull PoolFull AuxFull QueueFull NoDescriptors Draining
  CallerError              fix the request or the call
    RoomInUse PromptTooLong BadRequest IllegalMove Closed
  DeploymentError          fix the deployment; start-up stops here
    BadConfig BadModel PortInUse NoMemory AttachFailed StartFailed
  Escalated                children die faster than restarting helps; whoever runs us must decide
  ProtocolError            a frame that is not ours; counted by kind and dropped
"""

from __future__ import annotations

import errno

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})


def is_exhausted(error: Exception) -> bool:
    """Does the kernel refuse for want of descriptors, memory or processes?  Later it may not."""
    return isinstance(error, OSError) and error.errno in EXHAUSTED


class PdrtError(Exception):
    """Base of every error pdrt raises.  `code` is stable and goes to clients."""

    code = "internal_error"
    exit_code = 1  # of a process that ends with it


class TransferError(PdrtError):
    """One room failed.  Other rooms are not affected."""

    code = "transfer_failed"

    def __init__(self, room: int, detail: str) -> None:
        super().__init__(f"room {room}: {detail}")
        self.room = room
        self.detail = detail


class Aborted(TransferError):
    code = "aborted"


class BootstrapTimeout(TransferError):
    code = "bootstrap_timeout"


class WaitingTimeout(TransferError):
    code = "waiting_timeout"


class TransferStalled(TransferError):
    code = "transfer_stalled"


class PeerLost(TransferError):
    code = "peer_lost"


class ProcessLost(TransferError):
    code = "process_lost"


class TransportFailed(TransferError):
    code = "transport_failed"


class BadDestination(TransferError):
    code = "bad_destination"


class CorruptAux(TransferError):
    code = "corrupt_aux"


class RankFailed(TransferError):
    code = "rank_failed"


class RoomLayoutMismatch(TransferError):
    code = "layout_mismatch"


class Refused(PdrtError):
    """A limit is reached.  Nothing changed; the caller may try again later."""

    code = "refused"


class TableFull(Refused):
    code = "rooms_max"


class PoolFull(Refused):
    code = "pages_max"


class AuxFull(Refused):
    code = "aux_rows_max"


class QueueFull(Refused):
    code = "queue_max"


class NoDescriptors(Refused):
    """The process may not open another descriptor."""

    code = "descriptors_max"


class Draining(Refused):
    code = "draining"


class CallerError(PdrtError):
    """The request or the call is wrong; the same one will be refused again."""

    code = "invalid_request"


class RoomInUse(CallerError):
    code = "room_in_use"

    def __init__(self, room: int) -> None:
        super().__init__(f"room {room} is already open here; a room id names one transfer")
        self.room = room


class PromptTooLong(CallerError):
    code = "prompt_too_long"


class BadRequest(CallerError):
    code = "invalid_request"


class IllegalMove(CallerError):
    code = "illegal_move"


class Closed(CallerError):
    code = "closed"


class DeploymentError(PdrtError):
    """Start-up cannot go on until the deployment is changed."""

    code = "deployment_error"
    exit_code = 2


class BadConfig(DeploymentError):
    code = "bad_config"


class BadModel(DeploymentError):
    code = "bad_model"


class PortInUse(DeploymentError):
    code = "port_in_use"


class NoMemory(DeploymentError):
    code = "no_memory"


class AttachFailed(DeploymentError):
    code = "attach_failed"


class StartFailed(DeploymentError):
    """A child was not ready in time, or died first.  Everything started before it is stopped."""

    code = "start_failed"
    exit_code = 69  # EX_UNAVAILABLE of sysexits.h

    def __init__(self, name: str, cause: str) -> None:
        super().__init__(f"{name} did not start: {cause}")
        self.name = name
        self.cause = cause


class Escalated(PdrtError):
    """Children die faster than restarting them may help; whoever runs us must decide."""

    code = "escalated"
    exit_code = 70  # EX_SOFTWARE

    def __init__(self, name: str, cause: str, *, deaths_max: int, period_s: float) -> None:
        super().__init__(f"more than {deaths_max} deaths in {period_s:g} s; last {name}: {cause}")
        self.name = name
        self.cause = cause


class ProtocolError(PdrtError):
    """A frame that is not ours.  `kind` is a `protocol.codec.Malformed` name, for counting."""

    code = "protocol_error"

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind
