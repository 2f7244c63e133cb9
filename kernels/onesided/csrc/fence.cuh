// Fence: plain stores, then a release and a flag; back, one flag and a pull.
//
// Every block of a source that sends raises a flag of its own at each destination, so no block waits for another of its
// rank; the first flag says how many there are. Flags carry the round's epoch and are compared for equality: epochs may
// wrap.
#pragma once

#include "escape.cuh"
#include "header.cuh"
#include "reduce.cuh"
#include "routing.cuh"
#include "wait.cuh"

namespace epcross {

inline constexpr int kMaxFlags = 256;  // per (source, destination)
inline constexpr int kFlagShift = 12;

EPCROSS_DEVICE u64 flag_of(u64 epoch, int flags) { return epoch << kFlagShift | static_cast<u32>(flags); }
EPCROSS_DEVICE bool raised(u64 flag, u64 epoch) { return (flag ^ epoch << kFlagShift) >> kFlagShift == 0; }

/// By one warp: await every flag of one source. What one lane acquired holds for all. False if a wait expired.
EPCROSS_DEVICE bool await_flags(const Place& p, Patience& patience, const u8* flags, int source, u64 epoch) {
    int count = 1;
    for (int base = 0; base < count; base += kLanes) {
        while (true) {
            const u64 flag = load_word_acquire(flags + (base + p.lane) * static_cast<i64>(sizeof(u64)));
            if (base == 0) {
                const u64 first = __shfl_sync(kFull, flag, 0);
                if (raised(first, epoch)) count = static_cast<int>(static_cast<u32>(first) & ((1u << kFlagShift) - 1u));
            }
            if (!__any_sync(kFull, base + p.lane < count && !raised(flag, epoch))) break;
            if (!patience.go_on(source)) return false;
        }
    }
    __syncwarp();
    return true;
}

/// Push the own tokens that go to one peer.
template <int kPerLane>
EPCROSS_DEVICE void push_records(const Exchange& x, const Call& call, const Place& p, const u8* slot_rank, u64 epoch,
                                 int to) {
    const int tokens = call.tokens[p.local];
    const int chunks = (x.record_vectors + kLanes * kPerLane - 1) / (kLanes * kPerLane);
    u8* there = workspace_of(x, to);
    for (int token = p.token; token < tokens; token += p.token_step) {
        for (int chunk = p.chunk; chunk < chunks; chunk += p.chunk_step) {
            const int first = chunk * kLanes * kPerLane + p.lane;
            const int id = own_id(x, call, p, token);
            Vector v[kPerLane];
#pragma unroll
            for (int j = 0; j < kPerLane; ++j) {
                const int i = first + j * kLanes;
                v[j] = i < x.record_vectors ? record_vector(x, call, p, token, i) : Vector{0, 0};
            }
            const bool goes = __any_sync(kFull, rank_of(slot_rank, id) == to);
            if (chunk == 0 && p.lane == 0) {
                send_header(x, p, 0, epoch, token, tokens, to, goes);
                store_u32(p.mine + sent_at(x, token, to), goes);
            }
            if (goes) store_vectors<kPerLane, false>(there + record_at(x, 0, p.rank, token), first, x.record_vectors, v);
        }
    }
}

template <int kPerLane>
EPCROSS_DEVICE void send_all(const Exchange& x, const Call& call, const Place& p, const u8* slot_rank) {
    const u64 epoch = load_word(&p.control->dispatch_epoch);
    if (has_failed(p)) return;
    const int warps = static_cast<int>(blockDim.x) / kLanes;
    const int flag = p.token * call.chunk_blocks + p.chunk / warps, flags = p.token_step * call.chunk_blocks;
    for (int i = p.peer; i < x.ep; i += p.peer_step) {
        const int to = p.above(x, i);
        push_records<kPerLane>(x, call, p, slot_rank, epoch, to);
        if (call.tokens[p.local] == 0 && p.token == 0 && p.chunk == 0 && p.lane == 0) {
            send_header(x, p, 0, epoch, 0, 0, to, false);
        }
        if (to == p.rank) continue;
        __syncthreads();  // every store of this block for that peer came before
        if (threadIdx.x != 0) continue;
        // Release: the block's rows and headers, then its flag. Hazard: a row read before it is there.
        const i64 at = x.dispatch_flags_at + (p.rank * kMaxFlags + flag) * static_cast<i64>(sizeof(u64));
        store_word_release(workspace_of(x, to) + at, flag_of(epoch, flags));
    }
    if (p.first() && p.lane == 0) store_word(&p.control->combine_epoch, epoch);
}

/// One warp a peer waits, so that the kernel ends when every row of this round is there.
EPCROSS_DEVICE void await_all(const Exchange& x, const Place& p) {
    if (p.token != 0 || p.chunk != 0) return;
    const u64 epoch = load_word(&p.control->dispatch_epoch);
    if (has_failed(p)) return;
    Patience patience(x, p, WaitPhase::kDispatch, epoch);
    for (int i = p.peer; i < x.ep - 1; i += p.peer_step) {
        const int source = p.below(x, i);
        const i64 at = x.dispatch_flags_at + source * kMaxFlags * static_cast<i64>(sizeof(u64));
        if (!await_flags(p, patience, p.mine + at, source, epoch)) return;
    }
}

template <int kPerLane>
EPCROSS_DEVICE void fence_dispatch(const Exchange& x, const Call& call) {
    const Place p = place(x, call);
    if (p.sends) {
        const u8* slot_rank = slot_ranks(x);
        __syncthreads();
        await_kernel_before();
        send_all<kPerLane>(x, call, p, slot_rank);
        admit_kernel_after();
    } else {
        await_kernel_before();
        admit_kernel_after();
        await_all(x, p);
    }
}

/// By one warp: await the combine flags of the ranks in a mask, a lane each. False if a wait expired.
EPCROSS_DEVICE bool await_ranks(const Exchange& x, const Place& p, Patience& patience, RankMask ranks, u64 epoch) {
#pragma unroll
    for (int w = 0; w < 3; ++w) {
        const u32 bits = w == 0 ? ranks.w0 : w == 1 ? ranks.w1 : ranks.w2;
        if (bits == 0) continue;
        const int rank = w * kLanes + p.lane;
        bool pending = (bits >> p.lane & 1u) && rank != p.rank;
        while (true) {
            if (pending) {
                const u64 flag = load_word_acquire(p.mine + x.combine_flags_at + rank * static_cast<i64>(sizeof(u64)));
                pending = !raised(flag, epoch);
            }
            if (!__any_sync(kFull, pending)) break;
            if (!patience.go_on(pending ? rank : -1)) return false;
        }
    }
    __syncwarp();  // what one lane acquired holds for all
    return true;
}

/// Pull and add the partials of one own token, ranks ascending, kGroup at a time.
template <int kPerLane, int kGroup>
EPCROSS_DEVICE void pull_partials(const Exchange& x, const Place& p, int token, int first, RankMask from,
                                  Sum (&sum)[kPerLane]) {
    const i64 at = partial_at(x, p.rank, token) + static_cast<i64>(first) * kVectorBytes;
    while (from.any()) {
        int rank[kGroup];
        Vector v[kGroup][kPerLane];
#pragma unroll
        for (int g = 0; g < kGroup; ++g) {
            rank[g] = from.pop();
            if (rank[g] < 0) continue;
#pragma unroll
            for (int j = 0; j < kPerLane; ++j) {
                if (first + j * kLanes >= x.partial_vectors) continue;
                v[g][j] = load_plain(workspace_of(x, rank[g]) + at + j * kLanes * kVectorBytes);
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

/// By one warp: tell the peers that what they may pull is there, then await the same of all of them, also of ranks that
/// hold nothing of ours: the next rows may then go there.
EPCROSS_DEVICE void exchange_flags(const Exchange& x, const Place& p, Patience& patience, u64 epoch) {
    // Release: the experts' partials (their kernel has ended), and their reading of our landing rows, then the flag.
    // Hazards: a partial pulled before it is there; the next rows over some that are still read.
    for (int i = p.peer * kLanes + p.lane; i < x.ep - 1; i += p.peer_step * kLanes) {
        const i64 at = x.combine_flags_at + p.rank * static_cast<i64>(sizeof(u64));
        store_word_release(workspace_of(x, p.above(x, i)) + at, flag_of(epoch, 1));
    }
    RankMask all{0, 0, 0};
    all.w0 = kFull >> max(0, 32 - x.ep);
    if (x.ep > 32) all.w1 = kFull >> max(0, 64 - x.ep);
    if (x.ep > 64) all.w2 = kFull >> max(0, 96 - x.ep);
    await_ranks(x, p, patience, all, epoch);
}

template <int kPerLane, int kGroup>
EPCROSS_DEVICE void fence_combine(const Exchange& x, const Call& call) {
    const Place p = place(x, call);
    await_kernel_before();
    const u64 epoch = load_word(&p.control->combine_epoch);
    const bool failed = has_failed(p);
    const int own = call.tokens[p.local];
    RankMask from{0, 0, 0};
    if (p.own_token() < own && !p.sends) from = sent_to(x, p, p.own_token());
    if (failed) return;
    admit_kernel_after();
    Patience patience(x, p, WaitPhase::kCombine, epoch);
    if (p.sends) {
        if (p.token != 0 || p.chunk != 0) return;
        exchange_flags(x, p, patience, epoch);
        if (p.first() && p.lane == 0) store_word(&p.control->dispatch_epoch, epoch + 1u);
        return;
    }
    const int chunks = (x.partial_vectors + kLanes * kPerLane - 1) / (kLanes * kPerLane);
    for (int token = p.own_token(); token < own; token += p.own_token_step()) {
        if (token != p.own_token()) from = sent_to(x, p, token);
        if (!await_ranks(x, p, patience, from, epoch)) return;
        for (int chunk = p.chunk; chunk < chunks; chunk += p.chunk_step) {
            const int first = chunk * kLanes * kPerLane + p.lane;
            Sum sum[kPerLane];
            pull_partials<kPerLane, kGroup>(x, p, token, first, from, sum);
            store_sums<kPerLane>(x, call, p, token, first, sum);
        }
    }
}

}  // namespace epcross
