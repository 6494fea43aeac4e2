// Decode attention over whole packed blocks of KVQuant by tensor cores, for bf16 and fp16 queries, and over what is
// exact: as fast_attention.cuh, of 8 query rows, with products of its own (level_keys.cuh, level_values.cuh).
#pragma once

#include "fast_attention.cuh"
#include "known_formats.h"
#include "level_keys.cuh"
#include "level_values.cuh"

namespace kvcache {

// Lays down for every row and pair of channels, times a power of two per row: the queries times the scales, and crossed
// times the scales, where crossed (a, b) is (b, -a); the queries times the offsets; and, for outliers, the queries.
KVCACHE_DEVICE void prepare_level_rows(const AttentionArguments& a, const Rows& rows, uint8_t* shared,
                                       const LevelMemory& memory) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, half = a.key.head_dim / 2;
  const bool interleaved = a.key.interleaved != 0;
  uint32_t* queries = reinterpret_cast<uint32_t*>(shared + memory.queries);
  float* row_scale = reinterpret_cast<float*>(shared + memory.row_scale);
  const int64_t channels = rows.batch * a.key.channel_batch_stride + static_cast<int64_t>(rows.head) * a.key.head_dim;
  const float *scales = a.key.channel_scale + channels, *offsets = a.key.channel_offset + channels;
  for (int row = thread / 32; row < 8; row += kWarps) {
    const bool is_used = row < rows.count;
    float largest = 0.0f;
    for (int pair = lane; is_used && pair < half; pair += 32) {
      const int first = interleaved ? 2 * pair : pair, second = interleaved ? 2 * pair + 1 : pair + half;
      const float offset = fabsf(offsets[first]) + fabsf(offsets[second]);
      const float factor = fmaxf(fmaxf(fabsf(scales[first]), fabsf(scales[second])), fmaxf(offset, 1.0f));
      largest = fmaxf(largest, (fabsf(rows.query(a, row, first)) + fabsf(rows.query(a, row, second))) * factor);
    }
    for (int mask = 16; mask > 0; mask /= 2) largest = fmaxf(largest, shuffle_xor(largest, mask));
    const int exponent = exponent_of(largest);
    const float shrink = bits_float(static_cast<uint32_t>(127 - exponent) << 23);
    for (int pair = lane; pair < half; pair += 32) {
      const int first = interleaved ? 2 * pair : pair, second = interleaved ? 2 * pair + 1 : pair + half;
      const float u = is_used ? rows.query(a, row, first) * shrink : 0.0f;
      const float v = is_used ? rows.query(a, row, second) * shrink : 0.0f;
      const float direct = u * offsets[first] + v * offsets[second];
      const float crossed = v * offsets[first] - u * offsets[second];
      const int owner = row * 4 + pair % 8 / 2, which = pair % 2;
      uint32_t* words = queries + pair / 8 * 256 + owner * 4;  // twice 32 lanes of four words
      words[2 * which] = half2_pack(u * scales[first], v * scales[second]);
      words[2 * which + 1] = half2_pack(v * scales[first], -u * scales[second]);
      words[128 + which] = half2_pack(direct, crossed);
      words[130 + which] = half2_pack(u, v);
    }
    if (lane == 0)
      row_scale[row] = is_used ? bits_float(static_cast<uint32_t>(127 + exponent) << 23) * a.scaling * kLog2E : 0.0f;
  }
}

