// Sentinel: the data is the flag. Every landing word is armed with a value that no sent word has.
//
// Between a word's arrival and its use stands nothing; the two fences below order *re-arming*, not data. Rows that a
// rank sends to itself take none of this: program order is enough.
#pragma once

#include <array>

#include "exchange.hpp"
#include "words.hpp"

namespace epcross {

/// Four bf16 NaNs with unusual payloads, so that in combine only NaNs can equal it.
inline constexpr Word kArmed = 0xFFDB'7FB6'FFA5'7FE9ull;
/// Travels in place of an escaped word; the bitmap says where.
inline constexpr Word kStandIn = 0;
/// Four quiet NaNs: travels in place of a combine word that equals the sentinel.
inline constexpr Word kOtherNans = 0x7FC0'7FC0'7FC0'7FC0ull;
/// Bits used of a bitmap word: its upper half stays 0, so it cannot equal the sentinel.
inline constexpr std::size_t kEscapeBits = 32;

class Sentinel : public Exchange {
  public:
    Sentinel(Workspaces workspaces, std::vector<std::int32_t> slot_rank, Patience patience)
        : Exchange(std::move(workspaces), std::move(slot_rank), patience),
          payload_words_(ws_.layout.header_at / sizeof(Word)),
          partial_words_((ws_.shape.hidden + kValuesPerWord - 1) / kValuesPerWord),
          meta_(ws_.shape.top_k),
          partials_(std::size_t{ws_.shape.ep_size} * ws_.shape.capacity * ws_.layout.partial_bytes),
          last_sent_(ws_.shape.ep_size) {}

    /// Arm the own workspace for rounds `first_epoch`, +1, ... Before any peer may write to it.
    void start(std::uint32_t first_epoch) {
        ws_.epoch() = first_epoch - 1;
        const std::size_t slots = std::size_t{ep_size()} * ws_.shape.capacity;
        for (const int set : {0, 1}) {
            arm(ws_.line(rank(), ws_.layout.counts[set], 0), ep_size() * kLineBytes / sizeof(Word));
            arm(record_at(set, rank(), 0, 0), slots * ws_.layout.record_bytes / sizeof(Word));
            arm(escapes_at(set, rank(), 0, 0), slots * ws_.layout.escape_bytes / sizeof(Word));
            arm(partial_at(set, rank(), 0, 0), slots * ws_.layout.partial_bytes / sizeof(Word));
        }
    }

    void dispatch(const Batch& batch) {
        for (std::uint32_t to = 0; to < ep_size(); ++to) last_sent_[to] = sent_.count(to);
        EPCROSS_STEP(begin);
        begin_round(batch);
        const int set = parity();
        // Release: all re-arming of the last round before any store of this one (hazard: a peer that has our new count
        // writes to a set that we still re-arm, and its word is lost). Pairs with the acquire fence below.
        std::atomic_thread_fence(std::memory_order_release);
        for (std::uint32_t i = 0; i + 1 < ep_size(); ++i) {
            EPCROSS_STEP(announce);
            store_relaxed(ws_.line(peer(i), ws_.layout.counts[set], rank()), sent_.count(peer(i)));
        }
        for (std::uint32_t token = 0; token < batch.tokens; ++token) {
            for (std::uint32_t i = 0; i < ep_size(); ++i) {
                const std::int32_t slot = sent_.slot(token, peer(i));
                if (slot == Routing::kNone) continue;
                EPCROSS_STEP(record);
                if (peer(i) == rank()) {
                    write_record(bytes(record_at(set, rank(), rank(), static_cast<std::size_t>(slot))), batch, token,
                                 copy_vectors);
                } else {
                    push_record(batch, token, set, peer(i), static_cast<std::size_t>(slot));
                }
            }
        }
        EPCROSS_STEP(rearm_partials);
        rearm_partials(set ^ 1);  // while rows are on their way: used again in the next round, but not in this one
        escaped_.clear();
        received_[rank()] = sent_.count(rank());
        for (std::uint32_t i = 0; i + 1 < ep_size(); ++i) {
            const std::uint32_t source = peer(i);
            const Waiting who = waiting(source, "dispatch");
            EPCROSS_STEP(await);
            received_[source] = static_cast<std::uint32_t>(await(ws_.line(rank(), ws_.layout.counts[set], source), who));
            for (std::uint32_t slot = 0; slot < received_[source]; ++slot) await_record(set, source, slot, who);
        }
        // Acquire: our later stores to peers after their counts of this round, hence after their re-arming of the
        // last (the other half of the hazard above). No data waits for it.
        std::atomic_thread_fence(std::memory_order_acquire);
    }

    void copy_received(const ReceivedRows& out) const {
        const int set = parity();
        copy_records(
            out, [&](auto source, auto slot) { return bytes(record_at(set, rank(), source, slot)); }, copy_words);
    }

