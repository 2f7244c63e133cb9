/* Fence as in onesided/csrc. Words between two ranks only: what a rank sends itself is ordered by kernel boundaries.
 *
 * A round is three kernels: dispatch, experts, combine. A block of a dispatch sends some tokens and then raises a flag of
 * its own at every peer; the first flag says how many there are. How many a grid has is the host's affair.
 *
 * A byte stands for a word; rows and partials name the round they were made for, headers and flags are what a rank
 * really compares.
 */

/* One owner, one peer: flags that the peer raises, slots that it fills, one for each of its tokens, and partials that it
 * pulls. */
#define COMBINE_FLAG TOKENS /* behind the flags of blocks */
#define FLAGS (TOKENS + 1)
#define HEADER PAYLOAD
#define PARTIAL (PAYLOAD + 1)
#define SLOT_WORDS (PAYLOAD + 2)
#define PAIR_WORDS (FLAGS + TOKENS * SLOT_WORDS)
#define WORDS (RANKS * (RANKS - 1) * PAIR_WORDS)
#define PLACE(owner, peer) (((peer) + RANKS - (owner) - 1) % RANKS)
#define FLAG_AT(owner, peer) ((((owner) * (RANKS - 1)) + PLACE(owner, peer)) * PAIR_WORDS)
#define SLOT_AT(owner, peer, t) (FLAG_AT(owner, peer) + FLAGS + (t) * SLOT_WORDS)
#define OWNER_OF(a) ((a) / (PAIR_WORDS * (RANKS - 1)))
#define PART_OF(a) ((a) % PAIR_WORDS)
#define QUIET(r, a) 0 /* peers read flags, rows and partials alike */
#ifndef ENTRIES
#define ENTRIES (3 * (RANKS - 1) * PAIR_WORDS)
#endif

#define FLAG(e, blocks) (1 + (e) * 3 + (blocks))
#define RAISED(v, e) ((v) != 0 && ((v) - 1) / 3 == (e))
#define BLOCKS_IN(v) (((v) - 1) % 3)
#define HEAD(e, count, present) (1 + ((e) * 3 + (count)) * 2 + (present))
#define ROW(n, s, t, w) (30 + (((n) * RANKS + (s)) * TOKENS + (t)) * PAYLOAD + (w))
#define RETURNED(n, from, t) (180 + ((n) * RANKS + (from)) * TOKENS + (t))

/* Release: a block's flag waits for what this block stored, not for other blocks; a combine flag waits for everything,
 * since it is of another kernel than the partials. */
#define IS_FLAG(a) (PART_OF(a) < FLAGS)
#define TOKEN_OF(a) ((PART_OF(a) - FLAGS) / SLOT_WORDS)
#define OF_BLOCK(flag, value, a) (!IS_FLAG(a) && TOKEN_OF(a) % BLOCKS_IN(value) == PART_OF(flag))
#ifdef NO_RELEASE
#define AFTER(r, i, j) 0
#else
#define AFTER(r, i, j) (IS_FLAG(buffer[r].address[i]) && (PART_OF(buffer[r].address[i]) == COMBINE_FLAG || \
                        OF_BLOCK(buffer[r].address[i], buffer[r].value[i], buffer[r].address[j])))
#endif

#define arriving(r, a, v) skip /* readers look twice instead, as early and as late as they may */

#include "memory.pml"
#include "routing.pml"

#ifndef LEAD
#define LEAD 1 /* one dispatch ahead, no more */
#endif
byte begun[RANKS]; /* dispatches */
byte epoch[RANKS];
hidden byte d_, t_, k_, w_, b_, base_;

#define PEER(r, i) (((r) + 1 + (i)) % RANKS)
#if TOKENS == 2
#define BLOCKS(n, s) (1 + (((n) + (s)) & 1)) /* one or two, in turn */
#else
#define BLOCKS(n, s) 1
#endif

/* A boundary between two kernels of a rank orders their steps, and need not perform a store: releases do that here. */

/* --- dispatch, senders: they wait for nothing, so their stores enter the buffer when the kernel starts */

inline send_record(r, n, t, to) {
    base_ = SLOT_AT(to, r, t);
    store(r, base_ + HEADER, HEAD(epoch[r], HAS(n, r), SENDS(n, r, t, to)));
    w_ = 0;
    do
    :: w_ < PAYLOAD && SENDS(n, r, t, to) -> store(r, base_ + w_, ROW(n, r, t, w_)); w_++
    :: else -> break
    od
}

inline send_records(r, n) { /* of block b_ */
    d_ = 0;
    do
    :: d_ + 1 < RANKS ->
        t_ = b_;
        do
        :: t_ < HAS(n, r) -> send_record(r, n, t_, PEER(r, d_)); t_ = t_ + BLOCKS(n, r)
        :: else -> break
        od;
        if
        :: b_ == 0 && HAS(n, r) == 0 -> store(r, SLOT_AT(PEER(r, d_), r, 0) + HEADER, HEAD(epoch[r], 0, 0))
        :: else
        fi;
        d_++
    :: else -> break
    od
}

inline raise(r, which, value) {
    d_ = 0;
    do
    :: d_ + 1 < RANKS -> store(r, FLAG_AT(PEER(r, d_), r) + which, value); d_++
    :: else -> break
    od
}

