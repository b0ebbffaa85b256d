/* BOTH SIDES OF A ROOM, and a network between them that loses, repeats and reorders.
 *
 * Stands for docs/protocol.md (tags 10 to 17), docs/architecture.md (the life of a room),
 * docs/decisions/0003 (whose quiet) and the actors behind them: decode_listener, decode_failing,
 * prefill_listener, prefill_failing, past, transfer, news.
 *
 * Rooms follow each other in ONE set of decode's pages, so that a late byte meets somebody.  A room
 * is two writes.  A tree that is restarted forgets everything but what is in the air: over nixl the
 * writes of a dead prefill still land.  Sessions are prefill's incarnations, epochs those of
 * decode's worker; a write to a dead worker's memory lands nowhere.  The handshake is left out:
 * decode may learn the present session at any moment, and so late.  With REUSED a prefill that was
 * restarted may be asked for a room again.
 *
 * Safe:  no byte lands in pages that belong to another room or to nobody (no page reused before
 *        quiet); Success means every byte.
 * Live:  every room ends and its pages come back, whatever is lost, frozen or restarted;
 *        with PATIENT (no deadline, no forced fence, no restart; losses come to an end) all that is
 *        done by messages alone, and a room that nobody gave up is a Success.
 *
 * With TELL each move is told (`EV`), so that stress/models/replay_sides.py can have pdrt's actors do
 * the same; what ends rooms begins only after so many lines (CALM_LINES), or no room would get far.
 *
 * Mutants (-D): REUSE_ON_VERDICT QUIET_OF_UNKNOWN QUIET_UNFENCED LANDED_EARLY ANY_EPOCH DECLINE_OPEN
 *               QUIET_OF_ANOTHER
 *               live: NO_DEADLINE NO_FORCED_FENCE NO_PREFILL_FENCE WAIT_FOR_FENCE
 *               patient: FORGET_DESTINATION FORGET_LANDED FORGET_ABORT FORGET_DECLINE
 */

#ifndef ROOMS
#define ROOMS 2
#endif
#ifndef RESTARTS
#define RESTARTS 1 /* of prefill's tree */
#endif
#ifndef DECODE_RESTARTS
#define DECODE_RESTARTS 0
#endif
#ifndef ABORTS
#define ABORTS 1   /* by an engine of either side */
#endif
#ifndef DECLINES
#define DECLINES 0 /* by an engine of either side, before it has a room: Declined */
#endif
#ifndef LOSSES
#define LOSSES 1
#endif
#ifndef REPEATS
#define REPEATS 1
#endif
#ifndef CHANNEL
#define CHANNEL 2
#endif
#define ALL 3 /* both writes, a bit each */

/* KVPoll, but NONE is a slot that is free */
#define FAILED 0
#define BOOTSTRAPPING 1
#define WAITING 2
#define TRANSFERRING 3
#define SUCCESS 4
#define NONE 5 /* not opened, or forgotten */

mtype = { destination, destination_taken, abort, abort_taken, landed, news_taken };

/* kind, room, session, quiet */
chan to_prefill = [CHANNEL] of { mtype, byte, byte, bit };
chan to_decode = [CHANNEL] of { mtype, byte, byte, bit };
/* room, session of the writer, epoch of the memory, which of the two */
chan air = [4] of { byte, byte, byte, byte };

#define OPEN(s) ((s) >= BOOTSTRAPPING && (s) <= TRANSFERRING)

/* decode: its room, every one another (instance, slot, generation) */
byte g = 1, d = NONE;
byte asked;             /* the session that was sent the destination */
bool d_quiet, d_taken, d_told;  /* DestinationTaken and AbortTaken have come */
byte known = 1;         /* prefill's session, as decode knows it */
byte epoch = 1;         /* of its own worker */
byte sent_epoch[ROOMS + 1];     /* what the destination of a room says */
byte pages, placed;     /* whose its pages are, 0 nobody's; which writes are in place */

