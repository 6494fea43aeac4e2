// What the kernels of decode attention over whole packed blocks share: by tensor cores, for bf16 and fp16 queries.
//
// A warp takes every fourth unit of its thread block's range, packed blocks of 64 tokens and then what is exact, and
// meets the others only at the end. Keys and values of a block travel as two parts of its record, contiguous bytes,
// through a ring of two or three places in shared memory: the others are on the way while one is worked on. Queries
// are fp16 numbers, scaled by a power of two per row so that none of weight is lost; products are summed in fp32.
// Bound: the bytes of the records, as long as at least 30 KB a multiprocessor are on the way (two parts of 3 to 8 KB
// per warp, 8 to 20 warps).
#pragma once

#include "exact_attention.cuh"
#include "fast_keys.cuh"
#include "unit_ring.cuh"

namespace kvcache {

constexpr int kFoldBlocks = 4;  // of a warp, from one `fold_minima` to the next

// The exponent by which the largest number of a row becomes 2^size to 2^(size + 1).
KVCACHE_DEVICE int exponent_of(float largest, int size = 8) {
  const int exponent = static_cast<int>(float_bits(largest) >> 23 & 255) - 127 - size;
  return exponent < -100 ? -100 : exponent;
}

// What all products of a head are multiplied by to be logits in units of log 2, metadata of records aside.
KVCACHE_DEVICE float logit_scale(const AttentionArguments& a, const Rows& rows) {
  float scale = a.scaling * kLog2E;
  if (a.key.format == kE4M3) scale *= 256.0f;
  if (a.key.scale_offset < 0 && a.key.static_scale != nullptr) scale *= a.key.static_scale[rows.head];
  return scale;
}

// Query rows of a warp, every fourth, times what channels are multiplied by: read all at once and kept. Loads that are
// asked for behind the copies of a kernel's first units would wait for those: so long that they were a sixth of the
// time of a batch of one (32k tokens, on an H200).
template <int kRows, int kChannels>
struct KeptQueries {
  static constexpr int kLaneRows = kRows / kWarps, kLaneChannels = kChannels / 32;
  float numbers[kLaneRows][kLaneChannels];

  KVCACHE_DEVICE KeptQueries(const AttentionArguments& a, const Rows& rows) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const float* const factors =
        a.key.factors == nullptr
            ? nullptr
            : a.key.factors + (static_cast<int64_t>(rows.batch) * a.records.heads + rows.head) * a.key.head_dim;
#pragma unroll
    for (int j = 0; j < kLaneChannels; ++j) {
      const int channel = lane + 32 * j;
      const bool is_used = channel < a.key.head_dim;
      const float factor = factors != nullptr && is_used ? factors[channel] : 1.0f;
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) {
        const int row = warp + i * kWarps;
        numbers[i][j] = row < rows.count && is_used ? rows.query(a, row, channel) * factor : 0.0f;
      }
    }
  }
};

// Lays the queries down as `b` fragments in the order of the key codes, their row scales and sums, and the rotations.
template <int kRows, int kChannels>
KVCACHE_DEVICE void prepare_queries(const AttentionArguments& a, const Rows& rows,
                                    const KeptQueries<kRows, kChannels>& queries, uint8_t* shared,
                                    const FastMemory& memory) {
  using Kept = KeptQueries<kRows, kChannels>;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, dim = a.key.head_dim, half = dim / 2;
  uint16_t* fragments = reinterpret_cast<uint16_t*>(shared + memory.fragments);
  uint16_t* small_fragments = reinterpret_cast<uint16_t*>(shared + memory.small_fragments);
  float* row_scale = reinterpret_cast<float*>(shared + memory.row_scale);
  float* row_sum = reinterpret_cast<float*>(shared + memory.row_sum);
#pragma unroll
  for (int i = 0; i < Kept::kLaneRows; ++i) {
    const int row = thread / 32 + i * kWarps;
    const bool is_used = row < rows.count;  // or zeros, for columns that nobody reads
    float largest = 0.0f;
#pragma unroll
    for (int j = 0; j < Kept::kLaneChannels; ++j) largest = fmaxf(largest, fabsf(queries.numbers[i][j]));
    largest = bits_float(warp_max(float_bits(largest)));  // of numbers that are not negative
    const int exponent = exponent_of(largest, query_size(a.key));
    const float shrink = bits_float(static_cast<uint32_t>(127 - exponent) << 23);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < Kept::kLaneChannels; ++j) {
      const int d = lane + 32 * j;
      if (d >= dim) continue;
      const uint16_t bits = float_half(queries.numbers[i][j] * shrink);
      sum += half_float(bits);
      int step, quad, place;  // place: of the four numbers of a lane in a step
      if (a.key.nbits == 8) {
        step = d / 16;
        quad = d % 16 / 4;
        place = d % 4;
      } else {
        const int upper = a.key.interleaved != 0 ? d % 2 : d >= half;
        const int pair = a.key.interleaved != 0 ? d / 2 : d - upper * half;
        step = pair / 8;
        quad = pair % 8 / 2;
        place = pair % 2 * 2 + upper;
      }
      const int at = ((row / 8 * (dim / 16) + step) * 32 + row % 8 * 4 + quad) * 4 + place;
      fragments[at] = bits;
      if (has_two_sizes(a.key)) small_fragments[at] = float_half(half_float(bits) / (1 << kQueryShift));
    }
    for (int mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
    if (lane == 0) {
      const float grow = bits_float(static_cast<uint32_t>(127 + exponent) << 23);
      row_scale[row] = is_used ? grow * logit_scale(a, rows) : 0.0f;
      row_sum[row] = sum * row_scale[row];
    }
  }
  if (a.key.cos == nullptr) return;
  const int pairs = half;
  uint2* rotations = reinterpret_cast<uint2*>(shared + memory.rotations);
  for (int i = thread; i < a.key.period * pairs; i += kThreads) {
    const float c = a.key.cos[i], s = a.key.sin[i];
    rotations[i / pairs * memory.rotation_stride + i % pairs] = {half2_pack(c, c), half2_pack(-s, s)};
  }
}

