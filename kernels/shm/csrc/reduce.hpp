// Adding bf16 rows in fp32.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace epcross {

inline constexpr std::size_t kTile = 512;  // values: 2 KiB of sums and 1 KiB of inputs stay in the first cache

inline float bf16_to_float(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

/// Round to nearest, ties to even. Any NaN becomes the one quiet NaN, the same on every CPU.
inline std::uint16_t float_to_bf16(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<std::uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

/// The sums of one tile of a row, started at +0. Callers add partials in ascending rank order.
class TileSum {
  public:
    explicit TileSum(std::size_t values) : values_(values) { std::fill_n(sums_, values, 0.0f); }

    void add(const std::uint16_t* __restrict partial) {
        for (std::size_t i = 0; i < values_; ++i) sums_[i] += bf16_to_float(partial[i]);
    }
    void round_to(std::uint16_t* __restrict out) const {
        for (std::size_t i = 0; i < values_; ++i) out[i] = float_to_bf16(sums_[i]);
    }

  private:
    std::size_t values_;
    alignas(64) float sums_[kTile];
};

/// Call `body(first value, number of values)` for each tile of a row.
template <typename Body>
inline void for_each_tile(std::size_t hidden, Body&& body) {
    for (std::size_t first = 0; first < hidden; first += kTile) body(first, std::min(kTile, hidden - first));
}

}  // namespace epcross
