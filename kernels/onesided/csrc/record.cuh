// A record is what travels for one (token, destination): | row | scales | ids i32[top_k] | weights f32[top_k] | pad |
#pragma once

#include "place.cuh"

namespace epcross {

EPCROSS_DEVICE const u8* input(u64 base, i64 stride, int local) {
    return reinterpret_cast<const u8*>(base) + local * stride;
}

/// Word `i` of | ids | weights | pad | of a token.
EPCROSS_DEVICE u32 metadata_word(const Exchange& x, const Call& call, const Place& p, int token, int i) {
    if (i >= 2 * x.top_k) return 0u;
    const bool id = i < x.top_k;
    const u8* from = id ? input(call.ids, call.ids_stride, p.local) : input(call.weights, call.weights_stride, p.local);
    return reinterpret_cast<const u32*>(from)[token * x.top_k + (id ? i : i - x.top_k)];
}

/// Vector `i` of a token's | scales | ids | weights | pad |.
EPCROSS_DEVICE Vector tail_vector(const Exchange& x, const Call& call, const Place& p, int token, int i) {
    if (i < x.scale_vectors) {
        const u32 at = static_cast<u32>(token * x.scale_vectors + i);
        return load_plain(input(call.scales, call.scales_stride, p.local) + static_cast<u64>(at) * kVectorBytes);
    }
    i = (i - x.scale_vectors) * 4;
    const u64 w0 = metadata_word(x, call, p, token, i), w1 = metadata_word(x, call, p, token, i + 1);
    const u64 w2 = metadata_word(x, call, p, token, i + 2), w3 = metadata_word(x, call, p, token, i + 3);
    return {w1 << 32 | w0, w3 << 32 | w2};
}

EPCROSS_DEVICE int groups_of(int vectors) { return (vectors + kLanes - 1) / kLanes; }

/// What one warp moves of a record: kPerLane groups of 32 vectors, of the row or of its tail, never of both, so that the
/// row's path has no branches.
template <int kPerLane>
struct Span {
    bool tail;
    int first, limit;  // vectors of the row or tail: this lane's first, and the end
    int group;         // number of the first group in the record
    int base;          // vectors before

    /// Warps that a record needs.
    EPCROSS_DEVICE static int count(const Exchange& x) {
        return row_chunks(x) + chunks_of(x.record_vectors - x.row_vectors);
    }
    EPCROSS_DEVICE Span(const Exchange& x, int chunk, int lane) {
        const int rows = row_chunks(x);
        tail = chunk >= rows;
        const int at = tail ? chunk - rows : chunk;
        first = at * kPerLane * kLanes + lane;
        limit = tail ? x.record_vectors - x.row_vectors : x.row_vectors;
        group = at * kPerLane + (tail ? groups_of(x.row_vectors) : 0);
        base = tail ? x.row_vectors : 0;
    }
    EPCROSS_DEVICE bool inside(int j) const { return first + j * kLanes < limit; }
    /// Bytes from the begin of the record.
    EPCROSS_DEVICE i64 offset() const { return static_cast<i64>(base + first) * kVectorBytes; }

    EPCROSS_DEVICE void load(const Exchange& x, const Call& call, const Place& p, int token, Vector (&v)[kPerLane]) const {
        if (tail) {
#pragma unroll
            for (int j = 0; j < kPerLane; ++j) {
                v[j] = inside(j) ? tail_vector(x, call, p, token, first + j * kLanes) : Vector{0, 0};
            }
            return;
        }
        const u32 at = static_cast<u32>(token * x.row_vectors + first);
        const u8* from = input(call.rows, call.rows_stride, p.local) + static_cast<u64>(at) * kVectorBytes;
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
            v[j] = {0, 0};
            if (inside(j)) v[j] = load_plain(from + j * kLanes * kVectorBytes);
        }
    }
    template <bool kWords>
    EPCROSS_DEVICE void store(u8* record, const Vector (&v)[kPerLane]) const {
        u8* at = record + offset();
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
            if (!inside(j)) continue;
            if constexpr (kWords) store_words(at + j * kLanes * kVectorBytes, v[j]);
            else store_plain(at + j * kLanes * kVectorBytes, v[j]);
        }
    }

  private:
    EPCROSS_DEVICE static int chunks_of(int vectors) { return (vectors + kLanes * kPerLane - 1) / (kLanes * kPerLane); }
    EPCROSS_DEVICE static int row_chunks(const Exchange& x) { return chunks_of(x.row_vectors); }
};

}  // namespace epcross
