// Who a block works for, and which tokens, peers and vectors its warps take.
//
// A grid is (local rank and vectors of a row, peers, role and tokens). Where it is smaller than the work, blocks take
// several peers and tokens in turn: it is never larger than what the GPU holds at once, since its blocks wait for peers.
#pragma once

#include "params.cuh"

namespace epcross {

/// How blocks divide the work. Sentinel: every second layer of the grid sends and the others receive, so that neither
/// waits for the other. Fence: the first layer raises flags and awaits them, the others move rows.
enum class Roles { kHalves, kFirstAlone };

struct Place {
    u8* mine;  // own workspace
    Control* control;
    int rank, local;
    int lane;
    int chunk, chunk_step;  // of 32 lanes' vectors
    int peer, peer_step;    // distance to a peer, less one; the last is the rank itself
    int token, token_step;
    bool alternate;  // in an odd layer, or not in the first: see Roles

    EPCROSS_DEVICE bool first() const { return chunk == 0 && peer == 0 && token == 0 && lane == 0; }
    /// Ranks at distance `i` + 1 above and below: what one rank sends at its turn `i`, another awaits at its turn `i`.
    EPCROSS_DEVICE int above(const Exchange& x, int i) const {
        const int r = rank + 1 + i;
        return r < x.ep ? r : r - x.ep;
    }
    EPCROSS_DEVICE int below(const Exchange& x, int i) const {
        const int r = rank - 1 - i;
        return r >= 0 ? r : r + x.ep;
    }
    /// Own tokens, where the peers have no part in the division of work.
    EPCROSS_DEVICE int own_token() const { return token * peer_step + peer; }
    EPCROSS_DEVICE int own_token_step() const { return token_step * peer_step; }
};

template <Roles kRoles>
EPCROSS_DEVICE Place place(const Exchange& x, const Call& call) {
    Place p;
    const int warps = static_cast<int>(blockDim.x) / kLanes;
    int bx = static_cast<int>(blockIdx.x);
    p.local = 0;
    if (x.local_ranks > 1) {  // ranks that share one launch take turns, so that they progress alike
        p.local = bx % x.local_ranks;
        bx /= x.local_ranks;
    }
    p.rank = x.first_rank + p.local;
    p.lane = static_cast<int>(threadIdx.x) % kLanes;
    p.chunk = bx * warps + static_cast<int>(threadIdx.x) / kLanes;
    p.chunk_step = call.chunk_blocks * warps;
    p.peer = static_cast<int>(blockIdx.y);
    p.peer_step = static_cast<int>(gridDim.y);
    const int layer = static_cast<int>(blockIdx.z), layers = static_cast<int>(gridDim.z);
    if constexpr (kRoles == Roles::kHalves) {
        p.alternate = layer & 1;
        p.token = layer / 2;
        p.token_step = layers / 2;
    } else {
        p.alternate = layer != 0;
        p.token = max(layer - 1, 0);
        p.token_step = layers - 1;
    }
    p.mine = reinterpret_cast<u8*>(x.workspace[p.rank]);
    p.control = reinterpret_cast<Control*>(p.mine + x.control_at);
    return p;
}

EPCROSS_DEVICE u8* workspace_of(const Exchange& x, int rank) { return reinterpret_cast<u8*>(x.workspace[rank]); }

EPCROSS_DEVICE bool has_failed(const Place& p) { return load_u32(&p.control->failed) != 0; }

// --- places in a workspace

EPCROSS_DEVICE i64 row_index(const Exchange& x, int rank, int token) {
    return static_cast<i64>(static_cast<u64>(static_cast<u32>(rank * x.capacity + token)));
}
EPCROSS_DEVICE i64 entry_index(const Exchange& x, int token, int rank) {
    return static_cast<i64>(static_cast<u64>(static_cast<u32>(token * x.ep + rank)));
}
EPCROSS_DEVICE i64 header_at(const Exchange& x, int set, int token, int source) {
    return x.headers_at[set] + entry_index(x, token, source) * static_cast<i64>(sizeof(u64));
}
EPCROSS_DEVICE i64 sent_at(const Exchange& x, int token, int to) {
    return x.sent_at + entry_index(x, token, to) * static_cast<i64>(sizeof(u32));
}
EPCROSS_DEVICE i64 record_at(const Exchange& x, int set, int source, int token) {
    return x.records_at[set] + row_index(x, source, token) * x.record_stride;
}
EPCROSS_DEVICE i64 escapes_at(const Exchange& x, int set, int source, int token) {
    return x.escapes_at[set] + row_index(x, source, token) * x.escape_stride;
}
EPCROSS_DEVICE i64 return_at(const Exchange& x, int from, int token) {
    return x.returns_at + row_index(x, from, token) * x.partial_stride;
}
EPCROSS_DEVICE i64 partial_at(const Exchange& x, int source, int token) {
    return x.partials_at + row_index(x, source, token) * x.partial_stride;
}

}  // namespace epcross
