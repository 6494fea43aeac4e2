// Decode attention over whole packed blocks by tensor cores, for bf16 and fp16 queries.
//
// A warp takes every fourth 64-token block of its thread block's range and meets the others only at the end. Keys and
// values of a block travel as two units, contiguous bytes of its record, through a ring of two or three places in
// shared memory: the others are on the way while one is worked on. Queries are fp16 numbers, scaled by a power of two
// per row so that none of weight is lost; products are summed in fp32. Bound: the bytes of the records, as long as at
// least 30 KB a multiprocessor are on the way (two units of 4 to 8 KB per warp, 8 to 16 warps). On an H200 (32 query
// and 8 key-value heads of 128, 8 sequences of 32k tokens, bf16) the kernels of known_formats.h read 8 bits with 95 to
// 99 % of the bandwidth of a copy and 4 bits with 85 to 92 %; 2 bits, with 69 %, are bound by instructions and what
// these wait for: by count in the machine code some 900 a block and warp. The kernels for all formats take 1500 to 1800
// in all, as the counters have it, and wait for them. A mask or another bias takes some 410 more (as PTX).
#pragma once

#include "exact_tokens.cuh"
#include "fast_keys.cuh"
#include "fast_values.cuh"
#include "general_attention.cuh"
#include "known_formats.h"
#include "unit_ring.cuh"

namespace kvcache {

constexpr float kWeightScale = 256.0f;  // of weights in fp16, against subnormal numbers
constexpr float kWeightShift = 8.0f;
// By which the maximum of a row is taken larger than it is: weights below 2^-30 of the largest, instead of 2^-33, are
// then too small for fp16.
constexpr float kSlack = 3.0f;
constexpr int kFoldBlocks = 4;  // of a warp, from one `fold_minima` to the next
constexpr float kLn2 = 0.69314718055994531f;

// One warp's state: this lane's columns are query rows 8n + 2t and 8n + 2t + 1.
template <int kColumns, int kTiles>
struct WarpState {
  float best[kColumns][2], total[kColumns][2];
  float output[kColumns][kTiles][4], minima[kColumns][4];
  int exponent;

  KVCACHE_DEVICE void clear() {
    exponent = -14;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      for (int i = 0; i < 2; ++i) {
        best[n][i] = -infinity();
        total[n][i] = 0.0f;
      }
      for (int i = 0; i < 4; ++i) minima[n][i] = 0.0f;
      for (int u = 0; u < kTiles; ++u)
        for (int i = 0; i < 4; ++i) output[n][u][i] = 0.0f;
    }
  }
  // `kHasMinima`: some may have been summed since they were folded.
  template <bool kHasMinima>
  KVCACHE_DEVICE void scale(int n, float even, float odd) {
#pragma unroll
    for (int u = 0; u < kTiles; ++u) {
      output[n][u][0] *= even;
      output[n][u][1] *= odd;
      output[n][u][2] *= even;
      output[n][u][3] *= odd;
    }
    if (!kHasMinima) return;
    minima[n][0] *= even;
    minima[n][1] *= odd;
    minima[n][2] *= even;
    minima[n][3] *= odd;
  }
  // Takes larger logits than those before, one of every lane, and some slack, so that this is rare; what was summed
  // before becomes less.
  template <bool kHasMinima>
  KVCACHE_DEVICE void raise_best(int n, const float (&found)[2]) {
    float decay[2];
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      float largest = found[column];
      for (int mask = 4; mask < 32; mask *= 2) largest = fmaxf(largest, shuffle_xor(largest, mask));
      largest = largest > best[n][column] ? largest + kSlack : best[n][column];
      decay[column] = power_of_two(best[n][column] - (largest == -infinity() ? 0.0f : largest));
      best[n][column] = largest;
      total[n][column] *= decay[column];
    }
    scale<kHasMinima>(n, decay[0], decay[1]);
  }
  // Turns sums of codes as they were multiplied into sums of what the codes stand for.
  KVCACHE_DEVICE void place_chunks(const Side& values, bool is_aligned) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int u = 0; u < kTiles; ++u) {
        const float place = chunk_place(values, is_aligned, u);
#pragma unroll
        for (int i = 0; i < 4; ++i) output[n][u][i] *= place;
      }
    }
  }
  // Raises the exponent of the accumulators to one that is needed; returns 2^-exponent, twice, as fp16.
  KVCACHE_DEVICE uint32_t raise_exponent(int needed) {
    if (needed > exponent) {
      const float shrink = bits_float(static_cast<uint32_t>(127 + exponent - needed) << 23);
#pragma unroll
      for (int n = 0; n < kColumns; ++n) scale<true>(n, shrink, shrink);
      exponent = needed;
    }
    return static_cast<uint32_t>(15 - exponent) * 0x04000400u;
  }
};

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