// Sets the metadata of a unit to zero from token `tokens` on, by one warp: what lies there belongs to no token, and a
// weight of zero would not undo what is not a number.
KVCACHE_DEVICE void clear_metadata(const Side& side, uint8_t* unit, int tokens) {
  const int used = (tokens + side.group_tokens - 1) >> power_of(side.group_tokens);
  const int end = (kBlockTokens >> power_of(side.group_tokens)) * side.width;
  for (const int offset : {side.scale_offset, side.minimum_offset}) {
    if (offset < 0) continue;
    uint16_t* field = reinterpret_cast<uint16_t*>(unit + (offset - side.codes_offset));
    for (int i = used * side.width + static_cast<int>(threadIdx.x) % 32; i < end; i += 32) field[i] = 0;
  }
  warp_barrier();
}

// Metadata of the tokens of this lane in tile k, two neighbours.
KVCACHE_DEVICE uint32_t load_token_pair(const uint8_t* field, int token, int group_shift) {
  if (group_shift == 0) return load_4(field + 2 * token);
  return load_2(field + (token >> group_shift) * 2) * 0x10001u;  // neighbours from an even one on share it
}

// Multiplies products by the scales of their tokens, and adds the tokens' minima times the sums of the query rows.
template <int kColumns>
KVCACHE_DEVICE void place_tokens(const AttentionArguments& a, const KeyUnit& unit, float (&c)[kColumns][4][4]) {
  const int lane = opaque_lane(), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t scales = load_token_pair(unit.scale, 16 * k + 2 * g, a.key_group_shift);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) c[n][k][i] *= i < 2 ? half_low(scales) : half_high(scales);
    }
  }
  if (a.key.minimum_offset < 0) return;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t minima = load_token_pair(unit.minimum, 16 * k + 2 * g, a.key_group_shift);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float minimum = i < 2 ? half_low(minima) : half_high(minima);
        c[n][k][i] = fmaf(minimum, unit.row_sum[8 * n + 2 * t + i % 2], c[n][k][i]);
      }
    }
  }
}

// Moves what the minima have summed, times `unit_of` a chunk, to this lane's channels of it: the groups of these are
// rows of state.minima, on other lanes.
template <int kColumns, int kTiles, typename UnitOf>
KVCACHE_DEVICE void move_minima(const ValueUnit& values, WarpState<kColumns, kTiles>& state, UnitOf unit_of) {
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int u = 0; u < kTiles; ++u) {
    if (u >= values.chunks) continue;
    const int group = u / values.chunks_per_group;
    const float unit = unit_of(u);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const float even = unit * shuffle(group < 8 ? state.minima[n][0] : state.minima[n][2], group % 8 * 4 + t);
      const float odd = unit * shuffle(group < 8 ? state.minima[n][1] : state.minima[n][3], group % 8 * 4 + t);
      state.output[n][u][0] += even;
      state.output[n][u][1] += odd;
      state.output[n][u][2] += even;
      state.output[n][u][3] += odd;
    }
  }
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) state.minima[n][i] = 0.0f;
  }
}

