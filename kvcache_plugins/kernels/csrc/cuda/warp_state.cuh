// What a warp of the fast path carries from unit to unit: how logits become weights, what of them and of the values it
// has summed, and how the warps of a thread block meet at the end.
#pragma once

#include "fast_values.cuh"

namespace kvcache {

constexpr float kWeightScale = 256.0f;  // of weights in fp16, against subnormal numbers
constexpr float kWeightShift = 8.0f;
// By which the maximum of a row is taken larger than it is: weights below 2^-30 of the largest, instead of 2^-33, are
// then too small for fp16.
constexpr float kSlack = 3.0f;
constexpr float kLn2 = 0.69314718055994531f;

// One warp's state: this lane's columns are query rows 8n + 2t and 8n + 2t + 1.
template <int kColumns, int kTiles>
struct WarpState {
  float best[kColumns][2], total[kColumns][2];
  float output[kColumns][kTiles][4], minima[kColumns][4];
  int exponent;

  // `least`: the smallest exponent of accumulators.
  KVCACHE_DEVICE void clear(int least) {
    exponent = least;
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
  // Leaves the first `kCount` chunks in shared memory, where weights of this lane may lie, and takes them back: what
  // comes between has their registers. No lane reads what another has left.
  template <int kCount>
  KVCACHE_DEVICE void put_aside(float2* shared) const {
    const int lane = opaque_lane();
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 2 * kCount; ++i)
        shared[(2 * kCount * n + i) * 32 + lane] = {output[n][i / 2][i % 2 * 2], output[n][i / 2][i % 2 * 2 + 1]};
    }
  }
  template <int kCount>
  KVCACHE_DEVICE void take_back(const float2* shared) {
    const int lane = opaque_lane();
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 2 * kCount; ++i) {
        const float2 pair = shared[(2 * kCount * n + i) * 32 + lane];
        output[n][i / 2][i % 2 * 2] = pair.x;
        output[n][i / 2][i % 2 * 2 + 1] = pair.y;
      }
    }
    keep_order();  // weights of another type may follow in the same place, before which no load may be moved
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
  // Raises the exponent of the accumulators to what the scales of a block need, if there are any; returns as
  // `raise_exponent`. Once some blocks have been seen, it is rare that one needs more: only then the lanes agree on how
  // much. The exponent may not be below kLeastExponent.
  template <bool kIsKnown>
  KVCACHE_DEVICE uint32_t make_room(const ValueUnit& values) {
    if (!values.has_scales) return raise_exponent(0);
    const uint32_t found = largest_scales<kIsKnown>(values), fitting = largest_fitting(exponent);
    if (warp_any(larger_halves(found, fitting) != fitting))
      raise_exponent(exponent_of_scale(warp_max(larger_half(found))));
    return shrink();
  }
  // 2^-exponent, twice, as fp16.
  KVCACHE_DEVICE uint32_t shrink() const { return static_cast<uint32_t>(15 - exponent) * 0x04000400u; }
  // Raises the exponent of the accumulators to one that is needed; returns 2^-exponent, twice, as fp16.
  KVCACHE_DEVICE uint32_t raise_exponent(int needed) {
    if (needed > exponent) {
      const float shrink = bits_float(static_cast<uint32_t>(127 + exponent - needed) << 23);
#pragma unroll
      for (int n = 0; n < kColumns; ++n) scale<true>(n, shrink, shrink);
      exponent = needed;
    }
    return shrink();
  }
};

// Applies to the logits of 64 slots from `start` on what is more than a product: masks, biases, and that slots end
// before `end`, counted from there. Caps come first, by themselves: they are what needs registers. All biases of a row
// are asked for before one is waited for. Columns without a row do as the first row: nobody reads what becomes of them.
template <int kColumns>
KVCACHE_DEVICE void adjust(const AttentionArguments& a, int start, int end, float (&c)[kColumns][4][4]) {
  constexpr int kAtOnce = 2;  // tiles whose biases are on the way
  const Rows rows = Rows::mine_again(a);
  const int lane = opaque_lane(), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
#pragma unroll
    for (int i = 0; i < 16; ++i) c[n][i / 4][i % 4] *= kLn2;
  }
  if (a.softcap > 0.0f) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 16; ++i) c[n][i / 4][i % 4] = capped(a, c[n][i / 4][i % 4]);
    }
  }
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const int row = 8 * n + 2 * t + column;
      RowInBlock mine(a, rows, row < rows.count ? row : 0, start);
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
            logit = mine.adjusted(a, 16 * (first + k) + 2 * g + i, biases[k][i], logit);
          }
        }
      }
    }
  }
}

// Turns logits into weights: c[n][k] holds tokens 16k + 2g (0, 1) and the next (2, 3), query rows 8n + 2t and the
// next. They become weights[4n + k], fragments for the values: what a lane will read it writes itself, so they may be
// registers, or lie in shared memory without a barrier.
template <bool kHasMinima, typename Weights, int kColumns, int kTiles>
KVCACHE_DEVICE void weigh(float (&c)[kColumns][4][4], WarpState<kColumns, kTiles>& state, Weights&& weights) {
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
      weights[n * 4 + k] = {permute_bytes(even, odd, 0x5410), permute_bytes(even, odd, 0x7632)};
    }
  }
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
    a.partial_outputs[rows.partial(a, row, place) * a.partial_channels() + channel] = merged;
  }
}

}  // namespace kvcache
