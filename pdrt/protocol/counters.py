"""What every process counts, as numbers into its row of shared counters.  Never reused."""

from __future__ import annotations

from enum import IntEnum

BUCKETS = 24  # of a latency histogram; bucket i ends at 2**i * 50 microseconds
BUCKET_BASE_NS = 50_000


class Counter(IntEnum):
    FRAMES_IN = 0
    FRAMES_OUT = 1
    MESSAGES_IN = 2
    MESSAGES_OUT = 3
    SENDS_REFUSED = 4  # a queue to somebody was full
    RESENDS = 5
    LATE = 6  # messages about rooms that are over or unknown
    ROOMS_OPENED = 7
    ROOMS_REFUSED = 8
    BYTES_MOVED = 9
    CHUNKS_MOVED = 10
    FENCES = 11
    ABORTS_SENT = 12
    ABORTS_TAKEN = 13
    RESYNCS = 14
    PEERS_LOST = 15
    DEADLINES = 16  # rooms ended by their deadline, by this observer
    SWEPT = 17  # rooms ended because a process died
    QUIET_FORCED = 18  # workers restarted on purpose at the quiet bound
    CALLBACK_ERRORS = 19  # of the supervisor's loop
    FORGOTTEN = 20  # by a memory that was full
    STRANGERS = 21  # connections to a control port that ended without a handshake
    CONNECTIONS_REFUSED = 22  # connections to a control port beyond its bound
    SHORTAGES = 23  # seconds in which a listener could open no descriptor
    MALFORMED = 24  # + Malformed kind, eight of them
    VERDICT_SUCCESS = 32
    VERDICT_FAILED = 33  # + Reason, up to 31 of them
    ROOM_NS = 64  # sum of room lifetimes, opened -> verdict
    ROOM_BUCKET = 65  # + bucket
    TRANSFER_NS = 96  # sum of times in Transferring
    TRANSFER_BUCKET = 97  # + bucket


COUNTERS_MAX = 128


def bucket_of(duration_ns: int) -> int:
    """Index of the first bucket whose upper end is not below `duration_ns`."""
    return min(BUCKETS - 1, max(0, (duration_ns - 1) // BUCKET_BASE_NS).bit_length())


def bucket_end_s(bucket: int) -> float:
    """Upper end of a bucket in seconds."""
    return float((BUCKET_BASE_NS << bucket) / 1e9)
