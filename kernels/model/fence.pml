/* Fence as in shm/csrc/fence.hpp. Words between two ranks only: what a rank sends itself is private to it.
 *
 * A byte stands for a word; rows and partials name the round they were made for, flags are what a rank really compares.
 */

/* One owner, one peer: two flags that the peer raises, slots that it fills, and partials that it pulls. */
#define COMBINE_FLAG 1
#define PARTIAL (PAYLOAD + 1)
#define SLOT_WORDS (PAYLOAD + 2) /* payload, header, partial */
#define PAIR_WORDS (2 + TOKENS * SLOT_WORDS)
#define WORDS (RANKS * (RANKS - 1) * PAIR_WORDS)
#define PLACE(owner, peer) (((peer) + RANKS - (owner) - 1) % RANKS)
#define FLAG_AT(owner, peer) ((((owner) * (RANKS - 1)) + PLACE(owner, peer)) * PAIR_WORDS)
#define SLOT_AT(owner, peer, slot) (FLAG_AT(owner, peer) + 2 + (slot) * SLOT_WORDS)
#define OWNER_OF(a) ((a) / (PAIR_WORDS * (RANKS - 1)))
#define QUIET(r, a) 0 /* peers read flags, rows and partials alike */
#ifdef NO_RELEASE
#define AFTER(r, i, j) 0
#else
#define AFTER(r, i, j) (buffer[r].address[i] % PAIR_WORDS < 2) /* flags wait for all */
#endif
#ifndef ENTRIES
#define ENTRIES (2 * (RANKS - 1) * PAIR_WORDS)
#endif

#define FLAG(e, count) ((e) * 3 + (count))
#define EPOCH_IN(v) ((v) / 3)
#define COUNT_IN(v) ((v) % 3)
#define ROW(n, s, t, w) (1 + (((n) * RANKS + (s)) * TOKENS + (t)) * (PAYLOAD + 1) + (w))
#define RETURNED(n, from, t) (180 + ((n) * RANKS + (from)) * TOKENS + (t))

#define arriving(r, a, v) skip /* readers look twice instead, as early and as late as they may */

#include "memory.pml"
#include "routing.pml"

#ifndef LEAD
#define LEAD 1 /* one dispatch ahead, no more */
#endif
byte begun[RANKS]; /* dispatches */
byte epoch[RANKS];
hidden byte d_, t_, k_, w_, base_;

#define PEER(r, i) (((r) + 1 + (i)) % RANKS)

/* --- dispatch, up to its first wait */

inline write_records(r, n) {
    t_ = 0;
    do
    :: t_ < TOKENS ->
        d_ = 0;
        do
        :: d_ + 1 < RANKS ->
            if
            :: SENDS(n, r, t_, PEER(r, d_)) ->
                base_ = SLOT_AT(PEER(r, d_), r, (t_ && SENDS(n, r, 0, PEER(r, d_))));
                w_ = 0;
                do
                :: w_ <= PAYLOAD -> store(r, base_ + w_, ROW(n, r, t_, w_)); w_++
                :: else -> break
                od
            :: else
            fi;
            d_++
        :: else -> break
        od;
        t_++
    :: else -> break
    od
}

inline raise(r, n, which) {
    d_ = 0;
    do
    :: d_ + 1 < RANKS ->
        store(r, FLAG_AT(PEER(r, d_), r) + which, FLAG(epoch[r], (which -> 0 : COUNT(n, r, PEER(r, d_)))));
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
        printf("@dispatch %d %d 0\n", r, n);
#ifdef FLAG_FIRST
        raise(r, n, 0);
        write_records(r, n);
#else
        write_records(r, n);
        raise(r, n, 0);
#endif
        refresh(r)
    }
}

/* --- experts: every received word is what was sent for this round; a flag's count is looked at once, by its wait */

inline read(r, n) {
    d_ = 0;
    do
    :: d_ + 1 < RANKS ->
        k_ = 0;
        do
        :: k_ < COUNT(n, PEER(r, d_), r) ->
            t_ = TOKEN_IN(n, PEER(r, d_), r, k_);
            w_ = 0;
            do
            :: w_ <= PAYLOAD -> assert(mem[SLOT_AT(r, PEER(r, d_), k_) + w_] == ROW(n, PEER(r, d_), t_, w_)); w_++
            :: else -> break
            od;
            k_++
        :: else -> break
        od;
        d_++
    :: else -> break
    od
}

