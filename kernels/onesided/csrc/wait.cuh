// Waits that end. A wait that runs out of time tells the host which one it was, and nothing traps: a trap in one process
// would take down every process that shares the GPU.
#pragma once

#include "place.cuh"

namespace epcross {

/// The first wait of a rank that expired, told to the host.
__device__ __noinline__ inline void report_failure(u32* failed, u64 record, int local, u32 rank, u32 peer, u32 phase,
                                                   u64 epoch) {
    if (atomicCAS(failed, 0u, 1u) != 0u) return;  // another warp of this rank was first
    volatile Failure* at = reinterpret_cast<volatile Failure*>(record) + local;
    at->rank = rank;
    at->peer = peer;
    at->phase = phase;
    at->epoch = epoch;
    fence_system();  // the host reads the other fields once it sees the state
    at->state = 1u;
}

/// Counts the turns of a warp's polling loops and looks at the clock now and then.
class Patience {
  public:
    EPCROSS_DEVICE Patience(const Exchange& x, const Place& p, WaitPhase phase, u64 epoch)
        : x_(x), p_(p), phase_(phase), epoch_(epoch) {}

    /// Call once a turn, by the whole warp; false when this warp should give up. `missing` is a rank still awaited by
    /// this lane, or -1.
    EPCROSS_DEVICE bool go_on(int missing) {
        if ((++turns_ & (kTurnsPerLook - 1)) != 0) return true;
        const u64 now = global_timer_ns();
        if (begin_ns_ == 0) begin_ns_ = now;
        const bool failed = load_u32(&p_.control->failed) != 0;
        const bool late = now - begin_ns_ > x_.timeout_ns;
        if (!__any_sync(kFull, late || failed)) return true;
        const u32 who = __ballot_sync(kFull, missing >= 0);
        if (who != 0 && p_.lane == __ffs(static_cast<int>(who)) - 1 && !failed) {
            report_failure(&p_.control->failed, x_.failure, p_.local, static_cast<u32>(p_.rank),
                           static_cast<u32>(missing), static_cast<u32>(phase_), epoch_);
        }
        __syncwarp();
        return false;
    }

  private:
    static constexpr u32 kTurnsPerLook = 256;

    const Exchange& x_;
    const Place& p_;
    WaitPhase phase_;
    u64 epoch_;
    u32 turns_ = 0;
    u64 begin_ns_ = 0;
};

}  // namespace epcross
