// Who a block works for, and which tokens and vectors its warps take.
#pragma once

#include "params.cuh"

namespace epcross {

/// A warp of one rank, and the bases of all workspaces where any lane may index them.
struct Place {
    u8* mine;    // own workspace
    u64* bases;  // shared memory
    Control* control;
    int rank, local;
    int lane, warp, warps;  // warp: among all warps of this rank
    int block;              // among all blocks of this rank

    EPCROSS_DEVICE u8* of(int rank_of) const { return reinterpret_cast<u8*>(bases[rank_of]); }
};

/// Blocks of the local ranks take turns, so that ranks which share one launch progress alike.
EPCROSS_DEVICE Place place(const Exchange& x) {
    __shared__ u64 bases[kMaxRanks];
    Place p;
    p.local = static_cast<int>(blockIdx.x) % x.local_ranks;
    p.block = static_cast<int>(blockIdx.x) / x.local_ranks;
    p.rank = x.first_rank + p.local;
    p.lane = static_cast<int>(threadIdx.x) % kLanes;
    const int per_block = static_cast<int>(blockDim.x) / kLanes;
    p.warp = p.block * per_block + static_cast<int>(threadIdx.x) / kLanes;
    p.warps = static_cast<int>(gridDim.x) / x.local_ranks * per_block;
    for (int i = static_cast<int>(threadIdx.x); i < x.ep; i += static_cast<int>(blockDim.x)) bases[i] = x.workspace[i];
    p.bases = bases;
    p.mine = reinterpret_cast<u8*>(x.workspace[p.rank]);
    p.control = reinterpret_cast<Control*>(p.mine + x.control_at);
    return p;
}

struct State {
    u32 dispatch_epoch, combine_epoch;
    int most_tokens;
    bool failed;
};

EPCROSS_DEVICE State load_state(const Place& p) {
    u32 a, b, c, d;
    asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "l"(p.control)
                 : "memory");
    return {a, b, static_cast<int>(c), d != 0};
}

/// Where things of a workspace lie.
struct Places {
    const Exchange& x;

    EPCROSS_DEVICE i64 header(int set, int token, int source) const {
        return x.headers_at[set] + (static_cast<i64>(token) * x.ep + source) * static_cast<i64>(sizeof(u64));
    }
    EPCROSS_DEVICE i64 record(int set, int source, int token) const {
        return x.records_at[set] + row_of(source, token) * x.record_stride;
    }
    EPCROSS_DEVICE i64 escapes(int set, int source, int token) const {
        return x.escapes_at[set] + row_of(source, token) * x.escape_stride;
    }
    EPCROSS_DEVICE i64 returned(int from, int token) const {
        return x.returns_at + row_of(from, token) * x.partial_stride;
    }
    EPCROSS_DEVICE i64 partial(int source, int token) const {
        return x.partials_at + row_of(source, token) * x.partial_stride;
    }

  private:
    EPCROSS_DEVICE i64 row_of(int rank, int token) const { return static_cast<i64>(rank) * x.capacity + token; }
};

}  // namespace epcross
