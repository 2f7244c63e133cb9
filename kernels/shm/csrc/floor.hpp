// What the machine itself costs: one flag across, and one copy. The floor that latencies are compared with.
#pragma once

#include <chrono>
#include <utility>

#include "copy.hpp"
#include "wait.hpp"

namespace epcross {

inline double monotonic_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Two ranks answer each other `rounds` times. `mine` is written by this rank, `theirs` by the peer; both start at 0.
/// Returns seconds per round, which is two one-way flags.
inline double ping_pong(Word* mine, const Word* theirs, bool first, std::uint32_t rounds, const Patience& patience,
                        Waiting waiting) {
    const double start = monotonic_s();
    for (std::uint32_t round = 1; round <= rounds; ++round) {
        waiting.epoch = round;
        if (first) store_release(mine, round);
        wait_until(patience, waiting, [&] { return load_acquire(theirs) >= round; });
        if (!first) store_release(mine, round);
    }
    return (monotonic_s() - start) / rounds;
}

/// Copy `bytes` a number of times, the way Fence copies many rows: long enough that ranks overlap although they do not
/// start together. Returns start and end on the machine's monotonic clock.
inline std::pair<double, double> timed_copies(Byte* dst, const Byte* src, std::size_t bytes, std::uint32_t times) {
    const double start = monotonic_s();
    for (std::uint32_t i = 0; i < times; ++i) copy_streaming(dst, src, bytes);
    drain_streaming();
    return {start, monotonic_s()};
}

}  // namespace epcross