inline send(r, n) {
    begun[r]++;
    k_ = 0;
    do
    :: k_ < RANKS -> assert(begun[r] <= begun[k_] + LEAD); k_++
    :: else -> break
    od;
#ifndef EPOCH_STUCK
    epoch[r] = (epoch[r] + 1) % EPOCHS;
#endif
    printf("@dispatch %d %d 0\n", r, n);
    b_ = 0;
    do
    :: b_ < BLOCKS(n, r) ->
#ifdef FLAG_FIRST
        raise(r, b_, FLAG(epoch[r], BLOCKS(n, r)));
        send_records(r, n);
#else
        send_records(r, n);
        raise(r, b_, FLAG(epoch[r], BLOCKS(n, r)));
#endif
        b_++
    :: else -> break
    od
}

/* --- dispatch, the first layer: every flag of every peer */

#define FIRST_FLAG(r, s) mem[FLAG_AT(r, s)]
#if TOKENS == 2 && !defined(FIRST_FLAG_ONLY)
#define SOURCE_THERE(r, s) (RAISED(FIRST_FLAG(r, s), epoch[r]) && \
                            (BLOCKS_IN(FIRST_FLAG(r, s)) < 2 || RAISED(mem[FLAG_AT(r, s) + 1], epoch[r])))
#else
#define SOURCE_THERE(r, s) RAISED(FIRST_FLAG(r, s), epoch[r])
#endif

/* --- experts: every received word is what was sent for this round, and headers say so */

inline read(r, n) {
    d_ = 0;
    do
    :: d_ + 1 < RANKS ->
        assert(mem[SLOT_AT(r, PEER(r, d_), 0) + HEADER] == HEAD(epoch[r], HAS(n, PEER(r, d_)), SENDS(n, PEER(r, d_), 0, r)));
        t_ = 0;
        do
        :: t_ < HAS(n, PEER(r, d_)) ->
            base_ = SLOT_AT(r, PEER(r, d_), t_);
            assert(mem[base_ + HEADER] == HEAD(epoch[r], HAS(n, PEER(r, d_)), SENDS(n, PEER(r, d_), t_, r)));
            w_ = 0;
            do
            :: w_ < PAYLOAD && SENDS(n, PEER(r, d_), t_, r) -> assert(mem[base_ + w_] == ROW(n, PEER(r, d_), t_, w_)); w_++
            :: else -> break
            od;
            t_++
        :: else -> break
        od;
        d_++
    :: else -> break
    od
}

inline write_partials(r, n) {
    d_ = 0;
    do
    :: d_ + 1 < RANKS ->
        t_ = 0;
        do
        :: t_ < TOKENS ->
            if
            :: SENDS(n, PEER(r, d_), t_, r) -> store(r, SLOT_AT(r, PEER(r, d_), t_) + PARTIAL, RETURNED(n, r, t_))
            :: else
            fi;
            t_++
        :: else -> break
        od;
        d_++
    :: else -> break
    od
}

/* --- combine: a flag to all, a flag from all, then pull */

inline pull(r, n) {
    d_ = 0;
    do
    :: d_ + 1 < RANKS ->
        t_ = 0;
        do
        :: t_ < TOKENS ->
            if
            :: SENDS(n, r, t_, PEER(r, d_)) ->
                assert(mem[SLOT_AT(PEER(r, d_), r, t_) + PARTIAL] == RETURNED(n, PEER(r, d_), t_))
            :: else
            fi;
            t_++
        :: else -> break
        od;
        d_++
    :: else -> break
    od
}

#define RAISED_BY(r, s) RAISED(mem[FLAG_AT(r, s) + COMBINE_FLAG], epoch[r])
#ifdef SKIP_IDLE
#define PARTIALS_OF(r, n, s) (!COUNT(n, r, s) || RAISED_BY(r, s))
#else
#define PARTIALS_OF(r, n, s) RAISED_BY(r, s)
#endif
#if RANKS == 3
#define ALL_THERE(r) (SOURCE_THERE(r, PEER(r, 0)) && SOURCE_THERE(r, PEER(r, 1)))
#define PARTIALS_THERE(r, n) (PARTIALS_OF(r, n, PEER(r, 0)) && PARTIALS_OF(r, n, PEER(r, 1)))
#else
#define ALL_THERE(r) SOURCE_THERE(r, PEER(r, 0))
#define PARTIALS_THERE(r, n) PARTIALS_OF(r, n, PEER(r, 0))
#endif

proctype Rank(byte r) {
    byte n; /* the round: a ghost, the rank itself knows its epoch only */
    do
    :: n < ROUNDS ->
        d_step { send(r, n); refresh(r) };
#ifdef EARLY_EXPERTS /* a first look, before the dispatch kernel has ended */
        d_step { printf("@read %d %d\n", r, n); read(r, n); write_partials(r, n); refresh(r) };
        d_step { ALL_THERE(r) -> skip };
#else
        d_step { ALL_THERE(r) -> /* the earliest look */
            printf("@read %d %d\n", r, n);
            read(r, n);
#ifdef EARLY_COMBINE
            raise(r, COMBINE_FLAG, FLAG(epoch[r], 1));
#endif
            write_partials(r, n);
            refresh(r)
        };
#endif
        d_step { /* the latest look, then the flags */
            printf("@combine %d %d 0\n", r, n);
            read(r, n);
#ifndef EARLY_COMBINE
            raise(r, COMBINE_FLAG, FLAG(epoch[r], 1));
#endif
            refresh(r)
        };
        d_step { PARTIALS_THERE(r, n) -> printf("@pull %d %d\n", r, n); pull(r, n) };
        d_step { printf("@sum %d %d\n", r, n); pull(r, n); n++ } /* the last look at the partials */
    :: else -> break
    od
}

init {
    byte r;
    route();
    d_step {
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
