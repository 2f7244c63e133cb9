// Sentinel, there: rows, ids and weights are pushed to the landing buffers of their destinations, and the landing words
// themselves are polled. No flag and no fence stand between a word's arrival and its use.
#pragma once

#include "escape.cuh"
#include "header.cuh"
#include "routing.cuh"
#include "wait.cuh"

namespace epcross {

#ifdef EPCROSS_STRICT_FENCES
/// Release and acquire for re-arming, in every thread, as the memory model of PTX asks for. By default the kernel
/// boundaries stand for them: `griddepcontrol.wait` returns when the kernel before, which re-armed, has ended and its
/// stores are performed in this GPU's memory, where peers' stores arrive later; and no store is issued before the polled
/// load that its execution depends on has returned.
EPCROSS_DEVICE void order_rearming() { fence_system(); }
#else
EPCROSS_DEVICE void order_rearming() {}
#endif

EPCROSS_DEVICE int set_of(u64 epoch) { return static_cast<int>(epoch & 1u); }

/// Send the own tokens. The epoch is read while the first row is on its way from memory.
template <int kPerLane>
EPCROSS_DEVICE void send_records(const Exchange& x, const Call& call, const Place& p, const u8* slot_rank) {
    const int tokens = call.tokens[p.local];
    const int chunks = (x.record_vectors + kLanes * kPerLane - 1) / (kLanes * kPerLane);
    u64 epoch = 0;
    bool known = false;
    for (int token = p.token; token < tokens; token += p.token_step) {
        for (int chunk = p.chunk; chunk < chunks; chunk += p.chunk_step) {
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
                epoch = load_word(&p.control->dispatch_epoch);
                const bool failed = has_failed(p);
                known = true;
                order_rearming();
                if (failed) return;
            }
            const int set = set_of(epoch);
            const int rank_of_id = rank_of(slot_rank, id);
            const bool escaped = any_reserved<kPerLane>(v);
            for (int i = p.peer; i < x.ep; i += p.peer_step) {
                const int to = p.above(x, i);
                const bool goes = __any_sync(kFull, rank_of_id == to);
                if (chunk == 0 && p.lane == 0) {
                    send_header(x, p, set, epoch, token, tokens, to, goes);
                    store_u32(p.mine + sent_at(x, token, to), goes);
                }
                if (!goes) continue;
                u8* there = workspace_of(x, to);
                u8* record = there + record_at(x, set, p.rank, token);
                if (to == p.rank) {  // ordered by the end of this kernel
                    store_vectors<kPerLane, false>(record, first, x.record_vectors, v);
                } else if (!escaped) {
                    store_vectors<kPerLane, true>(record, first, x.record_vectors, v);
                } else {
                    Vectors<kPerLane> all;
#pragma unroll
                    for (int j = 0; j < kPerLane; ++j) all.v[j] = v[j];
                    u8* bitmaps = there + escapes_at(x, set, p.rank, token);
                    send_escaped<kPerLane>(record, bitmaps, first, x.record_vectors, all);
                }
            }
        }
    }
    if (p.token != 0 || p.chunk != 0 || p.lane != 0) return;
    if (!known) {
        epoch = load_word(&p.control->dispatch_epoch);
        order_rearming();
    }
    if (p.peer == 0) store_word(&p.control->combine_epoch, epoch);
    if (tokens != 0 || has_failed(p)) return;
    for (int i = p.peer; i < x.ep; i += p.peer_step) send_header(x, p, set_of(epoch), epoch, 0, 0, p.above(x, i), false);
}

/// Await one warp's vectors of what `source` sends for `token`. The header and the row are polled together, so that the
/// row costs no second trip once the header is there. `count` is the source's tokens, -1 until known. False if a wait
/// expired.
template <int kPerLane>
EPCROSS_DEVICE bool await_record(const Exchange& x, const Place& p, Patience& patience, u64 epoch, int source, int token,
                                 int first, int& count) {
    const int set = set_of(epoch);
    const u8* header = p.mine + header_at(x, set, token, source);
    const u8* first_header = p.mine + header_at(x, set, 0, source);
    u8* record = p.mine + record_at(x, set, source, token);
    bool escaped = false;
    while (true) {
        const u64 h0 = count < 0 ? load_word(first_header) : 0;
        const u64 h = load_word(header);
        bool there = true, stand_in = false;
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
            const int i = first + j * kLanes;
            Vector v{0, 0};
            if (i < x.record_vectors) v = load_words(record + static_cast<i64>(i) * kVectorBytes);
            there &= arrived(v);
            stand_in |= maybe_escape(v.a) || maybe_escape(v.b);
        }
        if (count < 0 && is_of(h0, epoch)) count = tokens_in(h0);
        bool done = false;
        if (count >= 0) {
            done = token >= count;
            if (!done && is_of(h, epoch)) {
                done = !present_in(h) || there;
                escaped = present_in(h) && stand_in;
            }
        }
        if (!__any_sync(kFull, !done)) break;
        if (!patience.go_on(done ? -1 : source)) return false;
    }
    if (!__any_sync(kFull, escaped)) return true;
    u8* bitmaps = p.mine + escapes_at(x, set, source, token);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        const int i = first + j * kLanes;
        u8* bitmap = bitmaps + (first / kLanes + j) * kVectorBytes;
        while (!restore(record + static_cast<i64>(i) * kVectorBytes, bitmap, i < x.record_vectors)) {
            if (!patience.go_on(source)) return false;
        }
    }
    return true;
}

template <int kPerLane>
EPCROSS_DEVICE void await_records(const Exchange& x, const Place& p) {
    const int chunks = (x.record_vectors + kLanes * kPerLane - 1) / (kLanes * kPerLane);
    const u64 epoch = load_word(&p.control->dispatch_epoch);
    if (has_failed(p)) return;
    Patience patience(x, p, WaitPhase::kDispatch, epoch);
    for (int i = p.peer; i < x.ep - 1; i += p.peer_step) {
        const int source = p.below(x, i);
        int count = -1;
        for (int token = p.token; token < (count < 0 ? x.capacity : count); token += p.token_step) {
            for (int chunk = p.chunk; chunk < chunks; chunk += p.chunk_step) {
                const int first = chunk * kLanes * kPerLane + p.lane;
                if (!await_record<kPerLane>(x, p, patience, epoch, source, token, first, count)) return;
            }
        }
    }
    order_rearming();
}

template <int kPerLane>
EPCROSS_DEVICE void sentinel_dispatch(const Exchange& x, const Call& call) {
    const Place p = place(x, call);
    if (p.sends) {
        const u8* slot_rank = slot_ranks(x);
        __syncthreads();
        await_kernel_before();
        send_records<kPerLane>(x, call, p, slot_rank);
        admit_kernel_after();
    } else {
        await_kernel_before();
        admit_kernel_after();
        await_records<kPerLane>(x, p);
    }
}

}  // namespace epcross