// Frequencies of half a slot as fractions of a turn, both tables of levels, patches of zeros.
KVCACHE_DEVICE void prepare_level_tables(const AttentionArguments& a, uint8_t* shared, const LevelMemory& memory) {
  const int thread = static_cast<int>(threadIdx.x), pairs = a.key.head_dim / 2;
  uint64_t* frequencies = reinterpret_cast<uint64_t*>(shared + memory.frequencies);
  for (int i = thread; i < pairs; i += kThreads) {
    const bool is_rotating = a.key.inv_freq != nullptr && 2 * i < a.key.rotary_dim;
    const double turns = is_rotating ? a.key.inv_freq[i] * (0.5 * 0.15915494309189533577) : 0.0;
    frequencies[i] = static_cast<uint64_t>((turns - floor(turns)) * 18446744073709551616.0);
  }
  for (int i = thread; i < 32; i += kThreads) {
    const int nbits = i < 16 ? a.key.nbits : a.value.nbits;
    const float* const numbers = i < 16 ? a.key.levels : a.value.levels;
    const uint16_t bits = i % 16 < 1 << nbits ? float_half(numbers[i % 16]) : 0;
    uint8_t* table = shared + memory.levels + i / 16 * kLevelBytes + i % 16;
    table[0] = static_cast<uint8_t>(bits);
    table[16] = static_cast<uint8_t>(bits >> 8);
  }
  uint32_t* patches = reinterpret_cast<uint32_t*>(shared + memory.patches);
  for (int i = thread; i < kWarps * memory.patch_bytes / 4; i += kThreads) patches[i] = 0;
}

// The turns of half a block, from the frequencies.
KVCACHE_DEVICE void prepare_turns(const AttentionArguments& a, uint8_t* shared, const LevelMemory& memory) {
  const int thread = static_cast<int>(threadIdx.x), pairs = a.key.head_dim / 2;
  const uint64_t* frequencies = reinterpret_cast<const uint64_t*>(shared + memory.frequencies);
  uint32_t* turns = reinterpret_cast<uint32_t*>(shared + memory.turns);
  for (int i = thread; i < 2 * kTurnRows * pairs; i += kThreads) {
    const int distance = i / pairs, pair = i % pairs;
    turns[distance / 2 * memory.turn_row * 4 + 2 * pair + distance % 2] =
        turn_pair(frequencies[pair] * static_cast<uint64_t>(2 * distance + 1));
  }
}

// Sets the scales and offsets of sinks in a unit of values to zero: a weight of zero would not undo what is not a
// number.
KVCACHE_DEVICE void clear_sinks(const HiddenSinks& sinks, uint8_t* scale, uint8_t* offset) {
  for (int slot = static_cast<int>(threadIdx.x) % 32; slot < kBlockTokens; slot += 32) {
    if (!sinks.has(slot)) continue;
    reinterpret_cast<uint16_t*>(scale)[slot] = 0;
    reinterpret_cast<uint16_t*>(offset)[slot] = 0;
  }
  warp_barrier();
}

