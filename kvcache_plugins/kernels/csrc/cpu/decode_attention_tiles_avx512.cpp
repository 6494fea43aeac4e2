// Decode attention for AVX-512 from tiles: the shared implementation with 16 lanes, which decodes a block once for all
// query rows of a task, and for bf16 queries products of bf16 pairs, which are twice as many multiply-adds an
// instruction. decode_attention_avx512.cpp says which tasks it serves.
//
// A pair is two channels for the scores and two tokens for the weighted sums. The query, without its scaling again, is
// rounded to pairs once a task, weights and tiles once a block: keys and values as those of a dense cache are. Exact
// tokens in bf16 are not rounded but moved, for any number of rows: from one token of 32 heads over 4096 of 8 kv heads
// of 128 channels 1.0 ms, and 2.9 where each is widened for every four rows; from 64 tokens 30 and 182. In fp32 from 8
// tokens 10 and 22, from 64 58 and 170.
//
// Bound: the dot products, half of the time of 64 rows, of which decoding is a quarter. From 64 tokens of 16 heads over
// 8192 of 4 kv heads of 128 channels, KVQuant's 3 bits took 18 ms so and 47 decoded anew for every four rows; in fp32,
// 25 and 49. From 256 tokens of 32 heads over 4096 of 8, KIVI's 4 bits 71 ms and 103, and with a rotation inside blocks
// 73 and 141 (one thread of a Zen 5). Codes of 8 bits and scales per token gain less, and would lose what makes them
// exact.
#if defined(__x86_64__) && __has_include(<avx512bf16intrin.h>)
#include "set_target.h"

KVCACHE_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx512vbmi,avx2,f16c,fma")
// See decode_attention_avx2.cpp.
#define KVCACHE_LANES 16
#define KVCACHE_F16C
#include "avx512_pairs.h"
#include "decode_attention_portable.inl"
#include "portable_transposition.inl"

namespace kvcache {
namespace {  // see portable_numbers.inl

// The products of a task in bf16, summed up in fp32.
class PairProducts {
 public:
  explicit PairProducts(const Task& task)
      : task_(task), scratch_(new Scratch), key_pairs_((task.key.head_dim + 1) / 2),
        scaling_(__builtin_isnormal(task.scaling) ? task.scaling : 1.0f) {
    if (task.query == nullptr) return;
    const int dim = task.key.head_dim;
    float row[kMaxHeadDim];
    for (int r = 0; r < task.queries; ++r) {
      for (int d = 0; d < dim; ++d) row[d] = task.query[static_cast<int64_t>(r) * dim + d] / scaling_;
      avx512::narrow(row, dim, scratch_->query + r * key_pairs_);
    }
  }

  // scores[row][token] of a tile of keys, [channel][token]; a channel without a partner gets one of zeros.
  void score(float* tile, float* scores) const {
    const int dim = task_.key.head_dim;
    if (dim % 2 != 0) std::memset(tile + dim * kBlockTokens, 0, sizeof(float) * kBlockTokens);
    avx512::pair_rows(tile, key_pairs_, kBlockTokens, scratch_->tile);
    score_tile(scores);
  }

  // Adds the weighted sums of the first `count` tokens of a tile of values, [token][padded_dim].
  void add(const float* weights, float* tile, int64_t count, float* output) const {
    const int width = task_.value.padded_dim;
    if (count % 2 != 0) std::memset(tile + count * width, 0, sizeof(float) * width);
    const int pairs = static_cast<int>(count + 1) / 2;
    avx512::pair_rows(tile, pairs, width, scratch_->tile);
    add_tile(weights, count, width, output);
  }

