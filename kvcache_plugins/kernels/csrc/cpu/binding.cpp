// The CPU implementation of kvcache_plugins::decode_attention (schema: kvcache_plugins/kernels/ops.py):
// checks the tensors, cuts the work into tasks of one (row, kv head, at most 64 query rows, range of slots),
// runs them on torch's threads with the kernel of this machine, and merges the ranges. It adds a few
// microseconds to what the kernels read.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <pthread.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "binding_inputs.h"
#include "decode_attention.h"

namespace kvcache {
namespace {

constexpr int64_t kSmallestSplit = 4;  // blocks
// Keys and values read in about the time it takes to wake a thread.
constexpr int64_t kSerialValues = 1 << 17;
constexpr int64_t kTasksPerThread = 4;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// OpenMP's threads do not survive a fork, and waiting for them would hang the child.
std::atomic<bool> is_forked{false};
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { is_forked = true; });

struct InstructionSet {
  const char* name;
  Kernel kernel;
  bool is_supported;
};

std::vector<InstructionSet> instruction_sets() {
  std::vector<InstructionSet> sets;
#if defined(__x86_64__)
#if !defined(KVCACHE_NO_AVX512)
  sets.push_back({"avx512", decode_attention_avx512,
                  __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16") &&
                      __builtin_cpu_supports("avx512vbmi")});
#else
  sets.push_back({"avx512", nullptr, false});
#endif
  sets.push_back(
      {"avx2", decode_attention_avx2,
       __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")});
#else
  sets.push_back({"avx512", nullptr, false});
  sets.push_back({"avx2", nullptr, false});
#endif
  sets.push_back({"portable", decode_attention_portable, true});
  return sets;
}

// The best instruction set, or the one KVCACHE_CPU_ISA names; read at every call, so that it can be changed.
InstructionSet choose_instruction_set() {
  static const std::vector<InstructionSet> sets = instruction_sets();
  const char* forced = std::getenv("KVCACHE_CPU_ISA");
  if (forced == nullptr || *forced == '\0') {
    return *std::find_if(sets.begin(), sets.end(),
                         [](const InstructionSet& set) { return set.is_supported; });
  }
  for (const InstructionSet& set : sets) {
    if (set.name != std::string(forced)) continue;
    TORCH_CHECK_VALUE(
        set.is_supported, "KVCACHE_CPU_ISA=", forced, ", but ",
        set.kernel == nullptr ? "that kernel was not built." : "this processor does not support it.");
    return set;
  }
  TORCH_CHECK_VALUE(false, "KVCACHE_CPU_ISA must be one of avx512, avx2, portable, got ", forced, ".");
}

// Runs every task; threads take the next one as they become free.
void run_tasks(const std::vector<Task>& tasks, Kernel kernel, bool is_serial) {
  if (is_serial || is_forked || tasks.size() == 1) {
    for (const Task& task : tasks) kernel(task);
    return;
  }
  std::atomic<size_t> next{0};
  at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), tasks.size()), 1, [&](int64_t, int64_t) {
    for (size_t i = next++; i < tasks.size(); i = next++) kernel(tasks[i]);
  });
}

// Ranges of at least kSmallestSplit blocks, so many that every thread has several tasks.
int64_t choose_splits(int64_t blocks, int64_t rows, bool is_serial) {
  const int64_t threads = is_serial ? 1 : at::get_num_threads();
  if (threads == 1 || blocks < 2 * kSmallestSplit) return 1;
  const int64_t wanted = (kTasksPerThread * threads + rows - 1) / rows;
  return std::max<int64_t>(1, std::min(wanted, blocks / kSmallestSplit));
}

