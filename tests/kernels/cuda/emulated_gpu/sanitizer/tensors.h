// The tensors that kernels may touch: torch takes memory for the CPU from here, so that every access is known to lie
// in a tensor, or not; a strip of memory that belongs to none follows each. New tensors hold garbage.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdlib>
#include <cstring>
#include <map>

#include "shadow.h"

namespace sanitizer {

class Tensors final : public c10::Allocator {
 public:
  static Tensors& instance() {
    static auto* const tensors = new Tensors;  // for as long as there may be a tensor
    return *tensors;
  }

  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, c10::kCPU};
    // aligned as torch's allocator for GPUs aligns
    auto* data = static_cast<uint8_t*>(std::aligned_alloc(kAlignment, (size / kAlignment + 2) * kAlignment));
    std::memset(data, emulation::garbage, size);
    const auto begin = reinterpret_cast<uintptr_t>(data);
    known_[begin] = {"a tensor", begin, size, nullptr, false};
    return {data, data, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }

  // The tensor that `size` bytes from an address on lie in, or null.
  const Region* find(uintptr_t address, size_t size) {
    if (last_ == nullptr || address < last_->begin || address >= last_->begin + last_->size) {
      const auto next = known_.upper_bound(address);
      if (next == known_.begin()) return nullptr;
      last_ = &std::prev(next)->second;
    }
    if (address + size > last_->begin + last_->size) return nullptr;
    if (last_->bytes == nullptr) last_->bytes = static_cast<Byte*>(std::calloc(last_->size, sizeof(Byte)));
    return last_;
  }

 private:
  static constexpr size_t kAlignment = 512;

  static void release(void* data) {
    Tensors& tensors = instance();
    const auto found = tensors.known_.find(reinterpret_cast<uintptr_t>(data));
    tensors.last_ = nullptr;
    std::free(found->second.bytes);
    tensors.known_.erase(found);
    std::free(data);
  }

  std::map<uintptr_t, Region> known_;
  Region* last_ = nullptr;
};

}  // namespace sanitizer
