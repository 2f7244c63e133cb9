/* Sentinel as in shm/csrc/sentinel.hpp. Words between two ranks only: what a rank sends itself is private to it.
 *
 * A byte stands for a 64-bit word. Its value also names the round it was made for: a ghost, by which the model notices
 * an old word that happens to be equal. No decision of a rank looks at a ghost.
 */

/* One owner, one peer (by its place in the owner's order), one set: count, then slots. */
#define HEADER PAYLOAD
#define BITMAP (PAYLOAD + 1)
#define PARTIAL (PAYLOAD + 2)
#define SLOT_WORDS (PAYLOAD + 3)
#define PAIR_WORDS (1 + TOKENS * SLOT_WORDS)
#define WORDS (RANKS * (RANKS - 1) * 2 * PAIR_WORDS)
#define PLACE(owner, peer) (((peer) + RANKS - (owner) - 1) % RANKS)
#define COUNT_AT(owner, peer, set) (((((owner) * (RANKS - 1)) + PLACE(owner, peer)) * 2 + (set)) * PAIR_WORDS)
#define SLOT_AT(owner, peer, set, slot) (COUNT_AT(owner, peer, set) + 1 + (slot) * SLOT_WORDS)
#define OWNER_OF(a) ((a) / (PAIR_WORDS * 2 * (RANKS - 1)))

#ifdef NO_RELEASE /* without the reduction: by it, own words arrive at a fence only, and so never here */
#define LITERAL
#define FIRST_SCENARIO 2
#endif
#ifdef LITERAL
#define QUIET(r, a) 0
#else
#define QUIET(r, a) (OWNER_OF(a) == (r)) /* nobody polls a word of another rank */
#endif
#define AFTER(r, i, j) 0 /* no release stores, only fences */
#ifndef ENTRIES
#define ENTRIES (3 * (RANKS - 1) * PAIR_WORDS)
#endif

#define ARMED 255
#define RESTORED 254 /* the sentinel's bits as payload, put back by the receiver; to a poll the same as armed */
#define THERE(v) ((v) < RESTORED)

#define COUNTED(n, count) (1 + (n) * 3 + (count))
#define COUNT_IN(v) (((v) - 1) % 3)
#define STAND_IN(n) (20 + (n))
#define OTHER_NANS(n) (30 + (n))
#define BITS(n) (40 + (n))
#define HEAD(n, escaped, t) (50 + (n) * 4 + (escaped) * 2 + (t))
#define IS_ESCAPED(v) ((((v) - 50) / 2) % 2)
#define SENT(n, s, t, w) (80 + (((n) * RANKS + (s)) * TOKENS + (t)) * PAYLOAD + (w))
#define RETURNED(n, from, t) (180 + ((n) * RANKS + (from)) * TOKENS + (t))

/* Where the payload's first word, or the partial, equals the sentinel. */
#define EQUAL(n, s, t) ((t) == 0 && (((s) == 0 && (n) != 1) || ((s) == 1 && (n) == 1)))
#define PARTIAL_EQUAL(n, from, t) ((t) == 0 && (from) == 1 && (n) != 1)

/* A peer's word lands on an armed word, or else overwrites one that is in use, or is wiped out by a later re-arming.
 * So from its own re-arming on an owner's load sees the armed word until the peer's arrives, and then that one until
 * the owner re-arms again: it does not matter when, in between, a load is executed. */
inline arriving(r, a, v) {
    if
    :: r == OWNER_OF(a)
    :: else -> assert(mem[a] == ARMED)
    fi
}

#include "memory.pml"
#include "routing.pml"

#ifndef LEAD
#define LEAD 1 /* one dispatch ahead, no more */
#endif
byte begun[RANKS]; /* dispatches */
byte epoch[RANKS];
hidden byte d_, t_, k_, w_, base_;

#ifdef ONE_SET
#define SET(r) 0
#define LAST_SET(r) 0
#else
#define SET(r) (epoch[r] & 1)
#define LAST_SET(r) (1 - SET(r))
#endif
#define PEER(r, i) (((r) + 1 + (i)) % RANKS)

/* --- dispatch, up to its first wait */

inline push_record(r, n, t) {
    w_ = 0;
    do
    :: w_ < PAYLOAD ->
        if
#ifdef RAW_SENTINEL
        :: w_ == 0 && EQUAL(n, r, t) -> store(r, base_, ARMED)
#else
        :: w_ == 0 && EQUAL(n, r, t) -> store(r, base_, STAND_IN(n))
#endif
        :: else -> store(r, base_ + w_, SENT(n, r, t, w_))
        fi;
        w_++
    :: else -> break
    od;
#ifdef NO_ESCAPE
    store(r, base_ + HEADER, HEAD(n, 0, t))
#else
    if :: EQUAL(n, r, t) -> store(r, base_ + BITMAP, BITS(n)) :: else fi;
    store(r, base_ + HEADER, HEAD(n, EQUAL(n, r, t), t))
#endif
}

