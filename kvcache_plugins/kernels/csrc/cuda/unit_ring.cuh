// How packed blocks come to shared memory: copied by the warp that will read them, while it works on those before.
#pragma once

#include "fast_lanes.cuh"

namespace kvcache {

// Starts the copy of one unit by a warp, 16 bytes a lane at a time; `from` is where this lane's bytes begin. The codes
// are spread over the banks: of the exclusive or that does it one part depends on the lane and one on the step of 512
// bytes, so that few instructions are left of it.
KVCACHE_DEVICE void copy_unit(uint8_t* to, const uint8_t* from, int code_bytes, int bytes, int swizzle) {
  constexpr int kStep = 512;
  const int first = opaque_lane() * 16, spread = swizzled(first, swizzle);
  int done = 0;
#pragma unroll 1
  for (; done + 4 * kStep <= code_bytes; done += 4 * kStep) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      copy_async_16(to + (spread ^ swizzled(done + i * kStep, swizzle)), from + done + i * kStep);
  }
#pragma unroll 1
  for (; done + first < code_bytes; done += kStep) copy_async_16(to + swizzled(done + first, swizzle), from + done);
#pragma unroll 1
  for (done = code_bytes + first; done < bytes; done += 2 * kStep) {
    copy_async_16(to + done, from + done - first);
    if (done + kStep < bytes) copy_async_16(to + done + kStep, from + done - first + kStep);
  }
}

// The blocks of one warp, every fourth of its thread block's range, as units: the keys of a block, then their values,
// then those of the next. They take turns in two or three places in shared memory.
class UnitRing {
 public:
  int begin, end;  // blocks

  KVCACHE_DEVICE UnitRing(const AttentionArguments& a, const Rows& rows, uint8_t* ring, int split) : a_(a) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int64_t blocks = a.fast_end - a.fast_begin;
    begin = a.fast_begin + static_cast<int>(split * blocks / a.fast_splits) + warp;
    end = a.fast_begin + static_cast<int>((split + 1) * blocks / a.fast_splits);
    record_ = a.records.of(rows.batch, rows.head) + begin * a.records.record_bytes + threadIdx.x % 32 * 16;
    places_ = ring + warp * a.unit_slots * a.unit_bytes;
  }
  // Starts the first units: as many as may be on the way at once.
  KVCACHE_DEVICE void begin_copies() const {
    for (int unit = 0; unit < a_.unit_slots - 1; ++unit) {
      if (begin < end) start(record_, unit == 0, unit * a_.unit_bytes);
      copy_commit();
    }
  }
  // Waits for the keys or the values of `block`, and starts another unit in the place that the last one has left.
  KVCACHE_DEVICE uint8_t* next(int block, bool are_keys) {
    const bool is_one_ahead = a_.unit_slots == 2;
    if (is_one_ahead) {
      copy_wait<0>();
    } else {
      copy_wait<1>();
    }
    warp_barrier();  // every lane's copies have landed, and every lane is done with the place to be filled
    const bool is_of_block = is_one_ahead && are_keys;
    const int last = (a_.unit_slots - 1) * a_.unit_bytes, stride = kWarps * static_cast<int>(a_.records.record_bytes);
    if (is_of_block || block + kWarps < end)
      start(record_ + (is_of_block ? 0 : stride), is_one_ahead != are_keys,
            used_ == 0 ? last : used_ - a_.unit_bytes);
    copy_commit();
    if (!are_keys) record_ += stride;
    uint8_t* const unit = places_ + used_;
    used_ = used_ == last ? 0 : used_ + a_.unit_bytes;
    return unit;
  }

 private:
  const AttentionArguments& a_;
  const uint8_t* record_;  // of the block, from this lane's bytes on
  uint8_t* places_;
  int used_ = 0;  // the next place to be used, in bytes; the one before it is the next to be filled

  KVCACHE_DEVICE void start(const uint8_t* record, bool are_keys, int place) const {
    const Side& side = are_keys ? a_.key : a_.value;
    copy_unit(places_ + place, record + side.codes_offset, plane_bytes(1, side.padded_dim) * side.nbits,
              are_keys ? a_.key_copy : a_.value_copy, are_keys ? a_.key_swizzle : a_.value_swizzle);
  }
};

}  // namespace kvcache
