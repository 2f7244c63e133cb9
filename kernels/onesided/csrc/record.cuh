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

/// Vector `i` of a token's record, from the inputs.
EPCROSS_DEVICE Vector record_vector(const Exchange& x, const Call& call, const Place& p, int token, int i) {
    if (i < x.row_vectors) {
        const u32 at = static_cast<u32>(token * x.row_vectors + i);
        return load_plain(input(call.rows, call.rows_stride, p.local) + static_cast<u64>(at) * kVectorBytes);
    }
    i -= x.row_vectors;
    if (i < x.scale_vectors) {
        const u32 at = static_cast<u32>(token * x.scale_vectors + i);
        return load_plain(input(call.scales, call.scales_stride, p.local) + static_cast<u64>(at) * kVectorBytes);
    }
    i = (i - x.scale_vectors) * 4;
    const u64 w0 = metadata_word(x, call, p, token, i), w1 = metadata_word(x, call, p, token, i + 1);
    const u64 w2 = metadata_word(x, call, p, token, i + 2), w3 = metadata_word(x, call, p, token, i + 3);
    return {w1 << 32 | w0, w3 << 32 | w2};
}

}  // namespace epcross
