// token -> destination ranks. Two experts on one rank are one destination; an id of -1 is none.
#pragma once

#include "record.cuh"

namespace epcross {

/// The table, copied to shared memory before the kernel before this one has ended: it never changes.
EPCROSS_DEVICE const u8* slot_ranks(const Exchange& x) {
    extern __shared__ u8 table[];
    const u8* from = reinterpret_cast<const u8*>(x.slot_rank);
    for (int i = static_cast<int>(threadIdx.x); i < x.num_slots; i += static_cast<int>(blockDim.x)) table[i] = from[i];
    return table;
}

/// This lane's id of a token; -1 past top_k.
EPCROSS_DEVICE int own_id(const Exchange& x, const Call& call, const Place& p, int token) {
    if (p.lane >= x.top_k) return -1;
    const i32* ids = reinterpret_cast<const i32*>(input(call.ids, call.ids_stride, p.local));
    return ids[token * x.top_k + p.lane];
}

/// The rank that holds a slot; -1 for a dropped one, and for an id past the slots, which would read past the table.
EPCROSS_DEVICE int rank_of(const Exchange& x, const u8* slot_rank, int id) {
    return static_cast<u32>(id) < static_cast<u32>(x.num_slots) ? slot_rank[id] : -1;
}

/// A set of up to 96 ranks.
struct RankMask {
    u32 w0, w1, w2;

    EPCROSS_DEVICE bool any() const { return (w0 | w1 | w2) != 0; }
    /// The lowest rank, taken out; -1 if there is none.
    EPCROSS_DEVICE int pop() {
        if (w0) return take(w0, 0);
        if (w1) return take(w1, 32);
        if (w2) return take(w2, 64);
        return -1;
    }

  private:
    EPCROSS_DEVICE static int take(u32& word, int base) {
        const int bit = __ffs(static_cast<int>(word)) - 1;
        word &= word - 1;
        return base + bit;
    }
};

/// By a whole warp: the ranks that an own token went to, as dispatch noted them.
EPCROSS_DEVICE RankMask sent_to(const Exchange& x, const Place& p, int token) {
    const u8* at = p.mine + sent_at(x, token, 0);
    RankMask m{0, 0, 0};
    m.w0 = __ballot_sync(kFull, p.lane < x.ep && load_u32(at + p.lane * 4) != 0);
    if (x.ep > 32) {  // the same for every thread
        m.w1 = __ballot_sync(kFull, p.lane + 32 < x.ep && load_u32(at + (p.lane + 32) * 4) != 0);
        m.w2 = __ballot_sync(kFull, p.lane + 64 < x.ep && load_u32(at + (p.lane + 64) * 4) != 0);
    }
    return m;
}

}  // namespace epcross