    /// `staged` [rows(), partial_bytes] -> private partials, from where combine pushes.
    void experts(const Byte* staged) {
        const int set = parity();
        std::size_t n = 0;
        run_experts(
            staged, [&](auto source, auto slot) { return bytes(record_at(set, rank(), source, slot)); }, touch_words,
            [&](auto, auto) { return own_partial(n++); }, copy_vectors);
    }

    /// Sums of the own tokens -> `out` [tokens, hidden].
    void combine(std::uint16_t* out) {
        const int set = parity();
        const std::size_t first_own = push_partials(set);
        EPCROSS_STEP(rearm_records);
        rearm_records(set);  // the rows were read; the partials of peers are on their way meanwhile
        const std::size_t hidden = ws_.shape.hidden;
        for (std::uint32_t token = 0; token < sent_.tokens(); ++token, out += hidden) {
            EPCROSS_STEP(sum);
            for_each_tile(hidden, [&](std::size_t first, std::size_t values) {
                TileSum sum(values);
                for (std::uint32_t from = 0; from < ep_size(); ++from) {
                    const std::int32_t slot = sent_.slot(token, from);
                    if (slot == Routing::kNone) continue;
                    const auto at = static_cast<std::size_t>(slot);
                    sum.add(from == rank() ? values_of(own_partial(first_own + at)) + first
                                           : await_tile(partial_at(set, rank(), from, at) + first / kValuesPerWord,
                                                        values, waiting(from, "combine")));
                }
                sum.round_to(out + first);
            });
        }
    }

  private:
    static constexpr std::size_t kValuesPerWord = sizeof(Word) / sizeof(std::uint16_t);
    /// Words looked at together: the last of them first. Less, and the reader takes lines away from the writer
    /// that still fills them; more, and it starts later.
    static constexpr std::size_t kChunkWords = 128;

    /// Two landing sets: a peer may send the next round while this rank still reads the last. The epoch's last bit
    /// alternates through a wrap too.
    int parity() const { return static_cast<int>(epoch() & 1u); }

    // --- sending

    struct Part {
        const Byte* from;
        std::size_t words;
    };

    /// Send one token's record; words equal to the sentinel are replaced, and listed in the bitmap.
    void push_record(const Batch& batch, std::uint32_t token, int set, std::uint32_t to, std::size_t slot) {
        const Layout& at = ws_.layout;
        const std::size_t top_k = ws_.shape.top_k;
        std::memcpy(meta_.data(), batch.ids + token * top_k, top_k * sizeof(std::int32_t));
        std::memcpy(bytes(meta_.data()) + top_k * sizeof(std::int32_t), batch.weights + token * top_k,
                    top_k * sizeof(float));
        const std::array<Part, 3> parts{{{batch.rows + token * at.row_bytes(), at.row_bytes() / sizeof(Word)},
                                         {batch.scales + token * at.scale_bytes(), at.scale_bytes() / sizeof(Word)},
                                         {bytes(meta_.data()), top_k}}};
        Word* word = record_at(set, to, rank(), slot);
        bool escaped = false;
        for (const Part& part : parts) {
            EPCROSS_STEP(part);
            escaped |= send_words(word, part.from, part.words, kArmed, kStandIn);
            word += part.words;
        }
        EPCROSS_STEP(header);
        if (escaped) [[unlikely]] push_escapes(parts, escapes_at(set, to, rank(), slot));
        store_relaxed(word, Word{escaped} << 32 | token);
    }

    static void push_escapes(const std::array<Part, 3>& parts, Word* bitmap) {
        std::size_t at = 0;
        Word bits = 0;
        for (const Part& part : parts) {
            for (std::size_t i = 0; i < part.words; ++i) {
                bits |= Word{word_at(part.from + i * sizeof(Word)) == kArmed} << at % kEscapeBits;
                if (++at % kEscapeBits == 0) store_relaxed(bitmap++, std::exchange(bits, 0));
            }
        }
        if (at % kEscapeBits) store_relaxed(bitmap, bits);
    }

    /// Returns the number of the first partial that stays here.
    std::size_t push_partials(int set) {
        std::size_t n = 0, first_own = 0;
        for (std::uint32_t source = 0; source < ep_size(); ++source) {
            if (source == rank()) {
                first_own = n;
                n += received_[source];
                continue;
            }
            for (std::uint32_t slot = 0; slot < received_[source]; ++slot) {
                EPCROSS_STEP(combine);
                send_words(partial_at(set, source, rank(), slot), own_partial(n++), partial_words_, kArmed, kOtherNans);
            }
        }
        return first_own;
    }

    // --- receiving

    Word await(const Word* word, const Waiting& who) const {
        Word seen = load_relaxed(word);
        if (seen == kArmed) [[unlikely]] {
            wait_until(patience_, who, [&] { return (seen = load_relaxed(word)) != kArmed; });
        }
        return seen;
    }

