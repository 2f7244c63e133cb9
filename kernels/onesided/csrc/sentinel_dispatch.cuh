// Sentinel, there: rows, ids and weights are pushed to the landing buffers of their destinations, and the landing words
// themselves are polled. No flag and no fence stand between a word's arrival and its use.
#pragma once

#include "send.cuh"
#include "wait.cuh"

namespace epcross {

/// Await one warp's part of what `source` sends for `token`. The header and the row are polled together, so that the row
/// costs no second trip once the header is there. `count` is the source's tokens, -1 until known. False if a wait expired.
template <int kPerLane>
EPCROSS_DEVICE bool await_record(const Exchange& x, const Place& p, Patience& patience, u64 epoch, int source, int token,
                                 const Span<kPerLane>& span, int& count) {
    const int set = set_of(epoch);
    const u8* header = p.mine + header_at(x, set, token, source);
    const u8* first_header = p.mine + header_at(x, set, 0, source);
    u8* at = p.mine + record_at(x, set, source, token) + span.offset();
    bool escaped = false;
    while (true) {
        const u64 h0 = count < 0 ? load_word(first_header) : 0;
        const u64 h = load_word(header);
        Vector v[kPerLane];
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
            v[j] = {0, 0};
            if (span.inside(j)) v[j] = load_words(at + j * kLanes * kVectorBytes);
        }
        bool there = true, stand_in = false;
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
            there &= arrived(v[j]);
            stand_in |= maybe_escape(v[j].a) || maybe_escape(v[j].b);
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
    u8* bitmaps = p.mine + escapes_at(x, set, source, token) + span.group * kVectorBytes;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        while (!restore(at + j * kLanes * kVectorBytes, bitmaps + j * kVectorBytes, span.inside(j))) {
            if (!patience.go_on(source)) return false;
        }
    }
    return true;
}

template <int kPerLane>
EPCROSS_DEVICE void await_records(const Exchange& x, const Place& p) {
    const u64 epoch = load_word(&p.control->dispatch_epoch);
    if (has_failed(p)) return;
    Patience patience(x, p, WaitPhase::kDispatch, epoch);
    const int chunks = Span<kPerLane>::count(x);
    for (int i = p.peer; i < x.ep - 1; i += p.peer_step) {
        const int source = p.below(x, i);
        int count = -1;
        for (int token = p.token; token < (count < 0 ? x.capacity : count); token += p.token_step) {
            for (int chunk = p.chunk; chunk < chunks; chunk += p.chunk_step) {
                const Span<kPerLane> span(x, chunk, p.lane);
                if (!await_record<kPerLane>(x, p, patience, epoch, source, token, span, count)) return;
            }
        }
    }
    order_rearming();
}

template <int kPerLane>
EPCROSS_DEVICE void sentinel_dispatch(const Exchange& x, const Call& call) {
    const Place p = place<Roles::kHalves>(x, call);
    if (p.alternate) {
        await_kernel_before();
        admit_kernel_after();
        await_records<kPerLane>(x, p);
    } else {
        const u8* slot_rank = slot_ranks(x);
        __syncthreads();
        await_kernel_before();
        send_records<kPerLane, Protocol::kSentinel>(x, call, p, slot_rank);
        admit_kernel_after();
    }
}

}  // namespace epcross
