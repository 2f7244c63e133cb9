// Entry points. `few*` poll headers and rows together (at most 1, 3 or 7 peers), `many` polls headers first, `wide` moves
// four vectors a lane for large steps.
#include "fence.cuh"
#include "sentinel_combine.cuh"
#include "sentinel_dispatch.cuh"

namespace {
constexpr int kBlockThreads = 256;
}

#define EPCROSS_KERNEL(name, blocks, body)                                                                            \
    extern "C" __global__ void __launch_bounds__(kBlockThreads, blocks)                                               \
        name(const __grid_constant__ epcross::Exchange x, const __grid_constant__ epcross::Call call) {               \
        epcross::body(x, call);                                                                                       \
    }
#define EPCROSS_ARGS(...) __VA_ARGS__

EPCROSS_KERNEL(sentinel_dispatch_few1, 4, sentinel_dispatch<EPCROSS_ARGS(1, 1, 1)>)
EPCROSS_KERNEL(sentinel_dispatch_few3, 4, sentinel_dispatch<EPCROSS_ARGS(1, 3, 1)>)
EPCROSS_KERNEL(sentinel_dispatch_few7, 2, sentinel_dispatch<EPCROSS_ARGS(1, 7, 1)>)
EPCROSS_KERNEL(sentinel_dispatch_many, 4, sentinel_dispatch<EPCROSS_ARGS(1, 0, 4)>)
EPCROSS_KERNEL(sentinel_dispatch_wide, 4, sentinel_dispatch<EPCROSS_ARGS(4, 0, 1)>)
EPCROSS_KERNEL(sentinel_combine_few1, 4, sentinel_combine<EPCROSS_ARGS(1, 1, 2)>)
EPCROSS_KERNEL(sentinel_combine_few3, 4, sentinel_combine<EPCROSS_ARGS(1, 3, 4)>)
EPCROSS_KERNEL(sentinel_combine_few7, 2, sentinel_combine<EPCROSS_ARGS(1, 7, 8)>)
EPCROSS_KERNEL(sentinel_combine_many, 4, sentinel_combine<EPCROSS_ARGS(1, 0, 4)>)
EPCROSS_KERNEL(sentinel_combine_wide, 4, sentinel_combine<EPCROSS_ARGS(4, 0, 1)>)
EPCROSS_KERNEL(fence_dispatch_one, 4, fence_dispatch<1>)
EPCROSS_KERNEL(fence_dispatch_wide, 4, fence_dispatch<4>)
EPCROSS_KERNEL(fence_combine_one, 4, fence_combine<EPCROSS_ARGS(1, 8)>)
EPCROSS_KERNEL(fence_combine_wide, 4, fence_combine<EPCROSS_ARGS(4, 2)>)