// Query rows of a warp, every fourth, times what channels are multiplied by: read where they are needed.
struct ReadQueries {
  const AttentionArguments& a;
  const Rows& rows;
  const float* factors;  // of channels, or null

  KVCACHE_DEVICE ReadQueries(const AttentionArguments& a, const Rows& rows)
      : a(a),
        rows(rows),
        factors(a.key.factors == nullptr
                    ? nullptr
                    : a.key.factors +
                          (static_cast<int64_t>(rows.batch) * a.records.heads + rows.head) * a.key.head_dim) {}
  KVCACHE_DEVICE float number(int, int row, int, int channel) const {
    return rows.query(a, row, channel) * (factors != nullptr ? factors[channel] : 1.0f);
  }
};

// The same, read all at once and kept. Loads that are asked for behind the copies of a kernel's first units would wait
// for those: so long that they were a sixth of the time of a batch of one (32k tokens, on an H200).
template <int kRows, int kChannels>
struct KeptQueries {
  float numbers[kRows / kWarps][kChannels / 32];

  KVCACHE_DEVICE KeptQueries(const AttentionArguments& a, const Rows& rows) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < kRows / kWarps; ++i) {
#pragma unroll
      for (int j = 0; j < kChannels / 32; ++j) {
        const int row = warp + i * kWarps;
        numbers[i][j] = row < rows.count ? rows.query(a, row, lane + 32 * j) : 0.0f;
      }
    }
  }
  KVCACHE_DEVICE float number(int i, int, int j, int) const { return numbers[i][j]; }
};

// Lays the queries down as `b` fragments in the order of the key codes, their row scales and sums, and the rotations.
// `kUnroll`: 1, or so much that whatever is kept of the queries is found in registers.
template <int kColumns, int kUnroll, typename Queries>
KVCACHE_DEVICE void prepare_queries(const AttentionArguments& a, const Rows& rows, const Queries& queries,
                                    uint8_t* shared, const FastMemory& memory) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, dim = a.key.head_dim, half = dim / 2;
  uint16_t* fragments = reinterpret_cast<uint16_t*>(shared + memory.fragments);
  uint16_t* small_fragments = reinterpret_cast<uint16_t*>(shared + memory.small_fragments);
  float* row_scale = reinterpret_cast<float*>(shared + memory.row_scale);
  float* row_sum = reinterpret_cast<float*>(shared + memory.row_sum);
#pragma unroll(kUnroll)
  for (int i = 0; i < 8 * kColumns / kWarps; ++i) {
    const int row = thread / 32 + i * kWarps;
    const bool is_used = row < rows.count;  // or zeros, for columns that nobody reads
    float largest = 0.0f;
#pragma unroll(kUnroll)
    for (int j = 0; j < (dim + 31) / 32; ++j) {
      const int d = lane + 32 * j;
      if (is_used && d < dim) largest = fmaxf(largest, fabsf(queries.number(i, row, j, d)));
    }
    largest = bits_float(warp_max(float_bits(largest)));  // of numbers that are not negative
    const int exponent = exponent_of(largest, query_size(a.key));
    const float shrink = bits_float(static_cast<uint32_t>(127 - exponent) << 23);
    float sum = 0.0f;
#pragma unroll(kUnroll)
    for (int j = 0; j < (dim + 31) / 32; ++j) {
      const int d = lane + 32 * j;
      if (d >= dim) continue;
      const uint16_t bits = float_half(is_used ? queries.number(i, row, j, d) * shrink : 0.0f);
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

// Applies to logits what is more than a product: masks, biases, and that slots end before `end`. All biases of a row
// are asked for before one is waited for. Columns without a row do as the first row: nobody reads what becomes of them.
template <int kColumns>
KVCACHE_DEVICE void adjust(const AttentionArguments& a, int block, int end, float (&c)[kColumns][4][4]) {
  constexpr int kAtOnce = 2;  // tiles whose biases are on the way
  const Rows rows = Rows::mine_again(a);
  const int lane = opaque_lane(), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const int row = 8 * n + 2 * t + column;
      RowInBlock mine(a, rows, row < rows.count ? row : 0, block * kBlockTokens);
      mine.newest = mine.newest < end ? mine.newest : end - 1;
#pragma unroll
      for (int first = 0; first < 4; first += kAtOnce) {
        float biases[kAtOnce][2] = {};
        if (mine.bias != nullptr) {
#pragma unroll
          for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const int slot = 16 * (first + k) + 2 * g + i;
              if (slot < end) biases[k][i] = mine.bias[slot];  // it may end before the block does
            }
          }
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& logit = c[n][first + k][2 * i + column];
            logit = mine.adjusted(a, 16 * (first + k) + 2 * g + i, biases[k][i], logit * kLn2);
          }
        }
      }
    }
  }
}

