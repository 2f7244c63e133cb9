// Sentinel, and back: partials are pushed to the source of their token, which polls and adds them.
//
// The landing words of dispatch are armed again here, while partials are on their way: the experts are done with them,
// and their senders use this set again only after our next dispatch. A returned word is armed as soon as it was read: its
// sender writes it again only after our next dispatch too.
#pragma once

#include "record.cuh"
#include "reduce.cuh"
#include "routing.cuh"
#include "wait.cuh"

namespace epcross {

EPCROSS_DEVICE u64 sendable(u64 word) { return word == kArmed ? kOtherNans : word; }

/// Push the partials of what was received, kGroup sources at a time so that their loads overlap.
template <int kPerLane, int kGroup>
EPCROSS_DEVICE void send_partials(const Exchange& x, const Place& p, int token, int first, RankMask to) {
    const Places at{x};
    to.drop(p.rank);
    while (to.any()) {
        int source[kGroup];
        Vector v[kGroup][kPerLane];
#pragma unroll
        for (int g = 0; g < kGroup; ++g) {
            source[g] = to.pop();
            if (source[g] < 0) continue;
            const u8* from = p.mine + at.partial(source[g], token) + static_cast<i64>(first) * kVectorBytes;
#pragma unroll
            for (int j = 0; j < kPerLane; ++j) {
                if (first + j * kLanes < x.partial_vectors) v[g][j] = load_plain(from + j * kLanes * kVectorBytes);
            }
        }
#pragma unroll
        for (int g = 0; g < kGroup; ++g) {
            if (source[g] < 0) continue;
            u8* there = p.of(source[g]) + at.returned(p.rank, token) + static_cast<i64>(first) * kVectorBytes;
#pragma unroll
            for (int j = 0; j < kPerLane; ++j) {
                if (first + j * kLanes >= x.partial_vectors) continue;
                store_words(there + j * kLanes * kVectorBytes, {sendable(v[g][j].a), sendable(v[g][j].b)});
            }
        }
    }
}

template <int kPerLane>
EPCROSS_DEVICE void arm_records(const Exchange& x, const Place& p, int set, int token, int first, bool headers,
                                RankMask from) {
    const Places at{x};
    from.drop(p.rank);
    if (headers) {  // of every source: one that sent nothing here left its header armed
        for (int s = p.lane; s < x.ep; s += kLanes) store_word(p.mine + at.header(set, token, s), kArmed);
    }
    for (int s = from.pop(); s >= 0; s = from.pop()) {
        u8* record = p.mine + at.record(set, s, token);
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
            const int i = first + j * kLanes;
            if (i < x.record_vectors) store_words(record + static_cast<i64>(i) * kVectorBytes, {kArmed, kArmed});
        }
    }
}

/// Await, add and arm again the partials of one own token, ranks ascending. False if a wait expired.
template <int kPerLane, int kGroup>
EPCROSS_DEVICE bool add_partials(const Exchange& x, const Place& p, Patience& patience, int token, int first,
                                 RankMask from, Sum (&sum)[kPerLane]) {
    const Places at{x};
    while (from.any()) {
        int rank[kGroup];
        u32 pending = 0;
        Vector v[kGroup][kPerLane];
#pragma unroll
        for (int g = 0; g < kGroup; ++g) {
            rank[g] = from.pop();
            if (rank[g] >= 0) pending |= 1u << g;
        }
        while (true) {
#pragma unroll
            for (int g = 0; g < kGroup; ++g) {
                if (!(pending >> g & 1u)) continue;
                const bool own = rank[g] == p.rank;
                const u8* row = p.mine + (own ? at.partial(p.rank, token) : at.returned(rank[g], token));
#pragma unroll
                for (int j = 0; j < kPerLane; ++j) {
                    const int i = first + j * kLanes;
                    v[g][j] = i < x.partial_vectors ? load_words(row + static_cast<i64>(i) * kVectorBytes) : Vector{0, 0};
                }
            }
            int missing = -1;
#pragma unroll
            for (int g = 0; g < kGroup; ++g) {
                if (!(pending >> g & 1u)) continue;
                bool there = true;
#pragma unroll
                for (int j = 0; j < kPerLane; ++j) there &= arrived(v[g][j]);
                if (there || rank[g] == p.rank) pending &= ~(1u << g);
                else missing = rank[g];
            }
            if (!__any_sync(kFull, pending != 0)) break;
            if (!patience.go_on(missing)) return false;
        }
#pragma unroll
        for (int g = 0; g < kGroup; ++g) {
            if (rank[g] < 0) continue;
            u8* row = p.mine + at.returned(rank[g], token);
#pragma unroll
            for (int j = 0; j < kPerLane; ++j) {
                const int i = first + j * kLanes;
                if (i >= x.partial_vectors) continue;
                sum[j].add(v[g][j]);
                if (rank[g] != p.rank) store_words(row + static_cast<i64>(i) * kVectorBytes, {kArmed, kArmed});
            }
        }
    }
    return true;
}

