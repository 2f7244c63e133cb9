// Sentinel, and back: partials are pushed to the source of their token, which polls and adds them.
//
// The landing words of dispatch are armed again here, while partials are on their way: the experts are done with them,
// and their senders use this set again only after our next dispatch. A returned word is armed as soon as it was read: its
// sender writes it again only after our next dispatch too.
#pragma once

#include "reduce.cuh"
#include "routing.cuh"
#include "send.cuh"
#include "wait.cuh"

namespace epcross {

EPCROSS_DEVICE u64 sendable(u64 word) { return word == kArmed ? kOtherNans : word; }

/// Push the partials of what was received, and arm what it was received in.
template <int kPerLane>
EPCROSS_DEVICE void send_partials(const Exchange& x, const Place& p) {
    const int vectors = max(x.partial_vectors, x.record_vectors);
    const int chunks = (vectors + kLanes * kPerLane - 1) / (kLanes * kPerLane);
    u64 epoch = 0;
    bool known = false;
    for (int i = p.peer; i < x.ep - 1; i += p.peer_step) {
        const int to = p.above(x, i);
        int count = x.capacity;
        for (int token = p.token; token < count; token += p.token_step) {
            for (int chunk = p.chunk; chunk < chunks; chunk += p.chunk_step) {
                const int first = chunk * kLanes * kPerLane + p.lane;
                // all independent loads before any use; the headers of both sets, as the epoch is not known yet
                const u8* partial = p.mine + partial_at(x, to, token) + static_cast<i64>(first) * kVectorBytes;
                Vector v[kPerLane];
#pragma unroll
                for (int j = 0; j < kPerLane; ++j) {
                    v[j] = {0, 0};
                    if (first + j * kLanes < x.partial_vectors) v[j] = load_plain(partial + j * kLanes * kVectorBytes);
                }
                const u64 even = load_word(p.mine + header_at(x, 0, token, to));
                const u64 odd = load_word(p.mine + header_at(x, 1, token, to));
                if (!known) {
                    epoch = load_word(&p.control->combine_epoch);
                    known = true;
                    if (has_failed(p)) return;
                }
                const u64 header = set_of(epoch) ? odd : even;
                if (!is_of(header, epoch)) {  // past the source's last token
                    count = 0;
                    break;
                }
                count = tokens_in(header);
                if (!present_in(header)) continue;
                u8* there = workspace_of(x, to) + return_at(x, p.rank, token) + static_cast<i64>(first) * kVectorBytes;
#pragma unroll
                for (int j = 0; j < kPerLane; ++j) {
                    if (first + j * kLanes >= x.partial_vectors) continue;
                    store_words(there + j * kLanes * kVectorBytes, {sendable(v[j].a), sendable(v[j].b)});
                }
                u8* record = p.mine + record_at(x, set_of(epoch), to, token) + static_cast<i64>(first) * kVectorBytes;
#pragma unroll
                for (int j = 0; j < kPerLane; ++j) {
                    if (first + j * kLanes >= x.record_vectors) continue;
                    store_words(record + j * kLanes * kVectorBytes, {kArmed, kArmed});
                }
            }
        }
    }
    if (p.first() && !has_failed(p)) {
        store_word(&p.control->dispatch_epoch, load_word(&p.control->combine_epoch) + 1u);
    }
}

/// Await, add and arm again the partials of one own token, ranks ascending, kGroup at a time. False if a wait expired.
template <int kPerLane, int kGroup>
EPCROSS_DEVICE bool add_partials(const Exchange& x, const Place& p, Patience& patience, int token, int first,
                                 RankMask from, Sum (&sum)[kPerLane]) {
    while (from.any()) {
        u8* row[kGroup];
        int rank[kGroup];
        Vector v[kGroup][kPerLane];
#pragma unroll
        for (int g = 0; g < kGroup; ++g) {
            rank[g] = from.pop();
            if (rank[g] < 0) continue;
            row[g] = p.mine + (rank[g] == p.rank ? partial_at(x, rank[g], token) : return_at(x, rank[g], token)) +
                     static_cast<i64>(first) * kVectorBytes;
        }
        while (true) {
#pragma unroll
            for (int g = 0; g < kGroup; ++g) {
                if (rank[g] < 0) continue;
#pragma unroll
                for (int j = 0; j < kPerLane; ++j) {
                    v[g][j] = {0, 0};
                    if (first + j * kLanes < x.partial_vectors) v[g][j] = load_words(row[g] + j * kLanes * kVectorBytes);
                }
            }
            int missing = -1;
#pragma unroll
            for (int g = 0; g < kGroup; ++g) {
                if (rank[g] < 0 || rank[g] == p.rank) continue;
#pragma unroll
                for (int j = 0; j < kPerLane; ++j) {
                    if (!arrived(v[g][j])) missing = rank[g];
                }
            }
            if (!__any_sync(kFull, missing >= 0)) break;
            if (!patience.go_on(missing)) return false;
        }
#pragma unroll
        for (int g = 0; g < kGroup; ++g) {
            if (rank[g] < 0) continue;
#pragma unroll
            for (int j = 0; j < kPerLane; ++j) {
                if (first + j * kLanes >= x.partial_vectors) continue;
                sum[j].add(v[g][j]);
                if (rank[g] != p.rank) store_words(row[g] + j * kLanes * kVectorBytes, {kArmed, kArmed});
            }
        }
    }
    return true;
}

template <int kPerLane, int kGroup>
EPCROSS_DEVICE void receive_partials(const Exchange& x, const Call& call, const Place& p) {
    const u64 epoch = load_word(&p.control->combine_epoch);
    const bool failed = has_failed(p);
    Patience patience(x, p, WaitPhase::kCombine, epoch);
    const int chunks = (x.partial_vectors + kLanes * kPerLane - 1) / (kLanes * kPerLane);
    for (int token = p.own_token(); token < call.tokens[p.local]; token += p.own_token_step()) {
        const RankMask from = sent_to(x, p, token);
        if (failed) return;
        for (int chunk = p.chunk; chunk < chunks; chunk += p.chunk_step) {
            const int first = chunk * kLanes * kPerLane + p.lane;
            Sum sum[kPerLane];
            if (!add_partials<kPerLane, kGroup>(x, p, patience, token, first, from, sum)) return;
            store_sums<kPerLane>(x, call, p, token, first, sum);
        }
    }
}

template <int kPerLane, int kGroup>
EPCROSS_DEVICE void sentinel_combine(const Exchange& x, const Call& call) {
    const Place p = place<Roles::kHalves>(x, call);
    await_kernel_before();
    if (!p.alternate) {
        send_partials<kPerLane>(x, p);
        admit_kernel_after();
    } else {
        admit_kernel_after();
        receive_partials<kPerLane, kGroup>(x, call, p);
    }
}

}  // namespace epcross
