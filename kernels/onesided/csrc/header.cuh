// Headers of Sentinel: one word per (token, source), sent to every peer. It says how many tokens its source has in this
// round, and whether this token comes here. That of token 0 is always sent, so everybody learns the count.
#pragma once

#include "record.cuh"
#include "routing.cuh"
#include "wait.cuh"

namespace epcross {

/// Its upper half is no count when armed: counts are at most the capacity.
EPCROSS_DEVICE u64 header_of(int tokens, bool present) {
    return static_cast<u64>(static_cast<u32>(tokens)) << 32 | (present ? 1u : 0u);
}
EPCROSS_DEVICE int tokens_in(u64 header) { return static_cast<int>(header >> 32); }
EPCROSS_DEVICE bool present_in(u64 header) { return header & 1u; }

/// This lane's id of a token; -1 past top_k.
EPCROSS_DEVICE int own_id(const Exchange& x, const Call& call, const Place& p, int token) {
    if (p.lane >= x.top_k) return -1;
    const i32* ids = reinterpret_cast<const i32*>(input(call.ids, call.ids_stride, p.local));
    return ids[static_cast<i64>(token) * x.top_k + p.lane];
}

/// By a whole warp: the header of one token to every peer.
EPCROSS_DEVICE void send_headers(const Exchange& x, const Place& p, int set, int token, int tokens, RankMask to) {
    const i64 at = Places{x}.header(set, token, p.rank);
    for (int r = p.lane; r < x.ep; r += kLanes) {
        if (r != p.rank) store_word(p.of(r) + at, header_of(tokens, to.has(r)));
    }
}

/// Tokens of the peers, each known once its first header arrived. For few peers every lane holds all of them.
template <int kPeers>
struct Counts {
    int of[kPeers];
    EPCROSS_DEVICE Counts() {
#pragma unroll
        for (int g = 0; g < kPeers; ++g) of[g] = -1;
    }
    EPCROSS_DEVICE int most() const {
        int m = 0;
#pragma unroll
        for (int g = 0; g < kPeers; ++g) m = max(m, of[g]);
        return m;
    }
};

/// For many peers a lane holds those of ranks lane, lane + 32 and lane + 64.
template <>
struct Counts<0> {
    int of[3] = {-1, -1, -1};
    EPCROSS_DEVICE int most() const { return __reduce_max_sync(kFull, max(of[0], max(of[1], of[2]))); }
};

/// Await the headers of one token from every peer, a lane each; `from` gets those that sent it. False if a wait expired.
EPCROSS_DEVICE bool await_headers(const Exchange& x, const Place& p, Patience& patience, int set, int token,
                                  Counts<0>& counts, RankMask& from) {
    u32 bits[3] = {0, 0, 0};
#pragma unroll
    for (int w = 0; w < 3; ++w) {
        if (w * kLanes >= x.ep) break;
        const int source = w * kLanes + p.lane;
        bool pending = source < x.ep && source != p.rank, present = false;
        while (true) {
            if (pending) {
                const u8* at = p.mine + Places{x}.header(set, token, source);
                u64 first = 0;
                if (counts.of[w] < 0) first = load_word(p.mine + Places{x}.header(set, 0, source));
                const u64 header = load_word(at);
                if (counts.of[w] < 0 && first != kArmed) counts.of[w] = tokens_in(first);
                if (counts.of[w] >= 0) {
                    if (token >= counts.of[w]) {
                        pending = false;
                    } else if (header != kArmed) {
                        pending = false;
                        present = present_in(header);
                    }
                }
            }
            if (!__any_sync(kFull, pending)) break;
            if (!patience.go_on(pending ? source : -1)) return false;
        }
        bits[w] = __ballot_sync(kFull, present);
    }
    from = {bits[0], bits[1], bits[2]};
    return true;
}

}  // namespace epcross
