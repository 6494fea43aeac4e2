// Attention over latents in plain C++ with compiler vectors; included by one source file per instruction set.
//
// A block of 64 slots at a time: its rotated keys and its latents are decoded to fp32 as [channel][token], a tile that
// stays in the second-level cache, and serve all query rows of the task. Logits are sums over channels of that tile;
// for the weighted sums 64 channels of it at a time are turned over to [token][channel], which the first-level cache
// holds while all rows pass. So nothing is decoded twice, and neither product needs a horizontal sum.
//
// Bound: the multiply-adds, (2 R + Dr) a slot and row, for which up to six rows are taken at a time; decoding is some
// two operations per number and vector lane, once for all rows.
//
// What masked or unused slots hold must not reach the result, as in decode_attention_portable.inl.
#pragma once

#include <memory>

#include "attend_latents.h"
#include "portable_products.inl"
#include "portable_softmax.inl"
#include "portable_transposition.inl"
#include "record_fetcher.h"

namespace kvcache {
namespace {  // see portable_numbers.inl

constexpr int kPanel = kBlockTokens;  // columns of a product: the tokens of a block, or as many channels

// The products of a task in fp32, of which its query and weights are taken as they are.
class FloatProducts {
 public:
  explicit FloatProducts(const Task& task) : task_(task), scratch_(new Scratch) {}

  // The rotated keys of a block, [token][padded_dim].
  void take_rotated(const float* tile) {
    const int width = task_.value.padded_dim;
    for (int d = 0; d < width; d += kLanes) {
      for (int t = 0; t < kBlockTokens; t += kLanes) {
        transpose_square(tile + t * width + d, width, scratch_->rotated + d * kPanel + t, kPanel);
      }
    }
  }

  // The latents of a block, [channel][token].
  void take_latents(const float* tile) { latents_ = tile; }

  // scores[row][token] of all rows.
  void score(float* scores) const {
    const int rank = task_.key.head_dim, rotated_dim = task_.value.head_dim, query_dim = rank + rotated_dim;
    multiply(task_.query, query_dim, latents_, rank, scores, kBlockTokens, false);
    multiply(task_.query + rank, query_dim, scratch_->rotated, rotated_dim, scores, kBlockTokens, true);
  }

  // What the rows make of the tokens, [row][token]; `count` of them are in use.
  void take_weights(const float* weights, int64_t count) {
    weights_ = weights;
    count_ = count;
  }

  // Adds the weighted sums of kPanel channels, of which `latents` is the first one's.
  void add(const float* latents, float* output, int64_t stride) {
    for (int d = 0; d < kPanel; d += kLanes) {
      for (int t = 0; t < kBlockTokens; t += kLanes) {
        transpose_square(latents + d * kBlockTokens + t, kBlockTokens, scratch_->panel + t * kPanel + d, kPanel);
      }
    }
    multiply(weights_, kBlockTokens, scratch_->panel, count_, output, stride, true);
  }

 private:
  struct Scratch {
    alignas(64) float rotated[kMaxHeadDim * kPanel];
    alignas(64) float panel[kBlockTokens * kPanel];
  };

  void multiply(const float* a, int64_t a_stride, const float* b, int64_t depth, float* c, int64_t c_stride,
                bool accumulate) const {
    by_panels(task_.queries, kPanel, [&]<int kRows, int kVectors>(int64_t r, int64_t n) {
      multiply_panel<kRows, kVectors>(a + r * a_stride, a_stride, b + n, kPanel, depth, c + r * c_stride + n, c_stride,
                                      accumulate);
    });
  }

  const Task& task_;
  const std::unique_ptr<Scratch> scratch_;
  const float* latents_ = nullptr;
  const float* weights_ = nullptr;
  int64_t count_ = 0;
};

// Zeroes what the products read of a tile of latents, but no slot or channel stands for: unused codes are decoded too.
void clear_unused(int rank, int width, int64_t count, float* tile) {
  for (int d = 0; count < kBlockTokens && d < rank; ++d) {
    std::memset(tile + d * kBlockTokens + count, 0, sizeof(float) * (kBlockTokens - count));
  }
  std::memset(tile + rank * kBlockTokens, 0, sizeof(float) * kBlockTokens * (width - rank));
}

// Takes latents that are not finite out of the tile of a partly hidden block, and adds them where they are seen.
void separate_non_finite(const Task& task, int64_t count, float* tile, const float* weights, float* output,
                         int width) {
  const int rank = task.key.head_dim;
  Floats checks[kBlockTokens / kLanes] = {};
  for (int d = 0; d < rank; ++d) {
    for (int v = 0; v < kBlockTokens / kLanes; ++v) {
      checks[v] += load<Floats>(tile + d * kBlockTokens + v * kLanes) * 0.0f;
    }
  }
  for (int64_t t = 0; t < count; ++t) {
    if (checks[t / kLanes][t % kLanes] == 0.0f) continue;
    for (int r = 0; r < task.queries; ++r) {
      const float weight = weights[r * kBlockTokens + t];
      if (weight == 0.0f) continue;
      for (int d = 0; d < rank; ++d) output[r * width + d] += weight * tile[d * kBlockTokens + t];
    }
    for (int d = 0; d < rank; ++d) tile[d * kBlockTokens + t] = 0.0f;
  }
}

struct LatentWorkspace : Workspace {
  alignas(64) float scores[kMaxLatentRows * kBlockTokens];
  alignas(64) float output[kMaxLatentRows * kMaxHeadDim];  // rows of whole panels
};

template <typename Products>
void attend(const Task& task) {
  // 460 KB, of which no more is written or read than the rows and channels at hand take
  const std::unique_ptr<LatentWorkspace> workspace(new LatentWorkspace);
  LatentWorkspace& ws = *workspace;
  Products products(task);
  const int rank = task.key.head_dim, width = (rank + kPanel - 1) / kPanel * kPanel;
  const Decoder decode_latents = choose_decoder(task.key, true), decode_rotated = choose_decoder(task.value, false);
  for (int r = 0; r < task.queries; ++r) {
    task.maximum[r] = -kInfinity;
    task.sum[r] = 0.0f;
  }
  std::memset(ws.output, 0, sizeof(float) * task.queries * width);
  RecordFetcher fetcher;
  for (int64_t start = task.begin; start < task.end; start += kBlockTokens) {
    const int64_t count = smaller(kBlockTokens, task.end - start);
    if (!is_visible(task, start, count)) continue;
    fetch_records(task, start, fetcher);
    load_block(task.value, false, decode_rotated, start, count, ws);
    products.take_rotated(ws.tile);
    load_block(task.key, true, decode_latents, start, count, ws);
    clear_unused(rank, width, count, ws.tile);
    products.take_latents(ws.tile);
    products.score(ws.scores);
    bool is_hidden = false;
    for (int r = 0; r < task.queries; ++r) {
      float* scores = ws.scores + r * kBlockTokens;
      is_hidden |= adjust(task, r, start, count, scores);
      soften(task, r, width, scores, ws.output + r * width);
    }
    if (is_hidden) separate_non_finite(task, count, ws.tile, ws.scores, ws.output, width);
    products.take_weights(ws.scores, count);
    for (int d = 0; d < width; d += kPanel) products.add(ws.tile + d * kBlockTokens, ws.output + d, width);
  }
  for (int r = 0; r < task.queries; ++r) {
    std::memcpy(task.output + static_cast<int64_t>(r) * rank, ws.output + r * width, rank * sizeof(float));
  }
}

}  // namespace
}  // namespace kvcache
