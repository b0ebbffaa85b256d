/* THE SUPERVISOR: two children, one standby for both, and the limit on restarts.
 *
 * Stands for pdrt/supervisor.py (`_launch`, `_promote`, `_tend`, `_bury`, `_after_death`,
 * `_restart_or_escalate`), pdrt/children.py (`standby_for`, `standby_may_come`, `take_over`) and pdrt/supervision.py (`Phase`,
 * `restarts_allowed`).  Child 1 is the listener, child 2 a worker, child 3 the standby.
 *
 * The supervisor is one thread, and each of its steps here is one of its own; processes live, hang
 * and die between any two of them.  SIGKILL may never work (stuck in a driver).  All deaths fall
 * into one period, which is the hard case.  The supervisor opens the socket that others connect to,
 * and each process it launches holds it too.  What happens is told (`EV`), so that
 * stress/models/replay_tree.py can have the real supervisor do the same.
 *
 * Safe:  at most one process acts as a child at a time, helpers it forked included; a process is
 *        promoted or launched only when its predecessor is buried; no connect is ever refused;
 *        no more than deaths_max restarts fall within a period.
 * Live:  a dead child comes back, or the tree escalates, or this child cannot be killed and is
 *        reported; and who connected is served, unless the tree escalates or that is the listener.
 *
 * Mutants (-D): PROMOTE_EARLY TWIN NO_LIMIT NO_GROUP CHILD_OWNS_SOCKET SPENT_STANDBY ACTS_EARLY
 *               live: NO_HANG_CHECK NO_RESTART NO_LIMIT WAIT_FOR_STUCK NOT_HANDED_ON
 */

#ifndef DEATHS_MAX
#define DEATHS_MAX 2
#endif
#ifndef STUCK
#define STUCK 1 /* may SIGKILL fail? */
#endif
#define PROCESSES 4
#define CHILDREN 3
#define LISTENER 1
#define STANDBY 3

/* Phase.  STOPPING is left out: a stop is not a restart. */
#define IDLE 0
#define STARTING 1
#define UP 2
#define KILLED 3
#define BURYING 4
#define BACKOFF 5
#define DONE 6
#define QUARANTINED 7

/* a process */
#define ABSENT 0
#define LOADING 1 /* or a standby that was promoted and has yet to say that it is ready */
#define READY 2
#define DEAD 3    /* its pidfd fired; what it forked may still be there */

mtype = { begun, waits, risen, killed, quarantined, burying, buried };    /* of a child */
mtype = { ready, heard, died, left_helper, helper_gone, hangs, sticks }; /* of a process */

#define TOLD(who, what) printf("EV %d %e %d %d %d %d %d %d %d\n", who, what, \
    phase[1], phase[2], phase[3], process[1], process[2], process[3], escalated)

byte phase[CHILDREN + 1];
byte process[CHILDREN + 1];   /* of a child, 0 none */
bool been_up[CHILDREN + 1];
bool waited[CHILDREN + 1];    /* for a standby that is on its way */
byte deaths;                  /* within the period; saturates one above what matters */
bool escalated;

byte condition[PROCESSES + 1];
byte acts_as[PROCESSES + 1];  /* which child the process takes itself for */
byte promotion[PROCESSES + 1];/* in its pipe: the child it is to become */
bool was_ready[PROCESSES + 1];/* it said so before it died; the board still says it */
bool hung[PROCESSES + 1], stuck[PROCESSES + 1], helper[PROCESSES + 1], kill_sent[PROCESSES + 1];

bool backlog;                 /* somebody has connected, and nobody has accepted it yet */
#ifdef CHILD_OWNS_SOCKET      /* whoever becomes the listener opens it, and nobody else has it */
#define OPENED_BY_US false
#else
#define OPENED_BY_US true
#endif
bool we_hold = OPENED_BY_US;  /* the supervisor, which outlives them all: the listening socket */
bool holds[PROCESSES + 1];    /* as does a process, until it dies */

#define PRESENT(p) (condition[p] == LOADING || condition[p] == READY || helper[p])
#define ACTS(p, c) (PRESENT(p) && acts_as[p] == (c))
#define ACTING(c) (ACTS(1, c) + ACTS(2, c) + ACTS(3, c) + ACTS(4, c))
#define HELD (we_hold || holds[1] || holds[2] || holds[3] || holds[4])
#define AWAY(c) (phase[c] == DONE || phase[c] == QUARANTINED)

