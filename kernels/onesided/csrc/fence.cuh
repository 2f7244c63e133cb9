// Fence: plain stores, one release and one flag per (source, destination) there; one flag and a pull on the way back.
//
// Flags are compared for equality with the round's epoch: epochs may wrap.
#pragma once

#include "header.cuh"
#include "reduce.cuh"

namespace epcross {

EPCROSS_DEVICE u64 flag_of(u32 epoch, int tokens) { return static_cast<u64>(epoch) << 32 | static_cast<u32>(tokens); }
EPCROSS_DEVICE bool raised(u64 flag, u32 epoch) { return static_cast<u32>(flag >> 32) == epoch; }

/// Await the flag of every peer, a lane each. `most` gets the largest token count. False if a wait expired.
EPCROSS_DEVICE bool await_flags(const Exchange& x, const Place& p, Patience& patience, i64 flags_at, u32 epoch,
                                int& most) {
    for (int base = 0; base < x.ep; base += kLanes) {
        const int source = base + p.lane;
        bool pending = source < x.ep && source != p.rank;
        int tokens = 0;
        while (true) {
            if (pending) {
                const u64 flag = load_word_acquire(p.mine + flags_at + source * static_cast<i64>(sizeof(u64)));
                if (raised(flag, epoch)) {
                    pending = false;
                    tokens = static_cast<int>(static_cast<u32>(flag));
                }
            }
            if (!__any_sync(kFull, pending)) break;
            if (!patience.go_on(pending ? source : -1)) return false;
        }
        most = max(most, __reduce_max_sync(kFull, tokens));
    }
    __syncwarp();  // what one lane acquired holds for all
    return true;
}

EPCROSS_DEVICE void raise_flags(const Exchange& x, const Place& p, i64 flags_at, u64 flag) {
    fence_system();
    for (int r = p.lane; r < x.ep; r += kLanes) {
        if (r != p.rank) store_word_release(p.of(r) + flags_at + p.rank * static_cast<i64>(sizeof(u64)), flag);
    }
}

template <int kPerLane>
EPCROSS_DEVICE void push_records(const Exchange& x, const Call& call, const Place& p, const u8* slot_rank) {
    const int items = call.tokens[p.local] * call.chunks;
    for (int item = p.warp; item < items; item += p.warps) {
        const int token = item / call.chunks, chunk = item % call.chunks;
        const int first = chunk * kLanes * kPerLane + p.lane;
        const int id = own_id(x, call, p, token);
        Vector v[kPerLane];
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
            const int i = first + j * kLanes;
            v[j] = i < x.record_vectors ? record_vector(x, call, p, token, i) : Vector{0, 0};
        }
        RankMask to = mask_of(id >= 0 ? slot_rank[id] : -1, x.ep);
        if (chunk == 0) {
            const i64 at = Places{x}.header(0, token, p.rank);
            for (int r = p.lane; r < x.ep; r += kLanes) {
                if (to.has(r)) store_word(p.of(r) + at, 1u);
            }
            if (p.lane == 0) store_mask(p.mine, x.sent_mask_at, token, to);
        }
        const i64 at = Places{x}.record(0, p.rank, token) + static_cast<i64>(first) * kVectorBytes;
        for (int r = to.pop(); r >= 0; r = to.pop()) {
            u8* there = p.of(r) + at;
#pragma unroll
            for (int j = 0; j < kPerLane; ++j) {
                if (first + j * kLanes < x.record_vectors) store_plain(there + j * kLanes * kVectorBytes, v[j]);
            }
        }
    }
}

