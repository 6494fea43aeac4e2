// Decode attention in plain C++ with compiler vectors; included by one source file per instruction set.
//
// A block of 64 slots at a time: its keys are decoded to fp32 as [channel][token], its values as
// [token][channel], so that both products are sums of scaled contiguous rows and neither needs a horizontal
// sum. Decoding costs about one operation per value and vector lane and is shared by all query rows; with
// four rows per kv head both are bound by the multiplications. The aim is a quarter of the time of attention
// over dense bf16 keys and values that repeats them per query head, on any x86-64 or other 64-bit machine;
// the AVX-512 kernel is the one that nears the bandwidth, and AVX2 leaves decoding out where it can (avx2_blocks.h).
//
// Whatever a masked or unused slot holds must not reach the result: its score is replaced, not shifted, and
// its value is left out where it is not finite (0 * NaN).

#include <algorithm>

#include "portable_products.inl"
#include "portable_softmax.inl"
#include "record_fetcher.h"

namespace kvcache {
namespace {  // see portable_numbers.inl

// Up to 340 KB on the stack of a pool's thread, where it stays in the cache from task to task; what few need is on the
// heap.
struct AttentionWorkspace : Workspace {
  alignas(64) float scores[kMaxQueries * kBlockTokens];
  alignas(64) float output[kMaxQueries * kMaxHeadDim];  // rows of the values' `padded_dim`
};

// ---- products

// The products of a task in fp32, of which its query and weights are taken as they are.
class FloatProducts {
 public:
  explicit FloatProducts(const Task& task) : task_(task) {}

  // scores[row][token] of a tile of keys, [channel][token].
  void score(const float* tile, float* scores) const {
    const int dim = task_.key.head_dim;
    multiply(task_.query, dim, tile, dim, kBlockTokens, scores, false);
  }

  // Adds the weighted sums of the first `count` tokens of a tile of values, [token][padded_dim].
  void add(const float* weights, const float* tile, int64_t count, float* output) const {
    multiply(weights, kBlockTokens, tile, count, task_.value.padded_dim, output, true);
  }

  // The same of exact tokens as they lie, without a tile in fp32; false if that is not done.
  bool score_exact(int64_t, int64_t, float*) const { return false; }
  bool add_exact(int64_t, int64_t, const float*, float*) const { return false; }

 protected:
  void multiply(const float* a, int64_t a_stride, const float* b, int64_t depth, int64_t width, float* c,
                bool accumulate) const {
    by_panels(task_.queries, width, [&]<int kRows, int kVectors>(int64_t r, int64_t n) {
      multiply_panel<kRows, kVectors>(a + r * a_stride, a_stride, b + n, width, depth, c + r * width + n, width,
                                      accumulate);
    });
  }

