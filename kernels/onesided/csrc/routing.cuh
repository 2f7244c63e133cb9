// token -> destination ranks. Two experts on one rank are one destination; an id of -1 is none.
#pragma once

#include "place.cuh"

namespace epcross {

/// A set of up to 96 ranks. Sixteen bytes in memory: one vector access.
struct RankMask {
    u32 w0, w1, w2;

    EPCROSS_DEVICE bool any() const { return (w0 | w1 | w2) != 0; }
    EPCROSS_DEVICE bool has(int rank) const {
        const u32 word = rank < 32 ? w0 : rank < 64 ? w1 : w2;
        return word >> (rank & 31) & 1u;
    }
    EPCROSS_DEVICE void drop(int rank) {
        const u32 keep = ~(1u << (rank & 31));
        if (rank < 32) w0 &= keep;
        else if (rank < 64) w1 &= keep;
        else w2 &= keep;
    }
    EPCROSS_DEVICE void add(int rank) {
        const u32 bit = 1u << (rank & 31);
        if (rank < 32) w0 |= bit;
        else if (rank < 64) w1 |= bit;
        else w2 |= bit;
    }
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

EPCROSS_DEVICE RankMask load_mask(const u8* workspace, i64 masks_at, int token) {
    const Vector v = load_plain(workspace + masks_at + static_cast<i64>(token) * kVectorBytes);
    return {static_cast<u32>(v.a), static_cast<u32>(v.a >> 32), static_cast<u32>(v.b)};
}
EPCROSS_DEVICE void store_mask(u8* workspace, i64 masks_at, int token, RankMask m) {
    store_plain(workspace + masks_at + static_cast<i64>(token) * kVectorBytes,
                {static_cast<u64>(m.w1) << 32 | m.w0, m.w2});
}

/// The union over a warp of one rank (or -1) a lane.
EPCROSS_DEVICE RankMask mask_of(int rank, int ep) {
    const u32 bit = rank >= 0 ? 1u << (rank & 31) : 0u;
    RankMask m{__reduce_or_sync(kFull, rank < 32 ? bit : 0u), 0u, 0u};
    if (ep > 32) {  // the same for every thread
        m.w1 = __reduce_or_sync(kFull, rank >= 32 && rank < 64 ? bit : 0u);
        m.w2 = __reduce_or_sync(kFull, rank >= 64 ? bit : 0u);
    }
    return m;
}

/// The table, copied to shared memory before the kernel before this one has ended: it never changes.
EPCROSS_DEVICE const u8* slot_ranks(const Exchange& x) {
    extern __shared__ u8 table[];
    const u8* from = reinterpret_cast<const u8*>(x.slot_rank);
    for (int i = static_cast<int>(threadIdx.x); i < x.num_slots; i += static_cast<int>(blockDim.x)) table[i] = from[i];
    return table;
}

}  // namespace epcross
