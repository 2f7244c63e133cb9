// Fence: plain rows, then one release flag for each (source, destination).
#pragma once

#include "exchange.hpp"

namespace epcross {

class Fence : public Exchange {
  public:
    using Exchange::Exchange;

    /// Make the own workspace ready for rounds `first_epoch`, +1, ... Before any peer may write to it.
    void start(std::uint32_t first_epoch) {
        ws_.epoch() = first_epoch - 1;
        for (std::uint32_t peer = 0; peer < ep_size(); ++peer) {
            store_release(flag(ws_.layout.dispatch_flags, rank(), peer), flag_of(first_epoch - 1, 0));
            store_release(flag(ws_.layout.combine_flags, rank(), peer), flag_of(first_epoch - 1, 0));
        }
    }

    void dispatch(const Batch& batch) {
        EPCROSS_STEP(begin);
        begin_round(batch);
        // The landing rows are free: their owner raised last round's combine flag after it had read them (hazard:
        // a row overwritten under its reader), and our combine waited for that flag.
        const bool streaming = sent_.total() * ws_.layout.record_bytes >= kStreamingFromBytes;
        for (std::uint32_t token = 0; token < batch.tokens; ++token) {
            for (std::uint32_t i = 0; i < ep_size(); ++i) {
                const std::int32_t slot = sent_.slot(token, peer(i));
                if (slot == Routing::kNone) continue;
                EPCROSS_STEP(record);
                Byte* record = record_at(peer(i), rank(), static_cast<std::size_t>(slot));
                if (streaming) {
                    write_record(record, batch, token, copy_streaming);
                } else {
                    write_record(record, batch, token, copy_vectors);
                }
            }
        }
        if (streaming) drain_streaming();
        // Release: the rows before the flag (hazard: a reader sees the flag and an old row).
        for (std::uint32_t i = 0; i < ep_size(); ++i) {
            EPCROSS_STEP(announce);
            store_release(flag(ws_.layout.dispatch_flags, peer(i), rank()), flag_of(epoch(), sent_.count(peer(i))));
        }
        // Acquire, in wait_flag: no row is read before its flag was seen.
        for (std::uint32_t source = 0; source < ep_size(); ++source) {
            EPCROSS_STEP(await);
            received_[source] = wait_flag(patience_, waiting(source, "dispatch"),
                                          flag(ws_.layout.dispatch_flags, rank(), source));
        }
    }

    void copy_received(const ReceivedRows& out) const {
        copy_records(out, [&](auto source, auto slot) { return record_at(rank(), source, slot); }, std::memcpy);
    }

    /// `staged` [rows(), partial_bytes] -> the own combine buffer. It is free: every source raised this round's
    /// dispatch flag after it had pulled the last round's partials (hazard: a partial overwritten under its reader).
    void experts(const Byte* staged) const {
        const auto record = [&](auto source, auto slot) { return record_at(rank(), source, slot); };
        const auto partial = [&](auto source, auto slot) { return partial_at(rank(), source, slot); };
        if (rows() * ws_.layout.partial_bytes >= kStreamingFromBytes) {
            run_experts(staged, record, touch, partial, copy_streaming);
            drain_streaming();  // before the flag that combine raises
        } else {
            run_experts(staged, record, touch, partial, copy_vectors);
        }
    }

    /// Sums of the own tokens -> `out` [tokens, hidden].
    void combine(std::uint16_t* out) {
        // Release: the partials before the flag; also says that the landing rows of this source were read.
        for (std::uint32_t i = 0; i < ep_size(); ++i) {
            EPCROSS_STEP(combine);
            store_release(flag(ws_.layout.combine_flags, peer(i), rank()), flag_of(epoch(), 0));
        }
        // Also from ranks that were sent nothing: it keeps every rank within one dispatch of this one.
        for (std::uint32_t from = 0; from < ep_size(); ++from) {
            EPCROSS_STEP(await_combine);
            wait_flag(patience_, waiting(from, "combine"), flag(ws_.layout.combine_flags, rank(), from));
        }
        EPCROSS_STEP(sum);
        reduce(out, [&](auto from, auto slot) { return partial_at(from, rank(), slot); });
    }

  private:
    Word* flag(std::size_t region, std::uint32_t owner, std::uint32_t peer) const {
        return ws_.line(owner, region, peer);
    }
    Byte* record_at(std::uint32_t owner, std::uint32_t source, std::size_t slot) const {
        return ws_.item(owner, ws_.layout.records[0], ws_.layout.record_bytes, source, slot);
    }
    Byte* partial_at(std::uint32_t owner, std::uint32_t source, std::size_t slot) const {
        return ws_.item(owner, ws_.layout.partials[0], ws_.layout.partial_bytes, source, slot);
    }
};

}  // namespace epcross
