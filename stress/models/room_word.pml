/* THE ROOM WORD: one slot of prefill's status table, and everybody who swaps its word.
 *
 * Stands for pdrt/shm_status.py (claim, publish, move, expire, set_quiet, clear, discard),
 * pdrt/actors/transfer.py (`_room`, `_post`, `_conclude`, `_check`, `_quieten`),
 * pdrt/actors/janitor.py (`sweep`, `_bury`, `_settle`) and docs/decisions/0003.
 *
 * Every operation is a load and a later compare-and-swap; a process may be killed between any two
 * statements.  A message is never modelled: "chunk, destination or news of room g comes now, again
 * or late" may happen at any moment for any room ever opened.
 *
 * Safe:  a verdict never changes; no page is reused while a living worker reads it; Success means
 *        that the bytes are in place and none is on its way.
 * Live:  every room ends, becomes quiet, and its slot is free again.
 *
 * Each look at the word and each swap is told (`EV`), so that stress/models/replay.py can have the real
 * table do the same.  -DDRIVEN puts one process that tries anything in everybody's place.
 *
 * Mutants (-D): NO_GENERATION BLIND_STORE SWEEP_EARLY REUSE_ON_VERDICT ADOPT POST_BEFORE_MOVE
 *               and, of the live half: NO_DEADLINE NO_FORCED_FENCE NO_DISCARD
 */

#ifndef ROOMS
#define ROOMS 2
#endif
#ifndef CRASHES
#define CRASHES 1 /* of the worker; forced fences come on top, one a room at most */
#endif
#ifndef ENGINE_CRASHES
#define ENGINE_CRASHES 1
#endif
#define WORKERS_MAX 5 /* incarnations; one more than two rooms can use */
#if ROOMS > 2 /* for traces alone */
#define MORE_WORKERS (worker_inc < WORKERS_MAX)
#else
#define MORE_WORKERS true
#endif

/* KVPoll of states.py, then the slot's own CLAIMED */
#define FAILED 0
#define BOOTSTRAPPING 1
#define WAITING 2
#define TRANSFERRING 3
#define SUCCESS 4
#define CLAIMED 5

/* generation | owner | reason | quiet | state.  Owner: 0 nobody, 1..5 that incarnation of the
 * worker, 6 and 7 the first and second incarnation of the engine. */
#define WORD(s, q, r, o, g) ((s) | ((q) << 3) | ((r) << 4) | ((o) << 6) | ((g) << 9))
#define STATE(w) ((w) & 7)
#define QUIET(w) (((w) >> 3) & 1)
#define REASON(w) (((w) >> 4) & 3)
#define OWNER(w) (((w) >> 6) & 7)
#define GEN(w) ((w) >> 9)
#define LIVE(w) (GEN(w) & 1)
#define OPEN(w) (STATE(w) >= BOOTSTRAPPING && STATE(w) <= TRANSFERRING)
#define ENGINE(inc) (5 + (inc))
#define NONE (-1)

#define ABORTED 1
#define DIED 2
#define LATE 3

#ifdef NO_GENERATION /* the word has none: a handle fits whatever room is in the slot */
#define FITS(w, g) LIVE(w)
#define TAG(w, g) GEN(w)
#else
#define FITS(w, g) (GEN(w) == (g) && LIVE(w))
#define TAG(w, g) (g)
#endif

/* A room that moves is nobody's to take over: the table refuses it, and the worker does not begin.
 * Either of the two is enough; ADOPT has neither. */
#define MINE(w, me) (STATE(w) != TRANSFERRING || OWNER(w) == (me))
#if defined(ADOPT) || defined(ONLY_WORKER_REFUSES)
#define MAY_MOVE(w, me) true
#else
#define MAY_MOVE(w, me) MINE(w, me)
#endif
#if defined(ADOPT) || defined(ONLY_TABLE_REFUSES)
#define MAY_BEGIN(w, me) true
#else
#define MAY_BEGIN(w, me) MINE(w, me)
#endif

#ifdef REUSE_ON_VERDICT
#define CLEARABLE(w) (STATE(w) == FAILED || STATE(w) == SUCCESS)
#else
#define CLEARABLE(w) QUIET(w)
#endif

mtype = { claim, publish, peer_known, posted, landed, fault, expire, set_quiet, clear, discard, reborn };
mtype = { looking, refused, kept, swapped, beaten }; /* looking: a swap will follow; kept: it is so */

int word;       /* zero memory reads as a free slot */
byte opener;    /* beside the word: incarnation of the engine that opened the room */
#ifdef TIMELESS  /* any deadline may have passed at any moment: all that safety needs */
#define late true
#define overdue true
#else
bool late;      /* its deadline has passed */
bool overdue;   /* it is unquiet beyond the quiet bound */
#endif
byte opened;    /* slots claimed so far */

