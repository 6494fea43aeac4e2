// Tokens that are read as they are: sinks, and those that follow the packed ones.
#pragma once

#include <algorithm>

#include "avx512_math.h"
#include "decode_attention.h"

namespace kvcache {
namespace avx512 {

// Up to 16 channels of one, in fp32; the other lanes are zero.
inline __m512 load_exact(const Side& side, const void* data, int64_t at, int count) {
  const __mmask16 live = first_lanes(count);
  if (side.dtype == kFloat32) return _mm512_maskz_loadu_ps(live, (const float*)data + at);
  const __m256i half = _mm256_maskz_loadu_epi16(live, (const uint16_t*)data + at);
  if (side.dtype == kFloat16) return _mm512_cvtph_ps(half);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// Where the exact token of a slot lies: element `*at` of the result, or null if the slot is read from codes.
inline const void* exact_token(const Side& side, int64_t slot, int64_t* at) {
  if (side.sinks != nullptr && slot >= side.sink_start && slot < side.sink_start + side.sink_length) {
    *at = (slot - side.sink_start) * side.head_dim;
    if (slot < side.packed_length) return side.sinks;
  }
  for (int i = 0; i < side.num_segments; ++i) {
    const Segment& segment = side.segments[i];
    if (slot >= segment.start && slot < segment.start + segment.length) {
      *at = (slot - segment.start) * segment.stride;
      return segment.data;
    }
  }
  return nullptr;
}

// The slots of a block, and before `end`, that are exact: sinks, and everything from `packed` on.
template <typename Visit>
void for_exact(const Side& side, int64_t start, int packed, int64_t end, Visit visit) {
  const int64_t stop = std::min(start + kBlockTokens, end);
  if (side.sinks != nullptr) {
    const int64_t first = std::max(start, side.sink_start);
    for (int64_t slot = first; slot < std::min(stop, side.sink_start + side.sink_length); ++slot)
      if (slot < side.packed_length) visit(slot);
  }
  for (int64_t slot = start + packed; slot < stop; ++slot) visit(slot);
}

}  // namespace avx512
}  // namespace kvcache
