// The shapes and offsets of a workspace, as handed over by layout.py. Nothing here computes an offset of a region.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace epcross {

using Byte = std::byte;
using Word = std::uint64_t;  // what one store writes whole on every CPU we run on
inline constexpr std::size_t kLineBytes = 64;

/// Who this rank is and what it exchanges.
struct Shape {
    std::uint32_t rank = 0;
    std::uint32_t ep_size = 0;
    std::uint32_t capacity = 0;  // most tokens of any rank
    std::uint32_t top_k = 0;
    std::uint32_t hidden = 0;  // values of a combine row (bf16)
};

/// Offsets and strides in bytes. Regions that a protocol does not have stay 0 and are not touched by it.
struct Layout {
    std::size_t scale_at = 0;  // inside a record
    std::size_t ids_at = 0;
    std::size_t weights_at = 0;
    std::size_t header_at = 0;
    std::size_t record_bytes = 0;   // stride of records
    std::size_t escape_bytes = 0;   // stride of escape bitmaps
    std::size_t partial_bytes = 0;  // stride of combine rows

    std::size_t control = 0;  // u32 epoch of the owner's current round
    std::size_t count_flags = 0, dispatch_flags = 0, combine_flags = 0;  // one line per peer
    std::size_t records[2] = {}, partials[2] = {};                       // [peer][slot]; second set: Sentinel
    std::size_t counts[2] = {}, escapes[2] = {};                         // Sentinel

    std::size_t row_bytes() const { return scale_at; }
    std::size_t scale_bytes() const { return ids_at - scale_at; }
};

/// One rank's inputs. T tokens: ids and weights [T, top_k], rows [T, row_bytes], scales [T, scale_bytes].
struct Batch {
    std::uint32_t tokens = 0;
    const std::int32_t* ids = nullptr;  // slots; -1 = dropped
    const float* weights = nullptr;
    const Byte* rows = nullptr;
    const Byte* scales = nullptr;
};

/// Where `copy_received` puts N rows; each array as in Batch, ids and weights as sent.
struct ReceivedRows {
    std::int32_t* source = nullptr;
    std::int32_t* token = nullptr;
    std::int32_t* ids = nullptr;
    float* weights = nullptr;
    Byte* rows = nullptr;
    Byte* scales = nullptr;
};

/// The mapped workspaces of a group: `base[r]` is rank r's, the own one included.
struct Workspaces {
    Shape shape;
    Layout layout;
    std::vector<Byte*> base;

    /// The line that belongs to `peer` in a region of flags or counts of `owner`.
    Word* line(std::uint32_t owner, std::size_t region, std::uint32_t peer) const {
        return reinterpret_cast<Word*>(base[owner] + region + peer * kLineBytes);
    }
    /// Item [peer][slot] of a region of `owner` with items of `stride` bytes.
    Byte* item(std::uint32_t owner, std::size_t region, std::size_t stride, std::uint32_t peer, std::size_t slot) const {
        return base[owner] + region + (std::size_t{peer} * shape.capacity + slot) * stride;
    }
    /// Own epoch. Only the owner reads and writes it, between calls nothing else keeps the round.
    std::uint32_t& epoch() const { return *reinterpret_cast<std::uint32_t*>(base[shape.rank] + layout.control); }
};

}  // namespace epcross