bool worker_alive = true, engine_alive = true;  /* does the process exist? */
byte worker_row = 1, engine_row = 1;            /* incarnation in the table; 0 once buried */
byte worker_inc = 1, engine_inc = 1;            /* that was launched last */
bool frozen;                                    /* the peer: nothing lands any more */

/* What really happens to bytes; no process reads `placed`.  air[i] is the room whose write
 * incarnation i has on its way: the transport still reads our pages while i lives, and the bytes
 * still land at decode even when it does not. */
byte air[WORKERS_MAX + 1];
int placed; /* a bit for each room whose bytes are all in place */

#define FLYING(g) (air[1] == (g) || air[2] == (g) || air[3] == (g) || air[4] == (g) || air[5] == (g))

/* The laws, checked at each change of the word, from a to b. */
inline lawful(a, b)
{
#ifndef DRIVEN
    assert(GEN(b) == GEN(a) || GEN(b) == GEN(a) + 1);
    if
    :: GEN(a) == GEN(b) && LIVE(a) && (STATE(a) == FAILED || STATE(a) == SUCCESS) ->
        assert(STATE(b) == STATE(a) && REASON(b) == REASON(a)); /* law 1 */
        assert(QUIET(b) >= QUIET(a))
    :: GEN(a) == GEN(b) && STATE(b) == SUCCESS && STATE(a) != SUCCESS ->
        assert((placed >> GEN(b) & 1) && !FLYING(GEN(b)))       /* law 5 */
    :: GEN(a) != GEN(b) && LIVE(a) ->                           /* its pages are free: law 4 */
        assert(STATE(a) == CLAIMED || STATE(a) == SUCCESS || STATE(a) == FAILED);
        assert(STATE(a) == CLAIMED || !(worker_alive && air[worker_inc] == GEN(a)))
    :: else
    fi
#else
    skip
#endif
}

#define TOLD(op, g, r, me, how) printf("EV %d %e %d %d %d %e %d\n", _pid, op, g, r, me, how, word)

/* The compare-and-swap from w to n.  Beaten, it has seen what is there now. */
inline swap(op, g, r, me)
{
#ifdef BLIND_STORE
    ok = true;
#else
    ok = (word == w);
#endif
    if
    :: ok -> lawful(word, n); word = n; TOLD(op, g, r, me, swapped); w = 0; n = 0
    :: else -> TOLD(op, g, r, me, beaten); w = word
    fi
}

inline decide(op, g, r, me) /* what becomes of w, if anything */
{
    n = NONE;
    if
    :: !FITS(w, g)
    :: else ->
        if
        :: op == peer_known && STATE(w) == BOOTSTRAPPING ->
            n = WORD(WAITING, 0, 0, OWNER(w), TAG(w, g))
        :: op == posted && (STATE(w) == WAITING || STATE(w) == TRANSFERRING) && MAY_MOVE(w, me) ->
            n = WORD(TRANSFERRING, 0, 0, me, TAG(w, g))
        :: op == landed && STATE(w) == TRANSFERRING ->
            n = WORD(SUCCESS, 1, 0, OWNER(w), TAG(w, g))
        :: op == fault && OPEN(w) ->
            n = WORD(FAILED, (STATE(w) < TRANSFERRING), r, OWNER(w), TAG(w, g))
        :: op == set_quiet && STATE(w) == FAILED && !QUIET(w) -> n = w | 8
        :: op == discard -> n = WORD(0, 0, 0, 0, GEN(w) + 1)
        :: else
        fi
    fi;
    if
    :: n == NONE -> w = 0; TOLD(op, g, r, me, refused) /* what is forgotten is one state, not many */
    :: n == w -> TOLD(op, g, r, me, kept)
    :: else -> TOLD(op, g, r, me, looking)
    fi
}

/* StatusTable.move, and set_quiet and discard, which are the same loop */
inline move(op, g, r, me)
{
    atomic { w = word; decide(op, g, r, me) };
    do
    :: atomic { n == NONE -> n = 0; ok = false; break }
    :: atomic { n == w -> w = 0; n = 0; ok = true; break }
    :: atomic { n != NONE && n != w ->
        swap(op, g, r, me);
        if
        :: ok -> break
        :: else -> decide(op, g, r, me)
        fi }
    od
}

inline once(op, g, r, me) /* no second try */
{
    if
    :: n -> atomic { swap(op, g, r, me); w = 0; n = 0 }
    :: else
    fi
}

/* StatusTable.poll and expire: against the very word that was found late */
inline end_late()
{
    atomic {
        w = word;
        if
        :: OPEN(w) && late ->
            n = WORD(FAILED, (STATE(w) < TRANSFERRING), LATE, OWNER(w), GEN(w));
            TOLD(expire, GEN(w), LATE, 0, looking)
        :: else ->
#ifdef DRIVEN /* elsewhere a room may be open and not late */
            TOLD(expire, GEN(w), LATE, 0, refused);
#endif
            w = 0
        fi
    }
    once(expire, GEN(w), LATE, 0)
}

