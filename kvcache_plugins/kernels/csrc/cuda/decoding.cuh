// From records, sinks and exact segments to fp32 numbers in shared memory, up to 64 slots at a time: every format and
// every option. It is what `decode_tokens` writes out, and how decode attention reads what the fast path does not.
#pragma once

#include "decode_words.cuh"
#include "query_rows.cuh"

namespace kvcache {

// Numbers of a row of a tile: one more than the channels, so that a column lies in different banks.
KVCACHE_BOTH int tile_stride(int dim) { return dim + 1; }

// Slots of a tile: of heads of more than 256 channels half a block, so that a tile, and what attention keeps beside it,
// fit GPUs that have 99 KB of shared memory for a thread block.
constexpr int kWideSlots = kBlockTokens / 2;
KVCACHE_BOTH int tile_slots(int dim) { return dim > 256 ? kWideSlots : kBlockTokens; }

// Adds what the codes of a block lack (kvcache_plugins/quantizers/outliers.py). Whatever the tensors hold, what is
// read and written lies inside of them.
KVCACHE_DEVICE void add_outliers(const Side& side, int batch, int head, int heads, int64_t block, int first_token,
                                 int packed, float* tile, int stride) {
  const int16_t* bounds = side.outlier_starts + (batch * side.outlier_blocks + block) * (heads + 1) + head;
  const int first = bounds[0], last = bounds[1];
  if (first < 0 || last > side.outlier_capacity) return;
  const int32_t* list = side.outliers + (batch * side.outlier_blocks + block) * side.outlier_capacity;
  for (int i = first + static_cast<int>(threadIdx.x); i < last; i += static_cast<int>(blockDim.x)) {
    const int32_t entry = list[i];
    const int token = entry >> 26 & (kBlockTokens - 1), channel = entry >> 16 & 1023;
    if (token >= first_token && token < packed && channel < side.head_dim)
      tile[token * stride + channel] += half_float(static_cast<uint16_t>(entry));
  }
}

template <bool kPositions>
KVCACHE_DEVICE void rotate_tile(const Side& side, int batch, int64_t start, int first_token, int packed, float* tile,
                                int stride) {
  const int pairs = side.rotary_dim / 2;
  // Divisions of 64 bits are calls, for which registers are spilled; slots fit 32.
  const int phase = side.cos != nullptr ? static_cast<int>(start) % side.period : 0;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  for (int i = first_token * pairs + thread; i < packed * pairs; i += threads) {
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

// Asks for lines of 128 bytes, those of `rows` that lie `row_step` apart.
KVCACHE_DEVICE void prefetch_rows(const uint8_t* from, int rows, int64_t row_step, int bytes) {
  const int lines = (bytes + 127) / 128;
  for (int i = static_cast<int>(threadIdx.x); i < rows * lines; i += static_cast<int>(blockDim.x))
    prefetch(from + i / lines * row_step + i % lines * 128);
}

// Asks for what `load_tile` will read of the slots [low, high) of a block. `bytes`: of a record, from the codes on.
KVCACHE_DEVICE void prefetch_tile(const Side& side, const Records& records, int bytes, int batch, int head,
                                  int64_t low, int64_t high) {
  if (low < side.packed_length)
    prefetch_rows(records.of(batch, head) + low / kBlockTokens * records.record_bytes + side.codes_offset, 1, 0, bytes);
  const int size = side.dtype == kFloat32 ? 4 : 2;
  for (int n = 0; n < side.num_segments; ++n) {
    const Segment& segment = side.segments[n];
    const int64_t begin = segment.start > low ? segment.start : low;
    const int64_t stop = segment.start + segment.length, end = stop < high ? stop : high;
    if (end <= begin) continue;
    const int64_t first = batch * segment.batch_stride + head * segment.head_stride +
                          (begin - segment.start) * segment.token_stride;
    prefetch_rows(static_cast<const uint8_t*>(segment.data) + first * size, static_cast<int>(end - begin),
                  segment.token_stride * size, side.head_dim * size);
  }
}

// Exact tokens to rows of the tile, number by number; several loads of a thread are on the way at a time.
template <typename Word>
KVCACHE_DEVICE void copy_numbers(const Word* from, int64_t token_stride, int dtype, int tokens, int dim, float* tile,
                                 int stride) {
  constexpr int kBatch = 8;
  const int threads = static_cast<int>(blockDim.x), numbers = tokens * dim;
  for (int i = static_cast<int>(threadIdx.x); i < numbers; i += kBatch * threads) {
    Word words[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int at = i + j * threads;
      words[j] = at < numbers ? from[at / dim * token_stride + at % dim] : Word{0};
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int at = i + j * threads;
      if (at < numbers) tile[at / dim * stride + at % dim] = word_number(words[j], dtype);
    }
  }
}

// The same, 16 bytes at a time: a warp loads 64 bytes of each of 8 tokens, whose numbers of 16 bits then lie in
// different banks.
template <typename Word>
KVCACHE_DEVICE void copy_vectors(const Word* from, int64_t token_stride, int dtype, int tokens, int dim, float* tile,
                                 int stride) {
  constexpr int kBatch = 4, kNumbers = 16 / sizeof(Word);
  const int warps = static_cast<int>(blockDim.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int groups = (dim / kNumbers + 3) / 4, all = (tokens + 7) / 8 * groups;
  for (int i = static_cast<int>(threadIdx.x) / 32; i < all; i += kBatch * warps) {
    uint4 loaded[kBatch];
    const auto visit = [&](int j, auto copy) {
      const int token = (i + j * warps) / groups * 8 + lane / 4;
      const int channel = ((i + j * warps) % groups * 4 + lane % 4) * kNumbers;
      if (token < tokens && channel < dim) copy(token, channel);
    };
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      visit(j, [&](int token, int channel) {
        loaded[j] = *reinterpret_cast<const uint4*>(from + token * token_stride + channel);
      });
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      visit(j, [&](int token, int channel) {
        float* const to = tile + token * stride + channel;
        const uint32_t words[4] = {loaded[j].x, loaded[j].y, loaded[j].z, loaded[j].w};
#pragma unroll
        for (int n = 0; n < kNumbers; ++n)
          to[n] = word_number(static_cast<Word>(words[n * 4 / kNumbers] >> n * 8 * sizeof(Word) % 32), dtype);
      });
  }
}

// `tokens` of a segment, from slot `low` on, to rows of the tile.
template <typename Word>
KVCACHE_DEVICE void copy_exact(const Segment& segment, int dtype, int64_t base, int64_t low, int tokens, int dim,
                               float* tile, int stride) {
  const Word* from = static_cast<const Word*>(segment.data) + base + (low - segment.start) * segment.token_stride;
  const int64_t steps = segment.token_stride | dim;  // both must be multiples of 16 bytes
  if (reinterpret_cast<uint64_t>(from) % 16 == 0 && steps * static_cast<int64_t>(sizeof(Word)) % 16 == 0) {
    copy_vectors(from, segment.token_stride, dtype, tokens, dim, tile, stride);
  } else {
    copy_numbers(from, segment.token_stride, dtype, tokens, dim, tile, stride);
  }
}

// Brings slots [start + first, start + count) of one side into rows [first, count) of tile[slot][channel], and touches
// no other row: a tile of half a block is passed as the block of which it holds a half. All threads of the block take
// part. `start` is a multiple of 64, `count` at most 64. `kPositions`: `inv_freq` may be given, whose angles in fp64
// cost registers.
template <bool kPositions>
KVCACHE_DEVICE void load_tile(const Side& side, const Records& records, bool is_key, int batch, int head,
                              int64_t start, int first, int count, float* tile, int stride) {
  const int dim = side.head_dim, threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  const int64_t left = side.packed_length - start;
  const int packed = left <= 0 ? 0 : left < count ? static_cast<int>(left) : count;
  if (packed > first) {
    const uint8_t* record = records.of(batch, head) + (start / kBlockTokens) * records.record_bytes;
    if (is_usual(side)) {
      RecordDecoder<true>(side, record, batch, head, records.heads, first, packed, tile, stride).decode(is_key);
    } else {
      RecordDecoder<false>(side, record, batch, head, records.heads, first, packed, tile, stride).decode(is_key);
    }
    if (side.outliers != nullptr) {
      block_barrier();
      add_outliers(side, batch, head, records.heads, start / kBlockTokens, first, packed, tile, stride);
    }
    if ((kPositions && side.inv_freq != nullptr) || side.cos != nullptr) {
      block_barrier();
      rotate_tile<kPositions>(side, batch, start, first, packed, tile, stride);
    }
  }
  block_barrier();
  if (packed > first && side.sinks != nullptr) {
    const int64_t sink_start = records.sink_start != nullptr ? records.sink_start[batch] : 0;
    const int64_t row = (static_cast<int64_t>(batch) * records.heads + head) * side.sink_length;
    for (int i = first * dim + thread; i < packed * dim; i += threads) {
      const int64_t sink = start + i / dim - sink_start;
      if (sink >= 0 && sink < side.sink_length)
        tile[i / dim * stride + i % dim] = read_number(side.sinks, side.dtype, (row + sink) * dim + i % dim);
    }
  }
  for (int n = 0; n < side.num_segments; ++n) {
    const Segment& segment = side.segments[n];
    const int64_t low = segment.start > start + first ? segment.start : start + first;
    const int64_t end = segment.start + segment.length, high = end < start + count ? end : start + count;
    const int64_t base = batch * segment.batch_stride + head * segment.head_stride;
    if (high <= low) continue;
    const int tokens = static_cast<int>(high - low);
    float* const to = tile + (low - start) * stride;
    if (side.dtype == kFloat32) {
      copy_exact<uint32_t>(segment, side.dtype, base, low, tokens, dim, to, stride);
    } else {
      copy_exact<uint16_t>(segment, side.dtype, base, low, tokens, dim, to, stride);
    }
  }
  block_barrier();
}

}  // namespace kvcache
