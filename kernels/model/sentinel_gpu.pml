/* Sentinel as in onesided/csrc. Words between two ranks only: what a rank sends itself is ordered by kernel boundaries.
 *
 * A round is two kernels, with the experts between them. Within a kernel every (peer, token) has warps of its own, senders
 * and receivers apart, and nothing orders them. A boundary lies between two kernels of a rank: see `next_kernel`.
 *
 * A byte stands for a 64-bit word. Its value also names the round it was made for: a ghost, by which the model notices
 * an old word that happens to be equal. No decision of a rank looks at a ghost.
 */

/* One owner, one peer (by its place in the owner's order): a slot for each of the peer's tokens in two sets, then the
 * words that come back for the owner's own tokens. */
#define HEADER PAYLOAD
#define BITMAP (PAYLOAD + 1)
#define SLOT_WORDS (PAYLOAD + 2)
#define PAIR_WORDS (2 * TOKENS * SLOT_WORDS + TOKENS)
#define WORDS (RANKS * (RANKS - 1) * PAIR_WORDS)
#define PLACE(owner, peer) (((peer) + RANKS - (owner) - 1) % RANKS)
#define PAIR_AT(owner, peer) (((owner) * (RANKS - 1) + PLACE(owner, peer)) * PAIR_WORDS)
#define SLOT_AT(owner, peer, set, t) (PAIR_AT(owner, peer) + ((set) * TOKENS + (t)) * SLOT_WORDS)
#define RETURN_AT(owner, peer, t) (PAIR_AT(owner, peer) + 2 * TOKENS * SLOT_WORDS + (t))
#define OWNER_OF(a) ((a) / (PAIR_WORDS * (RANKS - 1)))
#define PART_OF(a) ((a) % PAIR_WORDS)
#define IS_HEADER(a) (PART_OF(a) < 2 * TOKENS * SLOT_WORDS && PART_OF(a) % SLOT_WORDS == HEADER)

#if defined(LITERAL) || (defined(NO_BOUNDARY) && !defined(STRICT)) || defined(RETURNS_REARMED_EARLY)
#define QUIET(r, a) 0 /* without the reduction: by it, own words arrive at a boundary only */
#else
#define QUIET(r, a) (OWNER_OF(a) == (r)) /* nobody polls a word of another rank */
#endif
#define AFTER(r, i, j) 0 /* no release stores */
#ifndef ENTRIES
#define ENTRIES (4 * (RANKS - 1) * TOKENS * SLOT_WORDS)
#endif

#define ARMED 255
#define RESTORED 254 /* the armed word's bits as payload, put back by the receiver; to a poll the same as armed */
#define THERE(v) ((v) < RESTORED)

#define OLD 0 /* of no round: as headers are at the beginning */
#define HEAD(e, count, present) (1 + ((e) * 3 + (count)) * 2 + (present))
#ifdef NO_HEADER_EPOCH
#define IS_OF(v, e) ((v) != OLD)
#else
#define IS_OF(v, e) ((v) != OLD && ((v) - 1) / 6 == (e))
#endif
#define TOKENS_IN(v) ((((v) - 1) / 2) % 3)
#define PRESENT_IN(v) (((v) - 1) % 2)
#define ESCAPE(n) (30 + (n))
#define IS_ESCAPE(v) ((v) >= 30 && (v) < 40)
#define BITS(n, bits) (40 + (n) * 4 + (bits)) /* bit w: word w is the escape word itself */
#define BIT_IN(v, w) (((v) >> (w)) & 1)
#define OTHER_NANS(n) (60 + (n))
#define SENT(n, s, t, w) (80 + (((n) * RANKS + (s)) * TOKENS + (t)) * PAYLOAD + (w))
#define RETURNED(n, from, t) (180 + ((n) * RANKS + (from)) * TOKENS + (t))

