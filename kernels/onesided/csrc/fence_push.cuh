// Fence, and back for many tokens: partials are pushed to the source of their token, since stores cross a link faster than
// loads. Nothing is armed: each (token, rank) has a flag of its own at the source, which carries the epoch.
//
// Why words may be used again. `returns` and its flags: a peer pushes in its combine kernel, which began after its dispatch
// kernel had awaited our dispatch flags of the same round; those we raise in a kernel that began after our combine of the
// round before, with all its loads, had ended. Partials: the experts that write the next ones run in a later kernel than
// this. Landing rows: as where partials are pulled, the combine flag, from everybody to everybody.
#pragma once

#include "fence.cuh"

namespace epcross {

/// Push the partials of what came from peers: a block takes whole rows, kTokens at a time, and raises a flag for each.
///
/// Headers may be those of the next round already: a source sends them once it has all that it awaits from here. Then
/// nothing is left to push to it, so a header of another epoch counts as one of a token that did not come. The warps of a
/// block agree on what came: while a row of this turn has no flag, its source is not done.
template <int kPerLane, int kTokens>
EPCROSS_DEVICE void push_partials(const Exchange& x, const Place& p, u64 epoch) {
    constexpr int kHeld = kTokens < 2 ? kTokens : 2;  // tokens whose vectors are in registers at once
    const int chunks = (x.partial_vectors + kLanes * kPerLane - 1) / (kLanes * kPerLane);
    for (int i = p.peer; i < x.ep - 1; i += p.peer_step) {
        const int to = p.above(x, i);
        const u64 head = load_word(p.mine + header_at(x, 0, 0, to));
        // as one lane saw it: the lanes must agree, and the header may change
        const int count = __shfl_sync(kFull, is_of(head, epoch) ? tokens_in(head) : 0, 0);
        for (int token = p.token; token < count; token += kTokens * p.token_step) {
            const int looked = token + p.lane * p.token_step;  // a lane for each token of this turn
            bool came = false;
            if (p.lane < kTokens && looked < count) {
                const u64 header = load_word(p.mine + header_at(x, 0, looked, to));
                came = is_of(header, epoch) && present_in(header);
            }
            const u32 here = __ballot_sync(kFull, came);
            if (here == 0) continue;
#pragma unroll 1
            for (int base = 0; base < kTokens; base += kHeld) {
#pragma unroll 1
                for (int chunk = p.chunk; chunk < chunks; chunk += p.chunk_step) {
                    const int first = chunk * kLanes * kPerLane + p.lane;
                    const i64 offset = static_cast<i64>(first) * kVectorBytes;
                    Vector v[kHeld][kPerLane];
#pragma unroll
                    for (int g = 0; g < kHeld; ++g) {
                        if (!(here >> (base + g) & 1u)) continue;
                        const u8* partial = p.mine + partial_at(x, to, token + (base + g) * p.token_step) + offset;
#pragma unroll
                        for (int j = 0; j < kPerLane; ++j) {
                            if (first + j * kLanes >= x.partial_vectors) continue;
                            v[g][j] = load_plain(partial + j * kLanes * kVectorBytes);
                        }
                    }
#pragma unroll
                    for (int g = 0; g < kHeld; ++g) {
                        if (!(here >> (base + g) & 1u)) continue;
                        u8* there = workspace_of(x, to) + return_at(x, p.rank, token + (base + g) * p.token_step) + offset;
#pragma unroll
                        for (int j = 0; j < kPerLane; ++j) {
                            if (first + j * kLanes >= x.partial_vectors) continue;
                            store_plain(there + j * kLanes * kVectorBytes, v[g][j]);
                        }
                    }
                }
            }
            __syncthreads();  // every store of this block to these rows came before
            if (p.chunk == 0 && came) {
                // Release: the rows, then their flags. Hazard: a partial added before it is there.
                u8* flags = workspace_of(x, to) + pushed_flags_at(x, looked);
                store_word_release(flags + p.rank * static_cast<i64>(sizeof(u64)), flag_of(epoch, 1));
            }
        }
    }
}

/// By one warp: await the flags of an own token, a lane for each rank. They are compared whole: one that was never raised
/// is 0, which must not pass for an epoch whose lower 52 bits are. False if a wait expired.
EPCROSS_DEVICE bool await_pushed(const Exchange& x, const Place& p, Patience& patience, int token, RankMask from, u64 epoch) {
    for (int base = 0; base < x.ep; base += kLanes) {
        const int rank = base + p.lane;
        const u8* flag = p.mine + pushed_flags_at(x, token) + rank * static_cast<i64>(sizeof(u64));
        const bool awaited = rank != p.rank && from.has(rank);
        bool pending = awaited;
        while (true) {
            // relaxed: an acquire at every look would empty the cache of whoever else works on this multiprocessor
            if (pending) pending = load_word(flag) != flag_of(epoch, 1);
            if (!__any_sync(kFull, pending)) break;
            if (!patience.go_on(pending ? rank : -1)) return false;
        }
        if (awaited) load_word_acquire(flag);  // Acquire: the flag, then what it stands for
    }
    return true;
}

/// Add the partials of one own token, ranks ascending: its own where the experts wrote it, the others as they arrived.
template <int kPerLane>
EPCROSS_DEVICE void add_pushed(const Exchange& x, const Place& p, int token, int first, RankMask from,
                               Sum (&sum)[kPerLane]) {
    while (from.any()) {
        const int rank = from.pop();
        const u8* row = p.mine + (rank == p.rank ? partial_at(x, rank, token) : return_at(x, rank, token)) +
                        static_cast<i64>(first) * kVectorBytes;
        Vector v[kPerLane];
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
            if (first + j * kLanes < x.partial_vectors) v[j] = load_plain(row + j * kLanes * kVectorBytes);
        }
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
            if (first + j * kLanes < x.partial_vectors) sum[j].add(v[j]);
        }
    }
}

