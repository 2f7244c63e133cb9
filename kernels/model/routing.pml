/* Who sends which token to whom: ids as a router writes them, X = dropped (-1). One expert a rank, so that an id is a
 * rank; an id twice is two experts on one rank, which cost one transfer. [scenario][round][rank][token][RANKS ids].
 */
#define X 9

#if RANKS == 2 && TOKENS == 2
#define SCENARIOS 3
hidden byte ids[SCENARIOS * 4 * 2 * 2 * 2] = {
    /* 0: every token to every rank */
    0,1, 0,1,   0,1, 0,1,
    0,1, 0,1,   0,1, 0,1,
    0,1, 0,1,   0,1, 0,1,
    0,1, 0,1,   0,1, 0,1,
    /* 1: unequal and zero counts, dropped ids, tokens without any, two experts on one rank */
    0,1, 1,1,   X,0, X,X,
    X,X, X,X,   0,0, 0,1,
    X,1, X,X,   1,1, X,X,
    X,X, 1,X,   0,1, 1,0,
    /* 2: one way: rank 1 never sends a row, so nothing comes back to it */
    1,X, 1,1,   X,X, 1,X,
    0,1, 1,1,   X,X, X,X,
    1,X, X,X,   1,1, X,X,
    1,0, 1,1,   X,X, X,X
};
#elif RANKS == 3 && TOKENS == 1
#ifdef FULL
#define SCENARIOS 4
#else
#define SCENARIOS 3
#endif
hidden byte ids[SCENARIOS * 3 * 3 * 1 * 3] = {
    /* 0: every token to every rank but one */
    0,1,2,   0,1,2,   0,X,2,
    0,1,2,   X,1,2,   0,1,2,
    0,1,X,   0,1,2,   0,1,2,
    /* 1: unequal and zero counts, dropped ids */
    1,2,X,   X,2,2,   X,X,X,
    X,X,X,   0,X,2,   1,1,X,
    2,2,X,   X,X,X,   0,1,X,
    /* 2: one sends to all, the others nothing */
    0,1,2,   X,X,X,   X,X,X,
    1,2,X,   1,X,X,   X,X,X,
    0,1,2,   X,X,X,   2,X,X
#ifdef FULL
    /* 3: every token to every rank */
  , 0,1,2,   0,1,2,   0,1,2,
    0,1,2,   0,1,2,   0,1,2,
    0,1,2,   0,1,2,   0,1,2
#endif
};
#endif

#ifndef FIRST_SCENARIO
#define FIRST_SCENARIO 0
#endif

hidden byte goes[SCENARIOS * ROUNDS * RANKS * TOKENS]; /* bit d: the token goes to rank d */
byte scenario;

#define TO(n, s, t) (goes[((scenario * ROUNDS + (n)) * RANKS + (s)) * TOKENS + (t)])
#define SENDS(n, s, t, d) ((TO(n, s, t) >> (d)) & 1)

/* Tokens that s has in round n: those up to its last that goes anywhere. */
#if TOKENS == 2
#define HAS(n, s) (TO(n, s, 1) != 0 -> 2 : (TO(n, s, 0) != 0 -> 1 : 0))
#else
#define HAS(n, s) (TO(n, s, 0) != 0 -> 1 : 0)
#endif

/* Rows that s sends to d in round n, and the token in a slot: slots are numbered in token order. */
#if TOKENS == 2
#define COUNT(n, s, d) (SENDS(n, s, 0, d) + SENDS(n, s, 1, d))
#define TOKEN_IN(n, s, d, slot) ((slot) == 1 || !SENDS(n, s, 0, d))
#else
#define COUNT(n, s, d) SENDS(n, s, 0, d)
#define TOKEN_IN(n, s, d, slot) 0
#endif

/* Routing::route, for all scenarios at once. */
inline route() {
    d_step {
        i_ = 0;
        do
        :: i_ < SCENARIOS * ROUNDS * RANKS * TOKENS ->
            goes[i_] = 0;
            j_ = 0;
            do
            :: j_ < RANKS ->
                if
                :: ids[i_ * RANKS + j_] != X -> goes[i_] = goes[i_] | (1 << ids[i_ * RANKS + j_])
                :: else
                fi;
                j_++
            :: else -> break
            od;
            i_++
        :: else -> break
        od;
        skip
    }
}