// The same for codes that are not negative, in the units of their sums. A tensor core cuts off what does not fit its
// accumulator (PeerJ Comput. Sci. 7:e330; arXiv:2512.07004): a sum that only grows loses the more the longer it is, and
// the minima, which make it small, would leave that loss alone. So they do so all the time.
template <int kColumns, int kTiles>
KVCACHE_DEVICE void fold_minima(const Side& side, const ValueUnit& values, WarpState<kColumns, kTiles>& state) {
  if (side.minimum_offset < 0 && side.format != kSymmetric) return;
  const float bias = side.format == kSymmetric ? -128.0f : 1.0f;  // symmetric codes are 128 too large
  move_minima(values, state, [&](int chunk) {
    return bias * bits_float((254u << 23) - float_bits(chunk_place(side, values.is_aligned, chunk)));  // 1 / 2^n
  });
}

// The parts of shared memory that keys are multiplied from, and what is the same for all blocks.
KVCACHE_DEVICE KeyUnit key_unit(const AttentionArguments& a, const uint8_t* shared, const FastMemory& memory) {
  KeyUnit key{};
  key.fragments = reinterpret_cast<const uint2*>(shared + memory.fragments);
  key.small_fragments = reinterpret_cast<const uint2*>(shared + memory.small_fragments);
  key.row_scale = reinterpret_cast<const float*>(shared + memory.row_scale);
  key.row_sum = reinterpret_cast<const float*>(shared + memory.row_sum);
  key.rotations = reinterpret_cast<const uint4*>(shared + memory.rotations);
  key.rotation_row = memory.rotation_stride / 2;
  key.period = a.key.period;
  key.steps = a.key_steps;
  key.dim = a.key.head_dim;
  key.swizzle = a.key_copy.swizzle;
  key.tile_shift = a.key_tile_shift;
  key.interleaved = a.key.interleaved != 0;
  return key;
}

// The same of values.
KVCACHE_DEVICE ValueUnit value_unit(const AttentionArguments& a, const uint2* weights) {
  ValueUnit value{};
  value.weights = weights;
  value.chunks = a.value_chunks;
  value.width = a.value.width;
  value.chunks_per_group = a.value_chunks_per_group;
  value.group_shift = a.value_group_shift;
  value.swizzle = a.value_copy.swizzle;
  value.groups = a.value_groups;
  value.has_scales = a.value.scale_offset >= 0;
  value.is_aligned = a.are_values_aligned != 0;
  return value;
}

// Points a unit to the keys of a block in shared memory.
KVCACHE_DEVICE void point_to_block(const AttentionArguments& a, KeyUnit& key, const uint8_t* codes, int block) {
  key.codes = codes;
  key.scale = codes + a.key_copy.scale;
  key.minimum = codes + a.key_copy.minimum;
  key.phase = a.key.cos != nullptr ? block * kBlockTokens % a.key.period : 0;
}

// The same of values.
KVCACHE_DEVICE void point_to_block(const AttentionArguments& a, ValueUnit& value, const uint8_t* codes) {
  value.codes = codes;
  value.scale = codes + a.value_copy.scale;
  value.minimum = codes + a.value_copy.minimum;
}

// Makes logits, in units of log 2, of products of which metadata per token are left out; but for what `adjust` does.
template <int kColumns>
KVCACHE_DEVICE void place_products(const AttentionArguments& a, const KeyUnit& key, float (&products)[kColumns][4][4]) {
  if (a.key.scale_offset >= 0 && a.key.width == 1) place_tokens(a, key, products);
}

// Turns sums of codes into sums of what the codes stand for, once the last packed block has been read.
template <int kColumns, int kTiles>
KVCACHE_DEVICE void leave_codes(const AttentionArguments& a, const ValueUnit& value, const Rows& rows,
                                WarpState<kColumns, kTiles>& state) {
  fold_minima(a.value, value, state);
  state.place_chunks(a.value, value.is_aligned);
  const float grow = a.value.scale_offset >= 0 ? bits_float(static_cast<uint32_t>(127 + state.exponent) << 23)
                                               : a.value.static_scale[rows.head];
#pragma unroll
  for (int n = 0; n < kColumns; ++n) state.template scale<false>(n, grow, grow);
}

// Merges the warps of a thread block into the split's results.
template <int kColumns, int kTiles>
KVCACHE_DEVICE void finish(const AttentionArguments& a, const Rows& rows, uint8_t* shared,
                           WarpState<kColumns, kTiles>& state, int place) {
  const float* const factors =
      a.value.factors == nullptr
          ? nullptr
          : a.value.factors + (static_cast<int64_t>(rows.batch) * a.records.heads + rows.head) * a.value.head_dim;
  merge_warps(a, rows, factors, shared, state, place);
}

}  // namespace kvcache
