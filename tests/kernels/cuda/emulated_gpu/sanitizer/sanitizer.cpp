// The emulated GPU's compute-sanitizer. Device units are compiled with -fsanitize=thread, of which only the calls
// before every load and store are wanted: they end here, and not in the library that looks for races of the host. The
// calls of -fsanitize=undefined end here too.
#include <cstdlib>
#include <cstring>

#include "shadow.h"
#include "tensors.h"

namespace sanitizer {
namespace {

enum class Kind { kRead, kWrite, kSame };

class Watch final : public emulation::Observer {
 public:
  void begin_launch(const uint8_t* shared, size_t shared_bytes) override {
    if (emulation::here.threads.x > 32 * kMostWarps) fail(0, "has more threads than readers are kept of");
    if (shared_bytes > kMostShared) fail(0, "is given %zu bytes of shared memory", shared_bytes);
    shared_.begin = reinterpret_cast<uintptr_t>(shared);
    shared_.size = shared_bytes;
    clock_.first_of_launch = clock_.phase + 1;
  }
  void end_launch() override { ++clock_.phase; }
  void begin_block() override { clock_.first_of_block = ++clock_.phase; }
  void resume(const uint8_t* stack, size_t stack_bytes) override {
    stack_ = reinterpret_cast<uintptr_t>(stack);
    stack_bytes_ = stack_bytes;
    const unsigned thread = emulation::here.thread.x;
    runner_ = {thread, thread / 32, thread % 32};
    is_running_ = true;
  }
  void pause() override { is_running_ = false; }
  void order_block() override { ++clock_.phase; }
  void order_warp(int warp) override { ++clock_.steps[warp]; }
  void store_same(const void* to, size_t size, const void* caller) override {
    access(to, size, Kind::kSame, caller);
  }
  void start_copy(const void* to, const void* from, const void* caller) override {
    access(from, 16, Kind::kRead, caller);
    const uintptr_t at = reinterpret_cast<uintptr_t>(to);
    if (at < shared_.begin || at + 16 > shared_.begin + shared_.size)
      fail(caller_of(caller), "copies outside of its shared memory: to byte %td of %zu",
           static_cast<ptrdiff_t>(at - shared_.begin), static_cast<size_t>(shared_.size));
    Access(clock_, shared_, runner_, at, 16, caller_of(caller)).start_copy();
  }
  void land_copy(const void* to, const void* from) override {
    const Access landing(clock_, shared_, runner_, reinterpret_cast<uintptr_t>(to), 16, 0);
    landing.land_copy();
    access(from, 16, Kind::kRead, nullptr);
  }
  void abandon_copies() override { fail(0, "ends with copies that it has not waited for"); }

  void access(const void* address, size_t size, Kind kind, const void* caller) {
    if (!is_running_) return;  // the host's part of a device unit
    const uintptr_t at = reinterpret_cast<uintptr_t>(address);
    if (at - stack_ < stack_bytes_) return;
    const Region* region = nullptr;
    if (at - shared_.begin < shared_.size && at + size <= shared_.begin + shared_.size) {
      region = &shared_;
    } else if (at - reinterpret_cast<uintptr_t>(&emulation::here) < sizeof(emulation::here) && kind == Kind::kRead) {
      return;
    } else {
      region = Tensors::instance().find(at, size);
    }
    if (region == nullptr)
      fail(caller_of(caller), "%s %zu bytes outside of its shared memory (at byte %td of %zu) and of all tensors",
           kind == Kind::kRead ? "reads" : "writes", size, static_cast<ptrdiff_t>(at - shared_.begin),
           static_cast<size_t>(shared_.size));
    const Caller from = caller == nullptr ? 0 : caller_of(caller);
    const Access access(clock_, *region, runner_, at, static_cast<int>(size), from);
    if (kind == Kind::kRead) {
      access.read();
    } else if (kind == Kind::kWrite) {
      access.write();
    } else {
      access.write_same();
    }
    ++accesses;
  }

  long accesses = 0;

 private:
  static constexpr size_t kMostShared = 232448;  // of a thread block, on any GPU so far
  static constexpr unsigned kMostWarps = 32;     // bits of Read::warps

