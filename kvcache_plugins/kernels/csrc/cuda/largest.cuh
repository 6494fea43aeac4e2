// The largest of many numbers, found by counting: a warp or a whole thread block looks for a bound that so many reach.
//
// Numbers are made different by their places (a key is a number followed by its place, first places being larger), so
// that a bound which exactly so many reach exists, and of equal numbers the first are taken. Every lane first keeps
// the largest of a few parts of the numbers, and a bound for these leaves few of all to be counted again and again.
#pragma once

#include "platform.cuh"

namespace kvcache {

// Who counts together. `sum` must be reached by all of them.
struct CountingWarp {
  KVCACHE_DEVICE uint32_t sum(uint32_t x) { return warp_sum(x); }
};

struct CountingBlock {
  static constexpr int kWords = 64;  // of shared memory
  uint32_t* words;
  int turn = 0;  // of two areas, so that one barrier is enough

  KVCACHE_DEVICE uint32_t sum(uint32_t x) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warps = static_cast<int>(blockDim.x) / 32;
    uint32_t* area = words + 32 * turn;
    turn ^= 1;
    x = warp_sum(x);
    if (lane == 0) area[thread / 32] = x;
    block_barrier();
    return warp_sum(lane < warps ? area[lane] : 0u);
  }
};

// `Keys` are those a warp looks after, of which 0 is none that counts: each(f) calls f(key) once for every key, in all
// lanes as often. `list` is room of the warp for `room` keys in shared memory.
template <class Keys, class Group>
class Largest {
 public:
  static constexpr int kParts = 4;  // of a lane

  KVCACHE_DEVICE Largest(const Keys& keys, const Group& group, int key_bits, uint64_t* list, int room)
      : keys_(keys), group_(group), key_bits_(key_bits), list_(list), room_(room) {}

  // A bound that exactly `wanted` keys reach; 0 if there are fewer.
  KVCACHE_DEVICE uint64_t find(int wanted) {
    uint64_t most[kParts] = {};
    keys_.each([&](uint64_t key) {
      const uint64_t larger = key > most[0] ? key : most[0];
      for (int i = 0; i + 1 < kParts; ++i) most[i] = most[i + 1];
      most[kParts - 1] = larger;
    });
    // one more than is wanted, for `next`
    gather(bisect(wanted + 1, [&](uint64_t bound) {
      uint32_t count = 0;
      for (int i = 0; i < kParts; ++i) count += most[i] >= bound;
      return count;
    }));
    if (wanted == 0) return ~uint64_t{0};
    return bisect(wanted, [&](uint64_t bound) {
      uint32_t count = 0;
      visit([&](uint64_t key) { count += key >= bound; });
      return count;
    });
  }

  // Of what `find` has left, this lane's largest key below a bound.
  KVCACHE_DEVICE uint64_t next(uint64_t bound) const {
    uint64_t found = 0;
    visit([&](uint64_t key) { found = key < bound && key > found ? key : found; });
    return found;
  }

 private:
  // The largest bound that at least `wanted` reach, or one that exactly as many do; 0 if there is none.
  template <class Count>
  KVCACHE_DEVICE uint64_t bisect(int wanted, Count count) {
    uint64_t bound = 0;
    for (int bit = key_bits_ - 1; bit >= 0; --bit) {
      const uint64_t higher = bound | uint64_t{1} << bit;
      const int found = static_cast<int>(group_.sum(count(higher)));
      if (found >= wanted) bound = higher;
      if (found == wanted) break;
    }
    return bound;
  }

  // Lists all keys that reach a bound, unless a warp has more than its list holds.
  KVCACHE_DEVICE void gather(uint64_t bound) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    held_ = 0;
    keys_.each([&](uint64_t key) {
      const bool reaches = key != 0 && key >= bound;
      const uint32_t reaching = warp_vote(reaches);
      const int at = held_ + count_bits(reaching & ((1u << lane) - 1));
      if (reaches && at < room_) list_[at] = key;
      held_ += count_bits(reaching);
    });
    is_listed_ = group_.sum(held_ > room_) == 0;
    warp_barrier();  // every lane's keys are listed
  }

  template <class Visit>
  KVCACHE_DEVICE void visit(Visit of_key) const {
    if (!is_listed_) {
      keys_.each(of_key);
      return;
    }
    for (int i = static_cast<int>(threadIdx.x) % 32; i < held_; i += 32) of_key(list_[i]);
  }

  const Keys& keys_;
  Group group_;
  int key_bits_;
  uint64_t* list_;
  int room_, held_ = 0;
  bool is_listed_ = false;
};

}  // namespace kvcache
