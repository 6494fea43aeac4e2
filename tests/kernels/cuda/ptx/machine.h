// The state of a running thread block, and how instructions get at registers.
#pragma once

#include <bit>
#include <type_traits>

#include "counting.h"
#include "program.h"

namespace ptx {

constexpr uint8_t kGarbage = 0xFF;  // what memory holds that nobody has written

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

// What is known of a byte of shared memory. Phases pass with block barriers and blocks, and never return, so records
// of earlier blocks need not be cleared; steps of a warp with its barriers.
struct alignas(32) SharedByte {
  uint32_t write_phase = 0, write_step = 0;
  uint32_t read_phase = 0, read_step = 0, read_warps = 0;
  uint32_t read_lanes = 0;  // of the last warp in `read_warps`, since its last barrier
  int16_t writer = 0;
  bool is_pending = false;  // a copy by the writer is under way
};

struct Block {
  const uint8_t* parameters = nullptr;
  uint8_t* shared = nullptr;
  size_t shared_bytes = 0;
  SharedByte* records = nullptr;
  dim3 index;
  uint32_t first_phase = 1, phase = 1;
};

struct Copy {
  uint32_t to;
  const uint8_t* from;
};

// Lanes that run together from `at` until they reach `join`, where those below wait for them.
struct Path {
  int at;
  uint32_t lanes;
  int join;
};

struct Warp {
  enum class State { kReady, kAtBarrier, kDone };

  Block* block = nullptr;
  const Kernel* kernel = nullptr;
  int index = 0;
  uint64_t* values = nullptr;                          // of registers, lane by lane
  std::vector<uint32_t> predicates;                    // a bit for every lane
  std::vector<uint32_t> defined, defined_predicates;  // in which lanes registers and predicates have been written
  std::vector<Path> paths;
  State state = State::kReady;
  uint32_t active = 0, step = 1;
  bool is_alone = true;                           // the kernel before this one has ended
  std::vector<std::vector<Copy>> copies[kLanes];  // groups committed, oldest first
  std::vector<Copy> open[kLanes];
  Count* counts = nullptr;  // of every instruction, if they are counted

  uint64_t* operator[](int number) { return values + static_cast<size_t>(number) * kLanes; }
  int thread(int lane) const { return index * kLanes + lane; }
  Count* count_of(const Instruction& i) const {
    return counts == nullptr ? nullptr : counts + (&i - kernel->code.data());
  }
};

// Runs a warp until it waits at a block barrier or ends.
void run(Warp& warp);

bool is_in_a_tensor(uint64_t address, size_t size);

// Products of the tensor core so far.
extern long products;

[[noreturn]] __attribute__((format(printf, 3, 4))) void fail(const Warp& warp, const Instruction& instruction,
                                                             const char* format, ...);

template <class Body>
inline void for_lanes(uint32_t lanes, Body body) {
  if (lanes == kAllLanes) {
    for (int lane = 0; lane < kLanes; ++lane) body(lane);
    return;
  }
  for (; lanes != 0; lanes &= lanes - 1) body(std::countr_zero(lanes));
}

// A number of a register, which holds it in its lowest bits.
template <class T>
inline T number(uint64_t bits) {
  if constexpr (std::is_same_v<T, float>) return std::bit_cast<float>(static_cast<uint32_t>(bits));
  else if constexpr (std::is_same_v<T, double>) return std::bit_cast<double>(bits);
  else return static_cast<T>(bits);
}

// The register of a number; of what is not a number there is one only.
template <class T>
inline uint64_t bits_of(T x) {
  if constexpr (std::is_same_v<T, float>) return x != x ? 0x7fffffffu : std::bit_cast<uint32_t>(x);
  else if constexpr (std::is_same_v<T, double>) return x != x ? 0x7fffffffffffffff : std::bit_cast<uint64_t>(x);
  else return static_cast<std::make_unsigned_t<T>>(x);
}

inline uint64_t cut(uint64_t bits, int width) { return width == 64 ? bits : bits & ((uint64_t{1} << width) - 1); }

inline void set_predicate(Warp& w, int number, uint32_t lanes, uint32_t value) {
  w.predicates[number] = (w.predicates[number] & ~lanes) | (value & lanes);
}

// Operations whose every lane is a function of that lane's numbers.

template <class From, class To, auto kBody>
void unary(Warp& w, const Instruction& i, uint32_t lanes) {
  uint64_t* to = w[i.to[0]];
  const uint64_t* a = w[i.from[0]];
  for_lanes(lanes, [&](int lane) { to[lane] = bits_of<To>(static_cast<To>(kBody(number<From>(a[lane])))); });
}

template <class From, auto kBody, class To = From>
void binary(Warp& w, const Instruction& i, uint32_t lanes) {
  uint64_t* to = w[i.to[0]];
  const uint64_t *a = w[i.from[0]], *b = w[i.from[1]];
  for_lanes(lanes, [&](int lane) {
    to[lane] = bits_of<To>(static_cast<To>(kBody(number<From>(a[lane]), number<From>(b[lane]))));
  });
}

template <class T, auto kBody>
void ternary(Warp& w, const Instruction& i, uint32_t lanes) {
  uint64_t* to = w[i.to[0]];
  const uint64_t *a = w[i.from[0]], *b = w[i.from[1]], *c = w[i.from[2]];
  for_lanes(lanes, [&](int lane) {
    to[lane] = bits_of<T>(static_cast<T>(kBody(number<T>(a[lane]), number<T>(b[lane]), number<T>(c[lane]))));
  });
}

template <class T, auto kBody>
void compare(Warp& w, const Instruction& i, uint32_t lanes) {
  const uint64_t *a = w[i.from[0]], *b = w[i.from[1]];
  uint32_t result = 0;
  for_lanes(lanes, [&](int lane) {
    result |= static_cast<uint32_t>(kBody(number<T>(a[lane]), number<T>(b[lane]))) << lane;
  });
  set_predicate(w, i.to_predicate, lanes, result);
}

}  // namespace ptx
