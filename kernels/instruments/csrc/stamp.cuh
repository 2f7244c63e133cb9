// What the harness itself runs on a GPU: a common start of all ranks, stamps, and kernels that do nothing.
//
// %globaltimer counts nanoseconds of one GPU; clocks of two GPUs differ by an offset that `ping_clock` bounds.
// Waits are bounded by `limit_ns`; the first that runs out sets `*expired`, and later ones return at once.
#pragma once

using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

__device__ __forceinline__ u64 global_timer_ns() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

__device__ __forceinline__ void store_word(u64* at, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

__device__ __forceinline__ u64 load_word(const u64* at) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

// Wait until the word is above `below`; 0 if that takes longer than `limit_ns`. Each word is data and flag at once.
__device__ __forceinline__ u64 wait_above(const u64* at, u64 below, u64 limit_ns) {
    const u64 begin = global_timer_ns();
    u64 value = load_word(at);
    while (value <= below) {
        if (global_timer_ns() - begin > limit_ns) return 0;
        value = load_word(at);
    }
    return value;
}

// A rank's pad, mapped by every rank: arrivals[size], then the next common start.
//
//     all     arrived -> every peer;  wait for every peer
//     rank 0  start = its clock + margin -> every peer
//     all     wait for a new start;  spin until own clock says start + offset;  stamp
//
// One block of at least `size` threads. `state` is private to the rank: rounds so far, last start.
// offset_ns: this GPU's clock minus that of rank 0's; in memory, since clocks drift while a captured graph stays.
extern "C" __global__ void line_up(u64* const* pads, int rank, int size, const i64* offset_ns, u64 margin_ns,
                                   u64 limit_ns, u64* state, u64* expired, u64* out) {
    if (size == 1) {
        if (threadIdx.x == 0) *out = global_timer_ns();
        return;
    }
    if (load_word(expired)) return;
    const int peer = threadIdx.x;
    const u64 round = state[0] + 1, last_start = state[1];
    bool here = true;
    if (peer < size) {
        store_word(pads[peer] + rank, round);
        here = wait_above(pads[rank] + peer, round - 1, limit_ns) != 0;
    }
    if (!__syncthreads_and(here)) {
        if (peer == 0) store_word(expired, 1);
        return;
    }
    __shared__ u64 start;
    if (rank == 0) {
        if (peer == 0) start = global_timer_ns() + margin_ns;
        __syncthreads();
        if (peer < size) store_word(pads[peer] + size, start);
    }
    if (peer == 0) {
        const u64 told = wait_above(pads[rank] + size, last_start, limit_ns);
        if (!told) {
            store_word(expired, 1);
            return;
        }
        const u64 own = told + *offset_ns;
        u64 now = global_timer_ns();
        while (now < own) now = global_timer_ns();
        state[0] = round;
        state[1] = told;
        *out = now;
    }
}

extern "C" __global__ void stamp(u64* out) { *out = global_timer_ns(); }

// Keeps the queue behind it waiting while the host enqueues more.
extern "C" __global__ void hold(u64 duration_ns) {
    const u64 begin = global_timer_ns();
    while (global_timer_ns() - begin < duration_ns) {
    }
}

// Does nothing, as an exchange kernel would begin and end it under programmatic dependent launch.
extern "C" __global__ void empty() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Smallest step between two readings of the timer, over `readings` readings.
extern "C" __global__ void timer_step(int readings, u64* out) {
    u64 last = global_timer_ns(), smallest = ~0ull;
    for (int i = 0; i < readings; ++i) {
        const u64 now = global_timer_ns();
        if (now != last && now - last < smallest) smallest = now - last;
        last = now;
    }
    *out = smallest;
}

// Offset of the second rank's clock to the first one's, as in NTP: the first sends a round's number, the second answers
// with its clock, the first takes the round with the shortest trip. out: offset, its uncertainty (half the trip).
// Both words start at 0. The first waits in its own `mine`, and writes to the second's through `theirs`.
extern "C" __global__ void ping_clock(u64* mine, u64* theirs, int first, int rounds, u64 limit_ns, u64* expired,
                                      i64* out) {
    if (!first) {
        u64 said = 0;
        for (int i = 1; i <= rounds; ++i) {
            if (!wait_above(mine, i - 1, limit_ns)) {
                store_word(expired, 1);
                return;
            }
            const u64 now = global_timer_ns();
            said = now > said ? now : said + 1;  // a clock may stand still between two answers; an answer may not
            store_word(theirs, said);
        }
        return;
    }
    u64 answer = 0, shortest = ~0ull;
    for (int i = 1; i <= rounds; ++i) {
        const u64 sent = global_timer_ns();
        store_word(theirs, i);
        answer = wait_above(mine, answer, limit_ns);
        const u64 back = global_timer_ns();
        if (!answer) {
            store_word(expired, 1);
            return;
        }
        if (back - sent < shortest) {
            shortest = back - sent;
            out[0] = (i64)(answer - sent) - (i64)(shortest / 2);
            out[1] = (i64)(shortest + 1) / 2;
        }
    }
}