/* prefill: a room each */
byte session = 1, p[ROOMS + 1] = NONE;
bool opened[ROOMS + 1]; /* the router asks it once a room */
bool p_quiet[ROOMS + 1], fenced[ROOMS + 1], p_told[ROOMS + 1];
byte written[ROOMS + 1];
bool early[ROOMS + 1];  /* its destination came before the router asked us */
bool claimed[ROOMS + 1];        /* decode has asked for it, so we know whom to tell */

byte aborts = ABORTS, losses = LOSSES, repeats = REPEATS, restarts = RESTARTS;
byte decode_restarts = DECODE_RESTARTS, declines = DECLINES;
bool frozen;            /* nothing lands */

/* Said again and again: the sender's timer is any moment at which it is not under way already.  A
 * queue that is full is a drop. */
#define UNSAID(c, kind, room) (len(c) < CHANNEL && !(c??[kind, eval(room), _, _]))
#ifdef FORGET_DESTINATION
bool said_destination[ROOMS + 1];
#define DESTINATION_DUE(i) !said_destination[i]
#define DESTINATION_SAID(i) said_destination[i] = true;
#else
#define DESTINATION_DUE(i) true
#define DESTINATION_SAID(i)
#endif
#ifdef FORGET_LANDED
bool said_landed[ROOMS + 1];
#define LANDED_DUE(i) !said_landed[i]
#define LANDED_SAID(i) said_landed[i] = true;
#else
#define LANDED_DUE(i) true
#define LANDED_SAID(i)
#endif
#ifdef FORGET_ABORT
bool said_abort[ROOMS + 1];
#define ABORT_DUE(i) !said_abort[i]
#define ABORT_SAID(i) said_abort[i] = true;
#else
#define ABORT_DUE(i) true
#define ABORT_SAID(i)
#endif

#ifdef TELL
mtype = { opens, declines_it, asks, gives_up, learns, runs_out, clears, says, hears,
    p_opens, p_declines, p_gives_up, p_runs_out, p_moves, p_writes, p_succeeds, p_fences, p_unfenced,
    p_restarts, p_says, p_hears, lands, loses, doubles, turns, nothing };
mtype answered = nothing;
bit answered_q;
short lines;
#ifndef CALM_LINES
#define CALM_LINES 0
#endif
#define BY_NOW (lines >= CALM_LINES)
#define ANSWERED(kind, q) answered = kind; answered_q = q;
#define TOLD(what, kind, room, s, q) \
    printf("EV %e %e %d %d %d %e %d %d %d %d %d %d %d %d %d\n", what, kind, room, s, q, \
        answered, answered_q, d, d_quiet, g, placed, p[1], p_quiet[1], p[2], p_quiet[2]); \
    lines++; answered = nothing; answered_q = 0;
#else
#define BY_NOW true
#define ANSWERED(kind, q)
#define TOLD(what, kind, room, s, q)
#endif

inline d_fail() /* states.quiet_at; a room that was declined never had pages */
{
    d_quiet = (d < TRANSFERRING || d == NONE);
    d = FAILED
}

inline believe(q, s) /* a word about quiet, from prefill's present session only */
{
    if
    :: q && s == known && d == FAILED -> d_quiet = true
    :: else
    fi
}

#ifdef REUSE_ON_VERDICT
#define D_OVER (d == SUCCESS || d == FAILED)
#else
#define D_OVER (d == SUCCESS || (d == FAILED && d_quiet))
#endif

#ifdef PATIENT
#define TELL_FIRST (d == SUCCESS || d_told)
#else
#define TELL_FIRST true /* the abort is repeated within its bound; the slot need not wait for it */
#endif

inline next_room() { d = NONE; d_quiet = false; d_taken = false; d_told = false; pages = 0; asked = 0; g++ }

