// The machine of emulation.h: fibers, the collectives at which they meet, asynchronous copies.
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../tensor_core.h"
#include "emulation_machine.h"

// Where to go on, after another fiber has run. The compiler's own jumps keep what its functions need and no more, and
// take a tenth of the instructions of the library's, which also look at signals and cleanups; most of what the machine
// does is to jump. The compiler has them for some processors only.
#if defined(__x86_64__)
using Resume = void* [5];
#define KVCACHE_SAVE(resume) __builtin_setjmp(resume)
#define KVCACHE_JUMP(resume) __builtin_longjmp(resume, 1)
#else
#include <setjmp.h>
using Resume = jmp_buf;
#define KVCACHE_SAVE(resume) _setjmp(resume)
#define KVCACHE_JUMP(resume) _longjmp(resume, 1)
#endif

namespace emulation {

constinit thread_local Place here;
Observer* observer = nullptr;
uint8_t garbage = 0xAB;

namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kSharedAlignment = 128;  // KVCACHE_SHARED of platform.cuh
unsigned order_seed = 0;

enum class State { kReady, kAtWarp, kAtBlock, kDone };
enum Collective {
  kBarrier = 1,
  kShuffle,
  kShuffleXor,
  kAny,
  kMax,
  kSum,
  kVote,
  kTranspose,
  kMultiply,
  kMultiplyBfloats
};

struct Copy {
  void* to;
  const void* from;
};

struct Fiber {
  Resume resume;
  bool is_started = false;
  State state = State::kReady;
  int parity = 0;      // which of the two exchange areas the next collective uses
  int collective = 0;  // the one waited at, to catch lanes that take different ones
  std::vector<std::vector<Copy>> copies;
  std::vector<Copy> open;
  std::vector<uint8_t> stack;
};

struct Exchange {
  uint32_t words[2][kLanes][16];
};

struct Machine {
  long products = 0;  // of the tensor core
  std::vector<std::string> launched;  // since somebody asked
  unsigned random = 0;
  std::vector<uint8_t> shared;
  std::vector<Fiber> kept;  // as many as any launch has had
  std::span<Fiber> fibers;  // those of this launch
  std::vector<Exchange> exchanges;
  Resume scheduler;
  Fiber* next = nullptr;  // whose turn it is, or nobody's
  int warp = 0, turn = 0, flip = 0;  // the running warp, which of its turns it is, and whose turn the first one is
  void (*body)(void*) = nullptr;
  void* argument = nullptr;
};

// This thread's, which it makes where it begins to use one.
constinit KVCACHE_NEAR thread_local Machine* running = nullptr;

__attribute__((noinline, cold)) void make_machine() {
  static thread_local Machine instance;
  running = &instance;
}

inline Machine& machine() {
  if (running == nullptr) make_machine();
  return *running;
}

Fiber& current() { return machine().fibers[here.thread.x]; }

// A number below `count`; 0 unless the order is to vary.
unsigned draw(unsigned count) {
  if (order_seed == 0) return 0;
  unsigned& x = machine().random;
  x ^= x << 13;
  x ^= x >> 17;
  x ^= x << 5;
  return x % count;
}

// The compiler's jumps must not be in the function that is jumped to.
[[noreturn]] __attribute__((noinline)) void go_on(Resume& resume) { KVCACHE_JUMP(resume); }

// The next fiber of the running warp that may run, or none; fibers take their turns one after the other.
inline Fiber* take_turn(Machine& m) {
  while (++m.turn < kLanes) {
    const int index = m.warp * kLanes + (m.turn ^ m.flip);
    if (m.fibers[index].state != State::kReady) continue;
    here.thread.x = static_cast<unsigned>(index);
    return &m.fibers[index];
  }
  return nullptr;
}

inline void tell_observer(const Fiber& fiber) {
  if (observer != nullptr) observer->resume(fiber.stack.data(), fiber.stack.size());
}

// Lets the next fiber run, and returns when it is this one's turn again. The way by the scheduler is for fibers that
// have never run, and for the end of the turns.
void yield(State state, int collective = 0) {
  Fiber& fiber = current();
  fiber.state = state;
  fiber.collective = collective;
  if (KVCACHE_SAVE(fiber.resume) != 0) return;
  Machine& m = machine();
  if (observer != nullptr) observer->pause();
  m.next = take_turn(m);
  if (m.next == nullptr || !m.next->is_started) go_on(m.scheduler);
  tell_observer(*m.next);
  go_on(m.next->resume);
}

// What a fiber does: the work of one thread after the other. Starting anew for each would take calls of the system.
void work() {
  for (;;) {
    machine().body(machine().argument);
    const Fiber& fiber = current();
    bool is_copying = !fiber.open.empty();
    for (const std::vector<Copy>& group : fiber.copies) is_copying |= !group.empty();
    if (observer != nullptr && is_copying) observer->abandon_copies();
    yield(State::kDone);
  }
}

void start(Fiber& fiber) {
  fiber.is_started = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack.data();
  context.uc_stack.ss_size = fiber.stack.size();
  context.uc_link = nullptr;
  makecontext(&context, work, 0);
  setcontext(&context);
}

// Runs the fibers of a warp, each until it waits or ends.
void run_turns() {
  Machine& m = machine();
  m.turn = -1;
  m.next = take_turn(m);
  static_cast<void>(KVCACHE_SAVE(m.scheduler));  // where a fiber comes back that has left `next` to run
  Machine& again = machine();  // of what was known before, nothing is after a jump
  if (again.next == nullptr) return;
  tell_observer(*again.next);
  if (again.next->is_started) go_on(again.next->resume);
  start(*again.next);
}

// What the lanes of a warp have laid down, of A four words, of B two, of C four, becomes the product of the tiles with
// C added: four words. Lane 4 g + t holds
//   of A: rows g, g + 8, g, g + 8, columns 2 t and 2 t + 1, and of the last two words 8 columns further;
//   of B: column g, rows 2 t and 2 t + 1, and of the second word 8 rows further;
//   of C: rows g, g, g + 8, g + 8, columns 2 t, 2 t + 1, 2 t, 2 t + 1.
void multiply(uint32_t (&words)[kLanes][16], bool are_bfloats) {
  using kvcache::bits_float;
  const auto number = [are_bfloats](uint32_t bits) {
    const auto half = static_cast<uint16_t>(bits);
    return are_bfloats ? bits_float(uint32_t{half} << 16) : kvcache::half_float(half);
  };
  tensor_core::Tile tile;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 8; ++i)
      tile.a[g + i / 2 % 2 * 8][2 * t + i % 2 + i / 4 * 8] = number(words[lane][i / 2] >> 16 * (i % 2));
    for (int i = 0; i < 4; ++i) tile.b[2 * t + i % 2 + i / 2 * 8][g] = number(words[lane][4 + i / 2] >> 16 * (i % 2));
    for (int i = 0; i < 4; ++i) tile.c[g + i / 2 * 8][2 * t + i % 2] = bits_float(words[lane][6 + i]);
  }
  tensor_core::multiply(tile, are_bfloats);
  for (int lane = 0; lane < kLanes; ++lane)
    for (int i = 0; i < 4; ++i)
      words[lane][i] = kvcache::float_bits(tile.c[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2]);
}

