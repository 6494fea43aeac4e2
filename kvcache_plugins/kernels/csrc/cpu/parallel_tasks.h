// Independent tasks on torch's threads, each taken by the next thread that is free.
#pragma once

#include <ATen/Parallel.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace kvcache {
namespace {

// OpenMP's threads do not survive a fork, and waiting for them would hang the child.
std::atomic<bool> is_child{false};
[[maybe_unused]] const int is_registered = pthread_atfork(nullptr, nullptr, [] { is_child = true; });

// Calls `run(task)` for every task in [0, count).
template <typename Run>
void run_parallel(int64_t count, bool is_serial, const Run& run) {
  const int64_t threads = is_serial || is_child ? 1 : std::min<int64_t>(at::get_num_threads(), count);
  if (threads <= 1) {
    for (int64_t task = 0; task < count; ++task) run(task);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t task = next++; task < count; task = next++) run(task);
  });
}

}  // namespace
}  // namespace kvcache