/* Several processes are one tree here: spin is fair to processes, not to the options of one. */
active proctype Decode() /* engine, janitor, and what the listener knows of peers */
{
    do
    :: atomic { d == NONE && g <= ROOMS -> d = BOOTSTRAPPING; TOLD(opens, nothing, g, 0, 0) }
#if DECLINES                                            /* prefill is told all the same */
#ifdef FORGET_DECLINE
    :: atomic { d == NONE && g <= ROOMS && declines -> declines--; next_room() }
#else
    :: atomic { d == NONE && g <= ROOMS && declines -> declines--; asked = known; d_fail();
        TOLD(declines_it, nothing, g, 0, 0) }
#endif
#endif
    :: atomic { d == BOOTSTRAPPING ->                   /* send_metadata: first the move */
        assert(pages == 0);
        pages = g; placed = 0; d = TRANSFERRING; asked = known; sent_epoch[g] = epoch;
        TOLD(asks, nothing, g, 0, 0) }
    :: atomic { OPEN(d) && asked && aborts && BY_NOW -> aborts--; d_fail(); TOLD(gives_up, nothing, g, 0, 0) }
    :: atomic { known != session ->                     /* a hello: PEER_RESTARTED */
        known = session;
        if
        :: OPEN(d) -> d_fail()
        :: d == FAILED -> asked = 0                     /* there is nobody to tell any more */
        :: else
        fi;
        TOLD(learns, nothing, g, session, 0) }
#ifndef PATIENT
#ifndef NO_DEADLINE
    :: atomic { OPEN(d) && BY_NOW -> d_fail(); TOLD(runs_out, nothing, g, 0, 0) }
#endif
#ifndef NO_FORCED_FENCE                                 /* _settle: our worker is restarted */
    :: atomic { d == FAILED && !d_quiet -> epoch++; d_quiet = true }
#endif
    :: atomic { decode_restarts && d != NONE -> decode_restarts--; epoch++; next_room() }
#endif
    :: atomic { D_OVER && TELL_FIRST -> next_room(); TOLD(clears, nothing, g - 1, 0, 0) }
    od
}

active proctype DecodeSays()
{
    do
    :: atomic { d == TRANSFERRING && !d_taken && UNSAID(to_prefill, destination, g) && DESTINATION_DUE(g) ->
        DESTINATION_SAID(g)
        to_prefill!destination(g, asked, 0); TOLD(says, destination, g, asked, 0) }
    :: atomic { d == FAILED && !(d_quiet && d_told) && asked && UNSAID(to_prefill, abort, g) && ABORT_DUE(g) ->
        ABORT_SAID(g)
        to_prefill!abort(g, asked, 0); TOLD(says, abort, g, asked, 0) }
    od
}

active proctype DecodeHears()
{
    byte room, s;
    bit q;
    do
    :: atomic { to_decode?destination_taken(room, s, q) ->
        d_taken = (room == g || d_taken); TOLD(hears, destination_taken, room, s, q)
        room = 0; s = 0; q = 0 }
    :: atomic { to_decode?abort_taken(room, s, q) ->
        if
        :: room == g -> d_told = true; believe(q, s)
        :: else
        fi;
        TOLD(hears, abort_taken, room, s, q)
        room = 0; s = 0; q = 0 }
    :: atomic { to_decode?abort(room, s, q) ->
        if
        :: room == g && d != NONE ->
            if
            :: OPEN(d) -> d_fail()
            :: else
            fi;
            d_told = true;
            believe(q, s)
        :: else
        fi;
        if
        :: len(to_prefill) < CHANNEL -> to_prefill!abort_taken(room, s, q); ANSWERED(abort_taken, q)
        :: else
        fi;
        TOLD(hears, abort, room, s, q)
        room = 0; s = 0; q = 0 }
    :: atomic { to_decode?landed(room, s, q) ->
        if
        :: room == g && d == TRANSFERRING -> assert(placed == ALL); d = SUCCESS
        :: room == g && d == FAILED -> d_quiet = true; d_told = true /* the last byte is in place */
        :: else
        fi;
        if
        :: len(to_prefill) < CHANNEL -> to_prefill!news_taken(room, s, 0); ANSWERED(news_taken, 0)
        :: else
        fi;
        TOLD(hears, landed, room, s, q)
        room = 0; s = 0; q = 0 }
    od
}