// Releases the lanes of a warp if all wait at the same collective; returns whether any lane may run.
bool release_warp(int warp) {
  Machine& m = machine();
  int waiting = 0, ready = 0, kind = 0;
  for (int i = warp * kLanes; i < (warp + 1) * kLanes; ++i) {
    const Fiber& fiber = m.fibers[i];
    ready += fiber.state == State::kReady;
    if (fiber.state != State::kAtWarp) continue;
    ++waiting;
    if (kind != 0 && kind != fiber.collective) fail("the lanes of a warp are at different collectives");
    kind = fiber.collective;
  }
  if (ready > 0) return true;
  if (waiting == 0) return false;
  if (waiting != kLanes) fail("some lanes of a warp are at a collective, the others are not");
  // of the collectives only the barrier orders what lanes do to memory
  if (observer != nullptr && kind == kBarrier) observer->order_warp(warp);
  if (kind == kMultiply || kind == kMultiplyBfloats) {
    // the area that the lanes used, which will use the other one next
    multiply(m.exchanges[warp].words[m.fibers[warp * kLanes].parity ^ 1], kind == kMultiplyBfloats);
    ++m.products;
  }
  for (int i = warp * kLanes; i < (warp + 1) * kLanes; ++i) m.fibers[i].state = State::kReady;
  return true;
}

