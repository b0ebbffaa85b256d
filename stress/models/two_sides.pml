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
 * decode may learn the present session at any moment, and so late.
 *
 * Safe:  no byte lands in pages that belong to another room or to nobody (no page reused before
 *        quiet); Success means every byte.
 * Live:  every room ends and its pages come back, whatever is lost, frozen or restarted;
 *        with PATIENT (no deadline, no forced fence, no restart; losses come to an end) all that is
 *        done by messages alone, and a room that nobody gave up is a Success.
 *
 * Mutants (-D): REUSE_ON_VERDICT QUIET_OF_UNKNOWN QUIET_UNFENCED LANDED_EARLY ANY_EPOCH DECLINE_OPEN
 *               live: NO_DEADLINE NO_FORCED_FENCE
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
    :: atomic { d == NONE && g <= ROOMS -> d = BOOTSTRAPPING }
#if DECLINES                                            /* prefill is told all the same */
#ifdef FORGET_DECLINE
    :: atomic { d == NONE && g <= ROOMS && declines -> declines--; next_room() }
#else
    :: atomic { d == NONE && g <= ROOMS && declines -> declines--; asked = known; d_fail() }
#endif
#endif
    :: atomic { d == BOOTSTRAPPING ->                   /* send_metadata: first the move */
        assert(pages == 0);
        pages = g; placed = 0; d = TRANSFERRING; asked = known; sent_epoch[g] = epoch }
    :: atomic { OPEN(d) && asked && aborts -> aborts--; d_fail() }
    :: atomic { known != session ->                     /* a hello: PEER_RESTARTED */
        known = session;
        if
        :: OPEN(d) && asked -> d_fail()
        :: else
        fi }
#ifndef PATIENT
#ifndef NO_DEADLINE
    :: atomic { OPEN(d) -> d_fail() }
#endif
#ifndef NO_FORCED_FENCE                                 /* _settle: our worker is restarted */
    :: atomic { d == FAILED && !d_quiet -> epoch++; d_quiet = true }
#endif
    :: atomic { decode_restarts && d != NONE -> decode_restarts--; epoch++; next_room() }
#endif
    :: atomic { D_OVER && TELL_FIRST -> next_room() }   /* clear */
    od
}

active proctype DecodeSays()
{
    do
    :: atomic { d == TRANSFERRING && !d_taken && UNSAID(to_prefill, destination, g) && DESTINATION_DUE(g) ->
        DESTINATION_SAID(g)
        to_prefill!destination(g, asked, 0) }
    :: atomic { d == FAILED && !(d_quiet && d_told) && asked && UNSAID(to_prefill, abort, g) && ABORT_DUE(g) ->
        ABORT_SAID(g)
        to_prefill!abort(g, asked, 0) }
    od
}

active proctype DecodeHears()
{
    byte room, s;
    bit q;
    do
    :: atomic { to_decode?destination_taken(room, s, q) ->
        d_taken = (room == g || d_taken); room = 0; s = 0; q = 0 }
    :: atomic { to_decode?abort_taken(room, s, q) ->
        if
        :: room == g -> d_told = true; believe(q, s)
        :: else
        fi;
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
        :: len(to_prefill) < CHANNEL -> to_prefill!abort_taken(room, s, q)
        :: else
        fi;
        room = 0; s = 0; q = 0 }
    :: atomic { to_decode?landed(room, s, q) ->
        if
        :: room == g && d == TRANSFERRING -> assert(placed == ALL); d = SUCCESS
        :: room == g && d == FAILED -> d_quiet = true; d_told = true /* the last byte is in place */
        :: else
        fi;
        if
        :: len(to_prefill) < CHANNEL -> to_prefill!news_taken(room, s, 0)
        :: else
        fi;
        room = 0; s = 0; q = 0 }
    od
}

inline p_fail(room) /* before Transferring nothing was posted: quiet, and decode may be told so */
{
    p_quiet[room] = (p[room] < TRANSFERRING);
    fenced[room] = p_quiet[room];
    p[room] = FAILED
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
    :: atomic { !opened[1] && g >= 1 -> opened[1] = true; p[1] = BOOTSTRAPPING }
#if DECLINES
#ifdef DECLINE_OPEN /* its engine knows what it declines; so why should the listener look? */
    :: atomic { g >= 1 && (!opened[1] || OPEN(p[1])) && declines ->
#else
    :: atomic { g >= 1 && !opened[1] && declines ->
#endif
        declines--; opened[1] = true; p[1] = FAILED; p_quiet[1] = true; fenced[1] = true }
#endif
#if ROOMS > 1
    :: atomic { !opened[2] && g >= 2 -> opened[2] = true; p[2] = BOOTSTRAPPING }
#endif
#ifndef PATIENT
    :: atomic { restarts -> restarts--; session++;      /* all is forgotten but what is in the air */
        i = 1;
        do
        :: i <= ROOMS ->
            p[i] = NONE; p_quiet[i] = false; fenced[i] = false; p_told[i] = false; written[i] = 0; i++
        :: else -> i = 0; break
        od }
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
        :: s == session && p[room] == BOOTSTRAPPING -> p[room] = WAITING
        :: else
        fi;
        if
        :: s == session && OPEN(p[room]) && len(to_decode) < CHANNEL ->
            to_decode!destination_taken(room, session, 0)
        :: s == session && p[room] == FAILED && len(to_decode) < CHANNEL ->
            to_decode!abort(room, session, fenced[room])
        :: else
        fi;
        room = 0; s = 0; q = 0 }
    :: atomic { to_prefill?abort(room, s, q) ->
        if
        :: OPEN(p[room]) -> p_fail(room); q = fenced[room]
        :: p[room] == FAILED -> q = fenced[room]
        :: p[room] == SUCCESS -> q = true
        :: p[room] == NONE ->                           /* unknown */
#ifdef QUIET_OF_UNKNOWN
            q = true;
#else
            q = (s == session);                         /* no other was ever told the destination */
#endif
            opened[room] = true; p[room] = FAILED; p_quiet[room] = true; fenced[room] = q;
            p_told[room] = true
        fi;
        if
        :: len(to_decode) < CHANNEL -> to_decode!abort_taken(room, session, q)
        :: else
        fi;
        room = 0; s = 0; q = 0 }
    :: atomic { to_prefill?abort_taken(room, s, q) ->   /* it heard what we have to say by now? */
        p_told[room] = (p_told[room] || q == fenced[room]); room = 0; s = 0; q = 0 }
    :: atomic { to_prefill?news_taken(room, s, q) -> p_told[room] = true; room = 0; s = 0; q = 0 }
    od
}