/* StatusTable.clear.  The pages are handed out again: `lawful` looks whether they may. */
inline free_slot(g)
{
    atomic {
        w = word;
        if
        :: FITS(w, g) && CLEARABLE(w) ->
            n = WORD(0, 0, 0, 0, GEN(w) + 1); TOLD(clear, g, 0, 0, looking)
        :: else -> w = 0; TOLD(clear, g, 0, 0, refused)
        fi
    }
    once(clear, g, 0, 0)
}

/* StatusTable.open, in two: one engine a tree, so nobody else claims */
inline claim_slot()
{
    atomic {
        w = word; g = GEN(w) + 1; n = WORD(CLAIMED, 0, 0, ENGINE(engine_inc), g); opened++;
        TOLD(claim, g, 0, ENGINE(engine_inc), looking)
    }
    atomic { swap(claim, g, 0, ENGINE(engine_inc)); assert(ok); ok = false }
}

inline publish_room()
{
    atomic {
        n = WORD(BOOTSTRAPPING, 0, 0, 0, g);
        lawful(word, n); word = n; n = 0; TOLD(publish, g, 0, ENGINE(engine_inc), swapped)
    }
}

#ifdef DRIVEN

/* Every operation, whoever should do it and whether it may or not. */
active proctype Driver()
{
    int w, n;
    bool ok;
    byte g, me, r;
    do
    :: opened < ROOMS && !LIVE(word) ->
        claim_slot();
        if
        :: publish_room()
        :: publish_room()
        :: publish_room()
        :: TOLD(reborn, 0, 0, 0, refused); move(discard, g, 0, 0)   /* died between the two */
        fi
    :: LIVE(word) || opened >= ROOMS ->
        if
        :: g = GEN(word)
        :: g = GEN(word)
        :: g = GEN(word)
        :: g = (GEN(word) - 1) & 255
        :: g = (GEN(word) - 2) & 255
        :: g = GEN(word) + 1
        fi;
        if
        :: me = 1; r = ABORTED
        :: me = 2; r = DIED
        fi;
        if
        :: move(peer_known, g, 0, 0)
        :: move(peer_known, g, 0, 0)
        :: move(peer_known, g, 0, 0)
        :: move(posted, g, 0, me)
        :: move(posted, g, 0, me)
        :: move(posted, g, 0, me)
        :: move(landed, g, 0, 0)
        :: move(landed, g, 0, 0)
        :: move(fault, g, r, 0)
        :: move(fault, g, r, 0)
        :: move(set_quiet, g, 0, 0)
        :: free_slot(g)
        :: end_late()
        :: g % 7 == 0 -> move(discard, g, 0, 0)
        fi
    od
}

#else

#ifdef CALM /* no late message and nobody who gives up: neither is needed to end a room */
#define NEWS OPEN(word)
#else
#define NEWS true
#endif

inline some_room(g) /* any that was ever opened */
{
    if
#ifdef CALM
    :: OPEN(word) -> g = GEN(word)
#else
    :: opened >= 1 -> g = 2 * opened - 1
    :: opened >= 2 -> g = 2 * opened - 3
#endif
    fi
}

active proctype Engine()
{
    int w, n;
    bool ok;
    byte g;
again:
    {
        do
        :: opened < ROOMS && !LIVE(word) ->
            claim_slot();
            opener = engine_inc;                        /* what is beside the word first */
#ifndef TIMELESS
            late = false;
#endif
            publish_room()
#ifndef CALM
        :: g && GEN(word) == g && OPEN(word) -> move(fault, g, ABORTED, 0)
#endif
        :: g && GEN(word) == g && OPEN(word) && late -> end_late()
        :: g && GEN(word) == g && CLEARABLE(word) -> free_slot(g)
        od
    } unless { !engine_alive };
    atomic { engine_row = 0; TOLD(reborn, 0, 0, 0, refused) }   /* bury */
    atomic { engine_inc++; engine_alive = true; engine_row = engine_inc; g = 0; w = 0; n = 0; ok = false };
    (!LIVE(word));  /* a new engine does not touch its pool before its predecessor's rooms are over */
    goto again
}

active proctype Listener()
{
    int w, n;
    bool ok;
    byte g;
    do
    :: atomic { some_room(g) }; move(peer_known, g, 0, 0)
    od
}

