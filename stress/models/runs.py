"""What is verified, as data: which model, which part of its world, which guard taken away, and what
has to break then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    model: str
    name: str
    defines: tuple[str, ...]
    ltl: str = ""  # a claim of the model, checked under weak fairness; without one, its assertions
    caught_by: str = ""  # of a mutant: what breaks, a part of what the verifier says
    quick: bool = False
    large: bool = False  # worth an optimised verifier

    @property
    def is_mutant(self) -> bool:
        return bool(self.caught_by)


def holds(
    model: str, name: str, *defines: str, ltl: str = "", quick: bool = False, large: bool = True
) -> Run:
    return Run(model, name, defines, ltl, quick=quick, large=large)


def mutants(
    model: str,
    *defines: str,
    of: Mapping[str, str],
    ltl: str = "",
    quick: tuple[str, ...] = (),
    large: bool = False,
) -> tuple[Run, ...]:
    """The same world with one guard less, once for each; `of` says what has to break."""
    return tuple(
        Run(model, f"mutant {name}", (*defines, name), ltl, caught_by, name in quick, large)
        for name, caught_by in of.items()
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

# What breaks: the claim of a run that never ends, or an assertion, as the verifier writes it out.
CYCLE = "acceptance cycle"
FINAL = "(n&7)==(word&7)"
PLACED = "(placed>>(n>>9))&1"
FREE = "((word&7)==5)||!((worker_alive&&"  # no page is, while a living worker reads it
PROMOTED_ALONE, LAUNCHED_ALONE = "(acts_as[4]==acts_as[me])", "(acts_as[4]==1)"
ROSE = "(acts_as[p]==1)"  # who is up as a child acts for it
BOUNDED = "(deaths<=2)"
SOCKET_HELD = "we_hold||"
OWN_PAGES, ALL_PLACED = "(pages==room)", "(placed==3)"
# The same claims where a run gets stuck.
SLOT_BACK = "(opened==1)&&!(((word>>9)&1))"
DECODE_OVER, PREFILL_OVER, PREFILL_BACK = "(g>1)", "!(((p[1]>=1)&&(p[1]<=3)))", "p_quiet[1]"
CLAIMS = (CYCLE, SLOT_BACK, DECODE_OVER, PREFILL_OVER, PREFILL_BACK)

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
        of={
            "NO_GENERATION": PLACED,
            "BLIND_STORE": FINAL,
            "REUSE_ON_VERDICT": FREE,
            "POST_BEFORE_MOVE": FREE,
            "SWEEP_EARLY": FREE,
        },
        quick=("NO_GENERATION", "BLIND_STORE", "REUSE_ON_VERDICT", "SWEEP_EARLY"),
    ),
    *mutants(WORD, *OLD_WORKER, of={"ADOPT": PLACED}, quick=("ADOPT",)),
    holds(WORD, "a frozen peer", *CALM, ltl="every_room_ends", quick=True),
    holds(WORD, "a frozen peer, late messages, aborts", *CALM[1:], ltl="every_room_ends"),
    holds(WORD, "all that, and the worker dies", *WORKER_DIES[1:], ltl="every_room_ends"),
    holds(WORD, "a frozen peer, the worker dies", *WORKER_DIES, ltl="every_room_ends"),
    holds(WORD, "a frozen peer, the engine dies", *ENGINE_DIES, ltl="every_room_ends"),
    *mutants(
        WORD,
        *CALM,
        of={"NO_DEADLINE": CYCLE, "NO_FORCED_FENCE": SLOT_BACK},
        ltl="every_room_ends",
        quick=("NO_DEADLINE", "NO_FORCED_FENCE"),
    ),
    *mutants(WORD, *ENGINE_DIES, of={"NO_DISCARD": SLOT_BACK}, ltl="every_room_ends", large=True),
    # the supervisor
    holds(TREE, "four failures", "FAILURES=4"),
    holds(TREE, "three failures", "FAILURES=3", quick=True, large=False),
    *mutants(
        TREE,
        "FAILURES=3",
        of={
            "PROMOTE_EARLY": PROMOTED_ALONE,
            "TWIN": PROMOTED_ALONE,
            "NO_LIMIT": BOUNDED,
            "NO_GROUP": PROMOTED_ALONE,
            "CHILD_OWNS_SOCKET": SOCKET_HELD,
            "SPENT_STANDBY": ROSE,
            "ACTS_EARLY": LAUNCHED_ALONE,
        },
        quick=("PROMOTE_EARLY", "NO_LIMIT", "SPENT_STANDBY"),
    ),
    holds(TREE, "two failures", *FAILING, ltl="settles", quick=True),
    holds(TREE, "two failures", *FAILING, ltl="served", quick=True),
    *mutants(
        TREE,
        *FAILING,
        of=dict.fromkeys(("NO_HANG_CHECK", "NO_RESTART", "WAIT_FOR_STUCK"), CYCLE),
        ltl="settles",
    ),
    *mutants(
        TREE, *FAILING, of=dict.fromkeys(("NO_RESTART", "NOT_HANDED_ON"), CYCLE), ltl="served"
    ),
    holds(TREE, "a crash loop for ever", *CRASH_LOOP, ltl="settles"),
    *mutants(TREE, *CRASH_LOOP, of={"NO_LIMIT": CYCLE}, ltl="settles", quick=("NO_LIMIT",)),
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
        of={
            "REUSE_ON_VERDICT": OWN_PAGES,
            "QUIET_OF_UNKNOWN": OWN_PAGES,
            "QUIET_UNFENCED": OWN_PAGES,
            "LANDED_EARLY": ALL_PLACED,
            "ANY_EPOCH": OWN_PAGES,
        },
        quick=("REUSE_ON_VERDICT", "QUIET_OF_UNKNOWN", "LANDED_EARLY"),
    ),
    *mutants(SIDES, *DECLINED, *NO_LOSS, of={"DECLINE_OPEN": OWN_PAGES}, quick=("DECLINE_OPEN",)),
    holds(SIDES, "a restart of prefill, ids used again", *REUSED, large=False),
    *mutants(SIDES, *REUSED, of={"QUIET_OF_ANOTHER": OWN_PAGES}),
    holds(SIDES, "a frozen wire", *FROZEN, ltl="every_room_ends"),
    *mutants(
        SIDES,
        *FROZEN,
        of={
            "NO_DEADLINE": DECODE_OVER,
            "NO_FORCED_FENCE": CYCLE,
            "NO_PREFILL_FENCE": PREFILL_BACK,
            "WAIT_FOR_FENCE": PREFILL_BACK,
        },
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
        of=dict.fromkeys(("FORGET_DESTINATION", "FORGET_LANDED"), DECODE_OVER),
        ltl="delivered",
        quick=("FORGET_DESTINATION",),
    ),
    *mutants(SIDES, *BY_MESSAGES, of={"FORGET_ABORT": DECODE_OVER}, ltl="every_room_ends"),
    *mutants(SIDES, *DECLINED_ALONE, of={"FORGET_DECLINE": PREFILL_OVER}, ltl="every_room_ends"),
)