/// Await and add what is pushed of the own tokens, a block a token. One warp then awaits everybody, also those that hold
/// nothing of ours.
template <int kPerLane>
EPCROSS_DEVICE void receive_pushed(const Exchange& x, const Call& call, const Place& p, u64 epoch) {
    Patience patience(x, p, WaitPhase::kCombine, epoch);
    const int chunks = (x.partial_vectors + kLanes * kPerLane - 1) / (kLanes * kPerLane);
    for (int token = p.own_token(); token < call.tokens[p.local]; token += p.own_token_step()) {
        const RankMask from = sent_to(x, p, token);
        // what one warp acquired holds for the block after the barrier
        const bool arrived = p.chunk != 0 || await_pushed(x, p, patience, token, from, epoch);
        if (!__syncthreads_and(arrived)) return;
        for (int chunk = p.chunk; chunk < chunks; chunk += p.chunk_step) {
            const int first = chunk * kLanes * kPerLane + p.lane;
            Sum sum[kPerLane];
            add_pushed<kPerLane>(x, p, token, first, from, sum);
            store_sums<kPerLane>(x, call, p, token, first, sum);
        }
    }
    if (p.chunk != 0 || p.own_token() != 0) return;
    if (!await_everyone(x, p, patience, epoch)) return;
    if (p.lane == 0) store_word(&p.control->dispatch_epoch, epoch + 1u);
}

/// `kTokens` rows are pushed by a block before their flags wait for the stores to be performed.
template <int kPerLane, int kTokens>
EPCROSS_DEVICE void fence_combine_push(const Exchange& x, const Call& call) {
    const Place p = place<Roles::kHalves>(x, call);
    await_kernel_before();
    if (p.alternate) admit_kernel_after();
    const u64 epoch = load_word(&p.control->combine_epoch);
    if (__syncthreads_or(has_failed(p))) return;  // its warps go on together
    if (p.alternate) {
        receive_pushed<kPerLane>(x, call, p, epoch);
        return;
    }
    if (p.token == 0 && p.chunk == 0) tell_everyone(x, p, epoch);
    push_partials<kPerLane, kTokens>(x, p, epoch);
    admit_kernel_after();
}

}  // namespace epcross