void begin_block() {
  Machine& m = machine();
  for (Fiber& fiber : m.fibers) {
    fiber.state = State::kReady;
    fiber.parity = 0;
    fiber.copies.clear();
    fiber.open.clear();
  }
  std::memset(m.shared.data(), garbage, m.shared.size());
  if (observer != nullptr) observer->begin_block();
}

// Runs every warp until its lanes wait for the block, or have ended.
void run_warps() {
  Machine& m = machine();
  std::vector<int> open(m.fibers.size() / kLanes);
  for (size_t i = 0; i < open.size(); ++i) open[i] = static_cast<int>(i);
  while (!open.empty()) {
    const unsigned chosen = draw(static_cast<unsigned>(open.size()));
    m.warp = open[chosen];
    m.flip = static_cast<int>(draw(kLanes));
    if (release_warp(m.warp)) run_turns();
    else open.erase(open.begin() + chosen);
  }
}

void run_block() {
  Machine& m = machine();
  begin_block();
  for (;;) {
    run_warps();
    size_t done = 0;
    for (const Fiber& fiber : m.fibers) done += fiber.state == State::kDone;
    if (done == m.fibers.size()) return;
    if (done > 0) fail("some threads of a block are at a barrier that others have left");
    if (observer != nullptr) observer->order_block();
    for (Fiber& fiber : m.fibers) fiber.state = State::kReady;
  }
}

// ---- collectives: a lane lays its words down, all lanes meet, every lane reads what it needs

inline int lane() { return static_cast<int>(here.thread.x) % kLanes; }

// Exchanges up to 16 words; the area stays valid until the lane's next collective but one.
inline const uint32_t (*exchange(const uint32_t* words, int count, Collective kind))[16] {
  Fiber& fiber = current();
  auto* area = machine().exchanges[here.thread.x / kLanes].words[fiber.parity];
  fiber.parity ^= 1;
  std::memcpy(area[lane()], words, sizeof(uint32_t) * count);
  yield(State::kAtWarp, kind);
  return area;
}

}  // namespace

void fail(const char* message) {
  std::fprintf(stderr, "emulated GPU: %s\n", message);
  std::fflush(stderr);
  std::abort();
}

void note_launch(const char* kernel, dim3 grid) {
  machine().launched.push_back(kernel + (" of " + std::to_string(grid.x) + " x " + std::to_string(grid.y)));
}

int compiled_for() {
  const char* const number = std::getenv("KVCACHE_EMULATED_CAPABILITY");
  return number != nullptr ? std::atoi(number) : 90;
}

void run_grid(dim3 grid, int threads, int shared_bytes, void (*body)(void*), void* argument) {
  Machine& m = machine();
  here.grid = grid;
  here.threads = {static_cast<unsigned>(threads), 1, 1};
  here.thread = {0, 0, 0};
  m.shared.resize(shared_bytes + kSharedAlignment);
  const uintptr_t start = reinterpret_cast<uintptr_t>(m.shared.data());
  here.shared = m.shared.data() + (kSharedAlignment - start % kSharedAlignment) % kSharedAlignment;
  while (m.kept.size() < static_cast<size_t>(threads)) m.kept.emplace_back().stack.resize(kStackBytes);
  m.fibers = {m.kept.data(), static_cast<size_t>(threads)};
  m.exchanges.resize(threads / kLanes);
  m.body = body;
  m.argument = argument;
  m.random = order_seed;
  if (observer != nullptr) observer->begin_launch(here.shared, shared_bytes);
  const unsigned count = grid.x * grid.y * grid.z;
  for (unsigned i = 0; i < count; ++i) {
    const unsigned block = order_seed % 2 == 0 ? i : count - 1 - i;
    here.block = {block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y};
    run_block();
  }
  if (observer != nullptr) observer->end_launch();
}