/* Which payload words equal the armed word, and which the escape word; which partials equal the armed word. */
#define EQUALS_ARMED(n, s, t, w) ((t) == 0 && (w) == 0 && (((s) == 0 && (n) != 1) || ((s) == 1 && (n) == 1)))
#define EQUALS_ESCAPE(n, s, t, w) ((t) == 0 && (((s) == 0 && (n) == 0 && (w) == 1) || ((s) == 1 && (n) == 3 && (w) == 0) \
                                  || ((s) == 2 && (n) == 1 && (w) == 0)))
#define RESERVED(n, s, t, w) (EQUALS_ARMED(n, s, t, w) || EQUALS_ESCAPE(n, s, t, w))
#define PARTIAL_EQUAL(n, from, t) ((t) == 0 && (from) == 1 && (n) != 1)
#if PAYLOAD == 2
#define ANY_RESERVED(n, s, t) (RESERVED(n, s, t, 0) || RESERVED(n, s, t, 1))
#define BITMAP_OF(n, s, t) BITS(n, EQUALS_ESCAPE(n, s, t, 0) + 2 * EQUALS_ESCAPE(n, s, t, 1))
#else
#define ANY_RESERVED(n, s, t) RESERVED(n, s, t, 0)
#define BITMAP_OF(n, s, t) BITS(n, EQUALS_ESCAPE(n, s, t, 0))
#endif

/* A peer's word lands on an armed word, or else overwrites one that is in use, or is wiped out by a later re-arming.
 * So from its own re-arming on an owner's load sees the armed word until the peer's arrives, and then that one until
 * the owner re-arms again: it does not matter when, in between, a load is executed. Headers are not armed; their reader
 * looks at them as early and as late as it may. */