// Turns logits into weights: c[n][k] holds tokens 16k + 2g (0, 1) and the next (2, 3), query rows 8n + 2t and the
// next. The weights go to shared memory as fragments for the values.
template <bool kHasMinima, int kColumns, int kTiles>
KVCACHE_DEVICE void weigh(float (&c)[kColumns][4][4], WarpState<kColumns, kTiles>& state, uint2* weights) {
  const int lane = opaque_lane();
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    float best[2] = {-infinity(), -infinity()};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) best[i % 2] = fmaxf(best[i % 2], c[n][k][i]);
    }
    // Once some blocks have been seen, it is rare that one holds a larger logit.
    if (warp_any(best[0] > state.best[n][0] || best[1] > state.best[n][1]))
      state.template raise_best<kHasMinima>(n, best);
    float shift[2];  // subtracted from logits
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const float largest = state.best[n][column];
      shift[column] = (largest == -infinity() ? 0.0f : largest) - kWeightShift;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float weight[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weight[i] = power_of_two(c[n][k][i] - shift[i % 2]);
        state.total[n][i % 2] += weight[i];
      }
      // rows 2g and 2g + 1 of tokens become columns: this lane then holds tokens 4t, 4t + 2 and 4t + 1, 4t + 3
      const uint32_t even = transpose_8x8(half2_pack(weight[0], weight[1]));
      const uint32_t odd = transpose_8x8(half2_pack(weight[2], weight[3]));
      weights[(n * 4 + k) * 32 + lane] = {permute_bytes(even, odd, 0x5410), permute_bytes(even, odd, 0x7632)};
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

// Merges the warps of a thread block into the split's results.
template <int kColumns, int kTiles>
KVCACHE_DEVICE void merge_warps(const AttentionArguments& a, const Rows& rows, const float* channel_factors,
                                uint8_t* ring, WarpState<kColumns, kTiles>& state, int place) {
  constexpr int kRows = 8 * kColumns;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
  const int value_dim = a.value.head_dim, stride = merge_stride(value_dim);
  float* const bests = reinterpret_cast<float*>(ring);  // [warp][row]
  float* const totals = bests + kWarps * kRows;
  float* const outputs = totals + kWarps * kRows;  // [warp][row][stride]
  let_next_begin();
  block_barrier();  // every warp is done with the copies
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = warp * kRows + 8 * n + 2 * t + i;
      float total = state.total[n][i];
      for (int mask = 4; mask < 32; mask *= 2) total += shuffle_xor(total, mask);
      if (g == 0) {
        bests[row] = state.best[n][i];
        totals[row] = total;
      }
#pragma unroll
      for (int u = 0; u < kTiles; ++u)
        if (16 * u < value_dim)
          *reinterpret_cast<float2*>(outputs + row * stride + 16 * u + 2 * g) = {state.output[n][u][i],
                                                                                 state.output[n][u][2 + i]};
    }
  }
  block_barrier();
  for (int row = thread; row < kRows; row += kThreads) {  // from here on `bests` are the warps' shares
    float best = -infinity(), total = 0.0f;
    for (int w = 0; w < kWarps; ++w) best = fmaxf(best, bests[w * kRows + row]);
    const float shift = best == -infinity() ? 0.0f : best;
    for (int w = 0; w < kWarps; ++w) {
      const float share = power_of_two(bests[w * kRows + row] - shift) / kWeightScale;
      bests[w * kRows + row] = share;
      total = fmaf(share, totals[w * kRows + row], total);
    }
    if (row >= rows.count) continue;
    float* sums = a.partial_sums + 2 * rows.partial(a, row, place);
    sums[0] = total != total ? 0.0f : best;
    sums[1] = total;
  }
  block_barrier();
  for (int i = thread; i < rows.count * value_dim; i += kThreads) {
    const int row = i / value_dim, channel = i % value_dim;
    float merged = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w)
      merged = fmaf(bests[w * kRows + row], outputs[(w * kRows + row) * stride + channel], merged);
    if (channel_factors != nullptr) merged *= channel_factors[channel];
    a.partial_outputs[rows.partial(a, row, place) * value_dim + channel] = merged;
  }
}

