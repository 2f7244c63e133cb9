// What the three protocols share: the rounds, the routing of the last dispatch, records and their copies.
#pragma once

#include <cstring>
#include <utility>
#include <vector>

#include "copy.hpp"
#include "layout.hpp"
#include "reduce.hpp"
#include "routing.hpp"
#include "wait.hpp"

namespace epcross {

/// State of one rank. Protocols derive from it and add `start`, `dispatch`, `experts`, `combine`, `copy_received`.
/// It owns no shared memory: `workspaces` outlive it.
class Exchange {
  public:
    Exchange(Workspaces workspaces, std::vector<std::int32_t> slot_rank, Patience patience)
        : ws_(std::move(workspaces)),
          patience_(patience),
          sent_(ws_.shape, std::move(slot_rank)),
          received_(ws_.shape.ep_size) {}

    std::uint32_t epoch() const { return ws_.epoch(); }
    /// Rows that the last dispatch delivered here, over all sources.
    std::size_t rows() const {
        std::size_t sum = 0;
        for (const auto count : received_) sum += count;
        return sum;
    }

  protected:
    std::uint32_t rank() const { return ws_.shape.rank; }
    std::uint32_t ep_size() const { return ws_.shape.ep_size; }
    /// The i-th peer in this rank's own order: ranks start with different ones, the own rank comes last.
    std::uint32_t peer(std::uint32_t i) const { return (rank() + 1 + i) % ep_size(); }

    /// Number and route a new round.
    void begin_round(const Batch& batch) {
        ++ws_.epoch();
        sent_.route(batch, ws_.shape.top_k);
    }
    Waiting waiting(std::uint32_t peer, const char* phase) const { return {rank(), peer, phase, epoch()}; }

    /// Write the record of one token. `copy(dst, src, bytes)` moves the row and its scales.
    template <typename Copy>
    void write_record(Byte* record, const Batch& batch, std::uint32_t token, Copy&& copy) const {
        const Layout& at = ws_.layout;
        const std::size_t top_k = ws_.shape.top_k;
        copy(record, batch.rows + token * at.row_bytes(), at.row_bytes());
        if (at.scale_bytes()) copy(record + at.scale_at, batch.scales + token * at.scale_bytes(), at.scale_bytes());
        std::memcpy(record + at.ids_at, batch.ids + token * top_k, top_k * sizeof(std::int32_t));
        std::memcpy(record + at.weights_at, batch.weights + token * top_k, top_k * sizeof(float));
        const Word header = token;
        std::memcpy(record + at.header_at, &header, sizeof header);
    }

    /// Copy the received records out, by source and slot. `record(source, slot)` finds one; `copy` reads it.
    template <typename Record, typename Copy>
    void copy_records(const ReceivedRows& out, Record&& record, Copy&& copy) const {
        const Layout& at = ws_.layout;
        const std::size_t top_k = ws_.shape.top_k;
        std::size_t n = 0;
        for (std::uint32_t source = 0; source < ep_size(); ++source) {
            for (std::uint32_t slot = 0; slot < received_[source]; ++slot, ++n) {
                const Byte* from = record(source, slot);
                Word header = 0;
                copy(&header, from + at.header_at, sizeof header);
                out.source[n] = static_cast<std::int32_t>(source);
                out.token[n] = static_cast<std::int32_t>(static_cast<std::uint32_t>(header));
                copy(out.rows + n * at.row_bytes(), from, at.row_bytes());
                copy(out.scales + n * at.scale_bytes(), from + at.scale_at, at.scale_bytes());
                // ids and weights together are whole words; one alone need not be
                meta_.resize(2 * top_k);
                copy(meta_.data(), from + at.ids_at, 2 * top_k * sizeof(std::int32_t));
                std::memcpy(out.ids + n * top_k, meta_.data(), top_k * sizeof(std::int32_t));
                std::memcpy(out.weights + n * top_k, meta_.data() + top_k, top_k * sizeof(float));
            }
        }
    }

    /// Identity experts: read every received row in place, copy its staged partial to where combine reads.
    template <typename Record, typename Touch, typename Partial, typename Copy>
    void run_experts(const Byte* staged, Record&& record, Touch&& read, Partial&& partial, Copy&& copy) const {
        const std::size_t bytes = ws_.layout.partial_bytes;
        unsigned seen = 0;
        for (std::uint32_t source = 0; source < ep_size(); ++source) {
            for (std::uint32_t slot = 0; slot < received_[source]; ++slot, staged += bytes) {
                EPCROSS_STEP(experts);
                seen += read(record(source, slot), ws_.layout.row_bytes());
                copy(partial(source, slot), staged, bytes);
            }
        }
        keep(seen);
    }

    /// Sum each sent token's partials, ranks ascending, into `out` [tokens, hidden]. `partial(rank, slot)` finds one.
    template <typename Partial>
    void reduce(std::uint16_t* out, Partial&& partial) const {
        const std::size_t hidden = ws_.shape.hidden;
        std::vector<const std::uint16_t*> rows;
        rows.reserve(ep_size());
        for (std::uint32_t token = 0; token < sent_.tokens(); ++token, out += hidden) {
            rows.clear();
            for (std::uint32_t from = 0; from < ep_size(); ++from) {
                const std::int32_t slot = sent_.slot(token, from);
                if (slot == Routing::kNone) continue;
                rows.push_back(reinterpret_cast<const std::uint16_t*>(partial(from, static_cast<std::size_t>(slot))));
            }
            for_each_tile(hidden, [&](std::size_t first, std::size_t values) {
                TileSum sum(values);
                for (const auto* row : rows) sum.add(row + first);
                sum.round_to(out + first);
            });
        }
    }

    Workspaces ws_;
    Patience patience_;
    Routing sent_;
    std::vector<std::uint32_t> received_;  // rows delivered by each source in the last dispatch

  private:
    mutable std::vector<std::int32_t> meta_;
};

}  // namespace epcross
