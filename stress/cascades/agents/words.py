"""What clients and driver of `agents` write down, and what they may say to a model."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """`room`: number of a request, or 0; a: client, or process of clients."""

    ASKED = 1100  # b: turn of its conversation; c: index of a first prompt and one, or 0
    FIRST = 1101  # a first token came
    DONE = 1102  # b: tokens' text in bytes; c: was it aborted
    FAILED = 1103  # b: HTTP status; c: index in CODES
    LEFT = 1104  # on purpose
    ABORTED = 1105  # by /abort_request.  b: status; c: how many requests it says it ended
    DIFFERS = 1106  # a first answer that is not what it was before
    HUNG = 1107  # given up
    EXIT = 1108  # a process of clients ended by itself

    KILLED = 1120  # a: process of clients; b: its life; c: pid
    STRUCK = 1121  # a: tree; b: pid; c: signal; room: row
    SERVES = 1122  # a: tree; c: ns since the signal; room: row
    STOP = 1123  # from here on no request is begun
    RESTARTED = 1125  # a: tree; room: row; by its supervisor, which nobody had asked
    ZERO = 1124  # nothing is in flight any more.  c: ns since STOP


#: Codes of errors: pdrt's own, and those that sglang-router puts in their place.
CODES = (
    "unreadable",
    "broken",
    "aborted",
    "bootstrap_timeout",
    "waiting_timeout",
    "transfer_stalled",
    "peer_lost",
    "process_lost",
    "transport_failed",
    "rank_failed",
    "transfer_failed",
    "queue_max",
    "pages_max",
    "rooms_max",
    "aux_rows_max",
    "draining",
    "prefill_unavailable",
    "prefill_server_error",
    "prefill_internal_error",
    "decode_unavailable",
    "decode_server_error",
    "decode_internal_error",
    "server_selection_failed",
)
OTHER = len(CODES)  # of an error with a code that is none of these: a fault
#: What is noted of an error that has no code: the answer said none, or it was cut.
UNTYPED = ("unreadable", "broken")
#: What a request ends with that somebody aborted: pdrt's word, and a router's for prefill's answer.
ABORTED_CODES = ("aborted", "prefill_unavailable")
#: Rows of those without whom nobody serves HTTP.  Only their death cuts a connection.
SUPERVISOR, ENGINE = 1, 48
HTTP_ROWS = (SUPERVISOR, ENGINE)

FIRST_PROMPTS = (
    "Name one river in France.",
    "What is two plus three?",
    "Say hello in Spanish.",
    "What color is the sky?",
    "Name an animal that can fly.",
    "What comes after Monday?",
)
NEXT_PROMPTS = (
    "And another one?",
    "Why?",
    "Say it in other words.",
    "Are you sure?",
    "Tell me more about it.",
    "Thank you. What else?",
)
FIRST_TOKENS = 8
CONTEXT_MESSAGES_MAX = 9


def code_index(code: str) -> int:
    return CODES.index(code) if code in CODES else OTHER
