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

// How many workers take the tasks of a call.
int64_t count_workers(int64_t tasks, bool is_serial) {
  return is_serial || is_child ? 1 : std::max<int64_t>(1, std::min<int64_t>(at::get_num_threads(), tasks));
}

// Calls `run(task, worker)` for every task in [0, count): a worker takes one after the other.
template <typename Run>
void run_on_workers(int64_t count, int64_t workers, const Run& run) {
  if (workers == 1) {
    for (int64_t task = 0; task < count; ++task) run(task, int64_t{0});
    return;
  }
  std::atomic<int64_t> next{0};
  // torch may call this once for several workers: the first then does their share
  at::parallel_for(0, workers, 1, [&](int64_t worker, int64_t) {
    for (int64_t task = next++; task < count; task = next++) run(task, worker);
  });
}

// Calls `run(task)` for every task in [0, count).
template <typename Run>
void run_parallel(int64_t count, bool is_serial, const Run& run) {
  run_on_workers(count, count_workers(count, is_serial), [&](int64_t task, int64_t) { run(task); });
}

}  // namespace
}  // namespace kvcache