inline arriving(r, a, v) {
    if
    :: r == OWNER_OF(a) || IS_HEADER(a)
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
hidden byte d_, t_, k_, w_, base_, bits_;

#define PARITY(r) (epoch[r] & 1)
#ifdef ONE_SET
#define SET(r) 0
#else
#define SET(r) PARITY(r)
#endif
#ifdef ONE_HEADER_SET
#define HEADER_SET(r) 0
#else
#define HEADER_SET(r) PARITY(r)
#endif
#define PEER(r, i) (((r) + 1 + (i)) % RANKS)
#define HEADER_AT(owner, peer, r, t) (SLOT_AT(owner, peer, HEADER_SET(r), t) + HEADER)

/* --- kernel boundaries: stores to own words are performed before the next kernel of this rank starts. Those to peers'
 * words are too, on hardware; nothing here needs it, so they may still be under way. With STRICT no boundary performs a
 * store, and the fence of a dispatch has to do: EPCROSS_STRICT_FENCES. */
#ifdef STRICT
#define NO_BOUNDARY
#endif
inline next_kernel(r) {
#ifndef NO_BOUNDARY
    i_ = 0;
    do
    :: i_ < buffer[r].n ->
        if
        :: OWNER_OF(buffer[r].address[i_]) == r -> mem[buffer[r].address[i_]] = buffer[r].value[i_]; take(r, i_)
        :: else -> i_++
        fi
    :: else -> break
    od
#else
    skip
#endif
}

/* --- dispatch, senders: they wait for nothing, so their stores enter the buffer when the kernel starts */

inline send_record(r, n, t) { /* to the slot at base_ */
    w_ = 0;
    do
    :: w_ < PAYLOAD ->
        if
#ifdef RAW_SENTINEL
        :: EQUALS_ARMED(n, r, t, w_) -> store(r, base_ + w_, ARMED)
        :: EQUALS_ESCAPE(n, r, t, w_) -> store(r, base_ + w_, ESCAPE(n))
#else
        :: RESERVED(n, r, t, w_) -> store(r, base_ + w_, ESCAPE(n))
#endif
        :: else -> store(r, base_ + w_, SENT(n, r, t, w_))
        fi;
        w_++
    :: else -> break
    od;
#ifndef NO_BITMAP
    if :: ANY_RESERVED(n, r, t) -> store(r, base_ + BITMAP, BITMAP_OF(n, r, t)) :: else fi
#endif
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
    printf("@dispatch %d %d %d\n", r, n, SET(r));
#ifdef STRICT
    release_fence(r);
#endif
    d_ = 0;
    do
    :: d_ + 1 < RANKS ->
        t_ = 0;
        do
        :: t_ < TOKENS ->
            if
            :: t_ < HAS(n, r) ->
                store(r, HEADER_AT(PEER(r, d_), r, r, t_), HEAD(epoch[r], HAS(n, r), SENDS(n, r, t_, PEER(r, d_))));
                if
                :: SENDS(n, r, t_, PEER(r, d_)) -> base_ = SLOT_AT(PEER(r, d_), r, SET(r), t_); send_record(r, n, t_)
                :: else
                fi
#ifndef IDLE_SILENT
            :: t_ == 0 && HAS(n, r) == 0 -> store(r, HEADER_AT(PEER(r, d_), r, r, 0), HEAD(epoch[r], 0, 0))
#endif
            :: else
            fi;
            t_++
        :: else -> break
        od;
        d_++
    :: else -> break
    od;
#ifdef RETURNS_REARMED_LATE
    if :: n > 0 -> rearm_returns(r, n - 1) :: else fi;
#endif
#ifdef EARLY_KERNEL
    push_partials(r, n)
#endif
}

/* --- dispatch, receivers */

#define COUNT_HEADER(r, s) view[HEADER_AT(r, s, r, 0)]
#define TOKEN_HEADER(r, s, t) view[HEADER_AT(r, s, r, t)]
#if PAYLOAD == 2
#define ROW_THERE(base) (THERE(view[base]) && THERE(view[(base) + 1]))
#define HAS_ESCAPE(base) (IS_ESCAPE(view[base]) || IS_ESCAPE(view[(base) + 1]))
#else
#define ROW_THERE(base) THERE(view[base])
#define HAS_ESCAPE(base) IS_ESCAPE(view[base])
#endif
#ifdef BITMAP_NOT_AWAITED
#define RECORD_THERE(base) ROW_THERE(base)
#else
#define RECORD_THERE(base) (ROW_THERE(base) && (!HAS_ESCAPE(base) || THERE(view[(base) + BITMAP])))
#endif
#define TOKEN_THERE(r, s, t) (IS_OF(COUNT_HEADER(r, s), epoch[r]) && (TOKENS_IN(COUNT_HEADER(r, s)) <= (t) || \
    (IS_OF(TOKEN_HEADER(r, s, t), epoch[r]) && \
     (!PRESENT_IN(TOKEN_HEADER(r, s, t)) || RECORD_THERE(SLOT_AT(r, s, SET(r), t))))))
#if TOKENS == 2
#define SOURCE_THERE(r, s) (TOKEN_THERE(r, s, 0) && TOKEN_THERE(r, s, 1))
#else
#define SOURCE_THERE(r, s) TOKEN_THERE(r, s, 0)
#endif
#if RANKS == 3
#define ALL_THERE(r) (SOURCE_THERE(r, PEER(r, 0)) && SOURCE_THERE(r, PEER(r, 1)))
#else
#define ALL_THERE(r) SOURCE_THERE(r, PEER(r, 0))
#endif

/* What the headers say of a token, and what they must say. */
#define HOLDS(r, s, t) (IS_OF(COUNT_HEADER(r, s), epoch[r]) && (t) < TOKENS_IN(COUNT_HEADER(r, s)) && \
                        IS_OF(TOKEN_HEADER(r, s, t), epoch[r]) && PRESENT_IN(TOKEN_HEADER(r, s, t)))
inline headers_right(r, n, s, t) {
    assert(COUNT_HEADER(r, s) == HEAD(epoch[r], HAS(n, s), SENDS(n, s, 0, r)));
    if
    :: t < HAS(n, s) -> assert(TOKEN_HEADER(r, s, t) == HEAD(epoch[r], HAS(n, s), SENDS(n, s, t, r)))
    :: else
    fi
}