inline launch(c, p) /* children.launch: a new process, LOADING */
{
    if
    :: condition[1] == ABSENT -> p = 1
    :: else ->
        if
        :: condition[2] == ABSENT -> p = 2
        :: else ->
            if
            :: condition[3] == ABSENT -> p = 3
            :: else -> p = 4; assert(condition[4] == ABSENT)
            fi
        fi
    fi;
    condition[p] = LOADING; acts_as[p] = c; process[c] = p;
#ifdef NOT_HANDED_ON /* a standby has nobody to listen to yet */
    holds[p] = (we_hold && c != STANDBY);
#else
    holds[p] = (we_hold || c == LISTENER);
#endif
#ifdef ACTS_EARLY /* a standby that opens the door when it loads is ready sooner */
    acts_as[p] = (c == STANDBY -> LISTENER : c);
#endif
    assert(c == STANDBY || ACTING(c) == 1)
}

#define ANSWERS(c) (phase[c] == UP && process[c] && !hung[process[c]])

#ifdef WAIT_FOR_STUCK /* a standby will be there when the stuck one is gone */
#define MAY_BEGIN(c) (c == STANDBY || phase[STANDBY] != QUARANTINED)
#else
#define MAY_BEGIN(c) true
#endif

inline begin(c) /* Supervisor._launch and _promote */
{
    atomic {
        if
        :: c != STANDBY && ANSWERS(STANDBY) ->
            p = process[STANDBY];
            process[c] = p; promotion[p] = c;
            condition[p] = (condition[p] == READY -> LOADING : condition[p]); /* row not ready now */
#ifndef SPENT_STANDBY
            process[STANDBY] = 0; phase[STANDBY] = BACKOFF
#endif
        :: else -> launch(c, p)
        fi;
        phase[c] = STARTING; waited[c] = false; p = 0;
        TOLD(c, begun)
    }
}

inline die(p) { was_ready[p] = (condition[p] == READY); condition[p] = DEAD; promotion[p] = 0; holds[p] = false }

inline on_exit(c) /* ready for less than a beat is no failed start */
{
    if
    :: phase[c] == STARTING && was_ready[p] -> phase[c] = UP; been_up[c] = true
    :: else
    fi;
    was_ready[p] = false
}

inline after_death(c) /* _after_death, _restart_or_escalate */
{
    if
    :: c == STANDBY -> phase[c] = BACKOFF  /* it failed nobody */
    :: c != STANDBY && !been_up[c] -> phase[c] = DONE; escalated = true  /* StartFailed */
    :: c != STANDBY && been_up[c] ->
        deaths = (deaths <= DEATHS_MAX -> deaths + 1 : deaths);
#ifdef NO_LIMIT
        phase[c] = BACKOFF
#elif defined(NO_RESTART)
        phase[c] = DONE
#else
        if
        :: deaths <= DEATHS_MAX -> phase[c] = BACKOFF
        :: else -> phase[c] = DONE; escalated = true
        fi
#endif
    fi
}

#ifdef NO_GROUP
#define GROUP_EMPTY(p) true
#else
#define GROUP_EMPTY(p) (!helper[p])
#endif

inline tend(c) /* one turn for one child: _on_exit, then _tend, then a launch that is due */
{
    atomic {
        p = process[c];
        if
        :: p && condition[p] == DEAD && GROUP_EMPTY(p) ->          /* _bury */
            on_exit(c);
            condition[p] = ABSENT; promotion[p] = 0; hung[p] = false; stuck[p] = false;
            kill_sent[p] = false;
#ifndef NO_GROUP
            acts_as[p] = 0;
#endif
            process[c] = 0;
            after_death(c);
            TOLD(c, buried)
        :: p && condition[p] == DEAD && !GROUP_EMPTY(p) && phase[c] != BURYING -> /* what it forked has to go */
            on_exit(c); phase[c] = BURYING; kill_sent[p] = true; TOLD(c, burying)
        :: p && condition[p] == READY && phase[c] == STARTING && !promotion[p] -> /* _rise */
            phase[c] = UP; been_up[c] = true;
            assert(acts_as[p] == c); TOLD(c, risen)
#ifndef NO_HANG_CHECK
        :: p && hung[p] && (phase[c] == STARTING && condition[p] == LOADING || phase[c] == UP && condition[p] != DEAD) ->
            phase[c] = KILLED; kill_sent[p] = true;                /* silent, or not ready in time */
            TOLD(c, killed)
#endif
#ifdef PROMOTE_EARLY
        :: p && phase[c] == KILLED && c != STANDBY && ANSWERS(STANDBY) ->  /* why wait? */
            phase[c] = BACKOFF
#endif
        :: p && phase[c] == KILLED && stuck[p] && condition[p] != DEAD ->  /* late: _quarantine */
            phase[c] = QUARANTINED; TOLD(c, quarantined)
#ifdef TWIN
        :: p && phase[c] == QUARANTINED && c != STANDBY -> phase[c] = BACKOFF
#endif
        :: else
        fi;
        p = 0
    }
    if
    :: phase[c] == BACKOFF && !escalated && MAY_BEGIN(c) ->
#ifndef LIVENESS /* there the claim has to see it */
        assert(c == STANDBY || deaths <= DEATHS_MAX);              /* never without a bound */
#endif
        if
        :: begin(c)
        :: atomic { c != STANDBY && !waited[c] && phase[STANDBY] == STARTING ->
            waited[c] = true; TOLD(c, waits) }
        fi
    :: else
    fi
}

