// How packed blocks come to shared memory: copied by the warp that will read them, while it works on those before.
#pragma once

#include "fast_lanes.cuh"

namespace kvcache {

// Starts the copy of one unit by a warp, 16 bytes a lane at a time; `to` is a multiple of 128 bytes, and `from` is
// where this lane's bytes begin. The codes are spread over the banks: of the exclusive or that does it one part depends
// on the lane and one on the step of 512 bytes, which is the same for every warp.
KVCACHE_DEVICE void copy_unit(uint8_t* to, const uint8_t* from, const UnitCopy& copy) {
  constexpr int kSteps = UnitCopy::kSteps, kStep = UnitCopy::kStepBytes;
  const int lane = opaque_lane(), first = 16 * lane;
  int places[kSteps];  // of this lane's bytes in the next steps, from where each of these begins
#pragma unroll
  for (int i = 0; i < kSteps; ++i) places[i] = swizzled(first, copy.swizzle) ^ copy.step_bits[i];
  int left = copy.code_bytes;
#pragma unroll 1
  for (; left >= kSteps * kStep; left -= kSteps * kStep) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) copy_async_16(to + places[i] + i * kStep, from + i * kStep);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) places[i] ^= copy.further_bits;  // twice is not at all: of swizzles up to 6
    to += kSteps * kStep;
    from += kSteps * kStep;
  }
  if (left > 0) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      if (i * kStep + first < left) copy_async_16(to + places[i] + i * kStep, from + i * kStep);
  }
  to += left + first;
  from += left;
#pragma unroll 1
  for (left = copy.bytes - copy.code_bytes - first; left > 0; left -= 2 * kStep) {
    copy_async_16(to, from);
    if (left > kStep) copy_async_16(to + kStep, from + kStep);
    to += 2 * kStep;
    from += 2 * kStep;
  }
}

// The same where the compiler knows `copy`: every place but for the lane's part is a constant.
KVCACHE_DEVICE void copy_known_unit(uint8_t* to, const uint8_t* from, const UnitCopy& copy) {
  constexpr int kStep = UnitCopy::kStepBytes, kMost = 16;  // steps
  const int first = 16 * opaque_lane(), spread = swizzled(first, copy.swizzle);
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const int begin = i * kStep;
    if (begin < copy.code_bytes) copy_async_16(to + (spread ^ swizzle_bits(begin, copy.swizzle)) + begin, from + begin);
  }
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const int begin = copy.code_bytes + i * kStep, left = copy.bytes - begin;
    if (left >= kStep || first < left) copy_async_16(to + first + begin, from + begin);
  }
}

// What a split attends to: units [first, last) of the fast path, of which blocks of packed keys and values come first.
struct SplitUnits {
  int first, last;

  KVCACHE_DEVICE SplitUnits(const AttentionArguments& a, int split)
      : first(unit_at(a, split)), last(unit_at(a, split + 1)) {}

 private:
  // The first unit of a split: all have the same work to do, or all but one, which has what is not packed.
  KVCACHE_DEVICE static int unit_at(const AttentionArguments& a, int split) {
    const int done = static_cast<int>(split * static_cast<int64_t>(a.shared_work) / a.sharing_splits);
    const int further = done - a.packed_units();
    if (further <= 0) return done;
    if (a.sharing_splits < a.fast_splits) return a.packed_units() + a.exact_units();  // behind the last split
    return a.packed_units() + (further + a.exact_work() - 1) / a.exact_work();
  }
};

// Asks for the first block of this warp while the kernel before this one may still be at work, and waits for that: as a
// rule it writes the newest tokens, and leaves memory alone for most of its time. Where the block lies is worked out
// anew by the ring: to keep that took registers, which the compiler then spilled.
KVCACHE_DEVICE void begin_early(const AttentionArguments& a) {
  const SplitUnits units(a, opaque(static_cast<int>(blockIdx.y)));
  const Rows rows = Rows::mine_again(a);
  const int thread = opaque(static_cast<int>(threadIdx.x)), last = a.fast_begin + units.last;
  const int block = a.fast_begin + units.first + thread / 32;
  if (thread % 32 == 0 && block < (last < a.fast_end ? last : a.fast_end)) {
    const int bytes = static_cast<int>(a.records.record_bytes);
    prefetch_run(a.records.of(rows.batch, rows.head) + block * a.records.record_bytes, bytes);
  }
  wait_for_previous();
}

