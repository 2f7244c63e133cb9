// Eight bf16 values of a partial, added in fp32, ranks ascending from +0, rounded once to nearest even.
#pragma once

#include "place.cuh"

namespace epcross {

class Sum {
  public:
    EPCROSS_DEVICE void add(Vector v) {
        add_word(v.a, 0);
        add_word(v.b, 4);
    }
    EPCROSS_DEVICE Vector rounded() const { return {pack(0), pack(4)}; }

  private:
    EPCROSS_DEVICE void add_word(u64 word, int at) {
        const u32 low = static_cast<u32>(word), high = static_cast<u32>(word >> 32);
        s_[at] += __uint_as_float(low << 16);
        s_[at + 1] += __uint_as_float(low & 0xFFFF'0000u);
        s_[at + 2] += __uint_as_float(high << 16);
        s_[at + 3] += __uint_as_float(high & 0xFFFF'0000u);
    }
    EPCROSS_DEVICE u64 pack(int at) const {
        return static_cast<u64>(pair(s_[at + 2], s_[at + 3])) << 32 | pair(s_[at], s_[at + 1]);
    }
    EPCROSS_DEVICE static u32 pair(float low, float high) {
        u32 packed;  // first operand to the upper half; NaN becomes the canonical NaN
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
        return packed;
    }

    float s_[8] = {};
};

template <int kPerLane>
EPCROSS_DEVICE void store_sums(const Exchange& x, const Call& call, const Place& p, int token, int first,
                               const Sum (&sum)[kPerLane]) {
    u8* out = reinterpret_cast<u8*>(call.out) + p.local * call.out_stride;
    out += static_cast<u64>(static_cast<u32>(token * x.partial_vectors + first)) * kVectorBytes;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        if (first + j * kLanes < x.partial_vectors) store_plain(out + j * kLanes * kVectorBytes, sum[j].rounded());
    }
}

}  // namespace epcross
