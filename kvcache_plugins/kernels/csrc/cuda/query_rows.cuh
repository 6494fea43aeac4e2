// The query rows of a thread block, and what becomes of a product on its way to a weight.
#pragma once

#include "packed_codes.cuh"

namespace kvcache {

// One thread block's share of the query rows.
struct Rows {
  int batch, head, first, count;  // rows [first, first + count) of group * query_length

  KVCACHE_DEVICE static Rows mine(const AttentionArguments& a) {
    const int all = a.group * a.query_length;
    const int group = static_cast<int>(blockIdx.x), head = group / a.chunks % a.records.heads;
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

// A logit, in units of log 2, from a product `q.k` times scaling; -inf where the slot is hidden.
KVCACHE_DEVICE float adjusted(const AttentionArguments& a, const Rows& rows, int row, int64_t slot, float z) {
  const int64_t query_slot = a.length - a.query_length + rows.query_token(a, row);
  const int head = rows.query_head(a, row);
  if (a.softcap > 0.0f) z = a.softcap * hyperbolic_tangent(z * a.inverse_softcap);
  if (a.alibi != nullptr) z += a.alibi[head] * static_cast<float>(slot - query_slot);
  if (a.bias != nullptr) {
    const float bias = a.bias[rows.batch * a.bias_batch_stride + head * a.bias_head_stride +
                              rows.query_token(a, row) * a.bias_token_stride + slot];
    z = bias == -infinity() ? bias : z + bias;
  }
  if (a.is_causal != 0 && slot > query_slot) z = -infinity();
  if (a.window > 0 && slot <= query_slot - a.window) z = -infinity();
  return z * kLog2E;
}

}  // namespace kvcache
