// Attention over latents for AVX-512 F, BW, VL and DQ: the shared implementation with 16 lanes, and where bf16 queries
// allow it, products of bf16 pairs, which are twice as many multiply-adds an instruction.
//
// A pair is two neighbours along what a product sums over, in one 32-bit lane: channels for the logits, tokens for the
// weighted sums. The query is turned into pairs once a task; of a block, the latents as they are decoded, and once more
// 64 channels at a time, when they are turned over.
#if defined(__x86_64__)
#include "set_target.h"

#if __has_include(<avx512bf16intrin.h>)
KVCACHE_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx512vbmi,avx2,f16c,fma")
#define KVCACHE_BF16
#else  // a compiler that does not know it: decode_attention_avx512 is not built either
KVCACHE_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#endif
// See decode_attention_avx2.cpp.
#define KVCACHE_LANES 16
#define KVCACHE_F16C
#include "attend_latents.inl"

#if defined(KVCACHE_BF16)

#include "avx512_pairs.h"

namespace kvcache {
namespace {  // see portable_numbers.inl

constexpr int kTokenPairs = kBlockTokens / 2;

// The products of a task in bf16, summed up in fp32.
class PairProducts {
 public:
  explicit PairProducts(const Task& task)
      : task_(task), scratch_(new Scratch), latent_pairs_((task.key.head_dim + 1) / 2),
        pairs_(latent_pairs_ + (task.value.head_dim + 1) / 2) {
    const int rank = task.key.head_dim, rotated_dim = task.value.head_dim;
    for (int r = 0; r < task.queries; ++r) {
      const float* row = task.query + static_cast<int64_t>(r) * (rank + rotated_dim);
      avx512::narrow(row, rank, scratch_->query + r * pairs_);
      avx512::narrow(row + rank, rotated_dim, scratch_->query + r * pairs_ + latent_pairs_);
    }
  }

  void take_rotated(const float* tile) {
    const int dim = task_.value.head_dim, width = task_.value.padded_dim;
    uint32_t* const keys = scratch_->keys + latent_pairs_ * kPanel;
    for (int d = 0; d < dim; d += 2 * kLanes) {
      for (int t = 0; t < kBlockTokens; t += kLanes) {
        Floats rows[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) rows[i] = (Floats)avx512::neighbours(tile + (t + i) * width + d, dim - d);
        transpose(rows);
        const int live = static_cast<int>(smaller(kLanes, (dim - d + 1) / 2));
        for (int i = 0; i < live; ++i) _mm512_store_ps(keys + (d / 2 + i) * kPanel + t, rows[i]);
      }
    }
  }

  void take_latents(const float* tile) { avx512::pair_rows(tile, latent_pairs_, kPanel, scratch_->keys); }

  void score(float* scores) const {
    multiply(scratch_->query, pairs_, scratch_->keys, scores, kBlockTokens, false);
  }

  void take_weights(const float* weights, int64_t) {
    for (int r = 0; r < task_.queries; ++r) {
      avx512::narrow(weights + r * kBlockTokens, kBlockTokens, scratch_->weights + r * kTokenPairs);
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
    multiply(scratch_->weights, kTokenPairs, scratch_->panel, output, stride, true);
  }

 private:
  struct Scratch {
    alignas(64) uint32_t keys[kMaxHeadDim * kPanel];  // [pair of channels][token], of latents and then of rotated keys
    alignas(64) uint32_t panel[kTokenPairs * kPanel];  // [pair of tokens][channel]
    alignas(64) uint32_t query[kMaxLatentRows * kMaxHeadDim];
    alignas(64) uint32_t weights[kMaxLatentRows * kTokenPairs];
  };

  // Of rows of `depth` pairs each.
  void multiply(const uint32_t* a, int64_t depth, const uint32_t* b, float* c, int64_t c_stride,
                bool accumulate) const {
    by_panels(task_.queries, kPanel, [&]<int kRows, int kVectors>(int64_t r, int64_t n) {
      avx512::multiply_pairs<kRows, kVectors>(a + r * depth, depth, b + n, kPanel, depth, c + r * c_stride + n,
                                              c_stride, accumulate);
    });
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

KVCACHE_END_TARGET
#endif
