// What a kernel is told: two structures passed by value. `layout.py` packs them; a test compares the offsets.
#pragma once

#include "words.cuh"

namespace epcross {

inline constexpr int kMaxRanks = 96;
inline constexpr int kMaxLocalRanks = 72;

/// Shapes and places, the same in every call of one exchange. Offsets and strides are bytes in a workspace.
struct Exchange {
    u64 workspace[kMaxRanks];  // base of every rank's workspace, as mapped here
    u64 slot_rank;             // u8[num_slots], the rank that holds each slot
    u64 failure;               // host-visible Failure
    u64 timeout_ns;

    i64 control_at;         // Control
    i64 sent_at;            // u32[capacity][ep]: whether an own token goes to a rank
    i64 headers_at[2];      // u64[capacity][ep]: see header.cuh; Fence has one set, as for records
    i64 records_at[2];      // [ep][capacity] records
    i64 escapes_at[2];      // [ep][capacity] bitmaps (Sentinel)
    i64 returns_at;         // [ep][capacity] partials as they arrive (Sentinel)
    i64 partials_at;        // [ep][capacity] partials as the experts write them
    i64 dispatch_flags_at;  // u64[ep][kMaxFlags] (Fence)
    i64 combine_flags_at;   // u64[ep] (Fence)
    i64 record_stride, partial_stride, escape_stride;

    i32 ep, first_rank, local_ranks;
    i32 top_k, num_slots, capacity;
    i32 row_vectors, scale_vectors, record_vectors, partial_vectors;
};

/// One call. Inputs of the local ranks lie behind one another, `*_stride` bytes apart.
struct Call {
    u64 rows, scales, ids, weights, out;
    i64 rows_stride, scales_stride, ids_stride, weights_stride, out_stride;
    i32 chunk_blocks;  // blocks of a rank along the vectors of a row
    i32 tokens[kMaxLocalRanks];
};

/// Local state of a rank. Two epochs, since neither kernel may change the one that its own blocks read.
struct alignas(16) Control {
    u64 dispatch_epoch;  // written by combine, read by dispatch
    u64 combine_epoch;   // written by dispatch, read by combine
    u32 failed;          // a wait expired: every later kernel returns at once
};

/// The first wait that expired, where the host reads it. `state` is written last.
struct Failure {
    u32 state, rank, peer, phase;
    u64 epoch;
};

enum class WaitPhase : u32 { kDispatch = 1, kCombine = 2 };

}  // namespace epcross
