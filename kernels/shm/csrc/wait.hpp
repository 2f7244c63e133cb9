// Bounded waits, and the words that ranks share.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <sched.h>
#include <stdexcept>
#include <string>

#include "layout.hpp"

/// A place in a protocol where a test may hold a rank up; see kernels/model. Nothing, unless a build defines it.
#ifndef EPCROSS_STEP
#define EPCROSS_STEP(step) static_cast<void>(0)
#endif

namespace epcross {

inline Word load_relaxed(const Word* word) {
    return std::atomic_ref<Word>(*const_cast<Word*>(word)).load(std::memory_order_relaxed);
}
inline void store_relaxed(Word* word, Word value) {
    std::atomic_ref<Word>(*word).store(value, std::memory_order_relaxed);
}
inline Word load_acquire(const Word* word) {
    return std::atomic_ref<Word>(*const_cast<Word*>(word)).load(std::memory_order_acquire);
}
inline void store_release(Word* word, Word value) {
    std::atomic_ref<Word>(*word).store(value, std::memory_order_release);
}

inline void cpu_relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");  // `yield` is a no-op on most cores; isb really gives the pipeline a rest
#endif
}

/// A wait that ran out: who waited for whom, where, in which round.
class Expired : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

/// How long to wait, and how. One per exchange.
struct Patience {
    double limit_s = 10.0;
    // After this many looks the core is offered to others. Small when ranks share cores: the awaited rank may need
    // this very core. Otherwise about a millisecond, longer than any wait between ranks that run.
    std::uint32_t spins_before_yield = 1u << 14;
};

/// What an expired wait says.
struct Waiting {
    std::uint32_t rank, peer;
    const char* phase;
    std::uint32_t epoch;
};

/// Look until `poll()` says true. Throws Expired after `patience.limit_s`.
template <typename Poll>
inline void wait_until(const Patience& patience, const Waiting& waiting, Poll&& poll) {
    using Clock = std::chrono::steady_clock;
    constexpr std::uint32_t kSpinsPerLookAtClock = 256;
    Clock::time_point start{};
    for (std::uint32_t spins = 1; !poll(); ++spins) {
        cpu_relax();
        const bool yields = spins >= patience.spins_before_yield;
        if (yields) sched_yield();
        if (!yields && spins % kSpinsPerLookAtClock != 0) continue;
        const auto now = Clock::now();
        if (start == Clock::time_point{}) start = now;
        if (std::chrono::duration<double>(now - start).count() > patience.limit_s) {
            throw Expired("rank " + std::to_string(waiting.rank) + " waited more than " +
                          std::to_string(patience.limit_s) + " s for rank " + std::to_string(waiting.peer) + " in " +
                          waiting.phase + ", epoch " + std::to_string(waiting.epoch));
        }
        if (yields) spins = patience.spins_before_yield;  // stay there: the counter must not wrap
    }
}

/// The flag of Fence and the two-sided baseline: the round's epoch, and a count that goes with it.
inline Word flag_of(std::uint32_t epoch, std::uint32_t count) { return Word{epoch} << 32 | count; }

/// Wait for `flag` to show `epoch`; returns its count. Equality, not order, so epochs may wrap.
/// Acquire: what the peer wrote before its release store of the flag is visible after this.
inline std::uint32_t wait_flag(const Patience& patience, const Waiting& waiting, const Word* flag) {
    Word seen = 0;
    wait_until(patience, waiting, [&] {
        seen = load_acquire(flag);
        return static_cast<std::uint32_t>(seen >> 32) == waiting.epoch;
    });
    return static_cast<std::uint32_t>(seen);
}

}  // namespace epcross
