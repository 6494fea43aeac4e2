// A machine with warps in plain C++, for the tests: the kernels compiled by a C++ compiler run on it, every thread of
// a block a fiber, switched at barriers and at the collectives of a warp. Not part of a build for a GPU. This is what
// the kernels see of it; how it works is in emulation.cpp.
//
// It is strict where a GPU may be lucky: shared memory starts as garbage, asynchronous copies land only when they are
// waited for, and lanes that do not all reach the same collective end the process. Races, uses of shared memory that
// nobody wrote, and accesses outside of it or of a tensor show in a build with an observer of every access
// (emulation_machine.h). What it does not show: bank conflicts, and anything about time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "emulation_numbers.h"

#define KVCACHE_DEVICE inline
#define KVCACHE_KERNEL(threads, blocks) void
#define KVCACHE_SHARED(name) uint8_t* const name = ::emulation::here.shared
#define __restrict__ __restrict
// Of what is a thread's own: found without a call, of which a library usually makes one wherever it looks.
#define KVCACHE_NEAR __attribute__((tls_model("initial-exec")))

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
// As aligned as CUDA's, so that a check of alignment sees what a GPU would refuse.
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

namespace emulation {

// What the running thread knows of its place.
struct Place {
  dim3 grid, threads, block, thread;
  uint8_t* shared = nullptr;
};
extern constinit KVCACHE_NEAR thread_local Place here;

// Notes that a kernel is launched: some text that has its name, and of how many thread blocks.
void note_launch(const char* kernel, dim3 grid);

// What a build for a GPU would say: KVCACHE_EMULATED_CAPABILITY, the compute capability times ten, or 90.
int compiled_for();

// Runs `body` for every thread of a grid of blocks.
void run_grid(dim3 grid, int threads, int shared_bytes, void (*body)(void*), void* argument);

// The fragment `c` of a lane, plus the product of all lanes' fragments `a` and `b`, of fp16 or bf16 numbers.
struct Fragment {
  float c[4];
};
Fragment multiply_accumulate(Fragment c, const uint32_t (&pairs)[6], bool are_bfloats);

void wait_for_copies(int pending);

}  // namespace emulation

#define threadIdx (::emulation::here.thread)
#define blockIdx (::emulation::here.block)
#define gridDim (::emulation::here.grid)
#define blockDim (::emulation::here.threads)

namespace kvcache {

template <typename Number>
inline const Number* device_memory(const Number* address) {
  return address;
}
inline int opaque(int number) { return number; }
inline void keep_order() {}
inline int opaque_lane() { return static_cast<int>(threadIdx.x) % 32; }
void warp_barrier();
void block_barrier();
float shuffle(float x, int lane);
float shuffle_xor(float x, int mask);
bool warp_any(bool x);
uint32_t warp_max(uint32_t x);
uint32_t warp_sum(uint32_t x);
uint32_t warp_vote(bool x);
uint32_t transpose_8x8(uint32_t x);
void store_same(uint32_t* to, uint32_t x);
void raise_flag(int32_t* flag);

inline void multiply_accumulate(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                uint32_t b1) {
  const uint32_t pairs[6] = {a0, a1, a2, a3, b0, b1};
  const emulation::Fragment sum = emulation::multiply_accumulate({c[0], c[1], c[2], c[3]}, pairs, false);
  for (int i = 0; i < 4; ++i) c[i] = sum.c[i];
}
inline void multiply_accumulate_bfloat(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                       uint32_t b1) {
  const uint32_t pairs[6] = {a0, a1, a2, a3, b0, b1};
  const emulation::Fragment sum = emulation::multiply_accumulate({c[0], c[1], c[2], c[3]}, pairs, true);
  for (int i = 0; i < 4; ++i) c[i] = sum.c[i];
}

inline void prefetch(const uint8_t*) {}
inline void prefetch_run(const uint8_t*, int) {}
inline void let_next_begin() {}
inline void wait_for_previous() {}
void copy_async_16(void* to, const void* from);
void copy_commit();
template <int kPending>
inline void copy_wait() {
  emulation::wait_for_copies(kPending);
}

template <auto kKernel, typename Arguments>
int launch(dim3 grid, int threads, int shared_bytes, void*, const Arguments& arguments) {
  struct Call {
    void (*kernel)(Arguments);
    const Arguments* arguments;

    // Reads what is the host's: nothing that an observer of the kernels should see.
    __attribute__((no_sanitize("thread"))) static void run(void* call) {
      const Call* one = static_cast<Call*>(call);
      one->kernel(*one->arguments);
    }
  } call{kKernel, &arguments};
  emulation::note_launch(__PRETTY_FUNCTION__, grid);
  emulation::run_grid(grid, threads, shared_bytes, Call::run, &call);
  return 0;
}

template <auto kKernel>
int compiled_for() {
  return emulation::compiled_for();
}

// Kernels run one after the other here.
template <auto kKernel, typename Arguments>
int launch_early(dim3 grid, int threads, int shared_bytes, void* stream, const Arguments& arguments) {
  return launch<kKernel>(grid, threads, shared_bytes, stream, arguments);
}

}  // namespace kvcache
