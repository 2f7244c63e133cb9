// Which ranks get a token, and at which slot of their landing buffer.
#pragma once

#include <cstdint>
#include <vector>

#include "layout.hpp"

namespace epcross {

/// The routing of the last dispatch of this rank. Combine reads it back: partial (token, rank) is at the same slot.
class Routing {
  public:
    static constexpr std::int32_t kNone = -1;

    Routing(const Shape& shape, std::vector<std::int32_t> slot_rank)
        : ep_size_(shape.ep_size),
          slot_rank_(std::move(slot_rank)),
          slots_(std::size_t{shape.capacity} * shape.ep_size, kNone),
          counts_(shape.ep_size) {}

    /// Number the tokens of each destination in token order; a destination counts once per token, -1 not at all.
    void route(const Batch& batch, std::uint32_t top_k) {
        tokens_ = batch.tokens;
        std::fill(counts_.begin(), counts_.end(), 0u);
        std::fill_n(slots_.begin(), std::size_t{tokens_} * ep_size_, kNone);
        for (std::uint32_t token = 0; token < tokens_; ++token) {
            std::int32_t* slots = &slots_[std::size_t{token} * ep_size_];
            const std::int32_t* ids = batch.ids + std::size_t{token} * top_k;
            for (std::uint32_t k = 0; k < top_k; ++k) {
                if (ids[k] < 0) continue;
                const auto rank = static_cast<std::uint32_t>(slot_rank_[static_cast<std::size_t>(ids[k])]);
                if (slots[rank] == kNone) slots[rank] = static_cast<std::int32_t>(counts_[rank]++);
            }
        }
    }

    std::uint32_t tokens() const { return tokens_; }
    /// Tokens sent to `rank`.
    std::uint32_t count(std::uint32_t rank) const { return counts_[rank]; }
    /// Slot of `token` on `rank`, or kNone.
    std::int32_t slot(std::uint32_t token, std::uint32_t rank) const {
        return slots_[std::size_t{token} * ep_size_ + rank];
    }
    /// Tokens sent, counted once per destination.
    std::size_t total() const {
        std::size_t sum = 0;
        for (const auto count : counts_) sum += count;
        return sum;
    }

  private:
    std::uint32_t ep_size_;
    std::uint32_t tokens_ = 0;
    std::vector<std::int32_t> slot_rank_;  // [num_slots]
    std::vector<std::int32_t> slots_;      // [token][rank]
    std::vector<std::uint32_t> counts_;    // [rank]
};

}  // namespace epcross