  Clock clock_;
  Runner runner_{};
  Region shared_{"shared memory", 0, 0, static_cast<Byte*>(std::calloc(kMostShared, sizeof(Byte))), true};
  uintptr_t stack_ = 0, stack_bytes_ = 0;
  bool is_running_ = false;
};

Watch watch;

// From the first tensor on that is made after the library is loaded.
const bool is_watching = [] {
  c10::SetAllocator(c10::kCPU, &Tensors::instance(), 1);
  emulation::observer = &watch;
  return true;
}();

// What -fsanitize=undefined says of the place; more follows, of which this needs nothing.
struct Place {
  const char* file;
  uint32_t line, column;
};

[[noreturn]] void fail_at(const void* data, const char* what) {
  const auto* place = static_cast<const Place*>(data);
  fail(0, "%s\n    from %s:%u", what, place->file == nullptr ? "?" : place->file, place->line);
}

}  // namespace
}  // namespace sanitizer

#define ACCESSES(name, size)                                                       \
  void __tsan_read##name(void* at) {                                               \
    sanitizer::watch.access(at, size, sanitizer::Kind::kRead, __builtin_return_address(0));         \
  }                                                                                \
  void __tsan_write##name(void* at) {                                              \
    sanitizer::watch.access(at, size, sanitizer::Kind::kWrite, __builtin_return_address(0));          \
  }                                                                                \
  void __tsan_unaligned_read##name(void* at) {                                     \
    sanitizer::watch.access(at, size, sanitizer::Kind::kRead, __builtin_return_address(0));         \
  }                                                                                \
  void __tsan_unaligned_write##name(void* at) {                                    \
    sanitizer::watch.access(at, size, sanitizer::Kind::kWrite, __builtin_return_address(0));          \
  }
#define UNDEFINED(name, what) \
  void __ubsan_handle_##name##_abort(void* data) { sanitizer::fail_at(data, what); }

extern "C" {
ACCESSES(1, 1)
ACCESSES(2, 2)
ACCESSES(4, 4)
ACCESSES(8, 8)
ACCESSES(16, 16)
void __tsan_read_range(void* at, size_t size) {
  sanitizer::watch.access(at, size, sanitizer::Kind::kRead, __builtin_return_address(0));
}
void __tsan_write_range(void* at, size_t size) {
  sanitizer::watch.access(at, size, sanitizer::Kind::kWrite, __builtin_return_address(0));
}
// Clang's, where GCC writes the calls above, or lets the library do it unseen.
void* __tsan_memset(void* to, int byte, size_t size) {
  sanitizer::watch.access(to, size, sanitizer::Kind::kWrite, __builtin_return_address(0));
  return std::memset(to, byte, size);
}
void* __tsan_memcpy(void* to, const void* from, size_t size) {
  sanitizer::watch.access(from, size, sanitizer::Kind::kRead, __builtin_return_address(0));
  sanitizer::watch.access(to, size, sanitizer::Kind::kWrite, __builtin_return_address(0));
  return std::memcpy(to, from, size);
}
void* __tsan_memmove(void* to, const void* from, size_t size) {
  sanitizer::watch.access(from, size, sanitizer::Kind::kRead, __builtin_return_address(0));
  sanitizer::watch.access(to, size, sanitizer::Kind::kWrite, __builtin_return_address(0));
  return std::memmove(to, from, size);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

UNDEFINED(type_mismatch_v1, "an address is not aligned")
UNDEFINED(shift_out_of_bounds, "a shift by more bits than there are")
UNDEFINED(add_overflow, "a sum overflows")
UNDEFINED(sub_overflow, "a difference overflows")
UNDEFINED(mul_overflow, "a product overflows")
UNDEFINED(negate_overflow, "a negation overflows")
UNDEFINED(divrem_overflow, "a division by zero")
UNDEFINED(out_of_bounds, "an index outside of its array")
UNDEFINED(float_cast_overflow, "a number that its integer cannot hold")

// Loads and stores of kernels that have been looked at.
__attribute__((visibility("default"))) long kvcache_watched_accesses() { return sanitizer::watch.accesses; }
}
