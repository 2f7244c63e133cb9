// Words that travel between GPUs, and how they are moved.
//
// A word is 64 bits: an aligned 64-bit access is single-copy atomic in the PTX memory model, also inside a vector access,
// while the vector as a whole may arrive torn. Sentinel therefore looks at every word of a vector.
#pragma once

namespace epcross {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
using i64 = long long;

#define EPCROSS_DEVICE __device__ __forceinline__

inline constexpr u32 kFull = 0xFFFF'FFFFu;
inline constexpr int kLanes = 32;
inline constexpr int kVectorBytes = 16;

/// Two words: one vector access of a thread.
struct Vector {
    u64 a, b;
};

/// What a landing word holds until it arrives: four bf16 NaNs of unusual payload, as in the protocol over shared memory.
inline constexpr u64 kArmed = 0xFFDB'7FB6'FFA5'7FE9ull;
/// Travels in place of a dispatch word that equals `kArmed` or itself; one bit in the escape bitmap says which.
inline constexpr u64 kEscape = 0x7FB6'FFDB'7FE9'FFA5ull;
/// Four quiet NaNs: travels in place of a combine word that equals `kArmed`, so that NaN stays NaN.
inline constexpr u64 kOtherNans = 0x7FC0'7FC0'7FC0'7FC0ull;

/// Relaxed, system scope: goes to the memory that owns the word, past the first-level cache.
EPCROSS_DEVICE u64 load_word(const void* at) {
    u64 word;
    asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
    return word;
}
EPCROSS_DEVICE void store_word(void* at, u64 word) {
    asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(at), "l"(word) : "memory");
}
EPCROSS_DEVICE Vector load_words(const void* at) {
    Vector v;
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(v.a), "=l"(v.b) : "l"(at) : "memory");
    return v;
}
EPCROSS_DEVICE void store_words(void* at, Vector v) {
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(at), "l"(v.a), "l"(v.b) : "memory");
}
EPCROSS_DEVICE u64 load_word_acquire(const void* at) {
    u64 word;
    asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
    return word;
}
EPCROSS_DEVICE void store_word_release(void* at, u64 word) {
    asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(at), "l"(word) : "memory");
}
/// Orders what this thread did and saw before it, for every GPU and the host.
EPCROSS_DEVICE void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

/// Plain accesses: ordered by kernel boundaries, flags and fences only. Read once, so kept out of the first-level cache.
EPCROSS_DEVICE Vector load_plain(const void* at) {
    Vector v;
    asm volatile("ld.global.L1::no_allocate.v2.b64 {%0, %1}, [%2];" : "=l"(v.a), "=l"(v.b) : "l"(at));
    return v;
}
EPCROSS_DEVICE void store_plain(void* at, Vector v) {
    asm volatile("st.global.v2.b64 [%0], {%1, %2};" ::"l"(at), "l"(v.a), "l"(v.b) : "memory");
}
EPCROSS_DEVICE u32 load_u32(const void* at) {
    u32 word;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(word) : "l"(at) : "memory");
    return word;
}
EPCROSS_DEVICE void store_u32(void* at, u32 word) {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(at), "r"(word) : "memory");
}

EPCROSS_DEVICE u64 global_timer_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

/// Programmatic dependent launch: the kernel before has ended and all it wrote is visible.
EPCROSS_DEVICE void await_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
/// The kernel after may take free room on the GPU; it still waits for this one to end.
EPCROSS_DEVICE void admit_kernel_after() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

EPCROSS_DEVICE bool arrived(Vector v) { return v.a != kArmed && v.b != kArmed; }

}  // namespace epcross
