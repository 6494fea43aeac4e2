// A machine with warps in plain C++, for the tests: the kernels compiled by a C++ compiler run on it, every thread of
// a block a fiber, switched at barriers and at the collectives of a warp. Not part of a build for a GPU.
//
// It is strict where a GPU may be lucky: shared memory starts as garbage, asynchronous copies land only when they are
// waited for, and lanes that do not all reach the same collective end the process. What it does not show: races
// between barriers that this order of execution hides, bank conflicts, and anything about time.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define KVCACHE_DEVICE inline
#define KVCACHE_KERNEL(threads, blocks) void
#define KVCACHE_SHARED(name) uint8_t* const name = ::emulation::machine().shared.data()
#define __restrict__ __restrict

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct uint2 {
  uint32_t x, y;
};
struct float2 {
  float x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};

namespace emulation {

constexpr int kLanes = 32;
constexpr size_t kStackBytes = 256 * 1024;

enum class State { kReady, kAtWarp, kAtBlock, kDone };

struct Copy {
  void* to;
  const void* from;
};

struct Fiber {
  ucontext_t start;
  jmp_buf resume;
  bool is_started = false;
  State state = State::kReady;
  int parity = 0;          // which of the two exchange areas the next collective uses
  int collective = 0;      // kind of the one waited at, to catch lanes that take different ones
  std::vector<std::vector<Copy>> copies;
  std::vector<Copy> open;
  std::vector<uint8_t> stack;
};

struct Exchange {
  uint32_t words[2][kLanes][16];
};

struct Machine {
  long products = 0;  // of the tensor core, of one lane
  dim3 grid, threads, block;
  std::vector<uint8_t> shared;
  std::vector<Fiber> fibers;
  std::vector<Exchange> exchanges;
  int current = 0;
  jmp_buf scheduler;
  void (*body)(void*) = nullptr;
  void* argument = nullptr;
};

inline Machine& machine() {
  static thread_local Machine instance;
  return instance;
}

[[noreturn]] inline void fail(const char* message) {
  std::fprintf(stderr, "emulated GPU: %s\n", message);
  std::fflush(stderr);
  std::abort();
}

inline void yield(State state, int collective = 0) {
  Machine& m = machine();
  Fiber& fiber = m.fibers[m.current];
  fiber.state = state;
  fiber.collective = collective;
  if (_setjmp(fiber.resume) == 0) _longjmp(m.scheduler, 1);
}

inline void enter() {
  Machine& m = machine();
  m.body(m.argument);
  m.fibers[m.current].state = State::kDone;
  _longjmp(m.scheduler, 1);
}

// Runs fiber `index` until it waits or ends.
inline void resume(int index) {
  Machine& m = machine();
  m.current = index;
  Fiber& fiber = m.fibers[index];
  if (_setjmp(m.scheduler) != 0) return;
  if (fiber.is_started) _longjmp(fiber.resume, 1);
  fiber.is_started = true;
  setcontext(&fiber.start);
}

// Releases the lanes of a warp if all wait at the same collective; returns whether any lane may run.
inline bool release_warp(int warp) {
  Machine& m = machine();
  int waiting = 0, ready = 0, done = 0, kind = -1;
  for (int i = warp * kLanes; i < (warp + 1) * kLanes; ++i) {
    const Fiber& fiber = m.fibers[i];
    ready += fiber.state == State::kReady;
    done += fiber.state == State::kDone;
    if (fiber.state != State::kAtWarp) continue;
    ++waiting;
    if (kind >= 0 && kind != fiber.collective) fail("the lanes of a warp are at different collectives");
    kind = fiber.collective;
  }
  if (ready > 0) return true;
  if (waiting == 0) return false;
  if (waiting != kLanes) fail("some lanes of a warp are at a collective, the others are not");
  for (int i = warp * kLanes; i < (warp + 1) * kLanes; ++i) m.fibers[i].state = State::kReady;
  return true;
}

inline void run_block() {
  Machine& m = machine();
  const int count = static_cast<int>(m.fibers.size()), warps = count / kLanes;
  for (Fiber& fiber : m.fibers) {
    fiber.is_started = false;
    fiber.state = State::kReady;
    fiber.parity = 0;
    fiber.copies.clear();
    fiber.open.clear();
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.data();
    fiber.start.uc_stack.ss_size = fiber.stack.size();
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, reinterpret_cast<void (*)()>(enter), 0);
  }
  std::memset(m.shared.data(), 0xAB, m.shared.size());
  for (;;) {
    for (int warp = 0; warp < warps; ++warp) {
      while (release_warp(warp)) {
        for (int i = warp * kLanes; i < (warp + 1) * kLanes; ++i) {
          if (m.fibers[i].state == State::kReady) resume(i);
        }
      }
    }
    int done = 0;
    for (const Fiber& fiber : m.fibers) done += fiber.state == State::kDone;
    if (done == count) return;
    if (done > 0) fail("some threads of a block are at a barrier that others have left");
    for (Fiber& fiber : m.fibers) fiber.state = State::kReady;
  }
}