inline rearm_partials(r, n) {
    d_ = 0;
    do
    :: d_ + 1 < RANKS ->
        k_ = 0;
        do
        :: k_ < COUNT(n, r, PEER(r, d_)) -> store(r, SLOT_AT(r, PEER(r, d_), LAST_SET(r), k_) + PARTIAL, ARMED); k_++
        :: else -> break
        od;
        d_++
    :: else -> break
    od
}

inline send(r, n) {
    d_step {
        begun[r]++;
        k_ = 0;
        do
        :: k_ < RANKS -> assert(begun[r] <= begun[k_] + LEAD); k_++
        :: else -> break
        od;
#ifndef EPOCH_STUCK
        epoch[r] = (epoch[r] + 1) % EPOCHS;
#endif
        printf("@dispatch %d %d %d\n", r, n, SET(r));
#ifndef NO_RELEASE
        release_fence(r);
#endif
        d_ = 0;
        do
        :: d_ + 1 < RANKS -> store(r, COUNT_AT(PEER(r, d_), r, SET(r)), COUNTED(n, COUNT(n, r, PEER(r, d_)))); d_++
        :: else -> break
        od;
        t_ = 0;
        do
        :: t_ < TOKENS ->
            d_ = 0;
            do
            :: d_ + 1 < RANKS ->
                if
                :: SENDS(n, r, t_, PEER(r, d_)) ->
                    base_ = SLOT_AT(PEER(r, d_), r, SET(r), (t_ && SENDS(n, r, 0, PEER(r, d_))));
                    push_record(r, n, t_)
                :: else
                fi;
                d_++
            :: else -> break
            od;
            t_++
        :: else -> break
        od;
        if :: n > 0 -> rearm_partials(r, n - 1) :: else fi;
#ifdef NO_ACQUIRE
        push_partials(r, n);
#endif
        refresh(r)
    }
}

/* --- dispatch, the waits */

#define RECEIVED(r, s) COUNT_IN(view[COUNT_AT(r, s, SET(r))])
#if PAYLOAD == 2
#define PAYLOAD_THERE(base) (THERE(view[base]) && THERE(view[(base) + 1]))
#else
#define PAYLOAD_THERE(base) THERE(view[base])
#endif
#define RECORD_THERE(base) (PAYLOAD_THERE(base) && THERE(view[(base) + HEADER]) && \
                            (!IS_ESCAPED(view[(base) + HEADER]) || THERE(view[(base) + BITMAP])))
#define SLOT_THERE(r, s, slot) (RECEIVED(r, s) <= slot || RECORD_THERE(SLOT_AT(r, s, SET(r), slot)))
#if TOKENS == 2
#define SLOTS_THERE(r, s) (SLOT_THERE(r, s, 0) && SLOT_THERE(r, s, 1))
#else
#define SLOTS_THERE(r, s) SLOT_THERE(r, s, 0)
#endif
#define SOURCE_THERE(r, s) (THERE(view[COUNT_AT(r, s, SET(r))]) && SLOTS_THERE(r, s))

/* Own landing words of one source, after they were used. */
inline rearm_records(r, s) {
    t_ = RECEIVED(r, s);
    store(r, COUNT_AT(r, s, SET(r)), ARMED);
    k_ = 0;
    do
    :: k_ < t_ ->
        base_ = SLOT_AT(r, s, SET(r), k_);
        if
        :: IS_ESCAPED(view[base_ + HEADER]) -> store(r, base_ + BITMAP, ARMED)
        :: else
        fi;
        w_ = 0;
        do
        :: w_ <= HEADER -> store(r, base_ + w_, ARMED); w_++
        :: else -> break
        od;
        k_++
    :: else -> break
    od
}

/* What experts read: every word is what s sent for this round. The count is not looked at again. */
inline read(r, n, s) {
    k_ = 0;
    do
    :: k_ < COUNT(n, s, r) ->
        base_ = SLOT_AT(r, s, SET(r), k_);
        t_ = TOKEN_IN(n, s, r, k_);
        w_ = 0;
        do
        :: w_ < PAYLOAD ->
            if
            :: w_ == 0 && EQUAL(n, s, t_) -> assert(view[base_] == RESTORED)
            :: else -> assert(view[base_ + w_] == SENT(n, s, t_, w_))
            fi;
            w_++
        :: else -> break
        od;
        assert(view[base_ + HEADER] == HEAD(n, EQUAL(n, s, t_), t_));
        k_++
    :: else -> break
    od
}

#if RANKS == 3
#define ALL_THERE(r) (SOURCE_THERE(r, PEER(r, 0)) && SOURCE_THERE(r, PEER(r, 1)))
#else
#define ALL_THERE(r) SOURCE_THERE(r, PEER(r, 0))
#endif

