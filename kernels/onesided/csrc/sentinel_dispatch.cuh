// Sentinel, there: rows, ids and weights are pushed to the landing buffers of their destinations, and the landing words
// themselves are polled. No flag and no fence stand between a word's arrival and its use.
#pragma once

#include "escape.cuh"
#include "header.cuh"
#include "record.cuh"

namespace epcross {

#ifdef EPCROSS_WITHOUT_FENCES  // to measure what they cost, never in use
EPCROSS_DEVICE void release_rearming() {}
EPCROSS_DEVICE void acquire_rearming() {}
#else
/// Release: re-arming in rounds before (the kernels before have ended) is seen before this round's words, so before any
/// word that a peer sends because it saw them; else a late re-arming would wipe that word out.
EPCROSS_DEVICE void release_rearming() { fence_system(); }
/// Acquire: what this rank pushes later (partials, and the rows of the next round) comes after the re-arming that its
/// peers did before they sent this round. No data waits for it.
EPCROSS_DEVICE void acquire_rearming() { fence_system(); }
#endif

/// Send the own tokens; nothing if a wait of an earlier kernel expired. The state is read while the first row is on its
/// way from memory.
template <int kPerLane>
EPCROSS_DEVICE State send_records(const Exchange& x, const Call& call, const Place& p, const u8* slot_rank) {
    const int tokens = call.tokens[p.local];
    const int items = tokens * call.chunks;
    State state{0, 0, 0, false};
    bool known = false;
    for (int item = p.warp; item < items; item += p.warps) {
        const int token = item / call.chunks, chunk = item % call.chunks;
        const int first = chunk * kLanes * kPerLane + p.lane;
        // all independent loads before any use
        const int id = own_id(x, call, p, token);
        Vector v[kPerLane];
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
            const int i = first + j * kLanes;
            v[j] = i < x.record_vectors ? record_vector(x, call, p, token, i) : Vector{0, 0};
        }
        if (!known) {
            state = load_state(p);
            known = true;
            release_rearming();
            if (state.failed) return state;
        }
        const int set = static_cast<int>(state.dispatch_epoch & 1u);
        RankMask to = mask_of(id >= 0 ? slot_rank[id] : -1, x.ep);
        if (chunk == 0) {
            send_headers(x, p, set, token, tokens, to);
            if (p.lane == 0) store_mask(p.mine, x.sent_mask_at, token, to);
        }
        const i64 at = Places{x}.record(set, p.rank, token) + static_cast<i64>(first) * kVectorBytes;
        if (to.has(p.rank)) {  // to itself: ordered by the end of this kernel
            to.drop(p.rank);
#pragma unroll
            for (int j = 0; j < kPerLane; ++j) {
                if (first + j * kLanes < x.record_vectors) store_plain(p.mine + at + j * kLanes * kVectorBytes, v[j]);
            }
        }
        if (!to.any()) continue;
        escape<kPerLane>(x, p, set, token, first, to, v);
        for (int r = to.pop(); r >= 0; r = to.pop()) {
            u8* there = p.of(r) + at;
#pragma unroll
            for (int j = 0; j < kPerLane; ++j) {
                if (first + j * kLanes < x.record_vectors) store_words(there + j * kLanes * kVectorBytes, v[j]);
            }
        }
    }
    if (!known) {
        state = load_state(p);
        release_rearming();
    }
    if (tokens == 0 && p.warp == 0 && !state.failed) {
        send_headers(x, p, static_cast<int>(state.dispatch_epoch & 1u), 0, 0, {0, 0, 0});
    }
    return state;
}

/// One source's vectors of a record, as this lane sees them now. Vectors past the end count as there.
template <int kPerLane>
struct Look {
    Vector v[kPerLane];

    EPCROSS_DEVICE void at(const Exchange& x, const u8* record, int first) {
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
            const int i = first + j * kLanes;
            v[j] = i < x.record_vectors ? load_words(record + static_cast<i64>(i) * kVectorBytes) : Vector{0, 0};
        }
    }
    EPCROSS_DEVICE bool there() const {
        bool all = true;
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) all &= arrived(v[j]);
        return all;
    }
    EPCROSS_DEVICE bool escaped() const {
        bool any = false;
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) any |= v[j].a == kEscape || v[j].b == kEscape;
        return any;
    }
};

