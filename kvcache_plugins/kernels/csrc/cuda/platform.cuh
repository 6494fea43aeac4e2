// What the kernels ask of the machine: half-precision pairs, the tensor core, asynchronous copies, collectives of a
// warp. The only file with inline PTX. With KVCACHE_EMULATION every function has a body in plain C++, by which
// the tests run the kernels on a machine without a GPU (tests/kernels/cuda/emulated_gpu).
//
// Pairs of fp16 numbers travel as 32-bit words, the first number in the lower half.
#pragma once

#include <cstdint>

#include "code_places.h"

#if defined(KVCACHE_EMULATION)
#include "emulation.h"
#else
#include <cuda_runtime.h>
#define KVCACHE_DEVICE __device__ __forceinline__
// At most `threads` in a block, registers for `blocks` of them on a multiprocessor.
#define KVCACHE_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define KVCACHE_SHARED(name) extern __shared__ __align__(128) uint8_t name[]
#endif

namespace kvcache {

constexpr float kLog2E = 1.4426950408889634f;

#if !defined(KVCACHE_EMULATION)

KVCACHE_DEVICE float infinity() { return __int_as_float(0x7f800000); }
KVCACHE_DEVICE uint32_t float_bits(float x) { return __float_as_uint(x); }
KVCACHE_DEVICE float bits_float(uint32_t x) { return __uint_as_float(x); }

// ---- pairs of fp16

KVCACHE_DEVICE uint32_t half2_add(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
KVCACHE_DEVICE uint32_t half2_multiply(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
KVCACHE_DEVICE uint32_t half2_fma(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
KVCACHE_DEVICE uint32_t half2_negate(uint32_t a) {
  uint32_t d;
  asm("neg.f16x2 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}
// The lower number of a pair twice, and the upper; unpacked so, it is a part of the instruction that takes it.
KVCACHE_DEVICE uint32_t low_twice(uint32_t a) {
  uint32_t d;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(d) : "r"(a));
  return d;
}
KVCACHE_DEVICE uint32_t high_twice(uint32_t a) {
  uint32_t d;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(d) : "r"(a));
  return d;
}
KVCACHE_DEVICE uint32_t half2_pack(float low, float high) {
  uint32_t d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
KVCACHE_DEVICE float half_float(uint16_t bits) {
  float d;
  asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(bits));
  return d;
}
KVCACHE_DEVICE uint16_t float_half(float x) {
  uint16_t d;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(x));
  return d;
}
// The larger of both halves, as unsigned numbers; of fp16 numbers that are not negative, too.
KVCACHE_DEVICE uint32_t larger_halves(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }
// Bytes of `a` (0 to 3) and `b` (4 to 7), chosen by the four low nibbles of `selector`, lowest first: 0 to 7.
KVCACHE_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}
// (x & mask) | bits in one instruction; of two constants the compiler makes two.
KVCACHE_DEVICE uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(x), "r"(mask), "r"(bits));
  return d;
}

// ---- arithmetic that must round as written: no contraction

KVCACHE_DEVICE float add_rounded(float a, float b) { return __fadd_rn(a, b); }
KVCACHE_DEVICE float multiply_rounded(float a, float b) { return __fmul_rn(a, b); }
KVCACHE_DEVICE float divide_rounded(float a, float b) { return __fdiv_rn(a, b); }
KVCACHE_DEVICE float nearest_even(float x) { return rintf(x); }
// Cosine and sine of an angle in radians; reduced in fp64, for angles of long contexts.
KVCACHE_DEVICE void turn(double angle, float* cosine, float* sine) {
  const double turns = angle * 0.15915494309189533577;
  const float part = static_cast<float>(2.0 * (turns - rint(turns)));
  *cosine = cospif(part);
  *sine = sinpif(part);
}
// Cosine and sine of `part` / 2^32 turns, to 2^-20: as numbers of fp16 need them.
KVCACHE_DEVICE void turn_part(uint32_t part, float* cosine, float* sine) {
  const float angle = static_cast<float>(static_cast<int32_t>(part)) * 1.4629180792671596e-9f;  // 2 pi / 2^32
  asm("cos.approx.ftz.f32 %0, %1;" : "=f"(*cosine) : "f"(angle));
  asm("sin.approx.ftz.f32 %0, %1;" : "=f"(*sine) : "f"(angle));
}
KVCACHE_DEVICE float power_of_two(float x) {  // 2 units in the last place, subnormal results are 0
  float d;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
  return d;
}

