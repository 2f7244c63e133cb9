// Fence: plain stores, then a release and a flag; back, one flag and a pull.
//
// Every block of a source that sends raises a flag of its own at each destination, so no block waits for another of its
// rank; the first flag says how many there are. Flags carry the round's epoch and are compared for equality: epochs may
// wrap.
#pragma once

#include "reduce.cuh"
#include "send.cuh"
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

/// Send the own tokens, then tell every peer that this block's part is there.
template <int kPerLane>
EPCROSS_DEVICE void send_all(const Exchange& x, const Call& call, const Place& p, const u8* slot_rank) {
    const bool works = send_records<kPerLane, Protocol::kFence>(x, call, p, slot_rank);
    __syncthreads();  // every store of this block came before
    const int warps = static_cast<int>(blockDim.x) / kLanes;
    if (!works || p.chunk % warps != 0) return;
    const u64 epoch = load_word(&p.control->dispatch_epoch);
    const int flag = p.token * call.chunk_blocks + p.chunk / warps, flags = p.token_step * call.chunk_blocks;
    const i64 at = x.dispatch_flags_at + (p.rank * kMaxFlags + flag) * static_cast<i64>(sizeof(u64));
    for (int i = p.peer + p.lane * p.peer_step; i < x.ep - 1; i += kLanes * p.peer_step) {
        // Release: the block's rows and headers, then its flag. Hazard: a row read before it is there.
        store_word_release(workspace_of(x, p.above(x, i)) + at, flag_of(epoch, flags));
    }
}

/// By one warp a peer: wait, so that the kernel ends when every row of this round is there.
EPCROSS_DEVICE void await_all(const Exchange& x, const Place& p) {
    if (p.chunk != 0) return;
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
    const Place p = place<Roles::kFirstAlone>(x, call);
    if (!p.alternate) {
        await_kernel_before();
        admit_kernel_after();
        await_all(x, p);
    } else {
        const u8* slot_rank = slot_ranks(x);
        __syncthreads();
        await_kernel_before();
        send_all<kPerLane>(x, call, p, slot_rank);
        admit_kernel_after();
    }
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

/// By one warp: await the combine flags of all ranks, also of those that hold nothing of ours: the next rows may then go
/// there. False if a wait expired.
EPCROSS_DEVICE bool await_everyone(const Exchange& x, const Place& p, Patience& patience, u64 epoch) {
    for (int base = 0; base < x.ep; base += kLanes) {
        const int rank = base + p.lane;
        bool pending = rank < x.ep && rank != p.rank;
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

/// By one warp: tell the peers that the partials are there and the rows were read.
EPCROSS_DEVICE void tell_everyone(const Exchange& x, const Place& p, u64 epoch) {
    // Release: the experts' partials (their kernel has ended), and their reading of our landing rows, then the flag.
    // Hazards: a partial pulled before it is there; the next rows over some that are still read.
    for (int i = p.peer + p.lane * p.peer_step; i < x.ep - 1; i += kLanes * p.peer_step) {
        const i64 at = x.combine_flags_at + p.rank * static_cast<i64>(sizeof(u64));
        store_word_release(workspace_of(x, p.above(x, i)) + at, flag_of(epoch, 1));
    }
}

template <int kPerLane, int kGroup>
EPCROSS_DEVICE void fence_combine(const Exchange& x, const Call& call) {
    const Place p = place<Roles::kFirstAlone>(x, call);
    await_kernel_before();
    admit_kernel_after();
    const u64 epoch = load_word(&p.control->combine_epoch);
    const bool failed = has_failed(p);
    Patience patience(x, p, WaitPhase::kCombine, epoch);
    if (failed) return;
    if (!p.alternate) {
        if (p.chunk != 0) return;
        tell_everyone(x, p, epoch);
        if (!await_everyone(x, p, patience, epoch)) return;
        if (p.first()) store_word(&p.control->dispatch_epoch, epoch + 1u);
        return;
    }
    const int tokens = call.tokens[p.local];
    int token = p.own_token();
    if (token >= tokens) return;
    RankMask next = sent_to(x, p, token);
    if (!await_everyone(x, p, patience, epoch)) return;
    const int chunks = (x.partial_vectors + kLanes * kPerLane - 1) / (kLanes * kPerLane);
    while (token < tokens) {
        const RankMask from = next;
        const int later = token + p.own_token_step();
        if (later < tokens) next = sent_to(x, p, later);
        for (int chunk = p.chunk; chunk < chunks; chunk += p.chunk_step) {
            const int first = chunk * kLanes * kPerLane + p.lane;
            Sum sum[kPerLane];
            pull_partials<kPerLane, kGroup>(x, p, token, first, from, sum);
            store_sums<kPerLane>(x, call, p, token, first, sum);
        }
        token = later;
    }
}

}  // namespace epcross