/* Token t of s is there: put reserved words back, and arm the bitmap again at once. */
inline receive_token(r, n, s, t) {
    headers_right(r, n, s, t);
    base_ = SLOT_AT(r, s, SET(r), t);
    if
    :: HOLDS(r, s, t) && HAS_ESCAPE(base_) ->
        bits_ = view[base_ + BITMAP];
        w_ = 0;
        do
        :: w_ < PAYLOAD ->
            if
            :: IS_ESCAPE(view[base_ + w_]) && !BIT_IN(bits_ - BITS(n, 0), w_) -> store(r, base_ + w_, RESTORED)
            :: else
            fi;
            w_++
        :: else -> break
        od;
#ifndef BITMAP_NOT_REARMED
        store(r, base_ + BITMAP, ARMED)
#endif
    :: else
    fi;
#ifdef EARLY_REARM
    rearm_record(r, s, t)
#endif
}

/* --- experts: every word is what s sent for this round */

inline read_token(r, n, s, t) {
    headers_right(r, n, s, t);
    base_ = SLOT_AT(r, s, SET(r), t);
    w_ = 0;
    do
    :: w_ < PAYLOAD && SENDS(n, s, t, r) ->
        if
        :: EQUALS_ARMED(n, s, t, w_) -> assert(view[base_ + w_] == RESTORED)
        :: EQUALS_ESCAPE(n, s, t, w_) -> assert(view[base_ + w_] == ESCAPE(n))
        :: else -> assert(view[base_ + w_] == SENT(n, s, t, w_))
        fi;
        w_++
    :: else -> break
    od
}

/* --- combine, senders */

inline rearm_record(r, s, t) {
    if
    :: HOLDS(r, s, t) ->
        base_ = SLOT_AT(r, s, SET(r), t);
        w_ = 0;
        do
        :: w_ < PAYLOAD -> store(r, base_ + w_, ARMED); w_++
        :: else -> break
        od
    :: else
    fi
}

inline send_partial(r, n, s, t) {
    if
    :: PARTIAL_EQUAL(n, r, t) -> store(r, RETURN_AT(s, r, t), OTHER_NANS(n))
    :: else -> store(r, RETURN_AT(s, r, t), RETURNED(n, r, t))
    fi
}

/* A warp that finds another header than of this round is past the source's last token. */
inline push_partial(r, n, s, t) {
    if
    :: IS_OF(TOKEN_HEADER(r, s, t), epoch[r]) && PRESENT_IN(TOKEN_HEADER(r, s, t)) -> send_partial(r, n, s, t)
    :: else
    fi
}

inline push_partials(r, n) { /* fault: of a kernel that does not wait for the one before; it knows who sends what */
    d_ = 0;
    do
    :: d_ + 1 < RANKS ->
        t_ = 0;
        do
        :: t_ < TOKENS ->
            if :: SENDS(n, PEER(r, d_), t_, r) -> send_partial(r, n, PEER(r, d_), t_) :: else fi;
            t_++
        :: else -> break
        od;
        d_++
    :: else -> break
    od
}

inline return_token(r, n, s, t) {
    read_token(r, n, s, t);
#ifndef EARLY_KERNEL
    push_partial(r, n, s, t);
#endif
#ifndef EARLY_REARM
    rearm_record(r, s, t)
#endif
}

inline begin_combine(r, n) {
    printf("@combine %d %d %d\n", r, n, SET(r));
#ifdef RETURNS_REARMED_EARLY
    rearm_returns(r, n)
#endif
}

/* --- combine, receivers: a word is armed again as soon as it was read */

#define PARTIAL_THERE(r, n, s, t) (!SENDS(n, r, t, s) || THERE(view[RETURN_AT(r, s, t)]))
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

