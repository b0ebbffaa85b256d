"""What is verified, as data: which model, which part of its world, which guard taken away."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    model: str
    name: str
    defines: tuple[str, ...]
    ltl: str = ""  # a claim of the model, checked under weak fairness; without one, its assertions
    is_mutant: bool = False
    quick: bool = False
    large: bool = False  # worth an optimised verifier


def holds(
    model: str, name: str, *defines: str, ltl: str = "", quick: bool = False, large: bool = True
) -> Run:
    return Run(model, name, defines, ltl, quick=quick, large=large)


def mutants(
    model: str,
    *defines: str,
    of: tuple[str, ...],
    ltl: str = "",
    quick: tuple[str, ...] = (),
    large: bool = False,
) -> tuple[Run, ...]:
    """The same world with one guard less, once for each."""
    return tuple(
        Run(model, f"mutant {mutant}", (*defines, mutant), ltl, True, mutant in quick, large)
        for mutant in of
    )


WORD, TREE, SIDES = "room_word.pml", "supervisor.pml", "two_sides.pml"
NOBODY_DIES = ("TIMELESS", "CRASHES=0", "ENGINE_CRASHES=0")
OLD_WORKER = ("TIMELESS", "ROOMS=1", "ENGINE_CRASHES=0")
ONLY_TABLE = (*OLD_WORKER, "ONLY_TABLE_REFUSES")
ONLY_WORKER = (*OLD_WORKER, "ONLY_WORKER_REFUSES")
# Liveness.  A frozen peer makes forced fences; CALM is without late messages and aborts.
CALM = ("CALM", "ROOMS=1", "CRASHES=0", "ENGINE_CRASHES=0")
ENGINE_DIES = ("CALM", "ROOMS=1", "CRASHES=0")
WORKER_DIES = ("CALM", "ROOMS=1", "ENGINE_CRASHES=0")
FAILING = ("FAILURES=2", "DEATHS_MAX=1")  # one more than the tree puts up with
CRASH_LOOP = ("FAILURES=255", "DEATHS_MAX=0", "STUCK=0", "NO_CLIENT")
ONE_ROOM = ("ROOMS=1", "ABORTS=0")
NO_LOSS = ("LOSSES=0", "REPEATS=0")
BOTH_RESTART = ("ROOMS=1", "DECODE_RESTARTS=1", *NO_LOSS)
DECLINED = (*ONE_ROOM, "RESTARTS=0", "DECLINES=1")
REUSED = (*ONE_ROOM, *NO_LOSS, "REUSED")
FROZEN = ("ROOMS=1", "ABORTS=0", "RESTARTS=0", "REPEATS=0", "LOSSES=0", "FREEZES")
BY_MESSAGES = ("PATIENT", "ROOMS=1", "REPEATS=0")
MESSAGES_ALONE = (*BY_MESSAGES, "ABORTS=0")
DECLINED_ALONE = (*MESSAGES_ALONE, "DECLINES=1")

RUNS: tuple[Run, ...] = (
    # the room word
    holds(WORD, "two rooms, forced fences", *NOBODY_DIES, quick=True),
    holds(WORD, "two rooms, the worker dies", "TIMELESS", "ENGINE_CRASHES=0"),
    holds(WORD, "two rooms, the engine dies", "TIMELESS", "CRASHES=0"),
    holds(WORD, "one room, both die", "TIMELESS", "ROOMS=1", quick=True),
    holds(WORD, "the table alone refuses a moving room", *ONLY_TABLE, large=False),
    holds(WORD, "the worker alone refuses it", *ONLY_WORKER, large=False),
    *mutants(
        WORD,
        *NOBODY_DIES,
        of=("NO_GENERATION", "BLIND_STORE", "REUSE_ON_VERDICT", "POST_BEFORE_MOVE", "SWEEP_EARLY"),
        quick=("NO_GENERATION", "BLIND_STORE", "REUSE_ON_VERDICT", "SWEEP_EARLY"),
    ),
    *mutants(WORD, *OLD_WORKER, of=("ADOPT",), quick=("ADOPT",)),
    holds(WORD, "a frozen peer", *CALM, ltl="every_room_ends", quick=True),
    holds(WORD, "a frozen peer, late messages, aborts", *CALM[1:], ltl="every_room_ends"),
    holds(WORD, "all that, and the worker dies", *WORKER_DIES[1:], ltl="every_room_ends"),
    holds(WORD, "a frozen peer, the worker dies", *WORKER_DIES, ltl="every_room_ends"),
    holds(WORD, "a frozen peer, the engine dies", *ENGINE_DIES, ltl="every_room_ends"),
    *mutants(
        WORD,
        *CALM,
        of=("NO_DEADLINE", "NO_FORCED_FENCE"),
        ltl="every_room_ends",
        quick=("NO_DEADLINE", "NO_FORCED_FENCE"),
    ),
    *mutants(WORD, *ENGINE_DIES, of=("NO_DISCARD",), ltl="every_room_ends", large=True),
    # the supervisor
    holds(TREE, "four failures", "FAILURES=4"),
    holds(TREE, "three failures", "FAILURES=3", quick=True, large=False),
    *mutants(
        TREE,
        "FAILURES=3",
        of=(
            "PROMOTE_EARLY",
            "TWIN",
            "NO_LIMIT",
            "NO_GROUP",
            "CHILD_OWNS_SOCKET",
            "SPENT_STANDBY",
            "ACTS_EARLY",
        ),
        quick=("PROMOTE_EARLY", "NO_LIMIT", "SPENT_STANDBY"),
    ),
    holds(TREE, "two failures", *FAILING, ltl="settles", quick=True),
    holds(TREE, "two failures", *FAILING, ltl="served", quick=True),
    *mutants(
        TREE, *FAILING, of=("NO_HANG_CHECK", "NO_RESTART", "WAIT_FOR_STUCK"), ltl="settles"
    ),
    *mutants(TREE, *FAILING, of=("NO_RESTART", "NOT_HANDED_ON"), ltl="served"),
    holds(TREE, "a crash loop for ever", *CRASH_LOOP, ltl="settles"),
    *mutants(TREE, *CRASH_LOOP, of=("NO_LIMIT",), ltl="settles", quick=("NO_LIMIT",)),
    # both sides
    holds(SIDES, "a restart of decode", *ONE_ROOM, "RESTARTS=0", "DECODE_RESTARTS=1"),
    holds(SIDES, "a restart of prefill", *ONE_ROOM, *NO_LOSS, large=False),
    holds(SIDES, "a restart of prefill, repeats", *ONE_ROOM, "LOSSES=0", "REPEATS=1"),
    holds(SIDES, "losses and repeats", *ONE_ROOM, "RESTARTS=0", quick=True),
    holds(SIDES, "restarts of both, an abort", *BOTH_RESTART),
    holds(SIDES, "either side declines, losses and repeats", *DECLINED),
    *mutants(
        SIDES,
        *ONE_ROOM,
        *NO_LOSS,
        of=(
            "REUSE_ON_VERDICT",
            "QUIET_OF_UNKNOWN",
            "QUIET_UNFENCED",
            "LANDED_EARLY",
            "ANY_EPOCH",
        ),
        quick=("REUSE_ON_VERDICT", "QUIET_OF_UNKNOWN", "LANDED_EARLY"),
    ),
    *mutants(SIDES, *DECLINED, *NO_LOSS, of=("DECLINE_OPEN",), quick=("DECLINE_OPEN",)),
    holds(SIDES, "a restart of prefill, ids used again", *REUSED, large=False),
    *mutants(SIDES, *REUSED, of=("QUIET_OF_ANOTHER",)),
    holds(SIDES, "a frozen wire", *FROZEN, ltl="every_room_ends"),
    *mutants(
        SIDES,
        *FROZEN,
        of=("NO_DEADLINE", "NO_FORCED_FENCE", "NO_PREFILL_FENCE", "WAIT_FOR_FENCE"),
        ltl="every_room_ends",
    ),
    holds(SIDES, "by messages alone, an abort", *BY_MESSAGES, ltl="every_room_ends", quick=True),
    holds(SIDES, "by messages alone", *MESSAGES_ALONE, ltl="delivered", quick=True, large=False),
    holds(
        SIDES, "by messages alone, declined", *DECLINED_ALONE, ltl="every_room_ends", large=False
    ),
    *mutants(
        SIDES,
        *MESSAGES_ALONE,
        of=("FORGET_DESTINATION", "FORGET_LANDED"),
        ltl="delivered",
        quick=("FORGET_DESTINATION",),
    ),
    *mutants(SIDES, *BY_MESSAGES, of=("FORGET_ABORT",), ltl="every_room_ends"),
    *mutants(SIDES, *DECLINED_ALONE, of=("FORGET_DECLINE",), ltl="every_room_ends"),
)