Fragment multiply_accumulate(Fragment c, const uint32_t (&pairs)[6], bool are_bfloats) {
  uint32_t mine[10];
  for (int i = 0; i < 6; ++i) mine[i] = pairs[i];
  for (int i = 0; i < 4; ++i) mine[6 + i] = kvcache::float_bits(c.c[i]);
  const uint32_t* sums = exchange(mine, 10, are_bfloats ? kMultiplyBfloats : kMultiply)[lane()];
  for (int i = 0; i < 4; ++i) c.c[i] = kvcache::bits_float(sums[i]);
  return c;
}

void wait_for_copies(int pending) {
  Fiber& fiber = current();
  while (fiber.copies.size() > static_cast<size_t>(pending)) {
    for (const Copy& copy : fiber.copies.front()) {
      std::memcpy(copy.to, copy.from, 16);
      if (observer != nullptr) observer->land_copy(copy.to, copy.from);
    }
    fiber.copies.erase(fiber.copies.begin());
  }
}

}  // namespace emulation

namespace kvcache {

void warp_barrier() {
  const uint32_t nothing = 0;
  emulation::exchange(&nothing, 1, emulation::kBarrier);
}
void block_barrier() { emulation::yield(emulation::State::kAtBlock); }
float shuffle(float x, int from) {
  const uint32_t word = float_bits(x);
  return bits_float(emulation::exchange(&word, 1, emulation::kShuffle)[from & 31][0]);
}
float shuffle_xor(float x, int mask) {
  const uint32_t word = float_bits(x);
  return bits_float(emulation::exchange(&word, 1, emulation::kShuffleXor)[emulation::lane() ^ mask][0]);
}
bool warp_any(bool x) {
  const uint32_t word = x;
  const auto* words = emulation::exchange(&word, 1, emulation::kAny);
  bool any = false;
  for (int i = 0; i < emulation::kLanes; ++i) any |= words[i][0] != 0;
  return any;
}
uint32_t warp_max(uint32_t x) {
  const auto* words = emulation::exchange(&x, 1, emulation::kMax);
  for (int i = 0; i < emulation::kLanes; ++i) x = words[i][0] > x ? words[i][0] : x;
  return x;
}
uint32_t warp_sum(uint32_t x) {
  const auto* words = emulation::exchange(&x, 1, emulation::kSum);
  uint32_t sum = 0;
  for (int i = 0; i < emulation::kLanes; ++i) sum += words[i][0];
  return sum;
}
uint32_t warp_vote(bool x) {
  const uint32_t word = x;
  const auto* words = emulation::exchange(&word, 1, emulation::kVote);
  uint32_t votes = 0;
  for (int i = 0; i < emulation::kLanes; ++i) votes |= words[i][0] << i;
  return votes;
}
uint32_t transpose_8x8(uint32_t x) {
  const auto* words = emulation::exchange(&x, 1, emulation::kTranspose);
  const int row = emulation::lane() / 4, column = emulation::lane() % 4 * 2;
  uint32_t result = 0;
  for (int i = 0; i < 2; ++i)  // element (column + i, row)
    result |= (words[(column + i) * 4 + row / 2][0] >> 16 * (row % 2) & 0xffffu) << 16 * i;
  return result;
}

void store_same(uint32_t* to, uint32_t x) {
  if (emulation::observer != nullptr) emulation::observer->store_same(to, sizeof(x), __builtin_return_address(0));
  *to = x;
}
// Threads that meet here all write the same, which is why an observer is not told of it.
void raise_flag(int32_t* flag) { *flag = 1; }

void copy_async_16(void* to, const void* from) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0)
    emulation::fail("an asynchronous copy of 16 bytes is not aligned");
  if (emulation::observer != nullptr) emulation::observer->start_copy(to, from, __builtin_return_address(0));
  emulation::current().open.push_back({to, from});
}
void copy_commit() {
  emulation::Fiber& fiber = emulation::current();
  fiber.copies.push_back(fiber.open);
  fiber.open.clear();
}

}  // namespace kvcache

extern "C" {
long kvcache_emulated_products() { return emulation::machine().products; }
const char* kvcache_emulated_kernels() {
  static thread_local std::string names;
  names.clear();
  for (const std::string& name : std::exchange(emulation::machine().launched, {})) names.append(name) += '\n';
  return names.c_str();
}
void kvcache_vary_emulation(unsigned seed, int garbage) {
  emulation::order_seed = seed;
  emulation::garbage = static_cast<uint8_t>(garbage);
}
}
