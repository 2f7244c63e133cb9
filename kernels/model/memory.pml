/* Weak memory for a checker that is sequentially consistent: one buffer of stores for each rank.
 *
 * A store enters its rank's buffer and reaches memory at any later time, in any order, with three exceptions:
 *   - stores of one rank to one word arrive in program order (coherence),
 *   - a release store arrives after what it releases: AFTER says whether entry i waits for j, which is ahead of it,
 *   - nothing behind a release fence arrives before everything ahead of it.
 * The owner of a word sees its own last store to it until that has arrived.
 *
 * A reduction: a store that nobody but its own rank will load (QUIET) is felt by others only if their store arrives at
 * the same word, and then the worse the later it arrives. So quiet stores arrive at the last moment, all together:
 * when the release fence behind them has nothing else ahead of it.
 *
 * Whoever includes this defines WORDS and ENTRIES (stores under way at most, fences included), OWNER_OF(a),
 * QUIET(r, a), AFTER(r, i, j), and `arriving(r, a, v)`: what must hold when rank
 * r's value v reaches word a. Names that end in _ are scratch of one d_step: written before they are read, no part of a state.
 */
#define CHOICES 24 /* of them, ahead of the first fence */
#define FENCE 255  /* in place of an address: a release fence */

typedef Buffer {
    byte n;
    byte address[ENTRIES];
    byte value[ENTRIES];
    int ready; /* bit i: entry i may arrive now; follows from the rest, kept for speed, as does the next */
    bit settles  /* the first fence has only quiet stores ahead of it */
};

Buffer buffer[RANKS];
byte mem[WORDS];
byte view[WORDS]; /* what the owner reads; follows from mem and the owner's buffer */
hidden byte i_, j_, at_, what_;
hidden byte clear_;

inline put(r, a, v) {
#ifdef ALONE /* no two stores to one word of a peer are under way at once */
    i_ = 0;
    do
    :: i_ < buffer[r].n -> assert(a == FENCE || OWNER_OF(a) == r || buffer[r].address[i_] != a); i_++
    :: else -> break
    od;
#endif
    assert(buffer[r].n < ENTRIES);
    buffer[r].address[buffer[r].n] = a;
    buffer[r].value[buffer[r].n] = v;
    buffer[r].n++
}

inline store(r, a, v) {
    put(r, a, v);
    if :: OWNER_OF(a) == r -> view[a] = v :: else fi
}
inline release_fence(r) { put(r, FENCE, 0) }

inline take(r, i) { /* entries behind i move up: equal contents are equal states */
    buffer[r].n--;
    j_ = i;
    do
    :: j_ < buffer[r].n ->
        buffer[r].address[j_] = buffer[r].address[j_ + 1];
        buffer[r].value[j_] = buffer[r].value[j_ + 1];
        j_++
    :: else -> break
    od;
    buffer[r].address[buffer[r].n] = 0;
    buffer[r].value[buffer[r].n] = 0
}

/* To be called after every change of a buffer. */
inline refresh(r) {
    buffer[r].ready = 0;
    i_ = 0;
    do
    :: i_ < buffer[r].n && buffer[r].address[i_] != FENCE ->
        clear_ = !QUIET(r, buffer[r].address[i_]);
        j_ = 0;
        do
        :: j_ < i_ && clear_ -> clear_ = buffer[r].address[j_] != buffer[r].address[i_] && !AFTER(r, i_, j_); j_++
        :: else -> break
        od;
        if
        :: clear_ -> assert(i_ < CHOICES); buffer[r].ready = buffer[r].ready | (1 << i_)
        :: else
        fi;
        i_++
    :: else -> break
    od;
    buffer[r].settles = i_ < buffer[r].n && buffer[r].ready == 0
}

/* The owner sees what arrived, unless a later store of its own is still under way. */
inline reveal(o, a, v) {
    clear_ = 1;
    j_ = 0;
    do
    :: j_ < buffer[o].n -> clear_ = clear_ && buffer[o].address[j_] != a; j_++
    :: else -> break
    od;
    if :: clear_ -> view[a] = v :: else fi
}

#define ARRIVE(i)                                                  \
    :: d_step { buffer[r].ready & (1 << i) ->                      \
        at_ = buffer[r].address[i]; what_ = buffer[r].value[i];    \
        printf("@arrive %d %d %d\n", r, at_, what_);               \
        arriving(r, at_, what_);                                   \
        mem[at_] = what_;                                          \
        take(r, i);                                                \
        reveal(OWNER_OF(at_), at_, what_);                         \
        refresh(r) }

/* The way of rank r's stores to memory. */
proctype Stores(byte r) {
end:
    do
    ARRIVE(0) ARRIVE(1) ARRIVE(2) ARRIVE(3) ARRIVE(4) ARRIVE(5) ARRIVE(6) ARRIVE(7)
    ARRIVE(8) ARRIVE(9) ARRIVE(10) ARRIVE(11) ARRIVE(12) ARRIVE(13) ARRIVE(14) ARRIVE(15)
    ARRIVE(16) ARRIVE(17) ARRIVE(18) ARRIVE(19) ARRIVE(20) ARRIVE(21) ARRIVE(22) ARRIVE(23)
    :: d_step { buffer[r].settles ->
        printf("@settle %d\n", r);
        do
        :: buffer[r].address[0] != FENCE -> mem[buffer[r].address[0]] = buffer[r].value[0]; take(r, 0)
        :: else -> break
        od;
        take(r, 0); /* the fence itself */
        refresh(r) }
    od
}