inline p_open(room) /* the destination may have been there first */
{
    opened[room] = true;
    p[room] = (early[room] -> WAITING : BOOTSTRAPPING);
    early[room] = false;
    TOLD(p_opens, nothing, room, 0, 0)
}

inline p_fail(room) /* before Transferring nothing was posted: quiet, and decode may be told so */
{
    p_quiet[room] = (p[room] < TRANSFERRING);
    fenced[room] = p_quiet[room];
    p[room] = FAILED
}

inline doubt(room, s) /* bytes of the room that another session had may still land */
{
#ifdef QUIET_OF_ANOTHER
    skip
#else
    fenced[room] = (fenced[room] && (claimed[room] || s == session))
#endif
}

#define MINE(room, bits) (air??[eval(room), eval(session), _, bits])
#define SETTLED(room) (!MINE(room, 1) && !MINE(room, 2))

active proctype Prefill()
{
    byte i = 1;
    atomic {
        do
        :: i <= ROOMS -> run Worker(i); run PrefillSays(i); i++
        :: else -> i = 0; break
        od
    }
    do
    :: atomic { !opened[1] && g >= 1 -> p_open(1) }
#if DECLINES
#ifdef DECLINE_OPEN /* its engine knows what it declines; so why should the listener look? */
    :: atomic { g >= 1 && (!opened[1] || OPEN(p[1])) && declines ->
#else
    :: atomic { g >= 1 && !opened[1] && declines ->
#endif
        declines--; opened[1] = true; early[1] = false;
        p[1] = FAILED; p_quiet[1] = true; fenced[1] = true;
        TOLD(p_declines, nothing, 1, 0, 0) }
#endif
#if ROOMS > 1
    :: atomic { !opened[2] && g >= 2 -> p_open(2) }
#endif
#ifndef PATIENT
    :: atomic { restarts && BY_NOW -> restarts--; session++;      /* all is forgotten but what is in the air */
        i = 1;
        do
        :: i <= ROOMS ->
            p[i] = NONE; p_quiet[i] = false; fenced[i] = false; p_told[i] = false; written[i] = 0;
            early[i] = false; claimed[i] = false;
#ifdef REUSED   /* the router uses its ids again */
            opened[i] = false;
#endif
            i++
        :: else -> i = 0; break
        od;
        TOLD(p_restarts, nothing, 0, session, 0) }
#endif
    od
}

active proctype PrefillHears()
{
    byte room, s;
    bit q;
    do
    :: atomic { to_prefill?destination(room, s, q) ->
        if
        :: s != session                                 /* meant for another: dropped */
        :: s == session ->
            claimed[room] = true;
            early[room] = (p[room] == NONE);
            p[room] = (p[room] == BOOTSTRAPPING -> WAITING : p[room])
        fi;
        if
        :: s == session && (OPEN(p[room]) || early[room]) && len(to_decode) < CHANNEL ->
            to_decode!destination_taken(room, session, 0); ANSWERED(destination_taken, 0)
        :: s == session && p[room] == FAILED && len(to_decode) < CHANNEL ->
            to_decode!abort(room, session, fenced[room]); ANSWERED(abort, fenced[room])
        :: else
        fi;
        TOLD(p_hears, destination, room, s, q)
        room = 0; s = 0; q = 0 }
    :: atomic { to_prefill?abort(room, s, q) ->
        if
        :: OPEN(p[room]) -> p_fail(room); doubt(room, s); q = fenced[room]; p_told[room] = true
        :: p[room] == FAILED -> doubt(room, s); q = fenced[room];
            p_told[room] = (p_told[room] || !claimed[room])
        :: p[room] == SUCCESS -> q = true
        :: p[room] == NONE ->                           /* unknown */
#ifdef QUIET_OF_UNKNOWN
            q = true;
#else
            q = (s == session);                         /* no other was ever told the destination */
#endif
            opened[room] = true; p[room] = FAILED; p_quiet[room] = true; fenced[room] = q;
            p_told[room] = true; early[room] = false
        fi;
        claimed[room] = true;
        if
        :: len(to_decode) < CHANNEL -> to_decode!abort_taken(room, session, q); ANSWERED(abort_taken, q)
        :: else
        fi;
        TOLD(p_hears, abort, room, s, q)
        room = 0; s = 0; q = 0 }
    :: atomic { to_prefill?abort_taken(room, s, q) ->   /* it heard what we have to say by now? */
        p_told[room] = (p_told[room] || q == fenced[room]); TOLD(p_hears, abort_taken, room, s, q)
        room = 0; s = 0; q = 0 }
    :: atomic { to_prefill?news_taken(room, s, q) ->
        p_told[room] = true; TOLD(p_hears, news_taken, room, s, q)
        room = 0; s = 0; q = 0 }
    od
}

#define WAITED_FOR(room) (room == g && d == BOOTSTRAPPING && known == session) /* Expect */

proctype PrefillSays(byte room)
{
    do
    :: atomic { p[room] == SUCCESS && !p_told[room] && UNSAID(to_decode, landed, room) && LANDED_DUE(room) ->
        LANDED_SAID(room)
        to_decode!landed(room, session, 0); TOLD(p_says, landed, room, session, 0) }
    :: atomic { p[room] == FAILED && !p_told[room] && (claimed[room] || WAITED_FOR(room)) &&
        UNSAID(to_decode, abort, room) && ABORT_DUE(room) ->
        ABORT_SAID(room)
        claimed[room] = true;
        to_decode!abort(room, session, fenced[room]); TOLD(p_says, abort, room, session, fenced[room]) }
    od
}

/* The worker, for one room */
proctype Worker(byte room)
{
    do
    :: atomic { p[room] == WAITING -> p[room] = TRANSFERRING; TOLD(p_moves, nothing, room, 0, 0) }
    :: atomic { p[room] == TRANSFERRING && written[room] == 0 ->
        written[room] = 1; air!room, session, sent_epoch[room], 1; TOLD(p_writes, nothing, room, session, 1) }
    :: atomic { p[room] == TRANSFERRING && written[room] == 1 ->
        written[room] = ALL; air!room, session, sent_epoch[room], 2; TOLD(p_writes, nothing, room, session, 2) }
#ifdef LANDED_EARLY /* the last write is DONE: surely the first is */
    :: atomic { p[room] == TRANSFERRING && written[room] == ALL && !MINE(room, 2) ->
        p[room] = SUCCESS; TOLD(p_succeeds, nothing, room, 0, 0) }
#else
    :: atomic { p[room] == TRANSFERRING && written[room] == ALL && SETTLED(room) ->
        p[room] = SUCCESS; TOLD(p_succeeds, nothing, room, 0, 0) }
#endif
#ifndef NO_PREFILL_FENCE /* decode has its word and its pages; what else is there to do? */
    :: atomic { p[room] == FAILED && !p_quiet[room] && SETTLED(room) ->  /* fence DONE */
        p_quiet[room] = true; fenced[room] = true; p_told[room] = false;
        TOLD(p_fences, nothing, room, 0, 0) }
#endif
    :: atomic { OPEN(p[room]) && aborts && BY_NOW -> aborts--; p_fail(room); TOLD(p_gives_up, nothing, room, 0, 0) }
#ifndef PATIENT
#if !defined(NO_PREFILL_FENCE) && !defined(WAIT_FOR_FENCE) /* it will be DONE, one day */
    :: atomic { p[room] == FAILED && !p_quiet[room] && BY_NOW ->
        /* fence FAILED: the writes have ended here, and nobody knows where the bytes are */
        p_quiet[room] = true;
#ifdef QUIET_UNFENCED
        fenced[room] = true;
#endif
        TOLD(p_unfenced, nothing, room, 0, 0)
    }
#endif
#ifndef NO_DEADLINE
    :: atomic { OPEN(p[room]) && BY_NOW -> p_fail(room); TOLD(p_runs_out, nothing, room, 0, 0) } /* or a fault */
#endif
#endif
    od
}

active proctype Air()
{
    byte room, s, e, bits;
    do
    :: atomic { !frozen && nempty(air) -> air?room, s, e, bits;
        if
        :: len(air) > 0 -> air!room, s, e, bits; air?room, s, e, bits   /* the next one is faster */
        :: true
        fi;
        if
#ifdef ANY_EPOCH /* the memory is the same, is it not? */
        :: true ->
#else
        :: e == epoch ->
#endif
            assert(pages == room); placed = placed | bits
        :: e != epoch
        fi;
        TOLD(lands, nothing, room, s, bits)
        room = 0; s = 0; e = 0; bits = 0 }
    od
}

active proctype Network()
{
    mtype kind;
    byte room, s;
    bit q;
    do
    :: atomic { losses && nempty(to_prefill) -> to_prefill?kind, room, s, q; losses--;
        TOLD(loses, kind, room, 0, q)
        room = 0; s = 0; q = 0 }
    :: atomic { losses && nempty(to_decode) -> to_decode?kind, room, s, q; losses--;
        TOLD(loses, kind, room, 1, q)
        room = 0; s = 0; q = 0 }
    :: atomic { repeats && len(to_prefill) > 0 && len(to_prefill) < CHANNEL -> to_prefill?<kind, room, s, q>;
        repeats--; to_prefill!kind, room, s, q; TOLD(doubles, kind, room, 0, q)
        room = 0; s = 0; q = 0 }
    :: atomic { repeats && len(to_decode) > 0 && len(to_decode) < CHANNEL -> to_decode?<kind, room, s, q>;
        repeats--; to_decode!kind, room, s, q; TOLD(doubles, kind, room, 1, q)
        room = 0; s = 0; q = 0 }
    :: atomic { len(to_prefill) > 1 -> to_prefill?kind, room, s, q;
        to_prefill!kind, room, s, q; TOLD(turns, kind, room, 0, q)
        room = 0; s = 0; q = 0 }
    :: atomic { len(to_decode) > 1 -> to_decode?kind, room, s, q;
        to_decode!kind, room, s, q; TOLD(turns, kind, room, 1, q)
        room = 0; s = 0; q = 0 }
    od
}

#ifdef FREEZES
active proctype Fate() { frozen = true }
#endif

/* A half that failed holds its pages until it is quiet. */
#define P_BACK_OF(room) (p[room] != FAILED || p_quiet[room])
#if ROOMS > 1
#define P_OVER (!OPEN(p[1]) && !OPEN(p[2]))
#define P_BACK (P_BACK_OF(1) && P_BACK_OF(2))
#define P_DONE (p[1] == SUCCESS && p[2] == SUCCESS)
#else
#define P_OVER (!OPEN(p[1]))
#define P_BACK P_BACK_OF(1)
#define P_DONE (p[1] == SUCCESS)
#endif

/* A run that ends is to spin no run at all, so somebody has to look where it does. */
#ifdef LIVENESS
#if defined(PATIENT) && ABORTS == 0 && DECLINES == 0
active proctype Stuck() { timeout -> atomic { assert(g > ROOMS); assert(P_DONE) } }
#else
active proctype Stuck() { timeout -> atomic { assert(g > ROOMS); assert(P_OVER); assert(P_BACK) } }
#endif
#endif

ltl every_room_ends { <>[] (g > ROOMS && P_OVER && P_BACK) }
ltl delivered { <>[] (g > ROOMS && P_DONE) }
