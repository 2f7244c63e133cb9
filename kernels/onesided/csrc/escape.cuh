// Payload that happens to equal a reserved word still arrives bit for bit.
//
// Such a word travels as kEscape. A bitmap, pushed beside the record for each 32 vectors that hold one, says which of the
// two reserved words it was. Its words use their lower half only, so they never look armed.
#pragma once

#include "words.cuh"

namespace epcross {

inline constexpr u32 kArmedHigh = static_cast<u32>(kArmed >> 32);
inline constexpr u32 kEscapeHigh = static_cast<u32>(kEscape >> 32);

EPCROSS_DEVICE bool reserved(u64 word) { return word == kArmed || word == kEscape; }
/// Cheaper, and true a little too often; decides only whether to look closely.
EPCROSS_DEVICE bool maybe_reserved(u64 word) {
    const u32 high = static_cast<u32>(word >> 32);
    return high == kArmedHigh || high == kEscapeHigh;
}
EPCROSS_DEVICE bool maybe_escape(u64 word) { return static_cast<u32>(word >> 32) == kEscapeHigh; }

/// By a whole warp: whether its vectors need `send_escaped`.
template <int kPerLane>
EPCROSS_DEVICE bool any_reserved(const Vector (&v)[kPerLane]) {
    bool any = false;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) any |= maybe_reserved(v[j].a) || maybe_reserved(v[j].b);
    return __any_sync(kFull, any);
}

template <int kPerLane>
struct Vectors {
    Vector v[kPerLane];
};

/// Send this warp's vectors with reserved words replaced, and the bitmaps beside them. `at` and `bitmaps` are those of
/// its first group there, `inside` has a bit for each of the lane's vectors that exist. Rare, so kept out of line, and
/// handed values: nothing of the caller's has to lie in memory.
template <int kPerLane>
__device__ __noinline__ void send_escaped(u8* at, u8* bitmaps, u32 inside, Vectors<kPerLane> all) {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        Vector sent = all.v[j];
        if (__any_sync(kFull, reserved(sent.a) || reserved(sent.b))) {
            const Vector bits{__ballot_sync(kFull, sent.a == kEscape), __ballot_sync(kFull, sent.b == kEscape)};
            if (sent.a == kArmed) sent.a = kEscape;
            if (sent.b == kArmed) sent.b = kEscape;
            if (lane == 0) store_words(bitmaps + j * kVectorBytes, bits);
        }
        if (inside >> j & 1u) store_words(at + j * kLanes * kVectorBytes, sent);
    }
}

/// Put reserved words of 32 vectors back in place, by the warp that owns them; the bitmap is armed again at once, since
/// nobody else reads it. False if the bitmap is not there yet.
__device__ __noinline__ inline bool restore(u8* record, u8* bitmap, bool inside) {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    Vector v{0, 0};
    if (inside) v = load_words(record);
    const bool a = v.a == kEscape, b = v.b == kEscape;
    if (!__any_sync(kFull, a || b)) return true;
    const Vector bits = load_words(bitmap);
    if (__any_sync(kFull, !arrived(bits))) return false;
    if (a && !(bits.a >> lane & 1u)) v.a = kArmed;
    if (b && !(bits.b >> lane & 1u)) v.b = kArmed;
    if (a || b) store_plain(record, v);
    __syncwarp();  // every lane has read the bitmap
    if (lane == 0) store_words(bitmap, {kArmed, kArmed});
    return true;
}

}  // namespace epcross