  // The same of exact tokens that lie in bf16 as they will be multiplied, which are only moved.
  bool score_exact(int64_t start, int64_t count, float* scores) const {
    const Rows rows = exact_rows(task_.key, start, count);
    if (rows.data == nullptr) return false;
    for (int first = 0; first < key_pairs_; first += kLanes) {
      const __mmask16 live = avx512::first_lanes(key_pairs_ - first);
      for (int t = 0; t < kBlockTokens; t += kLanes) {
        Floats pairs[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          const uint16_t* const token = rows.data + (t + i) * rows.stride + 2 * first;
          _mm_prefetch(token + kBlockTokens * rows.stride, _MM_HINT_T0);
          pairs[i] = t + i < count ? (Floats)_mm512_maskz_loadu_epi32(live, token) : Floats{};
        }
        transpose(pairs);
        for (int i = 0; i < smaller(kLanes, key_pairs_ - first); ++i)
          store(reinterpret_cast<float*>(scratch_->tile) + (first + i) * kBlockTokens + t, pairs[i]);
      }
    }
    score_tile(scores);
    return true;
  }

  bool add_exact(int64_t start, int64_t count, const float* weights, float* output) const {
    const Rows rows = exact_rows(task_.value, start, count);
    if (rows.data == nullptr) return false;
    const int width = task_.value.padded_dim;
    avx512::pair_exact_rows(rows.data, rows.stride, count, task_.value.head_dim, width, scratch_->tile);
    add_tile(weights, count, width, output);
    return true;
  }

 private:
  static constexpr int kTokenPairs = kBlockTokens / 2;

  struct Scratch {
    alignas(64) uint32_t tile[kMaxHeadDim / 2 * kBlockTokens];  // pairs of channels or of tokens
    alignas(64) uint32_t query[kMaxQueries * kMaxHeadDim / 2];
    alignas(64) uint32_t weights[kMaxQueries * kTokenPairs];
  };

  // Numbers of a token after those of the one before; null if a block is not of such alone, in one piece, and in bf16.
  struct Rows {
    const uint16_t* data;
    int64_t stride;
  };

  static Rows exact_rows(const Side& side, int64_t start, int64_t count) {
    if (start < side.packed_length || side.dtype != kBFloat16 || side.head_dim % 2 != 0) return {nullptr, 0};
    for (int i = 0; i < side.num_segments; ++i) {
      const Segment& segment = side.segments[i];
      if (start >= segment.start && start + count <= segment.start + segment.length)
        return {static_cast<const uint16_t*>(segment.data) + (start - segment.start) * segment.stride, segment.stride};
    }
    return {nullptr, 0};
  }

  void score_tile(float* scores) const {
    multiply(scratch_->query, key_pairs_, key_pairs_, kBlockTokens, scores, false);
    for (int64_t i = 0; i < task_.queries * kBlockTokens; i += kLanes)
      store(scores + i, load<Floats>(scores + i) * scaling_);
  }

  // Adds the weighted sums of pairs of tokens.
  void add_tile(const float* weights, int64_t count, int width, float* output) const {
    for (int r = 0; r < task_.queries; ++r)
      avx512::narrow(weights + r * kBlockTokens, kBlockTokens, scratch_->weights + r * kTokenPairs);
    multiply(scratch_->weights, kTokenPairs, (count + 1) / 2, width, output, true);
  }

  void multiply(const uint32_t* a, int64_t a_stride, int64_t depth, int64_t width, float* c, bool accumulate) const {
    by_panels(task_.queries, width, [&]<int kRows, int kVectors>(int64_t r, int64_t n) {
      avx512::multiply_pairs<kRows, kVectors>(a + r * a_stride, a_stride, scratch_->tile + n, width, depth,
                                              c + r * width + n, width, accumulate);
    });
  }

  const Task& task_;
  const std::unique_ptr<Scratch> scratch_;
  const int key_pairs_;
  const float scaling_;
};

}  // namespace

void decode_attention_tiles_avx512(const Task& task) {
  if (task.precise == 0) return run<NoProducts, NoProducts, PairProducts>(task);
  run<NoProducts, NoProducts>(task);
}

}  // namespace kvcache

KVCACHE_END_TARGET
#endif