// One split: a range of units, whole packed blocks first, of which every fourth is a warp's. `Format`: one of
// known_formats.h, or any.
template <int kTiles, typename Format = AnyFormat>
KVCACHE_DEVICE void attend_over_levels(const AttentionArguments& a, const Rows& rows, uint8_t* shared, int split,
                                       int place) {
  constexpr bool kIsKnown = Format::kIsKnown;
  constexpr int kEntries = kTiles == 8 ? 4 : 6;  // 128 or 192 in a warp: 1 in 100 numbers is 82 or 164
  const int warp = static_cast<int>(threadIdx.x) / 32, heads = a.records.heads, pairs = a.key.head_dim / 2;
  const LevelMemory memory(a);
  UnitRing<kIsKnown> ring(a, rows, shared, SplitUnits(a, split));
  // Where lists are is asked for most of a block ahead; those of keys are half a block ahead, those of values while
  // weights are made. What is loaded behind the first copies would wait for them.
  OutlierBounds key_bounds(a.key, rows, heads, ring.begin, ring.begin < ring.end);
  OutlierBounds value_bounds(a.value, rows, heads, ring.begin, ring.begin < ring.end);
  int* const sinks_end = reinterpret_cast<int*>(shared + memory.sinks_end);  // a block; in memory, to spare a register
  if (threadIdx.x == 0) *sinks_end = a.sink_units > 0 ? HiddenSinks::end_block(a, rows.batch) : 0;
  prepare_level_rows(a, rows, shared, memory);
  prepare_level_tables(a, shared, memory);
  OutlierList<kEntries> of_keys, of_values;
  of_keys.load(a.key, rows, ring.begin, key_bounds);
  ring.begin_copies();
  block_barrier();
  prepare_turns(a, shared, memory);
  block_barrier();

  uint2* const weights = reinterpret_cast<uint2*>(shared + memory.weights) + warp * 128;
  uint2* const angles = reinterpret_cast<uint2*>(shared + memory.angles + warp * FastMemory::aligned(8 * pairs));
  const uint64_t* const frequencies = reinterpret_cast<const uint64_t*>(shared + memory.frequencies);
  const float* const row_scale = reinterpret_cast<const float*>(shared + memory.row_scale);

  LevelKeyUnit key{};
  key.table = shared + memory.levels;
  key.queries = reinterpret_cast<const uint4*>(shared + memory.queries);
  key.turns = reinterpret_cast<const uint4*>(shared + memory.turns);
  key.turn_row = memory.turn_row;
  key.angles = reinterpret_cast<const uint4*>(angles);
  key.patches = shared + memory.patches + warp * memory.patch_bytes;
  key.steps = a.key_steps;
  key.dim = a.key.head_dim;
  key.interleaved = a.key.interleaved != 0;
  LevelValueUnit value{};
  value.table = key.table + kLevelBytes;
  value.patches = key.patches;
  value.unit.weights = weights;
  value.unit.chunks = a.value_chunks;
  value.unit.width = 1;
  value.unit.has_scales = true;
  value.unit.chunks_per_group = value.unit.chunks;
  value.unit.swizzle = a.value_copy.swizzle;

  WarpState<1, kTiles> state;
  state.clear(kLeastLevelExponent);
  int block = ring.begin;
  for (; block < ring.end; block += kWarps) {
    const bool is_left_out = !kIsKnown && holds_sinks(a, rows.batch, block), has_next = block + kWarps < ring.end;
    key_bounds = OutlierBounds(a.key, rows, heads, block + kWarps, has_next);
    const int64_t first = a.key.positions != nullptr ? a.key.positions[rows.batch] : 0;  // of slot 0
    turn_block(frequencies, first + static_cast<int64_t>(block) * kBlockTokens, pairs, angles);
    key.codes = ring.template next<true>(block);  // its barrier also shows every lane the angles
    if (!is_left_out) {
      float products[1][4][4] = {};
      multiply_level_keys<Format>(a.key, key, of_keys, products[0]);
      of_values.load(a.value, rows, block, value_bounds);
      scale_rows(row_scale, products);
      if (block < a.plain_begin || block >= a.plain_end) adjust(a, block * kBlockTokens, a.tokens_of(block), products);
      if (block < *sinks_end) hide_sinks(HiddenSinks(a, rows.batch, block), products);
      weigh<true>(products, state, LanePairs(weights));
    }
    of_keys.load(a.key, rows, block + kWarps, key_bounds);
    value_bounds = OutlierBounds(a.value, rows, heads, block + kWarps, has_next);
    uint8_t* const codes = ring.template next<false>(block);
    value.unit.codes = codes;
    if (!is_left_out) {
      value.unit.scale = codes + a.value_copy.scale;
      value.unit.minimum = codes + a.value_copy.minimum;
      if (block < *sinks_end)
        clear_sinks(HiddenSinks(a, rows.batch, block), codes + a.value_copy.scale, codes + a.value_copy.minimum);
      value.unit.shrink = state.raise_exponent(needed_exponent(value.unit, of_values.largest()));
      multiply_level_values<Format>(a.value, value, of_values, state.output[0], state.minima[0]);
    }
  }
  copy_wait<0>();
  move_minima(value.unit, state, [](int) { return 1.0f; });
  const float grow = bits_float(static_cast<uint32_t>(127 + state.exponent) << 23);
  state.template scale<true>(0, grow, grow);
  const Rows mine = Rows::mine_again(a);
  const int unit = block - a.fast_begin;  // the first of this warp's that is no packed block
  attend_exact<false>(a, mine, unit, SplitUnits(a, opaque(split)).last, state, weights, nullptr,
                      [](int, float(&)[1][4][4]) {});
  merge_warps(a, mine, nullptr, shared, state, place);
}

}  // namespace kvcache