// The blocks of one warp, every fourth of its thread block's range, as units: the keys of a block, then their values,
// then those of the next. They take turns in two or three places in shared memory. To ask for a further one, as far as
// the cache, made attention to 8 bits 14 % slower on an H200, and to 4 bits 11 to 14 %.
template <bool kIsKnown>
class UnitRing {
 public:
  int begin, end;  // blocks

  KVCACHE_DEVICE UnitRing(const AttentionArguments& a, const Rows& rows, uint8_t* shared, const SplitUnits& units)
      : a_(a) {
    const int warp = static_cast<int>(threadIdx.x / 32), last = a.fast_begin + units.last;
    begin = a.fast_begin + units.first + warp;
    end = last < a.fast_end ? last : a.fast_end;
    record_ = a.records.of(rows.batch, rows.head) + begin * a.records.record_bytes + threadIdx.x % 32 * 16;
    places_ = shared + warp * a.warp_bytes;
  }
  // Starts the first block: two units, also where later one alone is on the way at a time.
  KVCACHE_DEVICE void begin_copies() const {
    if (begin < end) start(record_, a_.key_copy, 0);
    copy_commit();
    if (begin < end) start(record_, a_.value_copy, a_.unit_bytes);
    copy_commit();
  }
  // Waits for the keys or the values of `block`, and starts another unit in the place that the last one has left.
  template <bool kAreKeys>
  KVCACHE_DEVICE uint8_t* next(int block) {
    const bool is_first = kAreKeys && block == begin;  // whose values are on the way, too
    const bool is_one_ahead = a_.unit_slots == 2, has_next = block + kWarps < end;
    if (is_one_ahead && !is_first) {
      copy_wait<0>();
    } else {
      copy_wait<1>();
    }
    warp_barrier();  // every lane's copies have landed, and every lane is done with the place to be filled
    const int last = a_.warp_bytes - a_.unit_bytes, place = used_ == 0 ? last : used_ - a_.unit_bytes;
    const int stride = kWarps * static_cast<int>(a_.records.record_bytes);
    // which side is known where it is written, so that what is known of it needs no registers
    if (!is_one_ahead) {
      if (has_next) start(record_ + stride, kAreKeys ? a_.key_copy : a_.value_copy, place);
    } else if (kAreKeys) {
      if (!is_first) start(record_, a_.value_copy, place);
    } else if (has_next) {
      start(record_ + stride, a_.key_copy, place);
    }
    copy_commit();
    if (!kAreKeys) record_ += stride;
    uint8_t* const unit = places_ + used_;
    used_ = used_ == last ? 0 : used_ + a_.unit_bytes;
    return unit;
  }
  // Copies the keys of one more block, when all others have been waited for.
  KVCACHE_DEVICE uint8_t* fetch_keys(const uint8_t* record) const {
    warp_barrier();  // every lane is done with the place
    start(record + threadIdx.x % 32 * 16, a_.key_copy, 0);
    copy_commit();
    copy_wait<0>();
    warp_barrier();
    return places_;
  }
  // What of this warp's places `fetch_keys` leaves alone, when all units have been waited for and read.
  KVCACHE_DEVICE uint8_t* unused() const {
    warp_barrier();  // every lane is done with the places
    return places_ + a_.unit_bytes;
  }

 private:
  const AttentionArguments& a_;
  const uint8_t* record_;  // of the block, from this lane's bytes on
  uint8_t* places_;
  int used_ = 0;  // the next place to be used, in bytes; the one before it is the next to be filled

  KVCACHE_DEVICE void start(const uint8_t* record, const UnitCopy& copy, int place) const {
    if (kIsKnown) {
      copy_known_unit(places_ + place, record + copy.codes_offset, copy);
    } else {
      copy_unit(places_ + place, record + copy.codes_offset, copy);
    }
  }
};

}  // namespace kvcache