template <typename Arguments>
struct Call {
  void (*kernel)(Arguments);
  const Arguments* arguments;
};

template <typename Arguments>
void call(void* argument) {
  const auto* one = static_cast<Call<Arguments>*>(argument);
  one->kernel(*one->arguments);
}

// ---- collectives: a lane lays its words down, all lanes meet, every lane reads what it needs

inline int lane() { return machine().current % kLanes; }

// Exchanges up to 16 words; the area stays valid until the lane's next collective but one.
inline const uint32_t (*exchange(const uint32_t* words, int count, int kind))[16] {
  Machine& m = machine();
  Fiber& fiber = m.fibers[m.current];
  auto* area = m.exchanges[m.current / kLanes].words[fiber.parity];
  fiber.parity ^= 1;
  std::memcpy(area[lane()], words, sizeof(uint32_t) * count);
  yield(State::kAtWarp, kind);
  return area;
}

// Products of the tensor core so far, which tells whether the fast path was taken.
extern "C" __attribute__((used)) inline long kvcache_emulated_products() { return machine().products / kLanes; }

struct Index {
  unsigned x, y, z;
};

inline Index thread_index() { return {static_cast<unsigned>(machine().current), 0, 0}; }

}  // namespace emulation

#define threadIdx (::emulation::thread_index())
#define blockIdx (::emulation::machine().block)
#define gridDim (::emulation::machine().grid)
#define blockDim (::emulation::machine().threads)

namespace kvcache {

inline float infinity() { return HUGE_VALF; }
inline uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float bits_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline float half_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
  if (magnitude >= 0x7c00) return bits_float(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
  const float value = magnitude < 0x400 ? static_cast<float>(magnitude) * 0x1p-24f
                                        : bits_float((magnitude << 13) + (112u << 23));
  return sign != 0 ? -value : value;
}

// Nearest fp16, ties to even.
inline uint16_t double_half(double x) {
  if (x != x) return 0x7fff;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::fabs(x);
  if (magnitude >= 65520.0) return sign | 0x7c00;
  if (magnitude < 0x1p-14) return sign | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24));
  int exponent;
  const double fraction = std::frexp(magnitude, &exponent);  // in [0.5, 1)
  const int scaled = static_cast<int>(std::nearbyint(fraction * 2048.0));  // 1024 to 2048
  return sign | static_cast<uint16_t>((exponent + 14) * 1024 + (scaled - 1024));
}
inline uint16_t float_half(float x) { return double_half(x); }

template <typename Function>
inline uint32_t half2_map(Function function, uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result = 0;
  for (int i = 0; i < 32; i += 16) {
    const double x = half_float(static_cast<uint16_t>(a >> i)), y = half_float(static_cast<uint16_t>(b >> i));
    const double z = half_float(static_cast<uint16_t>(c >> i));
    result |= static_cast<uint32_t>(double_half(function(x, y, z))) << i;
  }
  return result;
}
inline uint32_t half2_add(uint32_t a, uint32_t b) {
  return half2_map([](double x, double y, double) { return x + y; }, a, b, 0);
}
inline uint32_t half2_multiply(uint32_t a, uint32_t b) {
  return half2_map([](double x, double y, double) { return x * y; }, a, b, 0);
}
inline uint32_t half2_fma(uint32_t a, uint32_t b, uint32_t c) {
  return half2_map([](double x, double y, double z) { return x * y + z; }, a, b, c);
}
inline uint32_t larger_halves(uint32_t a, uint32_t b) {
  const uint32_t low = std::max(a & 0xffffu, b & 0xffffu), high = std::max(a >> 16, b >> 16);
  return high << 16 | low;
}
inline uint32_t half2_negate(uint32_t a) { return a ^ 0x80008000u; }
inline uint32_t low_twice(uint32_t a) { return (a & 0xffffu) * 0x10001u; }
inline uint32_t high_twice(uint32_t a) { return (a >> 16) * 0x10001u; }
inline uint32_t half2_pack(float low, float high) {
  return float_half(low) | static_cast<uint32_t>(float_half(high)) << 16;
}
inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  if ((selector & 0x8888u) != 0) emulation::fail("a byte permutation would replicate a sign");
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
inline uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) { return (x & mask) | bits; }

inline float add_rounded(float a, float b) {
  volatile float sum = a + b;
  return sum;
}
inline float multiply_rounded(float a, float b) {
  volatile float product = a * b;
  return product;
}
inline float divide_rounded(float a, float b) { return a / b; }
inline float nearest_even(float x) { return std::nearbyintf(x); }
inline void turn(double angle, float* cosine, float* sine) {
  *cosine = static_cast<float>(std::cos(angle));
  *sine = static_cast<float>(std::sin(angle));
}
inline void turn_part(uint32_t part, float* cosine, float* sine) {
  const float angle = static_cast<float>(static_cast<int32_t>(part)) * 1.4629180792671596e-9f;
  *cosine = std::cos(angle);
  *sine = std::sin(angle);
}
inline float power_of_two(float x) { return std::exp2(x); }

