// Attention over exact slots, the newest ones or sinks, by tensor cores, by one warp: keys or values in their own
// dtype.
//
// A unit is up to 64 slots. Its logits and weights have the places of those of packed blocks
// (fast_lanes.cuh), so that one state takes both. Numbers are loaded from device memory where they are needed: units
// are few. Weights in fp16 are each a sum of two numbers of bf16, so that no product is rounded.
#pragma once

#include "query_rows.cuh"

namespace kvcache {

// Where the exact tokens of a row and head lie, whose numbers can be counted in 32 bits.
struct ExactTokens {
  const uint16_t* first;
  int start, stride;

  // The newest ones: in one segment.
  KVCACHE_DEVICE static ExactTokens newest(const Side& side, const Rows& rows) {
    const Segment& segment = side.segments[0];
    return {static_cast<const uint16_t*>(segment.data) + rows.batch * segment.batch_stride +
                rows.head * segment.head_stride,
            static_cast<int>(segment.start), static_cast<int>(segment.token_stride)};
  }
  // Sinks, from slot `start` on.
  KVCACHE_DEVICE static ExactTokens sinks(const Side& side, const Rows& rows, int heads, int start) {
    const int64_t row = (static_cast<int64_t>(rows.batch) * heads + rows.head) * side.sink_length;
    return {static_cast<const uint16_t*>(side.sinks) + row * side.head_dim, start, side.head_dim};
  }
  // How far a slot's numbers lie from the first.
  KVCACHE_DEVICE int offset(int slot) const { return (slot - start) * stride; }
};

// Slots [first, last) of 64, counted from the first of these.
struct SlotRange {
  int start, first, last;

  KVCACHE_DEVICE int clamped(int slot) const { return start + (slot < first ? first : slot < last ? slot : last - 1); }
  // Whether any of slots [from, from + count) is among them: the same in every lane.
  KVCACHE_DEVICE bool has_any(int from, int count) const { return from < last && from + count > first; }
};

template <bool kIsHalf>
KVCACHE_DEVICE void multiply_exact(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if (kIsHalf) return multiply_accumulate(c, a[0], a[1], a[2], a[3], b0, b1);
  multiply_accumulate_bfloat(c, a[0], a[1], a[2], a[3], b0, b1);
}

// q.k in units of log 2, of the query rows 8n + 2t and the next: `c` is [column][tile], and 0 before. Tiles without a
// slot are left at that, which `hide_others` replaces.
template <bool kIsHalf, int kColumns>
KVCACHE_DEVICE void exact_key_products(const AttentionArguments& a, const Rows& rows, const ExactTokens& keys,
                                       const SlotRange& slots, float (&c)[kColumns][4][4]) {
  constexpr int kAtOnce = 2;  // tiles whose numbers are on the way
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  const uint16_t* queries[kColumns];
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    const int row = 8 * n + g < rows.count ? 8 * n + g : 0;  // nobody reads what becomes of rows beyond
    queries[n] = static_cast<const uint16_t*>(a.query) + rows.batch * a.query_batch_stride +
                 rows.query_head(a, row) * a.query_head_stride + rows.query_token(a, row) * a.query_token_stride +
                 4 * t;
  }
#pragma unroll
  for (int first = 0; first < 4; first += kAtOnce) {
    if (!slots.has_any(16 * first, 16 * kAtOnce)) continue;
    int tokens[kAtOnce][2];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      for (int i = 0; i < 2; ++i) tokens[k][i] = keys.offset(slots.clamped(16 * (first + k) + 2 * g + i)) + 4 * t;
    }
#pragma unroll 4
    for (int channel = 0; channel < a.key.head_dim; channel += 16) {
      uint2 numbers[kAtOnce][2], b[kColumns];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        for (int i = 0; i < 2; ++i)
          numbers[k][i] = *reinterpret_cast<const uint2*>(keys.first + (tokens[k][i] + channel));
      }
#pragma unroll
      for (int n = 0; n < kColumns; ++n) b[n] = *reinterpret_cast<const uint2*>(queries[n] + channel);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const uint32_t of[4] = {numbers[k][0].x, numbers[k][1].x, numbers[k][0].y, numbers[k][1].y};
#pragma unroll
        for (int n = 0; n < kColumns; ++n) multiply_exact<kIsHalf>(c[n][first + k], of, b[n].x, b[n].y);
      }
    }
  }
  const float scale = a.scaling * kLog2E;
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      for (int i = 0; i < 4; ++i) c[n][k][i] *= scale;
    }
  }
}

