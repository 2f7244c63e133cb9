// Moving rows: plain copies, streaming copies, and the touch of identity experts.
#pragma once

#include <atomic>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "layout.hpp"

namespace epcross {

/// Copy with plain vector loads and stores. `bytes`: a multiple of 16.
///
/// Not memcpy: for rows of a few KB and more glibc's becomes `rep movsb`, which on AMD processors of 2022 and 2023 (seen
/// on family 25, model 17) takes three times as long in some process groups, depending on where memory came to lie. With
/// that instruction switched off (GLIBC_TUNABLES=glibc.cpu.x86_rep_movsb_threshold=...) the difference is gone.
inline void copy_vectors(Byte* dst, const Byte* src, std::size_t bytes) {
#if defined(__x86_64__)
    std::size_t at = 0;
#if defined(__AVX512F__)
    for (; at + 64 <= bytes; at += 64) _mm512_storeu_si512(dst + at, _mm512_loadu_si512(src + at));
#elif defined(__AVX__)
    for (; at + 32 <= bytes; at += 32) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + at),
                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + at)));
    }
#endif
    for (; at < bytes; at += 16) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + at),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + at)));
    }
#else
    std::memcpy(dst, src, bytes);
#endif
}

/// Copy with stores that do not first fetch the line they overwrite. `dst` and `bytes`: multiples of 16.
/// The stores are weakly ordered: `drain_streaming` must stand between them and the flag that announces them.
inline void copy_streaming(Byte* dst, const Byte* src, std::size_t bytes) {
#if defined(__x86_64__)
    std::size_t at = 0;
#if defined(__AVX512F__)
    if (reinterpret_cast<std::uintptr_t>(dst) % 64 == 0) {
        for (; at + 64 <= bytes; at += 64) {
            _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + at), _mm512_loadu_si512(src + at));
        }
    }
#endif
    for (; at < bytes; at += 16) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(dst + at),
                         _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + at)));
    }
#else
    std::memcpy(dst, src, bytes);
#endif
}

/// From this size on, streaming copies beat plain ones: what is written would not stay in a cache until it is read.
inline constexpr std::size_t kStreamingFromBytes = std::size_t{8} << 20;

/// A release store does not order streaming stores on x86; this does.
inline void drain_streaming() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

/// Read one byte of each cache line, as identity experts do. Returns something that depends on all of them.
inline unsigned touch(const Byte* row, std::size_t bytes) {
    unsigned sum = 0;
    for (std::size_t at = 0; at < bytes; at += kLineBytes) sum += std::to_integer<unsigned>(row[at]);
    return sum;
}

/// Make the compiler believe that `value` is used.
inline void keep(unsigned value) { asm volatile("" ::"r"(value)); }

}  // namespace epcross