/// Await what up to kPeers peers send for one token, looking at headers and rows in the same turn: for few ranks, where a
/// row is more likely than not. `count` [kPeers] is filled with each peer's tokens. False if a wait expired.
template <int kPerLane, int kPeers>
EPCROSS_DEVICE bool await_few(const Exchange& x, const Place& p, Patience& patience, int set, int token, int first,
                              int (&count)[kPeers], RankMask& from) {
    const Places at{x};
    u32 pending = (1u << (x.ep - 1)) - 1u, escaped = 0;
    while (true) {
        u64 first_header[kPeers], header[kPeers];
        Look<kPerLane> look[kPeers];
#pragma unroll
        for (int g = 0; g < kPeers; ++g) {
            if (!(pending >> g & 1u)) continue;
            const int source = g + (g >= p.rank);
            if (count[g] < 0 || token == 0) first_header[g] = load_word(p.mine + at.header(set, 0, source));
            header[g] = token == 0 ? first_header[g] : load_word(p.mine + at.header(set, token, source));
            look[g].at(x, p.mine + at.record(set, source, token), first);
        }
        int missing = -1;
#pragma unroll
        for (int g = 0; g < kPeers; ++g) {
            if (!(pending >> g & 1u)) continue;
            const int source = g + (g >= p.rank);
            if (count[g] < 0 && first_header[g] != kArmed) count[g] = tokens_in(first_header[g]);
            bool done = count[g] >= 0 && token >= count[g];
            if (!done && count[g] >= 0 && header[g] != kArmed) {
                done = !present_in(header[g]) || look[g].there();
                if (done && present_in(header[g])) {
                    from.add(source);
                    if (look[g].escaped()) escaped |= 1u << g;
                }
            }
            if (done) pending &= ~(1u << g);
            else missing = source;
        }
        if (!__any_sync(kFull, pending != 0)) break;
        if (!patience.go_on(missing)) return false;
    }
    if (!__any_sync(kFull, escaped != 0)) return true;
#pragma unroll
    for (int g = 0; g < kPeers; ++g) {
        if (!__any_sync(kFull, escaped >> g & 1u)) continue;
        if (!restore<kPerLane>(x, p, patience, set, g + (g >= p.rank), token, first)) return false;
    }
    return true;
}

/// Await the records of the ranks `from`, kGroup at a time. False if a wait expired.
template <int kPerLane, int kGroup>
EPCROSS_DEVICE bool await_records(const Exchange& x, const Place& p, Patience& patience, int set, int token, int first,
                                  RankMask from) {
    while (from.any()) {
        int source[kGroup];
        u32 pending = 0, escaped = 0;
#pragma unroll
        for (int g = 0; g < kGroup; ++g) {
            source[g] = from.pop();
            if (source[g] >= 0) pending |= 1u << g;
        }
        while (true) {
            Look<kPerLane> look[kGroup];
#pragma unroll
            for (int g = 0; g < kGroup; ++g) {
                if (pending >> g & 1u) look[g].at(x, p.mine + Places{x}.record(set, source[g], token), first);
            }
            int missing = -1;
#pragma unroll
            for (int g = 0; g < kGroup; ++g) {
                if (!(pending >> g & 1u)) continue;
                if (look[g].there()) {
                    pending &= ~(1u << g);
                    if (look[g].escaped()) escaped |= 1u << g;
                } else {
                    missing = source[g];
                }
            }
            if (!__any_sync(kFull, pending != 0)) break;
            if (!patience.go_on(missing)) return false;
        }
        if (!__any_sync(kFull, escaped != 0)) continue;
#pragma unroll
        for (int g = 0; g < kGroup; ++g) {
            if (!__any_sync(kFull, escaped >> g & 1u)) continue;
            if (!restore<kPerLane>(x, p, patience, set, source[g], token, first)) return false;
        }
    }
    return true;
}

/// The end of one token for this warp: who sent it, for combine and for the experts.
EPCROSS_DEVICE void note_received(const Exchange& x, const Call& call, const Place& p, int token, RankMask from) {
    __syncwarp();  // the first lane of this warp stored the mask
    if (token < call.tokens[p.local] && load_mask(p.mine, x.sent_mask_at, token).has(p.rank)) from.add(p.rank);
    if (p.lane == 0) store_mask(p.mine, x.received_mask_at, token, from);
}

EPCROSS_DEVICE void end_dispatch(const Place& p, u32 epoch, int most_tokens) {
    if (p.warp != 0 || p.lane != 0) return;
    store_u32(&p.control->most_tokens, static_cast<u32>(most_tokens));
    store_u32(&p.control->set_index, epoch & 1u);
    store_u32(&p.control->combine_epoch, epoch);
}

/// kPeers > 0: at most so many peers, headers and rows polled together. kPeers == 0: headers first, then rows by groups.
template <int kPerLane, int kPeers, int kGroup>
EPCROSS_DEVICE void sentinel_dispatch(const Exchange& x, const Call& call) {
    const Place p = place(x);
    const u8* slot_rank = slot_ranks(x);
    __syncthreads();
    await_kernel_before();
    const State state = send_records<kPerLane>(x, call, p, slot_rank);
    admit_kernel_after();
    if (state.failed) return;
    const u32 epoch = state.dispatch_epoch;
    const int set = static_cast<int>(epoch & 1u);
    const int own = call.tokens[p.local];
    Patience patience(x, p, WaitPhase::kDispatch, epoch);
    int most = x.capacity;
    bool counted = false;
    Counts<kPeers> counts;
    for (int item = p.warp; item < most * call.chunks; item += p.warps) {
        const int token = item / call.chunks, chunk = item % call.chunks;
        const int first = chunk * kLanes * kPerLane + p.lane;
        RankMask from{0, 0, 0};
        if constexpr (kPeers > 0) {
            if (!await_few<kPerLane, kPeers>(x, p, patience, set, token, first, counts.of, from)) return;
            // a lane adds a source when its own vectors are there; after the loop all lanes have the same
        } else {
            if (!await_headers(x, p, patience, set, token, counts, from)) return;
            if (!await_records<kPerLane, kGroup>(x, p, patience, set, token, first, from)) return;
        }
        if (!counted) {
            most = max(own, counts.most());
            counted = true;
        }
        if (chunk == 0 && token < most) note_received(x, call, p, token, from);
    }
    end_dispatch(p, epoch, most);
    acquire_rearming();
}

}  // namespace epcross
