// Decode attention in fp32 without tensor cores: every format, every option, any head of up to 512 channels, fp32
// queries. The fast path (fast_attention.cuh) leaves it exact tokens and sinks that do not lie as tensor cores read
// them: in several parts, of another dtype.
//
// A thread block takes 64 slots at a time, of wide heads 32: keys to a tile in shared memory, logits, weights, values
// to the same tile, products. Both products read a tile row by row or column by column without bank conflicts, for two
// query rows at a time. Bound: for every slot and query row, one multiply-add per channel and key, and one per channel
// and value, for two of which three numbers are loaded from shared memory. On an H200, by sampling
// of warps, most of its time goes into waiting for instructions: some 70 to 90 us of a thread block for one or two
// tiles.
#pragma once

#include "decoding.cuh"

namespace kvcache {

struct GeneralMemory {
  float *tile, *query, *scores, *output, *best, *total, *decay;
  int stride;

  KVCACHE_BOTH static int larger_dim(const AttentionArguments& a) {
    return a.key.head_dim > a.value.head_dim ? a.key.head_dim : a.value.head_dim;
  }
  KVCACHE_BOTH static int bytes(const AttentionArguments& a) {
    const int dim = larger_dim(a);
    const int row = a.key.head_dim + a.value.head_dim + kBlockTokens + 3;
    return 4 * (tile_slots(dim) * tile_stride(dim) + a.chunk_rows * row);
  }
  KVCACHE_DEVICE GeneralMemory(const AttentionArguments& a, uint8_t* shared) : stride(tile_stride(larger_dim(a))) {
    tile = reinterpret_cast<float*>(shared);
    query = tile + tile_slots(larger_dim(a)) * stride;
    scores = query + a.chunk_rows * a.key.head_dim;
    output = scores + a.chunk_rows * kBlockTokens;
    best = output + a.chunk_rows * a.value.head_dim;
    total = best + a.chunk_rows;
    decay = total + a.chunk_rows;
  }
};

// Weights of one row from its logits, by one warp; the row's sum and maximum follow.
KVCACHE_DEVICE void soften(const GeneralMemory& m, int row, int count) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float* scores = m.scores + row * kBlockTokens;
  const float low = lane < count ? scores[lane] : -infinity();
  const float high = lane + 32 < count ? scores[lane + 32] : -infinity();
  float best = fmaxf(low, high);
  for (int mask = 16; mask > 0; mask /= 2) best = fmaxf(best, shuffle_xor(best, mask));
  const float before = m.best[row], now = fmaxf(before, best);
  const float shift = now == -infinity() ? 0.0f : now;
  const float weight_low = power_of_two(low - shift), weight_high = power_of_two(high - shift);
  float sum = weight_low + weight_high;
  for (int mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  scores[lane] = weight_low;
  scores[lane + 32] = weight_high;
  warp_barrier();  // every lane has read the maximum
  if (lane == 0) {
    const float decay = power_of_two(before - shift);
    m.decay[row] = decay;
    m.total[row] = m.total[row] * decay + sum;
    m.best[row] = now;
  }
}

// Attends from this thread block's rows to those slots of one 64-slot block that lie in [low, high): as many as the
// tile takes.
template <bool kPositions, int kSlots>
KVCACHE_DEVICE void attend_block(const AttentionArguments& a, const Rows& rows, const GeneralMemory& m, int block,
                                 int low, int high) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int start = block * kBlockTokens;
  const int first = low > start ? low - start : 0, count = high - start < kBlockTokens ? high - start : kBlockTokens;
  const int key_dim = a.key.head_dim, value_dim = a.value.head_dim;
  float* const tile = kSlots < kBlockTokens ? m.tile - first / kSlots * kSlots * m.stride : m.tile;
  load_tile<kPositions>(a.key, a.records, true, rows.batch, rows.head, start, first, count, tile, m.stride);
  // two rows of a token at a time: its key is loaded once
  for (int i = thread; i < (rows.count + 1) / 2 * kBlockTokens; i += threads) {
    const int row = i / kBlockTokens * 2, token = i % kBlockTokens, next = row + 1 < rows.count ? 1 : 0;
    if (token >= count) continue;
    const float *query = m.query + row * key_dim, *key = tile + token * m.stride;
    float sum[2] = {0.0f, 0.0f};
#pragma unroll 8
    for (int d = 0; token >= first && d < key_dim; ++d) {
      sum[0] = fmaf(query[d], key[d], sum[0]);
      sum[1] = fmaf(query[next * key_dim + d], key[d], sum[1]);
    }
    for (int j = 0; j <= next; ++j) {
      const RowInBlock mine(a, rows, row + j, start);
      const float z = a.softcap > 0.0f ? capped(a, sum[j]) : sum[j];
      m.scores[(row + j) * kBlockTokens + token] =
          token < first ? -infinity() : mine.adjusted(a, token, mine.bias_of(token), z);
    }
  }
  block_barrier();
  for (int row = thread / 32; row < rows.count; row += threads / 32) soften(m, row, count);
  block_barrier();
  load_tile<kPositions>(a.value, a.records, false, rows.batch, rows.head, start, first, count, tile, m.stride);
  for (int i = thread; i < (rows.count + 1) / 2 * value_dim; i += threads) {
    const int row = i / value_dim * 2, channel = i % value_dim, next = row + 1 < rows.count ? 1 : 0;
    const float *weights = m.scores + row * kBlockTokens, *value = tile + channel;
    float* const output = m.output + row * value_dim + channel;
    float sum[2] = {output[0] * m.decay[row], output[next * value_dim] * m.decay[row + next]};
#pragma unroll 8
    for (int t = first; t < count; ++t) {
      const float number = value[t * m.stride], weight[2] = {weights[t], weights[next * kBlockTokens + t]};
      sum[0] = fmaf(weight[0], weight[0] != 0.0f ? number : 0.0f, sum[0]);  // a hidden slot may hold anything
      sum[1] = fmaf(weight[1], weight[1] != 0.0f ? number : 0.0f, sum[1]);
    }
    output[0] = sum[0];
    if (next > 0) output[value_dim] = sum[1];
  }
  block_barrier();
}

