// A block's keys in shared memory, as one warp reads them.
#pragma once

#include "fast_lanes.cuh"

namespace kvcache {

struct KeyUnit {
  const uint8_t *codes, *scale, *minimum;  // then metadata, where there are any
  const uint2* fragments;                  // the queries as `b`, [columns][steps][lane]
  const uint2* small_fragments;            // the same times 2^-kQueryShift; only where `has_two_sizes`
  const float* row_scale;                  // of every query row: what its products are multiplied by
  const float* row_sum;                    // of every query row, so multiplied
  const uint4* rotations;                  // cos, cos, -sin, sin of two pairs: [period][pairs / 2], padded rows
  int rotation_row;                        // uint4 per row of `rotations`
  int phase, period;                       // of the first token of the block
  int steps, dim, swizzle;
  int tile_shift;  // a row of metadata per channel serves 2^tile_shift tiles
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

// Multiplies products by the scales of their query rows.
template <int kColumns>
KVCACHE_DEVICE void scale_rows(const float* row_scale, float (&c)[kColumns][4][4]) {
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    const float scale[2] = {row_scale[8 * n + 2 * t], row_scale[8 * n + 2 * t + 1]};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) c[n][k][i] *= scale[i % 2];
    }
  }
}

}  // namespace kvcache