proctype PrefillSays(byte room)
{
    do
    :: atomic { p[room] == SUCCESS && !p_told[room] && UNSAID(to_decode, landed, room) && LANDED_DUE(room) ->
        LANDED_SAID(room)
        to_decode!landed(room, session, 0) }
    :: atomic { p[room] == FAILED && !p_told[room] && UNSAID(to_decode, abort, room) && ABORT_DUE(room) ->
        ABORT_SAID(room)
        to_decode!abort(room, session, fenced[room]) }
    od
}

/* The worker, for one room */
proctype Worker(byte room)
{
    do
    :: atomic { p[room] == WAITING -> p[room] = TRANSFERRING }
    :: atomic { p[room] == TRANSFERRING && written[room] == 0 ->
        written[room] = 1; air!room, session, sent_epoch[room], 1 }
    :: atomic { p[room] == TRANSFERRING && written[room] == 1 ->
        written[room] = ALL; air!room, session, sent_epoch[room], 2 }
#ifdef LANDED_EARLY /* the last write is DONE: surely the first is */
    :: atomic { p[room] == TRANSFERRING && written[room] == ALL && !MINE(room, 2) -> p[room] = SUCCESS }
#else
    :: atomic { p[room] == TRANSFERRING && written[room] == ALL && SETTLED(room) -> p[room] = SUCCESS }
#endif
    :: atomic { p[room] == FAILED && !p_quiet[room] && SETTLED(room) ->  /* fence DONE */
        p_quiet[room] = true; fenced[room] = true; p_told[room] = false }
    :: atomic { OPEN(p[room]) && aborts -> aborts--; p_fail(room) }
#ifndef PATIENT
    :: atomic { p[room] == FAILED && !p_quiet[room] ->
        /* fence FAILED: the writes have ended here, and nobody knows where the bytes are */
        p_quiet[room] = true;
#ifdef QUIET_UNFENCED
        fenced[room] = true
#endif
    }
#ifndef NO_DEADLINE
    :: atomic { OPEN(p[room]) -> p_fail(room) } /* its deadline, or a fault */
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
        room = 0; s = 0; e = 0; bits = 0 }
    od
}

active proctype Network()
{
    mtype kind;
    byte room, s;
    bit q;
    do
    :: atomic { losses && nempty(to_prefill) -> to_prefill?kind, room, s, q; losses--; room = 0; s = 0; q = 0 }
    :: atomic { losses && nempty(to_decode) -> to_decode?kind, room, s, q; losses--; room = 0; s = 0; q = 0 }
    :: atomic { repeats && len(to_prefill) > 0 && len(to_prefill) < CHANNEL -> to_prefill?<kind, room, s, q>;
        repeats--; to_prefill!kind, room, s, q; room = 0; s = 0; q = 0 }
    :: atomic { repeats && len(to_decode) > 0 && len(to_decode) < CHANNEL -> to_decode?<kind, room, s, q>;
        repeats--; to_decode!kind, room, s, q; room = 0; s = 0; q = 0 }
    :: atomic { len(to_prefill) > 1 -> to_prefill?kind, room, s, q;
        to_prefill!kind, room, s, q; room = 0; s = 0; q = 0 }
    :: atomic { len(to_decode) > 1 -> to_decode?kind, room, s, q;
        to_decode!kind, room, s, q; room = 0; s = 0; q = 0 }
    od
}

#ifdef FREEZES
active proctype Fate() { frozen = true }
#endif

#if ROOMS > 1
#define P_OVER (!OPEN(p[1]) && !OPEN(p[2]))
#define P_DONE (p[1] == SUCCESS && p[2] == SUCCESS)
#else
#define P_OVER (!OPEN(p[1]))
#define P_DONE (p[1] == SUCCESS)
#endif

/* A run that ends is to spin no run at all, so somebody has to look where it does. */
#ifdef LIVENESS
#if defined(PATIENT) && ABORTS == 0 && DECLINES == 0
active proctype Stuck() { timeout -> assert(g > ROOMS && P_DONE) }
#else
active proctype Stuck() { timeout -> assert(g > ROOMS && P_OVER) }
#endif
#endif

ltl every_room_ends { <>[] (g > ROOMS && P_OVER) }
ltl delivered { <>[] (g > ROOMS && P_DONE) }
