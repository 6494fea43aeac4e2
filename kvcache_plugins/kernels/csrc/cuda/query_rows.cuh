// The query rows of a thread block, and what becomes of a product on its way to a weight.
#pragma once

#include "packed_codes.cuh"

namespace kvcache {

constexpr float kLeastLogit = -1e6f;  // of a slot that is not hidden: what is added to it later still counts

// One thread block's share of the query rows.
struct Rows {
  int batch, head, first, count;  // rows [first, first + count) of group * query_length

  KVCACHE_DEVICE static Rows mine(const AttentionArguments& a) { return of(a, static_cast<int>(blockIdx.x)); }
  // The same, worked out anew: what is needed again behind a loop takes no registers in it.
  KVCACHE_DEVICE static Rows mine_again(const AttentionArguments& a) {
    return of(a, opaque(static_cast<int>(blockIdx.x)));
  }
  // These, or the same worked out anew, if their registers are wanted meanwhile.
  template <bool kAnew>
  KVCACHE_DEVICE Rows or_again(const AttentionArguments& a) const {
    return kAnew ? mine_again(a) : *this;
  }
  KVCACHE_DEVICE static Rows of(const AttentionArguments& a, int group) {
    const int all = a.group * a.query_length, head = group / a.chunks % a.records.heads;
    const int first = group % a.chunks * a.chunk_rows;
    const int count = all - first < a.chunk_rows ? all - first : a.chunk_rows;
    return {group / a.chunks / a.records.heads, head, first, count};
  }
  KVCACHE_DEVICE int query_head(const AttentionArguments& a, int row) const {
    return head * a.group + (first + row) / a.query_length;
  }
  KVCACHE_DEVICE int query_token(const AttentionArguments& a, int row) const { return (first + row) % a.query_length; }
  KVCACHE_DEVICE float query(const AttentionArguments& a, int row, int channel) const {
    return read_number(a.query, a.query_dtype,
                       batch * a.query_batch_stride + query_head(a, row) * a.query_head_stride +
                           query_token(a, row) * a.query_token_stride + channel);
  }
  // Place of a row's results of one split.
  KVCACHE_DEVICE int64_t partial(const AttentionArguments& a, int row, int split) const {
    const int64_t all = static_cast<int64_t>(a.group) * a.query_length;
    return ((static_cast<int64_t>(batch) * a.records.heads + head) * all + first + row) * a.splits() + split;
  }
};

KVCACHE_DEVICE float hyperbolic_tangent(float x) {
#if defined(KVCACHE_EMULATION)
  return std::tanh(x);
#else
  return tanhf(x);
#endif
}

// A product `q.k` times scaling, under a cap.
KVCACHE_DEVICE float capped(const AttentionArguments& a, float z) {
  return a.softcap * hyperbolic_tangent(z * a.inverse_softcap);
}

// A query row in one block, whose first slot is `start`: what may change its logits there, worked out once for all of
// them. Slots are counted from `start`, and fit 32 bits as everywhere.
struct RowInBlock {
  const float* bias;   // of the block's slots; null without one
  float slope;         // of ALiBi
  int query_slot;      // before the block, in it, or behind it
  int oldest, newest;  // visible slots

  KVCACHE_DEVICE RowInBlock(const AttentionArguments& a, const Rows& rows, int row, int start) {
    int head = rows.head * a.group + rows.first + row, token = 0;
    if (a.query_length > 1) {  // by a division, which takes as long as all else here
      head = rows.query_head(a, row);
      token = rows.query_token(a, row);
    }
    query_slot = static_cast<int>(a.length) - a.query_length + token - start;
    newest = a.is_causal != 0 ? query_slot : kBlockTokens;
    const int64_t left = query_slot - a.window;  // the newest slot that the window has left
    oldest = a.window <= 0 || left < 0 ? 0 : left < kBlockTokens ? static_cast<int>(left) + 1 : kBlockTokens;
    slope = a.alibi != nullptr ? a.alibi[head] : 0.0f;
    bias = a.bias == nullptr ? nullptr
                             : a.bias + rows.batch * a.bias_batch_stride + head * a.bias_head_stride +
                                   token * a.bias_token_stride + start;
  }
  KVCACHE_DEVICE float bias_of(int slot) const { return bias != nullptr ? bias[slot] : 0.0f; }
  // A logit, in units of log 2, from a product `q.k` times scaling, under a cap if there is one, and the slot's bias;
  // -inf where it is hidden, but not by the least number of a dtype alone: of nothing but such slots all are seen
  // alike.
  KVCACHE_DEVICE float adjusted(const AttentionArguments& a, int slot, float added, float z) const {
    if (a.alibi != nullptr) z += slope * static_cast<float>(slot - query_slot);
    z = added == -infinity() ? added : z + added < kLeastLogit ? kLeastLogit : z + added;
    return slot < oldest || slot > newest ? -infinity() : z * kLog2E;
  }
};

}  // namespace kvcache
