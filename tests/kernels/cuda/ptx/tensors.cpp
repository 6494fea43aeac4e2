// The tensors that kernels may touch: torch takes memory for the CPU from here once the library is loaded, so that
// every access is known to lie in a tensor, or not; a strip of memory that belongs to none follows each.
#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "machine.h"

namespace ptx {
namespace {

// The tensor in which this thread has last found an address: most accesses lie in that of the one before. It counts
// for as long as no tensor has been given back.
struct Found {
  uintptr_t begin = 0;
  size_t bytes = 0;
  uint64_t releases = 0;

  bool holds(uintptr_t address, size_t size) const {
    const uintptr_t at = address - begin;  // large for what comes before
    return at < bytes && size <= bytes - at;
  }
};
constinit thread_local __attribute__((tls_model("initial-exec"))) Found last;

class Tensors final : public c10::Allocator {
 public:
  static Tensors& instance() {
    static auto* const tensors = new Tensors;  // for as long as there may be a tensor
    return *tensors;
  }

  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, c10::kCPU};
    // aligned as torch's allocator for GPUs aligns
    void* data = std::aligned_alloc(kAlignment, (size / kAlignment + 2) * kAlignment);
    std::memset(data, kGarbage, size);
    const std::lock_guard lock(mutex_);
    sizes_[reinterpret_cast<uintptr_t>(data)] = size;
    return {data, data, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }

  bool hold(uintptr_t address, size_t size) {
    if (last.releases == releases_ && last.holds(address, size)) return true;
    const std::lock_guard lock(mutex_);
    const auto next = sizes_.upper_bound(address);
    if (next == sizes_.begin()) return false;
    const auto& [begin, bytes] = *std::prev(next);
    last = {begin, bytes, releases_};
    return last.holds(address, size);
  }

 private:
  static constexpr size_t kAlignment = 512;

  static void release(void* data) {
    const std::lock_guard lock(instance().mutex_);
    instance().sizes_.erase(reinterpret_cast<uintptr_t>(data));
    ++instance().releases_;
    std::free(data);
  }

  std::map<uintptr_t, size_t> sizes_;  // by address
  std::mutex mutex_;
  std::atomic<uint64_t> releases_ = 0;
};

const bool is_used = [] {
  c10::SetAllocator(c10::kCPU, &Tensors::instance(), 1);
  return true;
}();

}  // namespace

bool is_in_a_tensor(uint64_t address, size_t size) { return Tensors::instance().hold(address, size); }

}  // namespace ptx