/// The partials of one token for every peer, loaded before it is known which of them are wanted: for few ranks. The first
/// item of a warp only.
template <int kPeers>
struct Ahead {
    Vector v[kPeers == 0 ? 1 : kPeers];

    EPCROSS_DEVICE void load(const Exchange& x, const Place& p, int token, int first) {
#pragma unroll
        for (int g = 0; g < kPeers; ++g) {
            const int source = g + (g >= p.rank);
            v[g] = {0, 0};
            if (source >= x.ep || first >= x.partial_vectors) continue;
            v[g] = load_plain(p.mine + Places{x}.partial(source, token) + static_cast<i64>(first) * kVectorBytes);
        }
    }
    EPCROSS_DEVICE void send(const Exchange& x, const Place& p, int token, int first, RankMask to) const {
        const i64 at = Places{x}.returned(p.rank, token) + static_cast<i64>(first) * kVectorBytes;
#pragma unroll
        for (int g = 0; g < kPeers; ++g) {
            const int source = g + (g >= p.rank);
            if (source >= x.ep || first >= x.partial_vectors || !to.has(source)) continue;
            store_words(p.of(source) + at, {sendable(v[g].a), sendable(v[g].b)});
        }
    }
};

template <int kPerLane, int kPeers, int kGroup>
EPCROSS_DEVICE void sentinel_combine(const Exchange& x, const Call& call) {
    const Place p = place(x);
    __syncthreads();
    await_kernel_before();
    // all independent loads before any use
    const int token0 = min(p.warp / call.chunks, x.capacity - 1);
    const int first0 = p.warp % call.chunks * kLanes * kPerLane + p.lane;
    Ahead<kPeers> ahead;
    if constexpr (kPeers > 0) ahead.load(x, p, token0, first0);
    const State state = load_state(p);
    const RankMask received0 = load_mask(p.mine, x.received_mask_at, token0);
    const RankMask sent0 = load_mask(p.mine, x.sent_mask_at, token0);
    if (state.failed) return;
    const int items = state.most_tokens * call.chunks;
    for (int item = p.warp; item < items; item += p.warps) {
        const int token = item / call.chunks, first = item % call.chunks * kLanes * kPerLane + p.lane;
        if (item == p.warp) {
            if constexpr (kPeers > 0) ahead.send(x, p, token, first, received0);
            else send_partials<kPerLane, kGroup>(x, p, token, first, received0);
        } else {
            send_partials<kPerLane, kGroup>(x, p, token, first, load_mask(p.mine, x.received_mask_at, token));
        }
    }
    admit_kernel_after();
    const int set = static_cast<int>(state.combine_epoch & 1u);
    for (int item = p.warp; item < items; item += p.warps) {
        const int token = item / call.chunks, chunk = item % call.chunks;
        const RankMask from = item == p.warp ? received0 : load_mask(p.mine, x.received_mask_at, token);
        arm_records<kPerLane>(x, p, set, token, chunk * kLanes * kPerLane + p.lane, chunk == 0, from);
    }
    if (p.warp == 0 && p.lane == 0) store_u32(&p.control->dispatch_epoch, state.combine_epoch + 1u);
    Patience patience(x, p, WaitPhase::kCombine, state.combine_epoch);
    u8* out = reinterpret_cast<u8*>(call.out) + static_cast<i64>(p.local) * call.out_stride;
    for (int item = p.warp; item < call.tokens[p.local] * call.chunks; item += p.warps) {
        const int token = item / call.chunks, first = item % call.chunks * kLanes * kPerLane + p.lane;
        Sum sum[kPerLane];
        const RankMask from = item == p.warp ? sent0 : load_mask(p.mine, x.sent_mask_at, token);
        if (!add_partials<kPerLane, kGroup>(x, p, patience, token, first, from, sum)) return;
        u8* to = out + static_cast<i64>(token) * x.partial_vectors * kVectorBytes;
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
            const int i = first + j * kLanes;
            if (i < x.partial_vectors) store_plain(to + static_cast<i64>(i) * kVectorBytes, sum[j].rounded());
        }
    }
}

}  // namespace epcross
