// From records, sinks and exact segments to fp32 numbers in shared memory, 64 slots at a time: every format and every
// option. It is what `decode_tokens` writes out, and how decode attention reads what the fast path does not.
#pragma once

#include "query_rows.cuh"

namespace kvcache {

// Numbers of a row of a tile: one more than the channels, so that a column lies in different banks.
KVCACHE_BOTH int tile_stride(int dim) { return dim + 1; }

// What the codes of a token and channel stand for, before outliers and rotations.
KVCACHE_DEVICE float decode_code(const Side& side, const uint8_t* record, bool is_key, int batch, int head, int heads,
                                 int token, int channel) {
  const uint32_t code = read_code(record + side.codes_offset, side.nbits, side.padded_dim, is_key,
                                  side.interleaved != 0, token, channel);
  const bool is_nonuniform = side.format == kNonUniform;
  float value = is_nonuniform ? side.levels[code] : code_value(code, side.format);
  float scale = 1.0f, minimum = 0.0f;
  if (side.channel_scale != nullptr) {
    const int64_t place = batch * side.channel_batch_stride + static_cast<int64_t>(head) * side.head_dim + channel;
    scale = side.channel_scale[place];
    minimum = side.channel_offset[place];
  } else {
    const int entry = token / side.group_tokens * side.width + channel / (side.head_dim / side.width);
    scale = side.scale_offset >= 0 ? read_metadata(record + side.scale_offset, side.metadata_bytes, entry)
                                   : side.static_scale[head];
    if (side.minimum_offset >= 0) minimum = read_metadata(record + side.minimum_offset, side.metadata_bytes, entry);
  }
  value = add_rounded(multiply_rounded(value, scale), minimum);
  if (side.factors != nullptr) {
    const int64_t row = static_cast<int64_t>(batch) * heads + head;
    value = multiply_rounded(value, side.factors[row * side.head_dim + channel]);
  }
  return value;
}

// Adds what the codes of a block lack (kvcache_plugins/quantizers/outliers.py). Whatever the tensors hold, what is
// read and written lies inside of them.
KVCACHE_DEVICE void add_outliers(const Side& side, int batch, int head, int heads, int64_t block, int packed,
                                 float* tile, int stride) {
  const int16_t* bounds = side.outlier_starts + (batch * side.outlier_blocks + block) * (heads + 1) + head;
  const int first = bounds[0], last = bounds[1];
  if (first < 0 || last > side.outlier_capacity) return;
  const int32_t* list = side.outliers + (batch * side.outlier_blocks + block) * side.outlier_capacity;
  for (int i = first + static_cast<int>(threadIdx.x); i < last; i += static_cast<int>(blockDim.x)) {
    const int32_t entry = list[i];
    const int token = entry >> 26 & (kBlockTokens - 1), channel = entry >> 16 & (kMaxHeadDim - 1);
    if (token < packed && channel < side.head_dim)
      tile[token * stride + channel] += half_float(static_cast<uint16_t>(entry));
  }
}

template <bool kPositions>
KVCACHE_DEVICE void rotate_tile(const Side& side, int batch, int64_t start, int packed, float* tile, int stride) {
  const int pairs = side.rotary_dim / 2;
  // Divisions of 64 bits are calls, for which registers are spilled; slots fit 32.
  const int phase = side.cos != nullptr ? static_cast<int>(start) % side.period : 0;
  for (int i = static_cast<int>(threadIdx.x); i < packed * pairs; i += static_cast<int>(blockDim.x)) {
    const int token = i / pairs, pair = i % pairs;
    float c, s;
    if (kPositions && side.inv_freq != nullptr) {
      const int64_t position = start + token + (side.positions != nullptr ? side.positions[batch] : 0);
      turn(static_cast<double>(position) * side.inv_freq[pair], &c, &s);
    } else {
      const int place = (phase + token) % side.period * pairs + pair;
      c = side.cos[place];
      s = side.sin[place];
    }
    float* first = tile + token * stride + (side.interleaved != 0 ? 2 * pair : pair);
    float* second = tile + token * stride + (side.interleaved != 0 ? 2 * pair + 1 : pair + pairs);
    const float a = *first, b = *second;
    *first = a * c - b * s;
    *second = b * c + a * s;
  }
}

// Brings slots [start, start + count) of one side into tile[slot][channel]; all threads of the block take part.
// `start` is a multiple of 64, `count` at most 64; rows beyond are left alone. `kPositions`: `inv_freq` may be given,
// whose angles in fp64 cost registers.
template <bool kPositions>
KVCACHE_DEVICE void load_tile(const Side& side, const Records& records, bool is_key, int batch, int head,
                              int64_t start, int count, float* tile, int stride) {
  const int dim = side.head_dim, threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const int64_t left = side.packed_length - start;
  const int packed = left <= 0 ? 0 : left < count ? static_cast<int>(left) : count;
  if (packed > 0) {
    const uint8_t* record = records.of(batch, head) + (start / kBlockTokens) * records.record_bytes;
    for (int i = thread; i < packed * dim; i += threads)
      tile[i / dim * stride + i % dim] =
          decode_code(side, record, is_key, batch, head, records.heads, i / dim, i % dim);
    if (side.outliers != nullptr) {
      block_barrier();
      add_outliers(side, batch, head, records.heads, start / kBlockTokens, packed, tile, stride);
    }
    if ((kPositions && side.inv_freq != nullptr) || side.cos != nullptr) {
      block_barrier();
      rotate_tile<kPositions>(side, batch, start, packed, tile, stride);
    }
  }
  block_barrier();
  if (packed > 0 && side.sinks != nullptr) {
    const int64_t first = records.sink_start != nullptr ? records.sink_start[batch] : 0;
    const int64_t row = (static_cast<int64_t>(batch) * records.heads + head) * side.sink_length;
    for (int i = thread; i < packed * dim; i += threads) {
      const int64_t sink = start + i / dim - first;
      if (sink >= 0 && sink < side.sink_length)
        tile[i / dim * stride + i % dim] = read_number(side.sinks, side.dtype, (row + sink) * dim + i % dim);
    }
  }
  for (int n = 0; n < side.num_segments; ++n) {
    const Segment& segment = side.segments[n];
    const int64_t low = segment.start > start ? segment.start : start;
    const int64_t end = segment.start + segment.length, high = end < start + count ? end : start + count;
    const int64_t base = batch * segment.batch_stride + head * segment.head_stride;
    const int numbers = high > low ? static_cast<int>(high - low) * dim : 0;
    for (int i = thread; i < numbers; i += threads) {
      const int64_t slot = low + i / dim;
      tile[(slot - start) * stride + i % dim] = read_number(
          segment.data, side.dtype, base + (slot - segment.start) * segment.token_stride + i % dim);
    }
  }
  block_barrier();
}

}  // namespace kvcache