// Hides what lies outside of a range, and tells which slots 16k + 4t + i are seen by any row: bits 4k + i.
template <int kColumns>
KVCACHE_DEVICE uint32_t hide_others(const SlotRange& slots, float (&c)[kColumns][4][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  uint32_t mine = 0;  // slots 16k + 2g + i
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int slot = 16 * k + 2 * g + i;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int column = 0; column < 2; ++column) {
          float& logit = c[n][k][2 * i + column];
          if (slot < slots.first || slot >= slots.last) logit = -infinity();
          if (!(logit == -infinity())) mine |= 1u << (4 * k + i);  // what is not a number is seen
        }
      }
    }
  }
  for (int mask = 1; mask < 4; mask *= 2) mine |= float_bits(shuffle_xor(bits_float(mine), mask));
  const uint32_t even = float_bits(shuffle(bits_float(mine), 8 * t)),
                 odd = float_bits(shuffle(bits_float(mine), 8 * t + 4));
  return even | odd << 2;
}

// A pair of weights in fp16 as two pairs in bf16, whose sum it is.
KVCACHE_DEVICE void split_weights(uint32_t pair, uint32_t& high, uint32_t& low) {
  const float even = half_low(pair), odd = half_high(pair);
  const uint32_t even_bits = float_bits(even), odd_bits = float_bits(odd);
  high = permute_bytes(even_bits, odd_bits, 0x7632);
  const float even_left = even - bits_float(even_bits & 0xFFFF0000u),
              odd_left = odd - bits_float(odd_bits & 0xFFFF0000u);
  low = permute_bytes(float_bits(even_left), float_bits(odd_left), 0x7632);
}

// o[column][chunk] += values * weights; `kAtOnce`: chunks whose numbers are on the way. Values of slots that no row
// sees may be anything. One that is not finite reaches all rows if any of them sees its slot, as in dense attention
// with a mask. Tiles without a slot have no weights.
template <bool kIsHalf, int kAtOnce, int kColumns, int kTiles>
KVCACHE_DEVICE void exact_value_products(const AttentionArguments& a, const ExactTokens& values, const SlotRange& slots,
                                         const uint2* weights, uint32_t seen, float (&o)[kColumns][kTiles][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
#pragma unroll 1
  for (int k = 0; k < 4; ++k) {
    if (!slots.has_any(16 * k, 16)) continue;
    int tokens[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) tokens[i] = values.offset(slots.clamped(16 * k + 4 * t + i)) + 2 * g;
    uint2 high[kColumns], low[kColumns];
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const uint2 pairs = weights[(n * 4 + k) * 32 + lane];
      high[n] = pairs;
      low[n] = {0, 0};
      if (!kIsHalf) {
        split_weights(pairs.x, high[n].x, low[n].x);
        split_weights(pairs.y, high[n].y, low[n].y);
      }
    }
#pragma unroll
    for (int first = 0; first < kTiles; first += kAtOnce) {
      uint32_t numbers[kAtOnce][4];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          numbers[u][i] = (seen >> (4 * k + i) & 1u) != 0 && 16 * (first + u) < a.value.head_dim
                              ? *reinterpret_cast<const uint32_t*>(values.first + (tokens[i] + 16 * (first + u)))
                              : 0;
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const uint32_t of[4] = {
            permute_bytes(numbers[u][0], numbers[u][1], 0x5410), permute_bytes(numbers[u][0], numbers[u][1], 0x7632),
            permute_bytes(numbers[u][2], numbers[u][3], 0x5410), permute_bytes(numbers[u][2], numbers[u][3], 0x7632)};
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          multiply_exact<kIsHalf>(o[n][first + u], of, high[n].x, high[n].y);
          if (!kIsHalf) multiply_exact<kIsHalf>(o[n][first + u], of, low[n].x, low[n].y);
        }
      }
    }
  }
}

}  // namespace kvcache