  const Task& task_;
};

// ---- blocks

// Takes values that are not finite out of the tile of a partly hidden block, and adds them where they are
// seen.
void separate_non_finite(const Task& task, int64_t count, AttentionWorkspace& ws) {
  const int width = task.value.head_dim;
  for (int64_t t = 0; t < count; ++t) {
    float* values = ws.tile + t * task.value.padded_dim;
    Floats checks = Floats{};
    int d = 0;
    for (; d + kLanes <= width; d += kLanes) checks += load<Floats>(values + d) * 0.0f;
    float check = 0.0f;
    for (; d < width; ++d) check += values[d] * 0.0f;
    for (int l = 0; l < kLanes; ++l) check += checks[l];
    if (check == 0.0f) continue;
    for (int r = 0; r < task.queries; ++r) {
      const float weight = ws.scores[r * kBlockTokens + t];
      if (weight == 0.0f) continue;
      for (d = 0; d < width; ++d) ws.output[r * task.value.padded_dim + d] += weight * values[d];
    }
    std::memset(values, 0, width * sizeof(float));
  }
}

// Nothing is made of the codes of a block without decoding them.
struct NoProducts {
  explicit NoProducts(const Task&) {}
  bool score(int64_t, const uint8_t*, float*, RecordFetcher&, Workspace&) const { return false; }
  bool add(int64_t, const uint8_t*, const float*, RecordFetcher&, Workspace&, float*, int64_t) const { return false; }
};

// Whether all slots of a block are read from its codes.
bool is_whole(const Side& side, int64_t start) {
  const bool has_sinks = side.sinks != nullptr && side.sink_start < start + kBlockTokens &&
                         side.sink_start + side.sink_length > start;
  return start + kBlockTokens <= side.packed_length && !has_sinks;
}

// `Keys`, `Values`: what makes scores and weighted sums of the codes of a whole block, where it can; `Products`: what
// makes them of decoded tiles.
template <typename Keys, typename Values, typename Products = FloatProducts>
void run(const Task& task) {
  AttentionWorkspace ws;
  Keys keys(task);
  Values values(task);
  Products products(task);
  RecordFetcher fetcher;
  const int queries = task.queries;
  const int key_dim = task.key.head_dim, value_dim = task.value.head_dim, value_width = task.value.padded_dim;
  const bool has_weights = task.weights != nullptr, wants_logits = task.logits != nullptr;
  const Decoder decode_key = has_weights ? nullptr : choose_decoder(task.key, true);
  const Decoder decode_value = wants_logits ? nullptr : choose_decoder(task.value, false);
  std::memset(ws.tile, 0, sizeof(float) * kBlockTokens * larger(key_dim, value_width));
  for (int r = 0; r < queries; ++r) {
    if (wants_logits) break;
    task.maximum[r] = has_weights ? 0.0f : -kInfinity;  // what is merged is not scaled, or nothing yet
    task.sum[r] = 0.0f;
    std::memset(ws.output + r * value_width, 0, value_width * sizeof(float));
  }
  for (int64_t start = task.begin; start < task.end; start += kBlockTokens) {
    const int64_t count = smaller(kBlockTokens, task.end - start), block = start / kBlockTokens;
    if (!is_visible(task, start, count)) continue;
    fetch_records(task, start, fetcher);
    const uint8_t* const key_record = task.key.records + block * task.key.record_bytes;
    const uint8_t* const value_record = task.value.records + block * task.value.record_bytes;
    const bool is_scored = has_weights || (is_whole(task.key, start) &&
                                           keys.score(start, key_record, ws.scores, fetcher, ws));
    if (!is_scored && !products.score_exact(start, count, ws.scores)) {
      load_block(task.key, true, decode_key, start, count, ws);
      products.score(ws.tile, ws.scores);
    }
    bool is_hidden = false;
    for (int r = 0; r < queries; ++r) {
      float* scores = ws.scores + r * kBlockTokens;
      if (wants_logits) {
        adjust(task, r, start, count, scores);
        give_logits(task, r, start, scores);
      } else if (has_weights) {
        take_weights(task, r, start, scores);
        is_hidden |= std::count(scores, scores + count, 0.0f) > 0;
      } else {
        is_hidden |= adjust(task, r, start, count, scores);
        soften(task, r, value_width, scores, ws.output + r * value_width);
      }
    }
    if (wants_logits) continue;
    if (is_whole(task.value, start) &&
        values.add(start, value_record, ws.scores, fetcher, ws, ws.output, value_width))
      continue;
    if (!is_hidden && products.add_exact(start, count, ws.scores, ws.output)) continue;
    load_block(task.value, false, decode_value, start, count, ws);
    if (is_hidden) separate_non_finite(task, count, ws);
    products.add(ws.scores, ws.tile, count, ws.output);
  }
  for (int r = 0; r < queries && !wants_logits; ++r) {
    std::memcpy(task.output + static_cast<int64_t>(r) * value_dim, ws.output + r * value_width,
                value_dim * sizeof(float));
  }
}

}  // namespace
}  // namespace kvcache