// ---- warps and blocks

// A number that is not negative, of which the compiler does not know where it comes from: what follows from it is
// worked out where it is needed, and does not take up registers around a loop that holds the code of many formats.
KVCACHE_DEVICE int opaque(int number) {
  asm volatile("" : "+r"(number));
  __builtin_assume(number >= 0);  // or its quarter would take four instructions
  return number;
}
// An address in device memory, of which the compiler may have lost sight.
template <typename Number>
KVCACHE_DEVICE const Number* device_memory(const Number* address) {
  __builtin_assume(__isGlobal(address));
  return address;
}
KVCACHE_DEVICE int opaque_lane() { return opaque(static_cast<int>(threadIdx.x) % 32); }
// Has the compiler load and store on either side what stands there, also where types differ; no instruction.
KVCACHE_DEVICE void keep_order() { asm volatile("" ::: "memory"); }
KVCACHE_DEVICE void warp_barrier() { __syncwarp(); }
KVCACHE_DEVICE void block_barrier() { __syncthreads(); }
// Lets a kernel that is launched by `launch_early` behind this one begin, once all thread blocks have come here or
// ended.
KVCACHE_DEVICE void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// In such a kernel, waits for all that the one before writes; until then nothing that this one reads may be its.
KVCACHE_DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
KVCACHE_DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
KVCACHE_DEVICE float shuffle(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
KVCACHE_DEVICE bool warp_any(bool x) { return __any_sync(0xffffffffu, x); }
KVCACHE_DEVICE uint32_t warp_max(uint32_t x) { return __reduce_max_sync(0xffffffffu, x); }
KVCACHE_DEVICE uint32_t warp_sum(uint32_t x) { return __reduce_add_sync(0xffffffffu, x); }
// A bit for every lane.
KVCACHE_DEVICE uint32_t warp_vote(bool x) { return __ballot_sync(0xffffffffu, x); }
KVCACHE_DEVICE int count_bits(uint32_t x) { return __popc(x); }

// Writes a word that other threads may write at the same time: all of them the same number, so that no order matters.
KVCACHE_DEVICE void store_same(uint32_t* to, uint32_t x) { *to = x; }

// Sets a flag in memory that the host reads while the device goes on.
KVCACHE_DEVICE void raise_flag(int32_t* flag) {
  *static_cast<volatile int32_t*>(flag) = 1;
  __threadfence_system();
}

// The transpose of an 8 x 8 matrix of 16-bit numbers, of which lane `l` holds row `l / 4`, columns `2 (l % 4)` and
// the next.
KVCACHE_DEVICE uint32_t transpose_8x8(uint32_t x) {
  uint32_t d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(x));
  return d;
}

