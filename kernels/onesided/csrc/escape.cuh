// Payload that happens to equal a reserved word still arrives bit for bit.
//
// Such a word travels as kEscape. A bitmap, pushed beside the record for each 32 vectors that hold one, says which of the
// two reserved words it was. Its words use their lower half only, so they never look armed.
#pragma once

#include "routing.cuh"
#include "wait.cuh"

namespace epcross {

EPCROSS_DEVICE bool reserved(u64 word) { return word == kArmed || word == kEscape; }

/// Replace reserved words in this warp's vectors and push the bitmaps. `first` is this lane's first vector.
template <int kPerLane>
EPCROSS_DEVICE void escape(const Exchange& x, const Place& p, int set, int token, int first, RankMask to,
                           Vector (&v)[kPerLane]) {
    bool any = false;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) any |= reserved(v[j].a) || reserved(v[j].b);
    if (!__any_sync(kFull, any)) return;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        if (!__any_sync(kFull, reserved(v[j].a) || reserved(v[j].b))) continue;
        const Vector bits{__ballot_sync(kFull, v[j].a == kEscape), __ballot_sync(kFull, v[j].b == kEscape)};
        if (v[j].a == kArmed) v[j].a = kEscape;
        if (v[j].b == kArmed) v[j].b = kEscape;
        const i64 at = Places{x}.escapes(set, p.rank, token) + (first / kLanes + j) * kVectorBytes;
        RankMask left = to;
        for (int r = left.pop(); r >= 0; r = left.pop()) {
            if (p.lane == 0) store_words(p.of(r) + at, bits);
        }
    }
}

/// Put reserved words of one record back in place, by the warp that owns these vectors; its bitmaps are armed again at
/// once, since nobody else reads them. False if a wait expired.
template <int kPerLane>
EPCROSS_DEVICE bool restore(const Exchange& x, const Place& p, Patience& patience, int set, int source, int token,
                            int first) {
    u8* record = p.mine + Places{x}.record(set, source, token);
    u8* bitmaps = p.mine + Places{x}.escapes(set, source, token);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        const int i = first + j * kLanes;
        Vector v{0, 0};
        if (i < x.record_vectors) v = load_words(record + static_cast<i64>(i) * kVectorBytes);
        if (!__any_sync(kFull, v.a == kEscape || v.b == kEscape)) continue;
        u8* at = bitmaps + (first / kLanes + j) * kVectorBytes;
        Vector bits = load_words(at);
        while (__any_sync(kFull, !arrived(bits))) {
            if (!patience.go_on(source)) return false;
            bits = load_words(at);
        }
        const bool a = v.a == kEscape, b = v.b == kEscape;
        if (a && !(bits.a >> p.lane & 1u)) v.a = kArmed;
        if (b && !(bits.b >> p.lane & 1u)) v.b = kArmed;
        if (a || b) store_plain(record + static_cast<i64>(i) * kVectorBytes, v);
        __syncwarp();  // every lane has read the bitmap
        if (p.lane == 0) store_words(at, {kArmed, kArmed});
    }
    return true;
}

}  // namespace epcross
