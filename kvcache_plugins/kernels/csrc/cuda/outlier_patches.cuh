// What the codes of a block lack (kvcache_plugins/quantizers/outliers.py), as sparse `a` fragments: a patch in shared
// memory is zero but for the listed numbers, which lanes lay down where the tensor core's fragments have them, and take
// away again. A product with it costs a load and an instruction per 16 x 16 numbers, however many are listed.
//
// A lane has the first `kEntries` of its entries (every 32nd of the list) in registers, asked for a block ahead; what a
// longer list holds is read again whenever it is needed. The order of the list is of no account. Every number of a
// patch is written by one lane, or by two one after the other, so results do not depend on which lane is faster.
#pragma once

#include "fast_lanes.cuh"

namespace kvcache {

// Where the list of a block and head begins and ends, in a register.
struct OutlierBounds {
  uint32_t bounds = 0;

  KVCACHE_DEVICE OutlierBounds(const Side& side, const Rows& rows, int heads, int64_t block, bool is_there) {
    if (side.outliers == nullptr || !is_there) return;
    const int64_t place = rows.batch * side.outlier_blocks + block;
    const int16_t* starts = side.outlier_starts + place * (heads + 1) + rows.head;
    bounds = static_cast<uint16_t>(starts[0]) | static_cast<uint32_t>(static_cast<uint16_t>(starts[1])) << 16;
  }
  KVCACHE_DEVICE int first() const { return static_cast<int16_t>(bounds); }
  KVCACHE_DEVICE int last() const { return static_cast<int16_t>(bounds >> 16); }
};

// A block's list, of one head.
template <int kEntries>
struct OutlierList {
  const int32_t* list;
  int first, last;
  int32_t entries[kEntries];

  // Asks for the entries of `block`. Whatever the tensors hold, what is read lies inside of them.
  KVCACHE_DEVICE void load(const Side& side, const Rows& rows, int64_t block, const OutlierBounds& bounds) {
    list = side.outliers + (rows.batch * side.outlier_blocks + block) * side.outlier_capacity;
    first = bounds.first();
    last = first < 0 || bounds.last() > side.outlier_capacity ? first : bounds.last();
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < kEntries; ++i) entries[i] = first + 32 * i + lane < last ? list[first + 32 * i + lane] : 0;
  }
  // Bits of the largest magnitude this lane knows of.
  KVCACHE_DEVICE uint32_t largest() const {
    uint32_t found = 0;
    const auto compare = [&](int32_t entry) {
      const uint32_t bits = static_cast<uint32_t>(entry) & 0x7FFFu;
      found = bits > found ? bits : found;
    };
#pragma unroll
    for (int i = 0; i < kEntries; ++i) compare(entries[i]);
    for_the_rest(compare);
    return found;
  }
  KVCACHE_DEVICE bool is_empty() const { return last <= first; }
  KVCACHE_DEVICE bool has(int i) const {
    return first + 32 * i + static_cast<int>(threadIdx.x) % 32 < last;
  }
  // Calls `visit` with this lane's entries beyond those in registers.
  template <typename Visit>
  KVCACHE_DEVICE void for_the_rest(Visit visit) const {
    if (last - first <= 32 * kEntries) return;
#pragma unroll 1
    for (int i = first + 32 * kEntries + static_cast<int>(threadIdx.x) % 32; i < last; i += 32) visit(list[i]);
  }
};

constexpr int kNoPatch = -1;

// A listed number: of which patch of the block, and where in it, in bytes.
struct PatchEntry {
  int patch, place;
  uint32_t number;
};

}  // namespace kvcache
