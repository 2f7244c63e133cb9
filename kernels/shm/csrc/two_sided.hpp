// The conventional baseline: sizes first, rows staged by the sender, copied out by the receiver.
#pragma once

#include <numeric>

#include "exchange.hpp"

namespace epcross {

class TwoSided : public Exchange {
  public:
    TwoSided(Workspaces workspaces, std::vector<std::int32_t> slot_rank, Patience patience)
        : Exchange(std::move(workspaces), std::move(slot_rank), patience),
          first_(ep_size()),
          rows_(slots() * ws_.layout.record_bytes),
          partials_(slots() * ws_.layout.partial_bytes),
          returned_(slots() * ws_.layout.partial_bytes) {}

    /// Make the own workspace ready for rounds `first_epoch`, +1, ... Before any peer may write to it.
    void start(std::uint32_t first_epoch) {
        ws_.epoch() = first_epoch - 1;
        for (const auto region : {ws_.layout.count_flags, ws_.layout.dispatch_flags, ws_.layout.combine_flags}) {
            for (std::uint32_t peer = 0; peer < ep_size(); ++peer) {
                store_release(ws_.line(rank(), region, peer), flag_of(first_epoch - 1, 0));
            }
        }
    }

    void dispatch(const Batch& batch) {
        EPCROSS_STEP(begin);
        begin_round(batch);
        raise(ws_.layout.count_flags, [&](auto to) { return sent_.count(to); });
        std::uint32_t first = 0;
        for (std::uint32_t source = 0; source < ep_size(); ++source) {
            received_[source] = wait_flag(patience_, waiting(source, "dispatch counts"),
                                          ws_.line(rank(), ws_.layout.count_flags, source));
            first_[source] = std::exchange(first, first + received_[source]);
        }
        // The staging rows are free: every destination sent this round's count after it had copied the last round's
        // rows out (hazard: a staged row overwritten under its reader).
        for (std::uint32_t token = 0; token < batch.tokens; ++token) {
            for (std::uint32_t to = 0; to < ep_size(); ++to) {
                const std::int32_t slot = sent_.slot(token, to);
                if (slot == Routing::kNone) continue;
                EPCROSS_STEP(record);
                write_record(staged_at(rank(), to, static_cast<std::size_t>(slot)), batch, token, copy_vectors);
            }
        }
        raise(ws_.layout.dispatch_flags, [&](auto to) { return sent_.count(to); });
        for (std::uint32_t i = 0; i < ep_size(); ++i) {
            const std::uint32_t source = peer(i);
            EPCROSS_STEP(await);
            wait_flag(patience_, waiting(source, "dispatch"), ws_.line(rank(), ws_.layout.dispatch_flags, source));
            copy_vectors(record_at(source, 0), staged_at(source, rank(), 0),
                        received_[source] * ws_.layout.record_bytes);
        }
    }

    void copy_received(const ReceivedRows& out) const {
        copy_records(out, [&](auto source, auto slot) { return record_at(source, slot); }, std::memcpy);
    }

    /// `staged` [rows(), partial_bytes] -> private partials.
    void experts(const Byte* staged) {
        run_experts(
            staged, [&](auto source, auto slot) { return record_at(source, slot); }, touch,
            [&](auto source, auto slot) { return partial_at(source, slot); }, copy_vectors);
    }

    /// Sums of the own tokens -> `out` [tokens, hidden].
    void combine(std::uint16_t* out) {
        const std::size_t bytes = ws_.layout.partial_bytes;
        // The return buffer is free: every source raised this round's dispatch flag after it had copied the last
        // round's partials out.
        for (std::uint32_t source = 0; source < ep_size(); ++source) {
            EPCROSS_STEP(combine);
            copy_vectors(return_at(rank(), source), partial_at(source, 0), received_[source] * bytes);
        }
        raise(ws_.layout.combine_flags, [&](auto to) { return received_[to]; });
        for (std::uint32_t i = 0; i < ep_size(); ++i) {
            const std::uint32_t from = peer(i);
            EPCROSS_STEP(await_combine);
            wait_flag(patience_, waiting(from, "combine"), ws_.line(rank(), ws_.layout.combine_flags, from));
            copy_vectors(returned_at(from, 0), return_at(from, rank()), sent_.count(from) * bytes);
        }
        EPCROSS_STEP(sum);
        reduce(out, [&](auto from, auto slot) { return returned_at(from, slot); });
    }

  private:
    std::size_t slots() const { return std::size_t{ws_.shape.ep_size} * ws_.shape.capacity; }

    /// Release: what was staged before stands before the flag (hazard: the reader sees the flag and an old row).
    template <typename Count>
    void raise(std::size_t region, Count&& count) const {
        for (std::uint32_t i = 0; i < ep_size(); ++i) {
            EPCROSS_STEP(announce);
            store_release(ws_.line(peer(i), region, rank()), flag_of(epoch(), count(peer(i))));
        }
    }
    /// In the sender's workspace, by destination.
    Byte* staged_at(std::uint32_t owner, std::uint32_t to, std::size_t slot) const {
        return ws_.item(owner, ws_.layout.records[0], ws_.layout.record_bytes, to, slot);
    }
    Byte* return_at(std::uint32_t owner, std::uint32_t to) const {
        return ws_.item(owner, ws_.layout.partials[0], ws_.layout.partial_bytes, to, 0);
    }
    /// Private and packed: the sizes are known before the rows.
    const Byte* record_at(std::uint32_t source, std::size_t slot) const {
        return rows_.data() + (first_[source] + slot) * ws_.layout.record_bytes;
    }
    Byte* record_at(std::uint32_t source, std::size_t slot) {
        return rows_.data() + (first_[source] + slot) * ws_.layout.record_bytes;
    }
    Byte* partial_at(std::uint32_t source, std::size_t slot) {
        return partials_.data() + (first_[source] + slot) * ws_.layout.partial_bytes;
    }
    Byte* returned_at(std::uint32_t from, std::size_t slot) {
        return returned_.data() + (std::size_t{from} * ws_.shape.capacity + slot) * ws_.layout.partial_bytes;
    }

    std::vector<std::uint32_t> first_;  // first received row of each source
    std::vector<Byte> rows_, partials_, returned_;
};

}  // namespace epcross