inline sum_token(r, n, s, t) {
    if
    :: SENDS(n, r, t, s) ->
        base_ = RETURN_AT(r, s, t);
        if
        :: PARTIAL_EQUAL(n, s, t) -> assert(view[base_] == OTHER_NANS(n))
        :: else -> assert(view[base_] == RETURNED(n, s, t))
        fi;
#if !defined(RETURNS_REARMED_LATE) && !defined(RETURNS_REARMED_EARLY)
        store(r, base_, ARMED)
#endif
    :: else
    fi
}

inline rearm_returns(r, n) { /* faults: in another place */
    d_ = 0;
    do
    :: d_ + 1 < RANKS ->
        t_ = 0;
        do
        :: t_ < TOKENS ->
            if :: SENDS(n, r, t_, PEER(r, d_)) -> store(r, RETURN_AT(r, PEER(r, d_), t_), ARMED) :: else fi;
            t_++
        :: else -> break
        od;
        d_++
    :: else -> break
    od
}

/* --- the rank */

#define ITEMS ((RANKS - 1) * TOKENS) /* (peer, token) */
#define PEER_OF(r, item) PEER(r, (item) / TOKENS)
#define TOKEN_OF(item) ((item) % TOKENS)
#define ALL_ITEMS ((1 << ITEMS) - 1)

#define FOR_ALL(step) \
    k_ = 0; \
    do \
    :: k_ < ITEMS -> step(r, n, PEER_OF(r, k_), TOKEN_OF(k_)); k_++ \
    :: else -> break \
    od

#ifdef LITERAL
/* One (peer, token), as soon as it may and in any order with the others. */
#define ITEM(i, part, may, step) \
    :: d_step { !(done & (1 << ((i) + (part)))) && may(i) -> \
        step(r, n, PEER_OF(r, i), TOKEN_OF(i)); done = done | (1 << ((i) + (part))); refresh(r) }
#if ITEMS == 2
#define EACH(part, may, step) ITEM(0, part, may, step) ITEM(1, part, may, step)
#endif
#define MAY_RECEIVE(i) TOKEN_THERE(r, PEER_OF(r, i), TOKEN_OF(i))
#define MAY_RETURN(i) 1
#define MAY_SUM(i) PARTIAL_THERE(r, n, PEER_OF(r, i), TOKEN_OF(i))

proctype Rank(byte r) {
    byte n; /* the round: a ghost, the rank itself knows its epoch only */
    byte done; /* bit i: item i of this kernel is through; of receivers of combine, bit ITEMS + i */
    do
    :: n < ROUNDS ->
        d_step { next_kernel(r); send(r, n); refresh(r) };
        do
        EACH(0, MAY_RECEIVE, receive_token)
        :: d_step { done == ALL_ITEMS -> done = 0; next_kernel(r); begin_combine(r, n); refresh(r) }; break
        od;
        do
        EACH(0, MAY_RETURN, return_token)
        EACH(ITEMS, MAY_SUM, sum_token)
        :: d_step { done == (1 << 2 * ITEMS) - 1 -> done = 0; n++ }; break
        od
    :: else -> break
    od
}
#else
/* All at once, when the last may. What receivers store is quiet, and nothing that waits is any senders' concern. */
proctype Rank(byte r) {
    byte n; /* the round: a ghost, the rank itself knows its epoch only */
    do
    :: n < ROUNDS ->
        d_step { next_kernel(r); send(r, n); refresh(r) };
        d_step { ALL_THERE(r) ->
            FOR_ALL(receive_token);
            next_kernel(r);
            begin_combine(r, n);
            FOR_ALL(return_token);
            refresh(r)
        };
        d_step { PARTIALS_THERE(r, n) ->
            printf("@sum %d %d\n", r, n);
            FOR_ALL(sum_token);
            refresh(r);
            n++
        }
    :: else -> break
    od
}
#endif

init {
    byte r;
    route();
    d_step {
        i_ = 0;
        do
        :: i_ < WORDS ->
            mem[i_] = (IS_HEADER(i_) -> OLD : ARMED);
            view[i_] = mem[i_];
            i_++
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
