// Kernels with one fault each, and some without: what the sanitizer must find, and what it must not.
#include "platform.cuh"

namespace kvcache {
namespace {

constexpr int kFaultThreads = 64;
constexpr int kFaultBytes = 1024;  // of shared memory, and of `data`

struct Threads;

struct FaultArguments {
  void (*run)(const Threads&);
  uint8_t* data;  // [1024], 16-byte aligned
  int* sink;      // [2][64]: takes what is read
};

struct Threads {
  const FaultArguments& a;
  uint8_t* shared;
  int thread, lane, warp, block;

  int* words() const { return reinterpret_cast<int*>(shared); }
  int* copied() const { return words() + 4 * lane + 128 * warp; }
  const uint8_t* source() const { return a.data + 16 * lane; }
  void keep(int number) const { a.sink[block * kFaultThreads + thread] = number; }
  void copy() const {
    copy_async_16(copied(), source());
    copy_commit();
  }
};

struct Kernel {
  const char* name;
  void (*run)(const Threads&);
};

const Kernel kernels[] = {
    // ---- nothing to find
    {"barriers", [](const Threads& t) {  // barriers wherever they are needed
      t.words()[t.thread] = t.thread;
      warp_barrier();
      t.keep(t.words()[t.thread ^ 1]);
      block_barrier();
      t.words()[t.thread ^ 32] = 1;
      block_barrier();
      t.keep(t.words()[t.thread ^ 33]);
    }},
    {"copies", [](const Threads& t) {  // a copy that is waited for, by its thread and then by the warp
      t.copy();
      copy_wait<0>();
      t.keep(t.copied()[1]);
      warp_barrier();
      t.keep(t.words()[128 * t.warp + (4 * t.lane + 4) % 128]);
      warp_barrier();
      t.copy();
      copy_wait<0>();
    }},
    {"the same number", [](const Threads& t) {  // the same number from everybody, and a flag
      store_same(reinterpret_cast<uint32_t*>(t.words()), 5);
      raise_flag(reinterpret_cast<int32_t*>(t.a.data));
      block_barrier();
      t.keep(t.words()[0]);
    }},
    // ---- races in shared memory
    {"race of warps", [](const Threads& t) {  // of warps
      t.words()[t.thread] = 0;
      block_barrier();
      if (t.warp == 0) t.words()[t.lane] = 1;
      warp_barrier();
      if (t.warp == 1) t.keep(t.words()[t.lane]);
      if (t.warp == 0) t.keep(0);
    }},
    {"race of lanes", [](const Threads& t) {  // of lanes: a shuffle is no barrier
      t.words()[t.thread] = 0;
      warp_barrier();
      t.words()[t.thread] = t.thread;
      shuffle(1.0f, 0);
      t.keep(t.words()[t.thread ^ 1]);
    }},
    {"race with readers", [](const Threads& t) {  // a write after others have read
      t.words()[t.thread] = t.thread;
      block_barrier();
      t.keep(t.words()[t.thread ^ 1]);
      shuffle(1.0f, 0);
      t.words()[t.thread] = 0;
    }},
    {"race for a byte", [](const Threads& t) {  // a byte of a word that another lane writes
      t.words()[t.thread] = 0;
      if (t.lane > 0) t.shared[4 * t.thread - 1] = 1;
    }},
    {"a promise broken", [](const Threads& t) {  // different numbers where the same were promised, by one
      if (t.thread == 0) {
        t.words()[0] = 1;
      } else {
        store_same(reinterpret_cast<uint32_t*>(t.words()), 5);
      }
    }},
    // ---- copies
    {"a copy not waited for", [](const Threads& t) {  // not waited for
      t.copy();
      t.keep(t.copied()[0]);
      copy_wait<0>();
    }},
    {"another copy waited for", [](const Threads& t) {  // another one is
      t.copy();
      copy_wait<0>();
      warp_barrier();
      copy_commit();
      t.copy();
      copy_wait<1>();
      t.keep(t.copied()[0]);
      copy_wait<0>();
    }},
    {"a copy shown to others", [](const Threads& t) {  // waited for by its own thread only
      t.copy();
      copy_wait<0>();
      shuffle(1.0f, 0);
      t.keep(t.words()[128 * t.warp + (4 * t.lane + 4) % 128]);
    }},
    {"a copy over what is read", [](const Threads& t) {  // over what its own thread may still be reading
      t.words()[128 * t.warp + 4 * t.lane] = 1;
      block_barrier();
      t.keep(t.copied()[0]);
      t.copy();
      copy_wait<0>();
    }},
    {"copies left behind", [](const Threads& t) {  // left behind
      t.copy();
    }},
    // ---- memory that nobody wrote
    {"shared memory of nobody", [](const Threads& t) { t.keep(t.words()[t.thread]); }},
    {"shared memory of another block", [](const Threads& t) {  // or only the thread block before
      if (t.block == 0) t.words()[t.thread] = 1;
      t.keep(t.words()[t.thread]);
    }},
    // ---- global memory
    {"blocks that write", [](const Threads& t) {  // two thread blocks write
      if (t.thread == 0) t.a.data[5] = 1;
    }},
    {"a block that reads", [](const Threads& t) {  // one reads
      if (t.thread == 0 && t.block == 1) t.a.data[5] = 1;
      if (t.thread == 0 && t.block == 0) t.keep(t.a.data[5]);
    }},
    {"threads that write", [](const Threads& t) {  // two threads write
      if (t.block == 0) t.a.data[t.thread / 2] = 1;
    }},
    // ---- outside
    {"behind shared memory", [](const Threads& t) { t.shared[kFaultBytes + t.thread - 63] = 1; }},
    {"before shared memory", [](const Threads& t) { t.shared[t.thread - 1] = 1; }},
    {"behind a tensor", [](const Threads& t) { t.keep(t.a.data[kFaultBytes - 62 + t.thread]); }},
    {"a copy from behind a tensor", [](const Threads& t) {
      copy_async_16(t.copied(), t.a.data + kFaultBytes - 16 * 31 + 16 * t.lane);
      copy_commit();
      copy_wait<0>();
    }},
    // ---- what a GPU refuses or leaves open
    {"8 bytes unaligned", [](const Threads& t) {
      t.keep(static_cast<int>(reinterpret_cast<const uint2*>(t.a.data + 4)->x));
    }},
    {"2 bytes unaligned", [](const Threads& t) { t.keep(*reinterpret_cast<const uint16_t*>(t.a.data + 1)); }},
    {"a wide shift", [](const Threads& t) { t.keep(static_cast<int>(1u << (t.thread + 1))); }},
    {"a large number", [](const Threads& t) { t.keep(static_cast<int>(1e8f * static_cast<float>(t.thread))); }},
    {"a large sum", [](const Threads& t) { t.keep(0x7fffff00 + 5 * t.thread); }},
    {"an index", [](const Threads& t) {
      int numbers[4] = {};
      numbers[t.thread / 8] = 1;
      t.keep(numbers[t.thread % 4]);
    }},
};

KVCACHE_KERNEL(kFaultThreads, 1) fault_kernel(const FaultArguments a) {
  KVCACHE_SHARED(shared);
  const int thread = static_cast<int>(threadIdx.x);
  a.run({a, shared, thread, thread % 32, thread / 32, static_cast<int>(blockIdx.x)});
}

}  // namespace
}  // namespace kvcache

// Runs a kernel in two thread blocks; returns whether there is one of this name.
extern "C" bool kvcache_run_fault(const char* name, uint8_t* data, int* sink) {
  using namespace kvcache;
  for (const Kernel& kernel : kernels) {
    if (std::strcmp(kernel.name, name) != 0) continue;
    dim3 grid;
    grid.x = 2;
    launch<fault_kernel>(grid, kFaultThreads, kFaultBytes, nullptr, FaultArguments{kernel.run, data, sink});
    return true;
  }
  return false;
}