/* Stores of experts may overtake their reads: only the flags that follow wait for both. */
inline experts(r, n) {
    atomic {
        printf("@read %d %d\n", r, n);
        d_step { read(r, n); write_partials(r, n); refresh(r) }
    }
}

inline write_partials(r, n) {
    d_ = 0;
    do
    :: d_ + 1 < RANKS ->
        k_ = 0;
        do
        :: k_ < COUNT(n, PEER(r, d_), r) ->
            t_ = TOKEN_IN(n, PEER(r, d_), r, k_);
            store(r, SLOT_AT(r, PEER(r, d_), k_) + PARTIAL, RETURNED(n, r, t_));
            k_++
        :: else -> break
        od;
        d_++
    :: else -> break
    od
}

/* The last look at the rows, then the flags. */
inline raise_combine(r, n) {
    atomic {
        printf("@combine %d %d 0\n", r, n);
        d_step { read(r, n); raise(r, n, COMBINE_FLAG); refresh(r) }
    }
}

/* --- combine: the sum pulls what peers wrote in their own workspaces */

inline pull(r, n) {
    d_ = 0;
    do
    :: d_ + 1 < RANKS ->
        k_ = 0;
        do
        :: k_ < COUNT(n, r, PEER(r, d_)) ->
            t_ = TOKEN_IN(n, r, PEER(r, d_), k_);
            assert(mem[SLOT_AT(PEER(r, d_), r, k_) + PARTIAL] == RETURNED(n, PEER(r, d_), t_));
            k_++
        :: else -> break
        od;
        d_++
    :: else -> break
    od
}

#define RAISED(r, s, which) (EPOCH_IN(mem[FLAG_AT(r, s) + which]) == epoch[r])
#ifdef SKIP_IDLE
#define RETURNS(r, n, s) (!COUNT(n, r, s) || RAISED(r, s, COMBINE_FLAG))
#else
#define RETURNS(r, n, s) RAISED(r, s, COMBINE_FLAG)
#endif

proctype Rank(byte r) {
    byte n; /* the round: a ghost, the rank itself knows its epoch only */
    byte i; /* the next peer to wait for */
    send(r, 0);
    do
    :: n < ROUNDS ->
#ifdef NO_ACQUIRE
        d_step { read(r, n); skip };
#endif
        do
        :: i + 1 < RANKS ->
            atomic {
                RAISED(r, PEER(r, i), 0) ->
                assert(COUNT_IN(mem[FLAG_AT(r, PEER(r, i))]) == COUNT(n, PEER(r, i), r));
                i++
            }
        :: i + 1 == RANKS -> break
        od;
        experts(r, n);
        raise_combine(r, n);
        i = 0;
        do
        :: i + 1 < RANKS -> atomic { RETURNS(r, n, PEER(r, i)) -> i++ }
        :: i + 1 == RANKS -> break
        od;
        atomic { printf("@pull %d %d\n", r, n); d_step { pull(r, n); i = 0 } };
        atomic { /* the last look at the partials, and at once the next round */
            printf("@sum %d %d\n", r, n);
            d_step { pull(r, n); n++ };
            if
            :: n < ROUNDS -> send(r, n)
            :: else
            fi
        }
    :: else -> break
    od
}

init {
    byte r;
    route();
    d_step {
        i_ = 0;
        do
        :: i_ < RANKS ->
            epoch[i_] = FIRST_EPOCH - 1;
            j_ = 0;
            do
            :: j_ + 1 < RANKS ->
                mem[FLAG_AT(i_, PEER(i_, j_))] = FLAG(FIRST_EPOCH - 1, 0);
                mem[FLAG_AT(i_, PEER(i_, j_)) + COMBINE_FLAG] = FLAG(FIRST_EPOCH - 1, 0);
                j_++
            :: else -> break
            od;
            i_++
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
