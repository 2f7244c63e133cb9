// Entry points. `narrow` moves one vector a lane, for few tokens; `wide` four, for many, and `row` as well, in blocks that
// hold a whole row.
#include "fence.cuh"
#include "sentinel_combine.cuh"
#include "sentinel_dispatch.cuh"

#ifndef EPCROSS_NARROW_BLOCKS
#define EPCROSS_NARROW_BLOCKS 8
#endif
#ifndef EPCROSS_WIDE_BLOCKS
#define EPCROSS_WIDE_BLOCKS 6
#endif
#ifndef EPCROSS_MAX_THREADS
#define EPCROSS_MAX_THREADS 128
#endif
#define EPCROSS_BOUNDED_KERNEL(name, threads, blocks, ...)                                                            \
    extern "C" __global__ void __launch_bounds__(threads, blocks)                                                     \
        name(const __grid_constant__ epcross::Exchange x, const __grid_constant__ epcross::Call call) {               \
        epcross::__VA_ARGS__(x, call);                                                                                \
    }
#define EPCROSS_KERNEL(name, blocks, ...) EPCROSS_BOUNDED_KERNEL(name, EPCROSS_MAX_THREADS, blocks, __VA_ARGS__)

EPCROSS_KERNEL(sentinel_dispatch_narrow, EPCROSS_NARROW_BLOCKS, sentinel_dispatch<1>)
EPCROSS_KERNEL(sentinel_dispatch_mid, EPCROSS_NARROW_BLOCKS, sentinel_dispatch<2>)
EPCROSS_KERNEL(sentinel_dispatch_wide, EPCROSS_WIDE_BLOCKS, sentinel_dispatch<4>)
EPCROSS_KERNEL(sentinel_combine_narrow, EPCROSS_WIDE_BLOCKS, sentinel_combine<1, 4>)
EPCROSS_KERNEL(sentinel_combine_mid, EPCROSS_WIDE_BLOCKS, sentinel_combine<2, 2>)
EPCROSS_KERNEL(sentinel_combine_wide, EPCROSS_WIDE_BLOCKS, sentinel_combine<4, 1>)
EPCROSS_KERNEL(fence_dispatch_narrow, EPCROSS_NARROW_BLOCKS, fence_dispatch<1>)
EPCROSS_KERNEL(fence_dispatch_mid, EPCROSS_NARROW_BLOCKS, fence_dispatch<2>)
EPCROSS_KERNEL(fence_dispatch_wide, EPCROSS_WIDE_BLOCKS, fence_dispatch<4>)
EPCROSS_BOUNDED_KERNEL(fence_dispatch_row, 512, 1, fence_dispatch<4>)
EPCROSS_KERNEL(fence_combine_narrow, EPCROSS_NARROW_BLOCKS, fence_combine<1, 4>)
EPCROSS_KERNEL(fence_combine_mid, EPCROSS_WIDE_BLOCKS, fence_combine<2, 4>)
EPCROSS_KERNEL(fence_combine_wide, EPCROSS_WIDE_BLOCKS, fence_combine<4, 2>)