// Points a unit to the keys of a block in shared memory and multiplies them: logits in units of log 2, but for what
// `adjust` does.
template <typename Format, int kUnroll, int kColumns>
KVCACHE_DEVICE void multiply_packed_keys(const AttentionArguments& a, KeyUnit& key, const uint8_t* codes, int block,
                                         float (&products)[kColumns][4][4]) {
  key.codes = codes;
  key.scale = key.codes + a.key_copy.scale;
  key.minimum = key.codes + a.key_copy.minimum;
  key.phase = a.key.cos != nullptr ? block * kBlockTokens % a.key.period : 0;
  if constexpr (Format::kIsKnown) {
    multiply_known_keys<Format, kUnroll>(key, products);
  } else {
    multiply_keys(a.key, key, products);
  }
  if (a.key.scale_offset >= 0 && a.key.width == 1) place_tokens(a, key, products);
}

// Units beyond the packed blocks: of which block, and which of its slots.
struct ExactUnit {
  bool is_mixed;  // keys are packed
  int block;
  SlotRange slots;

  KVCACHE_DEVICE ExactUnit(const AttentionArguments& a, int unit) {
    const int mixed = a.mixed_end - a.mixed_begin, further = unit - a.packed_units();
    is_mixed = further < mixed;
    block = is_mixed ? a.mixed_begin + further : a.exact_begin + further - mixed;
    slots.start = block * kBlockTokens;
    const int low = static_cast<int>(is_mixed ? a.fast_stop : a.exact_start) - slots.start;
    const int high = static_cast<int>(is_mixed ? a.exact_start : a.length) - slots.start;
    slots.first = low > 0 ? low : 0;
    slots.last = high < kBlockTokens ? high : kBlockTokens;
  }
};

// The newest slots, of which values are exact: this warp's units from `unit` on. `state` holds what codes stand for.
template <typename Format, bool kIsHalf, int kColumns, int kTiles>
KVCACHE_DEVICE void attend_exact(const AttentionArguments& a, const Rows& rows, const UnitRing<true>& ring, int unit,
                                 int last, KeyUnit& key, WarpState<kColumns, kTiles>& state, uint2* weights) {
#pragma unroll 1
  for (; unit < last; unit += kWarps) {
    float products[kColumns][4][4] = {};
    {
      const ExactUnit now(a, unit);
      if (now.is_mixed) {
        const uint8_t* record = a.records.of(rows.batch, rows.head) + now.block * a.records.record_bytes;
        multiply_packed_keys<Format, 1>(a, key, ring.fetch_keys(record), now.block, products);
      } else {
        exact_key_products<kIsHalf>(a, rows, now.slots, products);
      }
      if (a.are_exact_plain == 0) adjust(a, now.block, now.slots.last, products);
    }
    const ExactUnit now(a, opaque(unit));  // worked out anew, which takes no registers meanwhile
    const uint32_t seen = hide_others(now.slots, products);
    weigh<false>(products, state, weights);
    warp_barrier();  // every lane sees the weights
    exact_value_products<kIsHalf>(a, rows, now.slots, weights, seen, state.output);
    warp_barrier();  // and is done with them
  }
}