// Asks for the keys and values that `attend_block` will read.
KVCACHE_DEVICE void prefetch_block(const AttentionArguments& a, const Rows& rows, int block, int low, int high) {
  const int start = block * kBlockTokens, end = start + kBlockTokens;
  const int first = low > start ? low : start, last = high < end ? high : end;
  prefetch_tile(a.key, a.records, a.key_copy.bytes, rows.batch, rows.head, first, last);
  prefetch_tile(a.value, a.records, a.value_copy.bytes, rows.batch, rows.head, first, last);
}

// One split of what the fast path leaves: split 0 .. general_splits - 1 a range of blocks, the one after those the
// blocks within the fast range that hold sinks. `kSlots`: those of a tile.
template <bool kPositions, int kSlots = kBlockTokens>
KVCACHE_DEVICE void attend_general(const AttentionArguments& a, const Rows& rows, uint8_t* shared, int split,
                                   int place) {
  const GeneralMemory m(a, shared);
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int key_dim = a.key.head_dim, value_dim = a.value.head_dim;
  // [begin, end): the blocks, [low, high): which of their slots, which fit 32 bits as everywhere
  int begin, end, low, high;
  if (split < a.general_splits) {
    const int blocks = a.general_end - a.general_begin;
    begin = a.general_begin + split * blocks / a.general_splits;  // at most 128 splits: fits 32 bits
    end = a.general_begin + (split + 1) * blocks / a.general_splits;
    low = static_cast<int>(a.fast_stop);
    high = static_cast<int>(a.length);
  } else {
    const int length = a.key.sink_length > a.value.sink_length ? a.key.sink_length : a.value.sink_length;
    const int64_t start = a.records.sink_start != nullptr ? a.records.sink_start[rows.batch] : 0;
    const int64_t beyond = static_cast<int64_t>(a.fast_end) * kBlockTokens;
    const int first = static_cast<int>(start < beyond ? start : beyond);  // rows without sinks have them far away
    begin = first / kBlockTokens > a.fast_begin ? first / kBlockTokens : a.fast_begin;
    end = (first + length - 1) / kBlockTokens + 1 < a.fast_end ? (first + length - 1) / kBlockTokens + 1 : a.fast_end;
    low = 0;
    high = static_cast<int>(a.fast_stop);
  }
  if (begin < end) prefetch_block(a, rows, begin, low, high);
  for (int i = thread; i < rows.count * key_dim; i += threads)
    m.query[i] = rows.query(a, i / key_dim, i % key_dim) * a.scaling;
  for (int i = thread; i < rows.count * value_dim; i += threads) m.output[i] = 0.0f;
  for (int i = thread; i < rows.count; i += threads) {
    m.best[i] = -infinity();
    m.total[i] = 0.0f;
  }
  block_barrier();
  for (int block = begin; block < end; ++block) {
    if (block + 1 < end) prefetch_block(a, rows, block + 1, low, high);
    if constexpr (kSlots == kBlockTokens) {
      attend_block<kPositions, kSlots>(a, rows, m, block, low, high);
    } else {
      for (int slot = block * kBlockTokens; slot < (block + 1) * kBlockTokens; slot += kSlots) {
        const int from = low > slot ? low : slot, to = high < slot + kSlots ? high : slot + kSlots;
        if (from < to) attend_block<kPositions, kSlots>(a, rows, m, block, from, to);
      }
    }
  }
  let_next_begin();
  for (int i = thread; i < rows.count; i += threads) {
    const bool is_spoilt = m.total[i] != m.total[i];  // by a visible score that is not a number
    float* sums = a.partial_sums + 2 * rows.partial(a, i, place);
    sums[0] = is_spoilt ? 0.0f : m.best[i];
    sums[1] = m.total[i];
  }
  for (int i = thread; i < rows.count * value_dim; i += threads)
    a.partial_outputs[rows.partial(a, i / value_dim, place) * a.partial_channels() + i % value_dim] = m.output[i];
}

}  // namespace kvcache
