// What the operators that attend have in common: their tensors are checked, the work is cut into tasks of one (row, kv
// head), some query rows and a range of slots, these run on torch's threads, and the ranges are merged (attention_binding.inl).
// It adds a few microseconds to what the kernels read.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "binding_inputs.h"
#include "decode_attention.h"
#include "parallel_tasks.h"

namespace kvcache {
namespace {

constexpr int64_t kSmallestSplit = 4;  // blocks
// Keys and values read in about the time it takes to wake a thread.
constexpr int64_t kSerialValues = 1 << 17;
constexpr int64_t kTasksPerThread = 4;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// A call of an operator; of the keys and values, what `describe` has checked.
struct AttentionCall {
  const char* operation;
  Kernel kernel;
  const at::Tensor& query;
  const at::Tensor& records;
  const Inputs& keys;
  const Inputs& values;
  const OptionalTensor& sink_start;
  const OptionalTensor& bias;
  const OptionalTensor& sink_logits;
  const OptionalTensor& alibi_slopes;
  float scaling;
  bool is_causal;
  int64_t window;
  float softcap;
  bool is_precise;
  int64_t query_dim, output_dim;  // channels of a query row, and of what it gets
  int64_t most_rows;              // of one task; at least kMaxQueries
};

// Ranges of at least kSmallestSplit blocks, so many that every thread has several tasks.
int64_t choose_splits(int64_t blocks, int64_t rows, bool is_serial) {
  const int64_t threads = is_serial ? 1 : at::get_num_threads();
  if (threads == 1 || blocks < 2 * kSmallestSplit) return 1;
  const int64_t wanted = (kTasksPerThread * threads + rows - 1) / rows;
  return std::max<int64_t>(1, std::min(wanted, blocks / kSmallestSplit));
}

// Bias as fp32 with strides such that one number leads from a query row to the next.
at::Tensor prepare_bias(const char* operation, const at::Tensor& bias, at::IntArrayRef full) {
  KVCACHE_CHECK(bias.dim() == 4 && bias.scalar_type() == at::kFloat && bias.device().is_cpu(), "bias",
                operation, "a 4-D float32 CPU tensor", bias.toString());
  for (int d = 0; d < 4; ++d) {
    KVCACHE_CHECK(bias.size(d) == full[d] || (d < 3 && bias.size(d) == 1), "shape", "bias", full,
                  bias.sizes());
  }
  const bool is_uniform = bias.size(1) == 1 && bias.size(2) == 1;
  const bool is_full = bias.size(1) == full[1] && bias.size(2) == full[2];
  if (is_uniform || is_full) return bias.contiguous();
  return bias.expand({bias.size(0), full[1], full[2], full[3]}).contiguous();
}

// Tells a task of its rows of the bias, of row b of the batch and from a query head on.
void give_bias(Task& task, const at::Tensor& biases, int64_t b, int64_t head) {
  const int64_t length = biases.size(3);
  const bool is_shared = biases.size(1) == 1 && biases.size(2) == 1;
  task.bias_row_stride = is_shared ? 0 : length;
  task.bias = biases.const_data_ptr<float>() + (biases.size(0) == 1 ? 0 : b * biases.stride(0)) +
              (is_shared ? 0 : head * task.query_length * length);
}

// Contiguous fp32 numbers of this shape, or null where there are none.
const float* check_numbers(const OptionalTensor& numbers, const char* name, at::IntArrayRef shape) {
  if (!numbers.has_value()) return nullptr;
  check_tensor(*numbers, name, shape);
  KVCACHE_CHECK(numbers->scalar_type() == at::kFloat, "dtype", name, "float32", numbers->scalar_type());
  KVCACHE_CHECK(numbers->is_contiguous(), "strides", name, "contiguous", numbers->strides());
  return numbers->const_data_ptr<float>();
}

// Writes the query as contiguous fp32 numbers times `scaling`; returns where they end.
float* scale_query(const at::Tensor& query, float scaling, float* out) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, query.scalar_type(), "decode_attention", [&] {
    const scalar_t* data = query.const_data_ptr<scalar_t>();
    for (int64_t b = 0; b < query.size(0); ++b) {
      for (int64_t h = 0; h < query.size(1); ++h) {
        for (int64_t i = 0; i < query.size(2); ++i) {
          const scalar_t* row = data + b * query.stride(0) + h * query.stride(1) + i * query.stride(2);
          for (int64_t d = 0; d < query.size(3); ++d) *out++ = static_cast<float>(row[d]) * scaling;
        }
      }
    }
  });
  return out;
}

// Merges what the tasks of one query row found, `splits` ranges of slots, into `width` numbers; `sink` is a logit
// without a value.
template <typename scalar_t>
void merge(const Task* tasks, int64_t splits, int32_t r, int64_t width, float sink, scalar_t* out) {
  float maximum = sink;
  for (int64_t s = 0; s < splits; ++s) maximum = std::max(maximum, tasks[s].maximum[r]);
  float total = maximum == kNothing ? 0.0f : std::exp(sink - maximum);
  float merged[kMaxHeadDim];
  std::memset(merged, 0, sizeof(float) * width);
  for (int64_t s = 0; s < splits; ++s) {
    if (tasks[s].maximum[r] == kNothing) continue;
    const float weight = std::exp(tasks[s].maximum[r] - maximum);
    total += weight * tasks[s].sum[r];
    const float* partial = tasks[s].output + int64_t{r} * width;
    for (int64_t d = 0; d < width; ++d) merged[d] += weight * partial[d];
  }
  const float inverse = total == 0.0f ? 1.0f : 1.0f / total;
  for (int64_t d = 0; d < width; ++d) out[d] = static_cast<scalar_t>(merged[d] * inverse);
}