// c += a b, with a 16 x 16 and b 16 x 8 of fp16. With g = lane / 4 and t = lane % 4 a lane holds
//     a[0] row g, columns 2t and 2t + 1; a[1] row g + 8, the same; a[2] and a[3] the same, 8 columns further;
//     b0 rows 2t and 2t + 1 of column g; b1 rows 2t + 8 and 2t + 9;
//     c[0], c[1] row g, columns 2t and 2t + 1; c[2], c[3] row g + 8.
KVCACHE_DEVICE void multiply_accumulate(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                        uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same of bf16 numbers.
KVCACHE_DEVICE void multiply_accumulate_bfloat(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                               uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- copies from global to shared memory that finish later

// Asks for the 128 bytes around an address, which will be read soon.
KVCACHE_DEVICE void prefetch(const uint8_t* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
// Asks for `bytes` from an address on, both multiples of 16, by one lane, to come as far as the cache that all
// multiprocessors share. So it may be asked before `wait_for_previous`, too: what is still to be written there is
// written to that cache.
KVCACHE_DEVICE void prefetch_run(const uint8_t* from, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

KVCACHE_DEVICE void copy_async_16(void* to, const void* from) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}
KVCACHE_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
KVCACHE_DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- host side

// Lets a kernel have as much shared memory as the device has, once for a kernel and a device: these calls may wait for
// copies that other streams have begun. The kernels have no static shared memory, which would count against it.
template <auto kKernel>
int let_share_memory() {
  static uint64_t done = 0;  // a bit of every device
  int device = 0, most = 0;
  cudaError_t status = cudaGetDevice(&device);
  const uint64_t bit = status == cudaSuccess && device < 64 ? uint64_t{1} << device : 0;
  if ((__atomic_load_n(&done, __ATOMIC_ACQUIRE) & bit) != 0) return cudaSuccess;
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (status == cudaSuccess) status = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  if (status != cudaSuccess) {
    cudaGetLastError();  // reported here, and not to whoever asks next
    return status;
  }
  // A preference, so that as many thread blocks as were planned fit a multiprocessor; without it they are only fewer.
  if (cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared) !=
      cudaSuccess)
    cudaGetLastError();
  __atomic_fetch_or(&done, bit, __ATOMIC_RELEASE);
  return cudaSuccess;
}

// Launches `kKernel` on a stream (a cudaStream_t); returns a cudaError_t.
template <auto kKernel, typename Arguments>
int launch(dim3 grid, int threads, int shared_bytes, void* stream, const Arguments& arguments) {
  if (shared_bytes > 0) {
    const int status = let_share_memory<kKernel>();
    if (status != cudaSuccess) return status;
  }
  kKernel<<<grid, threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(arguments);
  return cudaGetLastError();
}

// The compute capability, times ten, for which the code of a kernel on the current device was compiled: of a build for
// older GPUs, which the driver has translated, theirs. 0 if the driver does not tell. Asked once for a kernel and a
// device.
template <auto kKernel>
int compiled_for() {
  constexpr int kDevices = 64;
  static int found[kDevices] = {};  // and 1: 0 of those that have not been asked
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return 0;
  int known = __atomic_load_n(&found[device], __ATOMIC_ACQUIRE);
  if (known == 0) {
    cudaFuncAttributes attributes{};
    const bool is_told = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kKernel)) == cudaSuccess;
    if (!is_told) cudaGetLastError();
    known = is_told ? attributes.ptxVersion + 1 : 1;
    __atomic_store_n(&found[device], known, __ATOMIC_RELEASE);
  }
  return known - 1;
}

// Whether the code of a kernel on the current device waits in `wait_for_previous`. Drivers before CUDA 12.3 do not
// record such launches in graphs.
template <auto kKernel>
bool may_begin_early() {
  static int version = 0;  // of the driver
  int driver = __atomic_load_n(&version, __ATOMIC_ACQUIRE);
  if (driver == 0) {
    if (cudaDriverGetVersion(&driver) != cudaSuccess) {
      cudaGetLastError();
      driver = 1;
    }
    __atomic_store_n(&version, driver, __ATOMIC_RELEASE);
  }
  return driver >= 12030 && compiled_for<kKernel>() >= 90;
}

// Launches a kernel that calls `wait_for_previous`: where it can, its launch does not wait for the kernel before it on
// the stream, so that its thread blocks are in place when that one ends.
template <auto kKernel, typename Arguments>
int launch_early(dim3 grid, int threads, int shared_bytes, void* stream, const Arguments& arguments) {
  if (!may_begin_early<kKernel>()) return launch<kKernel>(grid, threads, shared_bytes, stream, arguments);
  if (shared_bytes > 0) {
    const int refused = let_share_memory<kKernel>();
    if (refused != cudaSuccess) return refused;
  }
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early;
  config.numAttrs = 1;
  Arguments copy = arguments;
  void* pointers[] = {&copy};
  const cudaError_t status = cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kKernel), pointers);
  if (status != cudaSuccess) cudaGetLastError();  // reported here, and not to whoever asks next
  return status;
}

#endif

KVCACHE_DEVICE float half_low(uint32_t pair) { return half_float(static_cast<uint16_t>(pair)); }
KVCACHE_DEVICE float half_high(uint32_t pair) { return half_float(static_cast<uint16_t>(pair >> 16)); }
KVCACHE_DEVICE float bfloat_float(uint16_t bits) { return bits_float(static_cast<uint32_t>(bits) << 16); }

// Nearest bf16, ties to even; what is not a number stays so.
KVCACHE_DEVICE uint16_t float_bfloat(float x) {
  const uint32_t bits = float_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

}  // namespace kvcache
