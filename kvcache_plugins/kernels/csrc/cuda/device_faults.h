// What a kernel finds out when nobody waits for it: a flag per fault and device, in memory that kernels write and the
// host reads. Every operator but attention looks at them when it is called, which costs a read of memory, so a fault is
// reported a step or so after it happened, by whichever cache comes next on that device.
#pragma once

#include <array>
#include <mutex>

#include "binding_device.h"

namespace kvcache {

enum Fault { kSaturated, kNoSuchSlot, kFaults };

// One set for all bindings of the library.
inline std::mutex fault_mutex;
inline std::array<int32_t*, 64> fault_flags{};

namespace {

inline int32_t* flags_of(const Device& device) {
  const std::lock_guard<std::mutex> lock(fault_mutex);
  int32_t*& flags = fault_flags.at(static_cast<size_t>(device.index()));
  if (flags == nullptr) flags = device.shared_words(kFaults);
  return flags;
}

inline bool take_fault(const Device& device, Fault fault) {
  volatile int32_t* flag = flags_of(device) + fault;
  if (*flag == 0) return false;
  *flag = 0;
  return true;
}

// Raises what has happened on the device since the last report.
inline void report_faults(const Device& device) {
  TORCH_CHECK(!take_fault(device, kSaturated),
              "Scales or minima beyond fp16 have been stored as the largest fp16 number in one of the last steps, so a "
              "cache on this device holds wrong keys or values: they need a cache with kernel='torch'.");
  TORCH_CHECK(!take_fault(device, kNoSuchSlot),
              "Slots that hold no packed token were to be kept in one of the last evictions and have become zeros, so "
              "a cache on this device holds wrong keys or values: a cache with kernel='torch' names the slots.");
}

}  // namespace
}  // namespace kvcache