/* The count and the records of one source are there: put escaped words back. */
inline receive(r, n, s) {
    d_step {
        printf("@received %d %d %d\n", r, s, RECEIVED(r, s));
        assert(view[COUNT_AT(r, s, SET(r))] == COUNTED(n, COUNT(n, s, r)));
        k_ = 0;
        do
        :: k_ < RECEIVED(r, s) ->
            base_ = SLOT_AT(r, s, SET(r), k_);
            if
            :: IS_ESCAPED(view[base_ + HEADER]) -> store(r, base_, RESTORED)
            :: else
            fi;
            k_++
        :: else -> break
        od;
        read(r, n, s); /* the first look of experts; the last one is in combine */
#ifdef EARLY_REARM
        rearm_records(r, s);
#endif
        refresh(r)
    }
}

/* --- combine */

inline push_partials(r, n) {
    d_ = 0;
    do
    :: d_ + 1 < RANKS ->
        k_ = 0;
        do
        :: k_ < COUNT(n, PEER(r, d_), r) ->
            t_ = TOKEN_IN(n, PEER(r, d_), r, k_);
            base_ = SLOT_AT(PEER(r, d_), r, SET(r), k_) + PARTIAL;
            if
            :: PARTIAL_EQUAL(n, r, t_) -> store(r, base_, OTHER_NANS(n))
            :: else -> store(r, base_, RETURNED(n, r, t_))
            fi;
            k_++
        :: else -> break
        od;
        d_++
    :: else -> break
    od
}

inline combine(r, n) {
    d_step {
        printf("@combine %d %d %d\n", r, n, SET(r));
        d_ = 0;
        do
        :: d_ + 1 < RANKS -> read(r, n, PEER(r, d_)); d_++
        :: else -> break
        od;
#ifndef NO_ACQUIRE
        push_partials(r, n);
#endif
#ifndef EARLY_REARM
        d_ = 0;
        do
        :: d_ + 1 < RANKS -> rearm_records(r, PEER(r, d_)); d_++
        :: else -> break
        od;
#endif
        refresh(r)
    }
}

#define PARTIAL_THERE(r, n, s, slot) (COUNT(n, r, s) <= slot || THERE(view[SLOT_AT(r, s, SET(r), slot) + PARTIAL]))
#if TOKENS == 2
#define PARTIALS_OF(r, n, s) (PARTIAL_THERE(r, n, s, 0) && PARTIAL_THERE(r, n, s, 1))
#else
#define PARTIALS_OF(r, n, s) PARTIAL_THERE(r, n, s, 0)
#endif
#if RANKS == 3
#define PARTIALS_THERE(r, n) (PARTIALS_OF(r, n, PEER(r, 0)) && PARTIALS_OF(r, n, PEER(r, 1)))
#else
#define PARTIALS_THERE(r, n) PARTIALS_OF(r, n, PEER(r, 0))
#endif

/* Await all partials and look at each; nothing is stored in between. */
inline sum(r, n) {
    d_step {
        printf("@sum %d %d\n", r, n);
        d_ = 0;
        do
        :: d_ + 1 < RANKS ->
            k_ = 0;
            do
            :: k_ < COUNT(n, r, PEER(r, d_)) ->
                t_ = TOKEN_IN(n, r, PEER(r, d_), k_);
                base_ = SLOT_AT(r, PEER(r, d_), SET(r), k_) + PARTIAL;
                if
                :: PARTIAL_EQUAL(n, PEER(r, d_), t_) -> assert(view[base_] == OTHER_NANS(n))
                :: else -> assert(view[base_] == RETURNED(n, PEER(r, d_), t_))
                fi;
                k_++
            :: else -> break
            od;
            d_++
        :: else -> break
        od;
        skip
    }
}

proctype Rank(byte r) {
    byte n; /* the round: a ghost, the rank itself knows its epoch only */
    byte i;
    send(r, 0);
    do
    :: atomic { /* between these steps a rank may rest; it may as well rest before them: see `arriving` */
        ALL_THERE(r) ->
        i = 0;
        do
        :: i + 1 < RANKS -> receive(r, n, PEER(r, i)); i++
        :: else -> break
        od;
        i = 0;
        combine(r, n)
        };
        atomic { /* and here likewise */
        PARTIALS_THERE(r, n) ->
        sum(r, n);
        n++;
        if
        :: n < ROUNDS -> send(r, n)
        :: else -> break
        fi
        }
    od
}

init {
    byte r;
    route();
    d_step {
        i_ = 0;
        do
        :: i_ < WORDS -> mem[i_] = ARMED; view[i_] = ARMED; i_++
        :: else -> break
        od;
        i_ = 0;
        do
        :: i_ < RANKS -> epoch[i_] = FIRST_EPOCH - 1; i_++
        :: else -> break
        od;
        skip
    };
    select(scenario : FIRST_SCENARIO .. SCENARIOS - 1);
    atomic {
        do
        :: r < RANKS -> run Rank(r); run Stores(r); r++
        :: else -> break
        od
    }
}