template <int kPerLane>
EPCROSS_DEVICE void fence_dispatch(const Exchange& x, const Call& call) {
    const Place p = place(x);
    const u8* slot_rank = slot_ranks(x);
    __shared__ bool last;
    __syncthreads();
    await_kernel_before();
    const State state = load_state(p);
    if (state.failed) return;
    const u32 epoch = state.dispatch_epoch;
    const int own = call.tokens[p.local];
    push_records<kPerLane>(x, call, p, slot_rank);
    admit_kernel_after();
    __syncthreads();  // every store of this block came before
    if (threadIdx.x == 0) {
        fence_system();
        const u32 blocks = gridDim.x / static_cast<u32>(x.local_ranks);
        last = atomicAdd(&p.control->blocks_done, 1u) == blocks - 1u;
        if (last) store_u32(&p.control->blocks_done, 0u);
    }
    __syncthreads();
    // Release: every row of every block, then the flag. Hazard: a row read before it is there.
    if (last && threadIdx.x < kLanes) raise_flags(x, p, x.dispatch_flags_at, flag_of(epoch, own));
    Patience patience(x, p, WaitPhase::kDispatch, epoch);
    int most = own;
    if (!await_flags(x, p, patience, x.dispatch_flags_at, epoch, most)) return;
    for (int token = p.warp; token < most; token += p.warps) {
        u32 bits[3] = {0, 0, 0};
#pragma unroll
        for (int w = 0; w < 3; ++w) {
            const int source = w * kLanes + p.lane;
            bool present = false;
            if (source < x.ep && source != p.rank) {
                u8* header = p.mine + Places{x}.header(0, token, source);
                present = load_word(header) != 0;
                // Cleared for the next round, whose headers are sent after our combine flag.
                if (present) store_word(header, 0);
            }
            bits[w] = __ballot_sync(kFull, present);
        }
        RankMask from{bits[0], bits[1], bits[2]};
        if (token < own) {
            // another warp may have sent this token: its own mask is made again
            const int id = own_id(x, call, p, token);
            if (mask_of(id >= 0 ? slot_rank[id] : -1, x.ep).has(p.rank)) from.add(p.rank);
        }
        if (p.lane == 0) store_mask(p.mine, x.received_mask_at, token, from);
    }
    if (p.warp == 0 && p.lane == 0) {
        store_u32(&p.control->most_tokens, static_cast<u32>(most));
        store_u32(&p.control->set_index, 0u);
        store_u32(&p.control->combine_epoch, epoch);
    }
}

/// Pull and add the partials of one own token, ranks ascending, kGroup loads of each lane's vectors at a time.
template <int kPerLane, int kGroup>
EPCROSS_DEVICE void pull_partials(const Exchange& x, const Place& p, int token, int first, RankMask from,
                                  Sum (&sum)[kPerLane]) {
    const i64 at = Places{x}.partial(p.rank, token) + static_cast<i64>(first) * kVectorBytes;
    while (from.any()) {
        int rank[kGroup];
        Vector v[kGroup][kPerLane];
#pragma unroll
        for (int g = 0; g < kGroup; ++g) {
            rank[g] = from.pop();
            if (rank[g] < 0) continue;
#pragma unroll
            for (int j = 0; j < kPerLane; ++j) {
                if (first + j * kLanes < x.partial_vectors) {
                    v[g][j] = load_plain(p.of(rank[g]) + at + j * kLanes * kVectorBytes);
                }
            }
        }
#pragma unroll
        for (int g = 0; g < kGroup; ++g) {
            if (rank[g] < 0) continue;
#pragma unroll
            for (int j = 0; j < kPerLane; ++j) {
                if (first + j * kLanes < x.partial_vectors) sum[j].add(v[g][j]);
            }
        }
    }
}

template <int kPerLane, int kGroup>
EPCROSS_DEVICE void fence_combine(const Exchange& x, const Call& call) {
    const Place p = place(x);
    __syncthreads();
    await_kernel_before();
    const State state = load_state(p);
    if (state.failed) return;
    const u32 epoch = state.combine_epoch;
    const int own = call.tokens[p.local];
    // Release: the experts' partials (their kernel has ended), and their reading of our landing rows, then the flag.
    // Hazards: a partial pulled before it is there; the next rows over some that are still read.
    if (p.warp == 0) raise_flags(x, p, x.combine_flags_at, flag_of(epoch, own));
    admit_kernel_after();
    Patience patience(x, p, WaitPhase::kCombine, epoch);
    int most = 0;
    if (!await_flags(x, p, patience, x.combine_flags_at, epoch, most)) return;
    u8* out = reinterpret_cast<u8*>(call.out) + static_cast<i64>(p.local) * call.out_stride;
    for (int item = p.warp; item < own * call.chunks; item += p.warps) {
        const int token = item / call.chunks, first = item % call.chunks * kLanes * kPerLane + p.lane;
        Sum sum[kPerLane];
        pull_partials<kPerLane, kGroup>(x, p, token, first, load_mask(p.mine, x.sent_mask_at, token), sum);
        u8* to = out + static_cast<i64>(token) * x.partial_vectors * kVectorBytes;
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
            const int i = first + j * kLanes;
            if (i < x.partial_vectors) store_plain(to + static_cast<i64>(i) * kVectorBytes, sum[j].rounded());
        }
    }
    if (p.warp == 0 && p.lane == 0) store_u32(&p.control->dispatch_epoch, epoch + 1u);
}

}  // namespace epcross
