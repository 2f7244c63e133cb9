// Pushing the own tokens to their destinations: the same for both protocols, but for how words are stored.
#pragma once

#include "escape.cuh"
#include "header.cuh"
#include "routing.cuh"

namespace epcross {

enum class Protocol { kFence, kSentinel };

#ifdef EPCROSS_STRICT_FENCES
/// Release and acquire for re-arming, in every thread, as the memory model of PTX asks for. By default the kernel
/// boundaries stand for them: `griddepcontrol.wait` returns when the kernel before, which re-armed, has ended and its
/// stores are performed in this GPU's memory, where peers' stores arrive later; and no store is issued before the polled
/// load that its execution depends on has returned.
EPCROSS_DEVICE void order_rearming() { fence_system(); }
#else
EPCROSS_DEVICE void order_rearming() {}
#endif

/// Two landing sets take turns: a peer may send the next round while this rank still reads the last. Fence has one.
EPCROSS_DEVICE int set_of(u64 epoch) { return static_cast<int>(epoch & 1u); }

/// One warp's vectors of a record to one rank.
template <int kPerLane, Protocol kProtocol>
EPCROSS_DEVICE void send_vectors(const Exchange& x, const Place& p, int set, int token, int to,
                                 const Span<kPerLane>& span, const Vector (&v)[kPerLane], bool escaped) {
    u8* there = workspace_of(x, to);
    u8* record = there + record_at(x, set, p.rank, token);
    if (kProtocol == Protocol::kFence || to == p.rank) {  // to itself: ordered by the end of this kernel
        span.template store<false>(record, v);
    } else if (!escaped) {
        span.template store<true>(record, v);
    } else {
        Vectors<kPerLane> all;
        u32 inside = 0;
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
            all.v[j] = v[j];
            inside |= static_cast<u32>(span.inside(j)) << j;
        }
        u8* bitmaps = there + escapes_at(x, set, p.rank, token) + span.group * kVectorBytes;
        send_escaped<kPerLane>(record + span.offset(), bitmaps, inside, all);
    }
}

/// Send the own tokens. The epoch is read while the first row is on its way from memory. False, and nothing sent, if a
/// wait of an earlier kernel expired.
template <int kPerLane, Protocol kProtocol>
EPCROSS_DEVICE bool send_records(const Exchange& x, const Call& call, const Place& p, const u8* slot_rank) {
    const int tokens = call.tokens[p.local];
    const int chunks = Span<kPerLane>::count(x);
    u64 epoch = 0;
    bool known = false;
    for (int token = p.token; token < tokens; token += p.token_step) {
        for (int chunk = p.chunk; chunk < chunks; chunk += p.chunk_step) {
            // all independent loads before any use
            const Span<kPerLane> span(x, chunk, p.lane);
            const int id = own_id(x, call, p, token);
            Vector v[kPerLane];
            span.load(x, call, p, token, v);
            if (!known) {
                epoch = load_word(&p.control->dispatch_epoch);
                const bool failed = has_failed(p);
                known = true;
                order_rearming();
                if (failed) return false;
            }
            const int set = kProtocol == Protocol::kSentinel ? set_of(epoch) : 0;
            const int rank_of_id = rank_of(x, slot_rank, id);
            const bool escaped = kProtocol == Protocol::kSentinel && any_reserved<kPerLane>(v);
            for (int i = p.peer; i < x.ep; i += p.peer_step) {
                const int to = p.above(x, i);
                const bool goes = __any_sync(kFull, rank_of_id == to);
                if (chunk == 0 && p.lane == 0) {
                    send_header(x, p, set, epoch, token, tokens, to, goes);
                    store_u32(p.mine + sent_at(x, token, to), goes);
                }
                if (goes) send_vectors<kPerLane, kProtocol>(x, p, set, token, to, span, v, escaped);
            }
        }
    }
    if (p.token != 0 || p.chunk != 0 || p.lane != 0) return true;
    if (!known) {
        epoch = load_word(&p.control->dispatch_epoch);
        order_rearming();
        if (has_failed(p)) return false;
    }
    if (p.peer == 0) store_word(&p.control->combine_epoch, epoch);
    if (tokens != 0) return true;
    const int set = kProtocol == Protocol::kSentinel ? set_of(epoch) : 0;
    for (int i = p.peer; i < x.ep; i += p.peer_step) send_header(x, p, set, epoch, 0, 0, p.above(x, i), false);
    return true;
}

}  // namespace epcross