active proctype Supervisor()
{
    byte p;
    /* start: each once the one before it is ready, the standby without waiting */
    begin(1);
    do
    :: phase[1] != UP && !been_up[1] && !AWAY(1) -> tend(1)
    :: else -> break
    od;
    if
    :: !escalated && been_up[1] -> begin(2); begin(3)
    :: else
    fi;
end:
    do
    :: escalated -> break                                          /* then it stops them all */
    :: !escalated && been_up[1] -> tend(1); tend(2); tend(3)
    :: !escalated && !been_up[1] -> tend(1)                        /* quarantined in its start */
    od
}

/* What a process does by itself.  `dies` is how often a process of the tree may still fail for no
 * reason; 255 is for ever. */
#ifndef FAILURES
#define FAILURES 4
#endif
byte failures = FAILURES;
#if FAILURES == 255
#define SPEND
#else
#define SPEND failures--;
#endif

proctype Process(byte me)
{
    do
    :: atomic { condition[me] == LOADING && !hung[me] && !kill_sent[me] && !promotion[me] ->
        condition[me] = READY; TOLD(me, ready) }
    :: atomic { promotion[me] && !hung[me] && !kill_sent[me] &&    /* it reads its pipe */
        condition[me] != DEAD && condition[me] != ABSENT ->
        acts_as[me] = promotion[me]; promotion[me] = 0;
#ifdef CHILD_OWNS_SOCKET
        holds[me] = holds[me] || acts_as[me] == LISTENER;
#endif
        assert(ACTING(acts_as[me]) == 1); TOLD(me, heard) }
    :: atomic { condition[me] == READY && acts_as[me] == LISTENER && holds[me] && !hung[me] && backlog ->
        backlog = false }                                          /* it accepts */
    :: atomic { failures && (condition[me] == LOADING || condition[me] == READY) && !kill_sent[me] ->
        SPEND
        if
        :: die(me); TOLD(me, died)
        :: helper[me] = true; die(me); TOLD(me, left_helper)       /* a child of its own is there */
        :: !hung[me] -> hung[me] = true; TOLD(me, hangs)
        :: STUCK && !hung[me] -> hung[me] = true; stuck[me] = true; TOLD(me, sticks)
        fi }
    :: atomic { kill_sent[me] && condition[me] != DEAD && condition[me] != ABSENT && !stuck[me] ->
        die(me); TOLD(me, died) }                                  /* SIGKILL arrives, in its time */
    :: atomic { kill_sent[me] && helper[me] -> helper[me] = false; TOLD(me, helper_gone) }
    od
}

init { atomic { run Process(1); run Process(2); run Process(3); run Process(4)
#ifndef NO_CLIENT
    ; run Client()
#endif
} }

proctype Client()
{
    do
    :: atomic { !backlog && been_up[1] && !escalated ->
        backlog = true;
        assert(HELD) }                                             /* or it is refused */
    od
}

/* Each child is up or reported; a standby that is reported is no excuse.  A listener that is stuck in
 * its first start holds back the rest. */
#define SETTLED(c) (phase[c] == UP || phase[c] == QUARANTINED)
#define STUCK_IN_START (phase[1] == QUARANTINED && !been_up[1])

ltl settles { <>[] (escalated || STUCK_IN_START || (SETTLED(1) && SETTLED(2))) }
ltl served { [] (backlog -> <> (!backlog || escalated || phase[1] == QUARANTINED)) }