active proctype Worker()
{
    int w, n;
    bool ok, written, ending;
    byte g, me = 1;
again:
    {
        do
        :: g == 0 && NEWS ->                            /* _room: a message names one */
            atomic {
                if
                :: NEWS -> some_room(g)
                :: else
                fi;
                w = word;
                if
                :: g && FITS(w, g) && OPEN(w) && MAY_BEGIN(w, me)
                :: else -> g = 0
                fi;
                w = 0
            }
        :: g && !written && !ending ->                  /* _post */
#ifdef POST_BEFORE_MOVE
            atomic { air[me] = g; written = true };
            move(posted, g, 0, me);
            ending = !ok
#else
            move(posted, g, 0, me);
            atomic {
                if
                :: ok -> air[me] = g; written = true
                :: else -> ending = true
                fi;
                ok = false
            }
#endif
        :: g && written && !ending && !air[me] ->       /* _conclude */
            move(landed, g, 0, me);
            atomic {
                if
                :: ok -> g = 0; written = false
                :: else -> ending = true
                fi;
                ok = false
            }
#ifndef CALM
        :: g && !ending -> move(fault, g, ABORTED, me); atomic { ending = true; ok = false }   /* _fault */
#endif
        :: g && !ending && !(FITS(word, g) && OPEN(word)) -> ending = true  /* _check */
        :: g && ending && !air[me] ->                   /* _settle: fence DONE, or nothing posted */
            move(set_quiet, g, 0, me);
            atomic { g = 0; written = false; ending = false; ok = false }
        od
    } unless { !worker_alive };
    atomic { worker_row = 0; TOLD(reborn, 0, 0, 0, refused) }   /* bury: its pidfd fired */
    atomic {
        worker_inc++; me = worker_inc; g = 0; w = 0; n = 0; ok = false; written = false; ending = false;
        assert(me <= WORKERS_MAX);
        worker_alive = true; worker_row = me
    };
    goto again
}

#define OWNER_DEAD(w) (OWNER(w) && OWNER(w) <= WORKERS_MAX && OWNER(w) != worker_row)
#define OPENER_DEAD(w) (opener != engine_row)
#define UNQUIET(w) (LIVE(w) && STATE(w) == FAILED && !QUIET(w))

active proctype Janitor()
{
    int w, n;
    bool ok;
    byte g;
    do
#ifndef NO_DISCARD
    :: atomic { LIVE(word) && STATE(word) == CLAIMED && OWNER(word) != ENGINE(engine_row) ->
         g = GEN(word) };
       move(discard, g, 0, 0)
#endif
    :: OPEN(word) && late -> end_late()
    :: atomic { OPEN(word) && (OWNER_DEAD(word) || OPENER_DEAD(word)) -> g = GEN(word) };
       move(fault, g, DIED, 0)
#ifdef SWEEP_EARLY /* it was silent for long: surely it is dead */
    :: atomic { UNQUIET(word) -> g = GEN(word) };
#else
    :: atomic { UNQUIET(word) && OWNER_DEAD(word) -> g = GEN(word) };
#endif
       move(set_quiet, g, 0, 0)
    :: atomic { LIVE(word) && STATE(word) != CLAIMED && QUIET(word) && OPENER_DEAD(word) ->
         g = GEN(word) };
       free_slot(g)
#ifndef NO_FORCED_FENCE /* _settle: its worker is restarted */
    :: atomic { UNQUIET(word) && overdue && OWNER(word) == worker_row && worker_alive && MORE_WORKERS ->
         worker_alive = false }
#endif
    od
}

active proctype Wire()
{
    byte i;
    do
    :: atomic { !frozen && (air[1] || air[2] || air[3] || air[4] || air[5]) ->
        if
        :: air[1] -> i = 1
        :: air[2] -> i = 2
        :: air[3] -> i = 3
        :: air[4] -> i = 4
        :: air[5] -> i = 5
        fi;
        placed = placed | (1 << air[i]); air[i] = 0; i = 0 }
    od
}

#ifndef TIMELESS
active proctype Time()
{
    do
#ifndef NO_DEADLINE
    :: OPEN(word) && !late -> late = true
#endif
    :: UNQUIET(word) && !overdue -> overdue = true
    :: !UNQUIET(word) && overdue -> overdue = false
    od
}
#endif

active proctype Fate()
{
    byte workers = CRASHES, engines = ENGINE_CRASHES;
    do
    :: atomic { workers && worker_alive && worker_row -> workers--; worker_alive = false }
    :: atomic { engines && engine_alive && engine_row -> engines--; engine_alive = false }
#ifndef TIMELESS
    :: !frozen -> frozen = true /* for safety the same as a wire that is slow */
#endif
    :: break
    od
}

/* A run that ends is to spin no run at all, so somebody has to look where it does. */
#ifdef LIVENESS
active proctype Stuck() { timeout -> assert(opened == ROOMS && !LIVE(word)) }
#endif

#endif

ltl every_room_ends { <>[] (opened == ROOMS && !LIVE(word)) }
