// Headers: one word per (token, source), sent to every rank. It says how many tokens its source has in this round and
// whether this token comes here, and it carries the round's epoch: one that is not of this round is not there yet. Hence
// headers need no arming. That of token 0 is always sent, so that everybody learns the count.
#pragma once

#include "place.cuh"

namespace epcross {

inline constexpr int kCountBits = 20, kEpochShift = kCountBits + 1;

EPCROSS_DEVICE u64 header_of(u64 epoch, int tokens, bool present) {
    return epoch << kEpochShift | static_cast<u64>(static_cast<u32>(tokens)) << 1 | (present ? 1u : 0u);
}
/// Epochs are compared in the 43 bits that a header has room for: a year of rounds.
EPCROSS_DEVICE bool is_of(u64 header, u64 epoch) { return (header ^ epoch << kEpochShift) >> kEpochShift == 0; }
EPCROSS_DEVICE int tokens_in(u64 header) { return static_cast<int>(static_cast<u32>(header) >> 1 & ((1u << kCountBits) - 1u)); }
EPCROSS_DEVICE bool present_in(u64 header) { return header & 1u; }

/// By one lane: say of an own token whether it goes to rank `to`.
EPCROSS_DEVICE void send_header(const Exchange& x, const Place& p, int set, u64 epoch, int token, int tokens, int to,
                                bool goes) {
    store_word(workspace_of(x, to) + header_at(x, set, token, p.rank), header_of(epoch, tokens, goes));
}

}  // namespace epcross