// One split: units of which every fourth is a warp's. Its results go to `place` among those of all. `Format`: one of
// known_formats.h, which the compiler knows; the newest slots are among the units then.
template <int kColumns, int kTiles, typename Format = AnyFormat>
KVCACHE_DEVICE void attend_fast(const AttentionArguments& a, uint8_t* shared, int split, int place) {
  constexpr bool kIsKnown = Format::kIsKnown;
  constexpr int kUnroll = 4;  // of known formats
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const FastMemory memory(a, kColumns);
  UnitRing<kIsKnown> ring(a, Rows::mine(a), shared, SplitUnits(a, split));
  if constexpr (kIsKnown) {
    const KeptQueries<8 * kColumns, 16 * kTiles> queries(a, Rows::mine(a));
    ring.begin_copies();  // nothing else in shared memory has to wait for them
    prepare_queries<kColumns, 8>(a, Rows::mine(a), queries, shared, memory);
  } else {
    ring.begin_copies();
    const Rows mine = Rows::mine(a);
    prepare_queries<kColumns, 1>(a, mine, ReadQueries(a, mine), shared, memory);
  }
  block_barrier();

  uint2* const weights = reinterpret_cast<uint2*>(shared + memory.weights) + warp * kColumns * 128;

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

  WarpState<kColumns, kTiles> state;
  state.clear();
  int block = ring.begin;
  for (; block < ring.end; block += kWarps) {
    const bool is_left_out = !kIsKnown && holds_sinks(a, Rows::mine(a).batch, block);
    uint8_t* place_of_unit = ring.template next<true>(block);
    if (!is_left_out) {
      if (block >= a.whole_end) clear_metadata(a.key, place_of_unit, a.tokens_of(block));
      float products[kColumns][4][4] = {};
      multiply_packed_keys<Format, kUnroll>(a, key, place_of_unit, block, products);
      if (block < a.plain_begin || block >= a.plain_end) adjust(a, block, a.tokens_of(block), products);
      weigh<true>(products, state, weights);
    }
    place_of_unit = ring.template next<false>(block);  // its barrier also shows every lane the weights
    value.codes = place_of_unit;
    if (!is_left_out) {
      if (block >= a.whole_end) clear_metadata(a.value, place_of_unit, a.tokens_of(block));
      value.scale = value.codes + a.value_copy.scale;
      value.minimum = value.codes + a.value_copy.minimum;
      value.shrink = state.raise_exponent(scale_exponent<kIsKnown>(value));
      if constexpr (kIsKnown) {
        value_products<Format::kNbits, Format::kKind, true, kTiles, Format::kValueGroups, kUnroll>(value, state.output,
                                                                                                   state.minima);
      } else {
        multiply_values(a.value, value, state.output, state.minima);
      }
    }
    if (static_cast<unsigned>(block) / kWarps % kFoldBlocks == kFoldBlocks - 1) fold_minima(a.value, value, state);
  }
  copy_wait<0>();

  const Rows rows = Rows::mine_again(a);
  fold_minima(a.value, value, state);
  state.place_chunks(a.value, value.is_aligned);
  const float grow = a.value.scale_offset >= 0 ? bits_float(static_cast<uint32_t>(127 + state.exponent) << 23)
                                               : a.value.static_scale[rows.head];
#pragma unroll
  for (int n = 0; n < kColumns; ++n) state.template scale<false>(n, grow, grow);
  if constexpr (kIsKnown) {
    const int unit = block - a.fast_begin;  // the first of this warp's that is no packed block
    const int last = SplitUnits(a, opaque(split)).last;
    if (a.query_dtype == kFloat16) {
      attend_exact<Format, true>(a, rows, ring, unit, last, key, state, weights);
    } else {
      attend_exact<Format, false>(a, rows, ring, unit, last, key, state, weights);
    }
  }
  const float* factors =
      a.value.factors == nullptr
          ? nullptr
          : a.value.factors + (static_cast<int64_t>(rows.batch) * a.records.heads + rows.head) * a.value.head_dim;
  merge_warps(a, rows, factors, shared, state, place);
}

}  // namespace kvcache