inline void warp_barrier() {
  const uint32_t nothing = 0;
  emulation::exchange(&nothing, 1, 1);
}
inline void block_barrier() { emulation::yield(emulation::State::kAtBlock); }
inline float shuffle(float x, int from) {
  const uint32_t word = float_bits(x);
  return bits_float(emulation::exchange(&word, 1, 2)[from & 31][0]);
}
inline float shuffle_xor(float x, int mask) {
  const uint32_t word = float_bits(x);
  return bits_float(emulation::exchange(&word, 1, 3)[emulation::lane() ^ mask][0]);
}
inline bool warp_any(bool x) {
  const uint32_t word = x;
  const auto* words = emulation::exchange(&word, 1, 4);
  bool any = false;
  for (int i = 0; i < emulation::kLanes; ++i) any |= words[i][0] != 0;
  return any;
}
inline uint32_t warp_max(uint32_t x) {
  const auto* words = emulation::exchange(&x, 1, 5);
  for (int i = 0; i < emulation::kLanes; ++i) x = words[i][0] > x ? words[i][0] : x;
  return x;
}

inline void raise_flag(int32_t* flag) { *flag = 1; }

inline uint32_t transpose_8x8(uint32_t x) {
  const auto* words = emulation::exchange(&x, 1, 6);
  const int row = emulation::lane() / 4, column = emulation::lane() % 4 * 2;
  uint32_t result = 0;
  for (int i = 0; i < 2; ++i)  // element (column + i, row)
    result |= (words[(column + i) * 4 + row / 2][0] >> 16 * (row % 2) & 0xffffu) << 16 * i;
  return result;
}

inline void multiply_accumulate(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                uint32_t b1) {
  const uint32_t pairs[6] = {a0, a1, a2, a3, b0, b1};
  uint32_t mine[16] = {};
  for (int i = 0; i < 6; ++i) {
    mine[2 * i] = float_bits(half_float(static_cast<uint16_t>(pairs[i])));
    mine[2 * i + 1] = float_bits(half_float(static_cast<uint16_t>(pairs[i] >> 16)));
  }
  const auto* words = emulation::exchange(mine, 12, 7);
  ++emulation::machine().products;
  const int group = emulation::lane() / 4, quad = emulation::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = group + i / 2 * 8, column = 2 * quad + i % 2;
    double sum = 0.0;
    for (int k = 0; k < 16; ++k) {
      const int a_register = row / 8 + k / 8 * 2, a_lane = row % 8 * 4 + k % 8 / 2;
      const int b_register = 4 + k / 8, b_lane = column * 4 + k % 8 / 2;
      sum += static_cast<double>(bits_float(words[a_lane][2 * a_register + k % 2])) *
             bits_float(words[b_lane][2 * b_register + k % 2]);
    }
    c[i] = static_cast<float>(c[i] + sum);
  }
}

inline void copy_async_16(void* to, const void* from) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0)
    emulation::fail("an asynchronous copy of 16 bytes is not aligned");
  emulation::Machine& m = emulation::machine();
  m.fibers[m.current].open.push_back({to, from});
}
inline void copy_commit() {
  emulation::Machine& m = emulation::machine();
  emulation::Fiber& fiber = m.fibers[m.current];
  fiber.copies.push_back(fiber.open);
  fiber.open.clear();
}
template <int kPending>
inline void copy_wait() {
  emulation::Machine& m = emulation::machine();
  emulation::Fiber& fiber = m.fibers[m.current];
  while (fiber.copies.size() > static_cast<size_t>(kPending)) {
    for (const emulation::Copy& copy : fiber.copies.front()) std::memcpy(copy.to, copy.from, 16);
    fiber.copies.erase(fiber.copies.begin());
  }
}

template <typename Arguments>
int launch(void (*kernel)(Arguments), dim3 grid, int threads, int shared_bytes, void*, const Arguments& arguments) {
  emulation::Machine& m = emulation::machine();
  m.grid = grid;
  m.threads = {static_cast<unsigned>(threads), 1, 1};
  // aligned like the real thing: the vector's own alignment is 16
  m.shared.resize(shared_bytes + 16);
  m.fibers.resize(threads);
  for (emulation::Fiber& fiber : m.fibers) fiber.stack.resize(emulation::kStackBytes);
  m.exchanges.resize(threads / emulation::kLanes);
  emulation::Call<Arguments> one{kernel, &arguments};
  m.body = emulation::call<Arguments>;
  m.argument = &one;
  for (m.block.z = 0; m.block.z < grid.z; ++m.block.z)
    for (m.block.y = 0; m.block.y < grid.y; ++m.block.y)
      for (m.block.x = 0; m.block.x < grid.x; ++m.block.x) emulation::run_block();
  return 0;
}

}  // namespace kvcache