// Bias as fp32 with strides such that one number leads from a query row to the next.
at::Tensor prepare_bias(const at::Tensor& bias, at::IntArrayRef full) {
  KVCACHE_CHECK(bias.dim() == 4 && bias.scalar_type() == at::kFloat && bias.device().is_cpu(), "bias",
                "decode_attention", "a 4-D float32 CPU tensor", bias.toString());
  for (int d = 0; d < 4; ++d) {
    KVCACHE_CHECK(bias.size(d) == full[d] || (d < 3 && bias.size(d) == 1), "shape", "bias", full,
                  bias.sizes());
  }
  const bool is_uniform = bias.size(1) == 1 && bias.size(2) == 1;
  const bool is_full = bias.size(1) == full[1] && bias.size(2) == full[2];
  if (is_uniform || is_full) return bias.contiguous();
  return bias.expand({bias.size(0), full[1], full[2], full[3]}).contiguous();
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

// Merges what the tasks of one query row found, `splits` ranges of slots; `sink` is a logit without a value.
template <typename scalar_t>
void merge(const Task* tasks, int64_t splits, int32_t r, float sink, scalar_t* out) {
  const int32_t value_dim = tasks->value.head_dim;
  float maximum = sink;
  for (int64_t s = 0; s < splits; ++s) maximum = std::max(maximum, tasks[s].maximum[r]);
  float total = maximum == kNothing ? 0.0f : std::exp(sink - maximum);
  float merged[kMaxHeadDim];
  std::memset(merged, 0, sizeof(float) * value_dim);
  for (int64_t s = 0; s < splits; ++s) {
    if (tasks[s].maximum[r] == kNothing) continue;
    const float weight = std::exp(tasks[s].maximum[r] - maximum);
    total += weight * tasks[s].sum[r];
    const float* partial = tasks[s].output + int64_t{r} * value_dim;
    for (int32_t d = 0; d < value_dim; ++d) merged[d] += weight * partial[d];
  }
  const float inverse = total == 0.0f ? 1.0f : 1.0f / total;
  for (int32_t d = 0; d < value_dim; ++d) out[d] = static_cast<scalar_t>(merged[d] * inverse);
}

at::Tensor decode_attention(const at::Tensor& query, const at::Tensor& records, at::TensorList key_segments,
                            at::TensorList value_segments, const c10::List<OptionalTensor>& key_extras,
                            const c10::List<OptionalTensor>& value_extras, const OptionalTensor& sink_start,
                            at::IntArrayRef key_layout, at::IntArrayRef value_layout, double scaling,
                            const OptionalTensor& bias, bool is_causal, int64_t window, double softcap,
                            const OptionalTensor& sink_logits, const OptionalTensor& alibi_slopes) {
  const InstructionSet instruction_set = choose_instruction_set();
  KVCACHE_CHECK(query.dim() == 4, "rank", "query", 4, query.dim());
  dtype_of(query, "query");
  KVCACHE_CHECK(records.dim() == 4, "rank", "records", 4, records.dim());
  KVCACHE_CHECK(records.scalar_type() == at::kByte, "dtype", "records", "uint8", records.scalar_type());
  check_tensor(records, "records", {query.size(0), records.size(1), records.size(2), records.size(3)});
  KVCACHE_CHECK(records.size(2) <= 1 || records.stride(2) == records.size(3), "stride", "records",
                records.size(3), records.stride(2));
  const Inputs keys = describe("key", records, key_segments, key_extras, key_layout, query);
  const Inputs values = describe("value", records, value_segments, value_extras, value_layout, query);

  const int64_t batch = query.size(0), query_heads = query.size(1), query_length = query.size(2);
  const int64_t kv_heads = records.size(1), length = length_of(keys), value_dim = values.side.head_dim;
  KVCACHE_CHECK(kv_heads > 0 && query_heads % kv_heads == 0, "heads", "query",
                "a multiple of " + std::to_string(kv_heads), query_heads);
  KVCACHE_CHECK(query_length >= 1 && query_length <= kMaxQueries, "tokens", "query", "1 to 64", query_length);
  check_tensor(query, "query", {batch, query_heads, query_length, keys.side.head_dim});
  KVCACHE_CHECK(length == length_of(values), "length", "values", length, length_of(values));
  KVCACHE_CHECK(length >= 1, "length", "keys", "at least 1", length);
  const int64_t group = query_heads / kv_heads, rows = group * query_length;

  const int64_t* starts = nullptr;
  if (sink_start.has_value()) {
    check_tensor(*sink_start, "sink_start", {batch});
    KVCACHE_CHECK(sink_start->scalar_type() == at::kLong, "dtype", "sink_start", "int64",
                  sink_start->scalar_type());
    starts = sink_start->const_data_ptr<int64_t>();
  }
  for (const auto& [tensor, name] :
       {std::pair{&sink_logits, "sink_logits"}, std::pair{&alibi_slopes, "alibi_slopes"}}) {
    if (!tensor->has_value()) continue;
    check_tensor(**tensor, name, {query_heads});
    KVCACHE_CHECK((*tensor)->scalar_type() == at::kFloat, "dtype", name, "float32", (*tensor)->scalar_type());
  }
  const float* slopes = alibi_slopes.has_value() ? alibi_slopes->const_data_ptr<float>() : nullptr;
  const float* logits = sink_logits.has_value() ? sink_logits->const_data_ptr<float>() : nullptr;
  at::Tensor biases;
  if (bias.has_value()) biases = prepare_bias(*bias, {batch, query_heads, query_length, length});

  const int64_t first =
      window > 0 ? std::max<int64_t>(0, length - query_length - window + 1) / kBlockTokens : 0;
  const int64_t blocks = (length + kBlockTokens - 1) / kBlockTokens - first;
  const int64_t heads_per_task = std::min(group, std::max<int64_t>(1, kMaxQueries / query_length));
  const int64_t chunks = (group + heads_per_task - 1) / heads_per_task;
  const int64_t row_groups = batch * kv_heads * chunks;
  const bool is_serial =
      row_groups * blocks * kBlockTokens * (keys.side.head_dim + value_dim) < kSerialValues;
  const int64_t splits = choose_splits(blocks, row_groups, is_serial);
  const int64_t key_dim = keys.side.head_dim;
  const at::Tensor scratch =
      at::empty({batch * kv_heads * rows * (key_dim + splits * (value_dim + 2))}, query.options().dtype(at::kFloat));
  float* const scaled = scratch.mutable_data_ptr<float>();
  float* free = scale_query(query, static_cast<float>(scaling), scaled);

  std::vector<Task> tasks;
  tasks.reserve(row_groups * splits);
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < kv_heads; ++h) {
      Task task{};
      task.key = side_of(keys, records, b, h, starts);
      task.value = side_of(values, records, b, h, starts);
      task.query_length = static_cast<int32_t>(query_length);
      task.precise = query.scalar_type() != at::kBFloat16;  // fp16 has three bits more than bf16
      task.length = length;
      task.is_causal = is_causal;
      task.window = window;
      task.softcap = static_cast<float>(softcap);
      for (int64_t g = 0; g < group; g += heads_per_task) {
        const int64_t head = h * group + g;
        task.queries = static_cast<int32_t>(std::min(heads_per_task, group - g) * query_length);
        task.query = scaled + (b * query_heads + head) * query_length * key_dim;
        task.alibi = slopes != nullptr ? slopes + head : nullptr;
        if (biases.defined()) {
          const bool is_shared = biases.size(1) == 1 && biases.size(2) == 1 && query_heads * query_length > 1;
          task.bias_row_stride = is_shared ? 0 : length;
          task.bias = biases.const_data_ptr<float>() + (biases.size(0) == 1 ? 0 : b * biases.stride(0)) +
                      (is_shared ? 0 : head * query_length * length);
        }
        for (int64_t s = 0; s < splits; ++s) {
          task.begin = (first + s * blocks / splits) * kBlockTokens;
          task.end = std::min(length, (first + (s + 1) * blocks / splits) * kBlockTokens);
          task.maximum = free;
          task.sum = free + task.queries;
          task.output = free + 2 * task.queries;
          free += task.queries * (value_dim + 2);
          tasks.push_back(task);
        }
      }
    }
  }
  run_tasks(tasks, instruction_set.kernel, is_serial);

  at::Tensor output = at::empty({batch, query_heads, query_length, value_dim}, query.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, query.scalar_type(), "decode_attention", [&] {
    scalar_t* out = output.mutable_data_ptr<scalar_t>();
    for (size_t t = 0, row = 0; t < tasks.size(); t += splits) {
      for (int32_t r = 0; r < tasks[t].queries; ++r, ++row, out += value_dim) {
        const int64_t head = row / query_length % query_heads;
        merge(&tasks[t], splits, r, logits != nullptr ? logits[head] : kNothing, out);
      }
    }
  });
  return output;
}

}  // namespace
}  // namespace kvcache

// The instruction set in use, or the reason there is none after "error: ".
extern "C" const char* kvcache_cpu_instruction_set() {
  thread_local std::string answer;
  try {
    answer = kvcache::choose_instruction_set().name;
  } catch (const c10::Error& error) {
    answer = std::string("error: ") + error.what_without_backtrace();
  }
  return answer.c_str();
}

TORCH_LIBRARY_IMPL(kvcache_plugins, CPU, library) {
  library.impl("decode_attention", TORCH_FN(kvcache::decode_attention));
}