    /// Wait for every one of `count` words from an aligned place on, and hand each block and each last word on.
    template <typename TakeBlock, typename TakeWord>
    void await_words(const Word* from, std::size_t count, const Waiting& who, TakeBlock&& take_block,
                     TakeWord&& take_word) const {
        const Block armed = block_of(kArmed);
        for (std::size_t i = 0; i < count;) {
            const std::size_t end = std::min(count, i + kChunkWords);
            await(from + end - 1, who);
            for (; i + kBlockWords <= end; i += kBlockWords) {
                Block block = load_block(from + i);
                if (any_equal(block, armed)) [[unlikely]] {
                    for (std::size_t j = i; j < i + kBlockWords; ++j) await(from + j, who);
                    block = load_block(from + i);  // a word once seen stays until we re-arm it
                }
                take_block(i, block);
            }
            for (; i < end; ++i) take_word(i, await(from + i, who));
        }
    }

    void await_record(int set, std::uint32_t source, std::uint32_t slot, const Waiting& who) {
        Word* record = record_at(set, rank(), source, slot);
        await_words(record, payload_words_ + 1, who, [](auto, auto) {}, [](auto, auto) {});
        if (load_relaxed(record + payload_words_) >> 32) [[unlikely]] {
            restore(record, escapes_at(set, rank(), source, slot), who);
        }
    }

    /// Put the sentinel's value back where it was payload, and re-arm the bitmap with the record later.
    void restore(Word* record, Word* bitmap, const Waiting& who) {
        for (std::size_t i = 0; i < escape_words(); ++i) {
            for (Word bits = await(bitmap + i, who); bits; bits &= bits - 1) {
                store_relaxed(record + i * kEscapeBits + static_cast<std::size_t>(std::countr_zero(bits)), kArmed);
            }
        }
        escaped_.push_back(bitmap);
    }

    /// One tile of a partial, awaited, in a buffer of our own: the sum runs on plain values.
    const std::uint16_t* await_tile(const Word* from, std::size_t values, const Waiting& who) {
        await_words(
            from, (values + kValuesPerWord - 1) / kValuesPerWord, who,
            [&](std::size_t i, Block block) { std::memcpy(tile_ + i, &block, sizeof block); },
            [&](std::size_t i, Word word) { tile_[i] = word; });
        return reinterpret_cast<const std::uint16_t*>(tile_);
    }

    // --- re-arming: own landing words only, after they were used

    static void arm(Word* words, std::size_t count) { fill_words(words, count, kArmed); }

    /// The landing set of this round. Its senders use it again after our next dispatch, whose release fence follows.
    void rearm_records(int set) {
        for (std::uint32_t i = 0; i + 1 < ep_size(); ++i) {
            const std::uint32_t source = peer(i);
            store_relaxed(ws_.line(rank(), ws_.layout.counts[set], source), kArmed);
            for (std::uint32_t slot = 0; slot < received_[source]; ++slot) {
                arm(record_at(set, rank(), source, slot), payload_words_ + 1);
            }
        }
        for (Word* bitmap : escaped_) arm(bitmap, escape_words());
    }

    /// The combine set of the last round. Ranks push to it again after our next dispatch.
    void rearm_partials(int set) const {
        for (std::uint32_t i = 0; i + 1 < ep_size(); ++i) {
            for (std::uint32_t slot = 0; slot < last_sent_[peer(i)]; ++slot) {
                arm(partial_at(set, rank(), peer(i), slot), partial_words_);
            }
        }
    }

    // --- places

    std::size_t escape_words() const { return (payload_words_ + kEscapeBits - 1) / kEscapeBits; }
    Word* record_at(int set, std::uint32_t owner, std::uint32_t source, std::size_t slot) const {
        return words(ws_.item(owner, ws_.layout.records[set], ws_.layout.record_bytes, source, slot));
    }
    Word* escapes_at(int set, std::uint32_t owner, std::uint32_t source, std::size_t slot) const {
        return words(ws_.item(owner, ws_.layout.escapes[set], ws_.layout.escape_bytes, source, slot));
    }
    Word* partial_at(int set, std::uint32_t owner, std::uint32_t from, std::size_t slot) const {
        return words(ws_.item(owner, ws_.layout.partials[set], ws_.layout.partial_bytes, from, slot));
    }
    /// The n-th received row's partial, private.
    Byte* own_partial(std::size_t n) { return partials_.data() + n * ws_.layout.partial_bytes; }

    static Word* words(Byte* at) { return reinterpret_cast<Word*>(at); }
    static Byte* bytes(Word* at) { return reinterpret_cast<Byte*>(at); }
    static const std::uint16_t* values_of(const Byte* at) { return reinterpret_cast<const std::uint16_t*>(at); }

    std::size_t payload_words_;  // of a record, without its header
    std::size_t partial_words_;  // of a combine row
    std::vector<Word> meta_;     // ids and weights of the token being sent
    std::vector<Byte> partials_;
    std::vector<std::uint32_t> last_sent_;  // partials that the last combine used, by rank
    std::vector<Word*> escaped_;            // bitmaps used in this round
    alignas(64) Word tile_[kTile / kValuesPerWord];
};

}  // namespace epcross
