// What a GPU and its links cost without any protocol.
#pragma once

#include "stamp.cuh"

// A word goes back and forth `rounds` times. out: nanoseconds from the first send to the last answer, on the first.
// Both words start at 0; each waits in its own `mine` and writes the other's through `theirs`.
extern "C" __global__ void ping_pong(u64* mine, u64* theirs, int first, int rounds, u64 limit_ns, u64* expired,
                                     u64* out) {
    const u64 begin = global_timer_ns();
    for (int i = 1; i <= rounds; ++i) {
        if (first) store_word(theirs, i);
        if (!wait_above(mine, i - 1, limit_ns)) {
            store_word(expired, 1);
            return;
        }
        if (!first) store_word(theirs, i);
    }
    *out = global_timer_ns() - begin;
}

// Vectors from `source` to `target`, four in flight for each thread; either may be another GPU's memory (push, pull).
extern "C" __global__ void copy_vectors(uint4* target, const uint4* source, i64 count) {
    const i64 stride = (i64)gridDim.x * blockDim.x;
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * stride < count; i += 4 * stride) {
        const uint4 a = source[i], b = source[i + stride], c = source[i + 2 * stride], d = source[i + 3 * stride];
        target[i] = a;
        target[i + stride] = b;
        target[i + 2 * stride] = c;
        target[i + 3 * stride] = d;
    }
    for (; i < count; i += stride) target[i] = source[i];
}