// Serves a call: `(B, Hq, q, output_dim)` in the dtype of the query.
at::Tensor attend(const AttentionCall& call) {
  const at::Tensor &query = call.query, &records = call.records;
  KVCACHE_CHECK(query.dim() == 4, "rank", "query", 4, query.dim());
  const int64_t batch = records.size(0), query_heads = query.size(1), query_length = query.size(2);
  const int64_t kv_heads = records.size(1), length = length_of(call.keys);
  const int64_t query_dim = call.query_dim, output_dim = call.output_dim;
  KVCACHE_CHECK(kv_heads > 0 && query_heads > 0 && query_heads % kv_heads == 0, "heads", "query",
                "a multiple of " + std::to_string(kv_heads), query_heads);
  KVCACHE_CHECK(query_length >= 1 && query_length <= kMaxQueries, "tokens", "query", "1 to 64", query_length);
  check_tensor(query, "query", {batch, query_heads, query_length, query_dim});
  KVCACHE_CHECK(length == length_of(call.values), "length", "values", length, length_of(call.values));
  KVCACHE_CHECK(length >= 1, "length", "keys", "at least 1", length);
  const int64_t group = query_heads / kv_heads, rows = group * query_length;

  const int64_t* starts = check_sink_start(call.sink_start, batch);
  const std::array<int64_t, 1> of_heads{query_heads};
  const std::array<int64_t, 3> of_queries{batch, query_heads, query_length};
  const bool are_sinks_of_queries = call.sink_logits.has_value() && call.sink_logits->dim() == 3;
  const float* slopes = check_numbers(call.alibi_slopes, "alibi_slopes", of_heads);
  const float* logits = check_numbers(call.sink_logits, "sink_logits",
                                      are_sinks_of_queries ? at::IntArrayRef(of_queries) : at::IntArrayRef(of_heads));
  at::Tensor biases;
  if (call.bias.has_value()) {
    biases = prepare_bias(call.operation, *call.bias, {batch, query_heads, query_length, length});
  }

  const int64_t first =
      call.window > 0 ? std::max<int64_t>(0, length - query_length - call.window + 1) / kBlockTokens : 0;
  const int64_t blocks = (length + kBlockTokens - 1) / kBlockTokens - first;
  const int64_t heads_per_task = std::min(group, std::max<int64_t>(1, call.most_rows / query_length));
  const int64_t chunks = (group + heads_per_task - 1) / heads_per_task;
  const int64_t row_groups = batch * kv_heads * chunks;
  const int64_t dims = call.keys.side.head_dim + call.values.side.head_dim;
  const bool is_serial = row_groups * blocks * kBlockTokens * dims < kSerialValues;
  const int64_t splits = choose_splits(blocks, row_groups, is_serial);
  const at::Tensor scratch = at::empty({batch * kv_heads * rows * (query_dim + splits * (output_dim + 2))},
                                       query.options().dtype(at::kFloat));
  float* const scaled = scratch.mutable_data_ptr<float>();
  float* free = scale_query(query, call.scaling, scaled);

  std::vector<Task> tasks;
  tasks.reserve(row_groups * splits);
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < kv_heads; ++h) {
      Task task{};
      task.key = side_of(call.keys, records, b, h, starts);
      task.value = side_of(call.values, records, b, h, starts);
      task.query_length = static_cast<int32_t>(query_length);
      task.scaling = call.scaling;
      task.precise = call.is_precise;
      task.length = length;
      task.is_causal = call.is_causal;
      task.window = call.window;
      task.softcap = call.softcap;
      for (int64_t g = 0; g < group; g += heads_per_task) {
        const int64_t head = h * group + g;
        task.queries = static_cast<int32_t>(std::min(heads_per_task, group - g) * query_length);
        task.query = scaled + (b * query_heads + head) * query_length * query_dim;
        task.alibi = slopes != nullptr ? slopes + head : nullptr;
        if (biases.defined()) give_bias(task, biases, b, head);
        for (int64_t s = 0; s < splits; ++s) {
          task.begin = (first + s * blocks / splits) * kBlockTokens;
          task.end = std::min(length, (first + (s + 1) * blocks / splits) * kBlockTokens);
          task.maximum = free;
          task.sum = free + task.queries;
          task.output = free + 2 * task.queries;
          free += task.queries * (output_dim + 2);
          tasks.push_back(task);
        }
      }
    }
  }
  run_parallel(tasks.size(), is_serial, [&](int64_t task) { call.kernel(tasks[task]); });

  at::Tensor output = at::empty({batch, query_heads, query_length, output_dim}, query.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, query.scalar_type(), "decode_attention", [&] {
    scalar_t* out = output.mutable_data_ptr<scalar_t>();
    for (size_t t = 0, row = 0; t < tasks.size(); t += splits) {
      for (int32_t r = 0; r < tasks[t].queries; ++r, ++row, out += output_dim) {
        const int64_t place = are_sinks_of_queries ? row : row / query_length % query_heads;
        merge(&tasks[t], splits, r, output_dim, logits != nullptr ? logits[place] : kNothing, out);
      }
    }
  });
  return output;
}

}  // namespace
}  // namespace kvcache
