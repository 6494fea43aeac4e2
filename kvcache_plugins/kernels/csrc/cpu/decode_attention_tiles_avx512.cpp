// Decode attention for AVX-512 from tiles: the shared implementation with 16 lanes, which decodes a block once for all
// query rows of a task, and for bf16 queries products of bf16 pairs, which are twice as many multiply-adds an
// instruction. decode_attention_avx512.cpp says which tasks it serves.
//
// A pair is two channels for the scores and two tokens for the weighted sums. The scaled query is rounded to pairs once
// a task, weights and tiles once a block: keys and values as those of a dense cache are. Bound: the dot products, half
// of the time of 64 rows, of which decoding is a quarter. From 64 tokens of 16 heads over 8192 of 4 kv heads of 128
// channels, KVQuant's 3 bits took 18 ms so and 47 decoded anew for every four rows; in fp32, 25 and 49. From 256 tokens
// of 32 heads over 4096 of 8, KIVI's 4 bits 71 ms and 103, and with a rotation inside blocks 73 and 141 (one thread of
// a Zen 5). Codes of 8 bits and scales per token gain less, and would lose what makes them exact.
#if defined(__x86_64__) && __has_include(<avx512bf16intrin.h>)
#include "set_target.h"

KVCACHE_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx512vbmi,avx2,f16c,fma")
// See decode_attention_avx2.cpp.
#define KVCACHE_LANES 16
#define KVCACHE_F16C
#include "avx512_pairs.h"
#include "decode_attention_portable.inl"

namespace kvcache {
namespace {  // see portable_numbers.inl

// The products of a task in bf16, summed up in fp32.
class PairProducts {
 public:
  explicit PairProducts(const Task& task)
      : task_(task), scratch_(new Scratch), key_pairs_((task.key.head_dim + 1) / 2) {
    if (task.query == nullptr) return;
    const int dim = task.key.head_dim;
    for (int r = 0; r < task.queries; ++r)
      avx512::narrow(task.query + static_cast<int64_t>(r) * dim, dim, scratch_->query + r * key_pairs_);
  }

  // scores[row][token] of a tile of keys, [channel][token]; a channel without a partner gets one of zeros.
  void score(float* tile, float* scores) const {
    const int dim = task_.key.head_dim;
    if (dim % 2 != 0) std::memset(tile + dim * kBlockTokens, 0, sizeof(float) * kBlockTokens);
    avx512::pair_rows(tile, key_pairs_, kBlockTokens, scratch_->tile);
    multiply(scratch_->query, key_pairs_, key_pairs_, kBlockTokens, scores, false);
  }

  // Adds the weighted sums of the first `count` tokens of a tile of values, [token][padded_dim].
  void add(const float* weights, float* tile, int64_t count, float* output) const {
    const int width = task_.value.padded_dim;
    if (count % 2 != 0) std::memset(tile + count * width, 0, sizeof(float) * width);
    const int pairs = static_cast<int>(count + 1) / 2;
    avx512::pair_rows(tile, pairs, width, scratch_->tile);
    for (int r = 0; r < task_.queries; ++r)
      avx512::narrow(weights + r * kBlockTokens, kBlockTokens, scratch_->weights + r * kTokenPairs);
    multiply(scratch_->weights, kTokenPairs, pairs, width, output, true);
  }

 private:
  static constexpr int kTokenPairs = kBlockTokens / 2;

  struct Scratch {
    alignas(64) uint32_t tile[kMaxHeadDim / 2 * kBlockTokens];  // pairs of channels or of tokens
    alignas(64) uint32_t query[kMaxQueries * kMaxHeadDim / 2];
    alignas(64) uint32_t weights[kMaxQueries * kTokenPairs];
  };

  void multiply(const uint32_t* a, int64_t a_stride, int64_t depth, int64_t width, float* c, bool accumulate) const {
    by_panels(task_.queries, width, [&]<int kRows, int kVectors>(int64_t r, int64_t n) {
      avx512::multiply_pairs<kRows, kVectors>(a + r * a_stride, a_stride, scratch_->tile + n, width, depth,
                                              c + r * width + n, width, accumulate);
    });
  }

  const Task& task_;
  const std::unique_ptr<Scratch> scratch_;
  const int key_pairs_;
};

}  // namespace

void decode_attention_tiles_avx512(const Task& task) {
  if (task.precise == 0) return run<NoProducts, NoProducts, PairProducts>(task);
  run<NoProducts, NoProducts>(task);
}

}  // namespace kvcache

KVCACHE_END_TARGET
#endif
