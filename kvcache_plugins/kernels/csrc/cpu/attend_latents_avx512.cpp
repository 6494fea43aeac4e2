// Attention over latents for AVX-512 F, BW, VL and DQ: the shared implementation with 16 lanes, and where bf16 queries
// allow it, products of bf16 pairs, which are twice as many multiply-adds an instruction.
//
// A pair is two neighbours along what a product sums over, in one 32-bit lane: channels for the logits, tokens for the
// weighted sums. The query is turned into pairs once a task; of a block, the latents as they are decoded, and once more
// 64 channels at a time, when they are turned over.
#if defined(__x86_64__)
#if __has_include(<avx512bf16intrin.h>)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx512vbmi,avx2,f16c,fma")
#define KVCACHE_BF16
#else  // a compiler that does not know it: decode_attention_avx512 is not built either
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif
// See decode_attention_avx2.cpp.
#define KVCACHE_LANES 16
#define KVCACHE_F16C
#include "attend_latents.inl"

#if defined(KVCACHE_BF16)

#include "avx512_math.h"

namespace kvcache {
namespace {  // see portable_numbers.inl

constexpr int kTokenPairs = kBlockTokens / 2;

// c[r][n] (+)= sum over k of the products of both halves of a[r][k] and b[k][n], for kRows rows and 64 columns.
template <int kRows>
void multiply_pairs(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t depth, float* c, int64_t c_stride,
                    bool accumulate) {
  __m512 sums[kRows][4];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      sums[r][v] = accumulate ? _mm512_loadu_ps(c + r * c_stride + v * kLanes) : _mm512_setzero_ps();
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    __m512i columns[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) columns[v] = _mm512_load_si512(b + k * kPanel + v * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const __m512i factor = avx512::broadcast_pair(a + r * a_stride + k);
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) sums[r][v] = avx512::dot_bf16(sums[r][v], factor, columns[v]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) _mm512_storeu_ps(c + r * c_stride + v * kLanes, sums[r][v]);
  }
}

// The products of a task in bf16, summed up in fp32.
class PairProducts {
 public:
  explicit PairProducts(const Task& task)
      : task_(task), scratch_(new Scratch), latent_pairs_((task.key.head_dim + 1) / 2),
        pairs_(latent_pairs_ + (task.value.head_dim + 1) / 2) {
    const int rank = task.key.head_dim, rotated_dim = task.value.head_dim;
    for (int r = 0; r < task.queries; ++r) {
      const float* row = task.query + static_cast<int64_t>(r) * (rank + rotated_dim);
      narrow(row, rank, scratch_->query + r * pairs_);
      narrow(row + rank, rotated_dim, scratch_->query + r * pairs_ + latent_pairs_);
    }
  }

  void take_rotated(const float* tile) {
    const int dim = task_.value.head_dim, width = task_.value.padded_dim;
    uint32_t* const keys = scratch_->keys + latent_pairs_ * kPanel;
    for (int d = 0; d < dim; d += 2 * kLanes) {
      for (int t = 0; t < kBlockTokens; t += kLanes) {
        Floats rows[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) rows[i] = neighbours(tile + (t + i) * width + d, dim - d);
        transpose(rows);
        const int live = static_cast<int>(smaller(kLanes, (dim - d + 1) / 2));
        for (int i = 0; i < live; ++i) _mm512_store_ps(keys + (d / 2 + i) * kPanel + t, rows[i]);
      }
    }
  }

  void take_latents(const float* tile) {
    const __m512i both = _mm512_add_epi32(_mm512_set1_epi32(16 << 16), _mm512_mullo_epi32(_mm512_set1_epi32(0x10001),
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)));
    for (int k = 0; k < latent_pairs_; ++k, tile += 2 * kBlockTokens) {
#pragma GCC unroll 4
      for (int t = 0; t < kBlockTokens; t += kLanes) {
        const __m512i rows = avx512::neighbour_pairs(_mm512_load_ps(tile + t), _mm512_load_ps(tile + kBlockTokens + t));
        _mm512_store_si512(scratch_->keys + k * kPanel + t, _mm512_permutexvar_epi16(both, rows));
      }
    }
  }

  void score(float* scores) const {
    by_rows(task_.queries, [&]<int kRows>(int64_t r) {
      multiply_pairs<kRows>(scratch_->query + r * pairs_, pairs_, scratch_->keys, pairs_, scores + r * kBlockTokens,
                            kBlockTokens, false);
    });
  }

  void take_weights(const float* weights, int64_t) {
    for (int r = 0; r < task_.queries; ++r) {
      narrow(weights + r * kBlockTokens, kBlockTokens, scratch_->weights + r * kTokenPairs);
    }
  }

  void add(const float* latents, float* output, int64_t stride) {
    for (int d = 0; d < kPanel; d += kLanes) {
      for (int k = 0; k < kTokenPairs; k += kLanes) {
        Floats rows[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          const float* from = latents + (d + i) * kBlockTokens + 2 * k;
          rows[i] = (Floats)avx512::neighbour_pairs(_mm512_load_ps(from), _mm512_load_ps(from + kLanes));
        }
        transpose(rows);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) _mm512_store_ps(scratch_->panel + (k + i) * kPanel + d, rows[i]);
      }
    }
    by_rows(task_.queries, [&]<int kRows>(int64_t r) {
      multiply_pairs<kRows>(scratch_->weights + r * kTokenPairs, kTokenPairs, scratch_->panel, kTokenPairs,
                            output + r * stride, stride, true);
    });
  }

 private:
  struct Scratch {
    alignas(64) uint32_t keys[kMaxHeadDim * kPanel];  // [pair of channels][token], of latents and then of rotated keys
    alignas(64) uint32_t panel[kTokenPairs * kPanel];  // [pair of tokens][channel]
    alignas(64) uint32_t query[kMaxLatentRows * kMaxHeadDim];
    alignas(64) uint32_t weights[kMaxLatentRows * kTokenPairs];
  };

  // Pairs of up to 32 neighbours; zeros after `count` of them.
  static Floats neighbours(const float* from, int count) {
    const __m512 first = _mm512_maskz_loadu_ps(avx512::first_lanes(count), from);
    const __m512 second = _mm512_maskz_loadu_ps(avx512::first_lanes(count - kLanes), from + kLanes);
    return (Floats)avx512::neighbour_pairs(first, second);
  }

  static void narrow(const float* from, int count, uint32_t* to) {
    for (int i = 0; i < count; i += 2 * kLanes) {
      const __mmask16 live = avx512::first_lanes((count - i + 1) / 2);
      _mm512_mask_storeu_ps(to + i / 2, live, neighbours(from + i, count - i));
    }
  }

  const Task& task_;
  const std::unique_ptr<Scratch> scratch_;
  const int latent_pairs_, pairs_;
};

}  // namespace
}  // namespace kvcache

#endif

namespace kvcache {

void attend_latents_avx512(const Task& task) {
#if defined(KVCACHE_BF16)
  if (task.precise == 0) return attend<PairProducts>(task);
#endif
  attend<FloatProducts>(task);
}

}  // namespace kvcache
#endif
