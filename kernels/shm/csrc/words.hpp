// Landing words of Sentinel: 64 bits, each stored and loaded whole.
//
// The portable form is one relaxed atomic word. On x86-64 a *block* is a whole vector: what may tear is the vector, not
// the aligned 64-bit words in it (AVX processors keep even 16 aligned bytes together), and a torn vector still shows an
// armed word. C++ has no name for such an access, so it is volatile, and ThreadSanitizer gets the portable form.
#pragma once

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "layout.hpp"
#include "wait.hpp"

namespace epcross {

inline Word word_at(const Byte* from) {
    Word word;
    std::memcpy(&word, from, sizeof word);
    return word;
}

#if defined(__AVX512F__) && !defined(__SANITIZE_THREAD__)
using Block = __m512i;
inline Block block_of(Word word) { return _mm512_set1_epi64(static_cast<long long>(word)); }
inline Block block_at(const Byte* from) { return _mm512_loadu_si512(from); }
inline bool any_equal(Block a, Block b) { return _mm512_cmpeq_epi64_mask(a, b) != 0; }
#elif defined(__AVX2__) && !defined(__SANITIZE_THREAD__)
using Block = __m256i;
inline Block block_of(Word word) { return _mm256_set1_epi64x(static_cast<long long>(word)); }
inline Block block_at(const Byte* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline bool any_equal(Block a, Block b) {
    const Block equal = _mm256_cmpeq_epi64(a, b);
    return !_mm256_testz_si256(equal, equal);
}
#else
#define EPCROSS_PORTABLE_WORDS
using Block = Word;
inline Block block_of(Word word) { return word; }
inline Block block_at(const Byte* from) { return word_at(from); }
inline bool any_equal(Block a, Block b) { return a == b; }
#endif

inline constexpr std::size_t kBlockWords = sizeof(Block) / sizeof(Word);

/// Load a block of landing words; `from` is aligned to the block.
inline Block load_block(const Word* from) {
#if defined(EPCROSS_PORTABLE_WORDS)
    return load_relaxed(from);
#else
    return *reinterpret_cast<const volatile Block*>(from);
#endif
}
inline void store_block(Word* to, Block block) {
#if defined(EPCROSS_PORTABLE_WORDS)
    store_relaxed(to, block);
#else
    *reinterpret_cast<volatile Block*>(to) = block;
#endif
}
inline bool is_block_aligned(const Word* at) { return reinterpret_cast<std::uintptr_t>(at) % sizeof(Block) == 0; }

/// Set `count` landing words, from an aligned place on, to `value`.
inline void fill_words(Word* to, std::size_t count, Word value) {
    const Block block = block_of(value);
    std::size_t i = 0;
    for (; i + kBlockWords <= count; i += kBlockWords) store_block(to + i, block);
    for (; i < count; ++i) store_relaxed(to + i, value);
}

/// Send `count` words; where one equals `armed`, send `instead`. Returns whether one did.
inline bool send_words(Word* to, const Byte* from, std::size_t count, Word armed, Word instead) {
    bool replaced = false;
    const auto send_one = [&](std::size_t i) {
        Word word = word_at(from + i * sizeof(Word));
        if (word == armed) [[unlikely]] {
            replaced = true;
            word = instead;
        }
        store_relaxed(to + i, word);
    };
    std::size_t i = 0;
    if (is_block_aligned(to)) {
        const Block armed_block = block_of(armed);
        for (; i + kBlockWords <= count; i += kBlockWords) {
            const Block block = block_at(from + i * sizeof(Word));
            if (any_equal(block, armed_block)) [[unlikely]] {
                for (std::size_t j = i; j < i + kBlockWords; ++j) send_one(j);
            } else {
                store_block(to + i, block);
            }
        }
    }
    for (; i < count; ++i) send_one(i);
    return replaced;
}

/// Copy landing words out. They are atomics for every reader; a plain read would be a data race in C++.
inline void copy_words(void* to, const Byte* from, std::size_t size) {
    for (std::size_t at = 0; at < size; at += sizeof(Word)) {
        const Word word = load_relaxed(reinterpret_cast<const Word*>(from + at));
        std::memcpy(static_cast<Byte*>(to) + at, &word, sizeof word);
    }
}

/// `touch` for landing words.
inline unsigned touch_words(const Byte* row, std::size_t size) {
    unsigned sum = 0;
    for (std::size_t at = 0; at < size; at += kLineBytes) {
        sum += static_cast<unsigned>(load_relaxed(reinterpret_cast<const Word*>(row + at)));
    }
    return sum;
}

}  // namespace epcross
