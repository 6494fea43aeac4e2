// A block's keys in shared memory, as one warp reads them.
#pragma once

#include "fast_lanes.cuh"

namespace kvcache {

struct KeyUnit {
  const uint8_t *codes, *scale, *minimum;  // then metadata; `scale` or `minimum` null where there are none
  const uint2* fragments;                  // the queries as `b`, [columns][steps][lane]
  const uint2* small_fragments;            // the same times 2^-kQueryShift; only where scales are per channel
  const float* row_sum;                    // of every query row, as its fragments hold it
  const uint4* rotations;                  // cos, cos, -sin, sin of two pairs: [period][pairs / 2], padded rows
  int rotation_row;                        // uint4 per row of `rotations`
  int phase, period;                       // of the first token of the block
  int steps, dim, swizzle;
  int row_shift;  // a row of metadata per channel serves 2^row_shift tiles
  bool interleaved;
};

// Metadata of the channels of a lane in one step, one row of them: two pairs. Neighbours, or halves of two words: a
// choice of addresses and selectors instead of a branch.
KVCACHE_DEVICE uint2 load_channels(const KeyUnit& unit, const uint8_t* field, int row, int pair) {
  const uint8_t* at = field + row * unit.dim * 2 + pair * (unit.interleaved ? 4 : 2);
  const uint32_t low = load_4(at), high = load_4(at + (unit.interleaved ? 4 : unit.dim));
  return {permute_bytes(low, high, unit.interleaved ? 0x3210u : 0x5410u),
          permute_bytes(low, high, unit.interleaved ? 0x7654u : 0x7632u)};
}

}  // namespace kvcache
